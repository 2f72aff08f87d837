"""Measures products on a GPU, for the autotuner and the benchmarks.

A product is timed with several copies of a matrix, one after the other. Together, the copies are
larger than the caches (`packhorse.gpu.timing`). A division that the GPU cannot run counts as
infinitely slow. So does one that is wrong: whose product is outside of the error bound, or whose
runs differ in any bit (`product_check.py`); a warning names it.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch

from packhorse.device.product_check import ExactProduct, WrongProductWarning, are_equal_bits
from packhorse.device.products import run_choice
from packhorse.device.strategy import Choice
from packhorse.gpu.timing import CANNOT_RUN, CHAIN_NBYTES, N_REPLAYS, chain_copies, time_chain
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.weights import decode_weights
from packhorse.layout import WeightFormat

__all__ = ["ProductTimer"]

_CHECKED_TOKENS = 32
_N_CHECKED_RUNS = 3


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
        self._exact: dict[int, ExactProduct] = {}  # by the number of tokens

    def __call__(self, choice: Choice, n_tokens: int) -> float:
        """Seconds of a product; infinity if it cannot run or is wrong.

        Warns:
            WrongProductWarning: it is wrong.
        """
        x = self.tokens(n_tokens)
        try:
            runs = [self._multiply(x, self._chain[0], choice) for _ in range(_N_CHECKED_RUNS)]
            fault = self._fault(x, runs, choice)
        except CANNOT_RUN:
            return math.inf
        except RuntimeError as error:  # of Triton's passes, or of the driver
            warnings.warn(f"{choice} fails here and is left out: {error}", stacklevel=2)
            if x.is_cuda:
                torch.cuda.synchronize()  # raises if this process can no longer use the GPU
            return math.inf
        if fault is not None:
            warnings.warn(
                f"{choice} gives a WRONG PRODUCT here with {n_tokens} tokens: {fault}. It is never "
                "chosen on this GPU; please report it",
                WrongProductWarning,
                stacklevel=2,
            )
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

    def _fault(self, x: torch.Tensor, runs: Sequence[torch.Tensor], choice: Choice) -> str | None:
        """What is wrong with several runs of a product; None if nothing is."""
        if not are_equal_bits(runs):
            return f"{_N_CHECKED_RUNS} runs differ"
        # Some tokens of every block, with the first and the last.
        some = torch.linspace(0, len(x) - 1, min(len(x), _CHECKED_TOKENS), dtype=torch.float64)
        tokens = some.round().to(device=x.device, dtype=torch.int64)
        if len(x) not in self._exact:
            self._exact[len(x)] = ExactProduct(x[tokens], self._decoded())
        if not self._exact[len(x)].allows(runs[0][tokens], choice):
            return "a sum is outside of the error bound"
        return None
