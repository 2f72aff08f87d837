"""Measures products on a GPU, for the autotuner and the benchmarks.

A product is timed with several copies of a matrix, one after the other. Together, the copies are
larger than the caches (`packhorse.gpu.timing`). A division that the GPU cannot run, or whose
product differs from that of the decoded matrix, counts as infinitely slow.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch

from packhorse.device.products import run_choice
from packhorse.device.strategy import Choice
from packhorse.gpu.timing import CANNOT_RUN, CHAIN_NBYTES, N_REPLAYS, chain_copies, time_chain
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.weights import decode_weights
from packhorse.layout import WeightFormat

__all__ = ["ProductTimer"]

_CHECKED_TOKENS = 64


class ProductTimer:
    """Times products with one matrix; a search of the autotuner calls it.

    Attributes:
        format: the format of the matrix.
        n_columns: its columns.
    """

    def __init__(
        self,
        weights: WeightTensors,
        format: WeightFormat,
        n_columns: int,
        *,
        chain_nbytes: int = CHAIN_NBYTES,
        n_replays: int = N_REPLAYS,
    ) -> None:
        """Makes as many copies of the matrix as a chain needs.

        Args:
            weights: the packed matrix, on the GPU.
            format: their format.
            n_columns: columns of the matrix.
            chain_nbytes: the least number of bytes of all copies together.
            n_replays: timed replays of each measurement.

        Raises:
            torch.OutOfMemoryError: there is too little memory for the copies.
        """
        self.format = format
        self.n_columns = n_columns
        nbytes = sum(tensor.nbytes for tensor in weights)
        n_copies = chain_copies(nbytes, chain_nbytes)
        copies = [WeightTensors(*(t.clone() for t in weights)) for _ in range(n_copies - 1)]
        self._chain = [weights, *copies]
        self._chain_nbytes = chain_nbytes
        self._n_replays = n_replays
        self._plain: torch.Tensor | None = None

    def __call__(self, choice: Choice, n_tokens: int) -> float:
        """Seconds of a product; infinity if it cannot run or is wrong."""
        x = self.tokens(n_tokens)
        try:
            y = self._multiply(x, self._chain[0], choice)
            is_right = self._is_right(x, y)
        except CANNOT_RUN:
            return math.inf
        except RuntimeError as error:  # of Triton's passes, or of the driver
            warnings.warn(f"{choice} fails here and is left out: {error}", stacklevel=2)
            if x.is_cuda:
                torch.cuda.synchronize()  # raises if this process can no longer use the GPU
            return math.inf
        if not is_right:
            warnings.warn(f"{choice} gives a wrong product here and is left out", stacklevel=2)
            return math.inf
        return self.time([partial(self._multiply, x, w, choice) for w in self._chain])

    def plain(self, n_tokens: int) -> float:
        """Seconds of `torch.nn.functional.linear` with the decoded matrix."""
        x, weight = self.tokens(n_tokens), self._decoded()
        n_copies = chain_copies(weight.nbytes, self._chain_nbytes)
        chain = [weight, *(weight.clone() for _ in range(n_copies - 1))]
        torch.nn.functional.linear(x, weight)
        return self.time([partial(torch.nn.functional.linear, x, w) for w in chain])

    def decoding(self) -> float:
        """Seconds of decoding the matrix to device memory; each copy has an output of its own."""
        format, n_columns, plain = self.format, self.n_columns, self._decoded()
        outs = [torch.empty_like(plain) for _ in self._chain]
        pairs = zip(self._chain, outs, strict=True)
        return self.time([partial(decode_weights, w, format, n_columns, out) for w, out in pairs])

    def tokens(self, n_tokens: int) -> torch.Tensor:
        """Vectors to multiply with, always the same."""
        device = self._chain[0].low_bytes.device
        generator = torch.Generator(device).manual_seed(n_tokens)
        x = torch.randn(n_tokens, self.n_columns, generator=generator, device=device)
        return x.to(torch.bfloat16)

    def time(self, calls: Sequence[Callable[[], object]]) -> float:
        """Seconds of one call of a chain; a subclass for another device replaces this clock."""
        return time_chain(calls, n_replays=self._n_replays)

    def _multiply(self, x: torch.Tensor, weights: WeightTensors, choice: Choice) -> torch.Tensor:
        return run_choice(choice, x, weights, self.format, self.n_columns)

    def _decoded(self) -> torch.Tensor:
        if self._plain is None:
            self._plain = decode_weights(self._chain[0], self.format, self.n_columns)
        return self._plain

    def _is_right(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether the product of the first tokens is that of the decoded matrix, up to the rounding
        of sums."""
        x, y = x[:_CHECKED_TOKENS], y[:_CHECKED_TOKENS]
        exact = torch.nn.functional.linear(x.float(), self._decoded().float())
        error = (y.float() - exact).abs().amax()
        return bool(error <= exact.abs().amax() * 2**-7)
