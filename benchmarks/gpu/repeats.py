"""Repeat each division many times, equal to the bit: part `repeat` of gpu.py.

Weights and tokens are integers, so small that every sum is exact in FP32, in any order. A product
then has one right result, which FP64 gives. Each division of each strategy must give exactly these
bits, run after run: a race, or a register that is overwritten too early, may show once in a hundred
runs only. Weights have exceptions, which are large powers of two.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu.checks import WrongError
from benchmarks.gpu.workers import Failure, spread
from packhorse.device.counts import INSTRUCTIONS
from packhorse.device.matrix_tuning import pack_on
from packhorse.device.products import run_choice
from packhorse.device.strategy import Choice, Strategy
from packhorse.device.stream import is_ready
from packhorse.device.stream_cost import stream_candidates
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.launch import choose_dialect
from packhorse.kernels.matmul import MAX_OWN_TOKENS, MatmulConfig
from packhorse.kernels.weights import decode_weights
from packhorse.layout import WEIGHT_FORMATS, WeightFormat

if TYPE_CHECKING:
    from benchmarks.gpu.run import Run

__all__ = ["DIVISIONS", "Repeat", "exact_operands", "repeat", "repeat_division"]

N_RUNS, N_RUNS_SMALL = 200, 3
SIZE, SIZE_SMALL = (4096, 14336), (24, 96)  # rows and columns
TOKENS, TOKENS_SMALL = (8, 128), (20,)
_MAX_EXACT = 1 << 24  # integers up to it are exact in FP32
_EXCEPTION = 1 << 16  # no window of a format has it beside small integers
_MAX_WEIGHT, _MAX_TOKEN = 31, 3
_ONE_EXCEPTION_IN = 512  # of 14336 columns, at most some 50 are


class Repeat(NamedTuple):
    """What one process repeats at a time.

    Attributes:
        choice: the division.
        format: name of the weight's format.
        n_tokens: vectors that it is multiplied with.
        smoke: on a tiny scale, on the CPU.
    """

    choice: Choice
    format: str
    n_tokens: int
    smoke: bool


def _fused(format: WeightFormat) -> Iterator[Choice]:
    """All divisions that the model of time knows, with one split and with several."""
    for i, (name, rows, tokens, steps, tiles) in enumerate(INSTRUCTIONS):
        if name == format.name:
            n_warps = 4 if tokens > MAX_OWN_TOKENS else (4, 8, 2)[i % 3]
            config = MatmulConfig(rows, tokens, steps, n_warps, 1 + i % 2, 3, tiles)
            yield Choice(Strategy.FUSED, config)


def _stream(format: WeightFormat) -> Iterator[Choice]:
    """All divisions of a matrix that the tuner knows."""
    for n_tokens in (8, 16, 32, 64, 128, 256):
        for config in stream_candidates(4096, 4096, n_tokens, format, 132):
            yield Choice(Strategy.STREAM, config)


def _decode(_: WeightFormat) -> Iterator[Choice]:
    yield Choice(Strategy.DECODE)


# The divisions of every strategy.
DIVISIONS: dict[Strategy, Callable[[WeightFormat], Iterator[Choice]]] = {
    Strategy.FUSED: _fused,
    Strategy.STREAM: _stream,
    Strategy.DECODE: _decode,
}


def repeats(smoke: bool, strategies: Sequence[str] = ()) -> list[Repeat]:
    """Everything that is repeated; in a smoke run one division of each strategy and format that
    Triton's interpreter runs.

    Args:
        smoke: whether it is such a run.
        strategies: names of the only ones, if any are given.
    """
    found = []
    for format in WEIGHT_FORMATS.values():
        for strategy, divisions in DIVISIONS.items():
            if strategies and strategy.value not in strategies:
                continue
            if smoke and strategy is Strategy.STREAM:
                continue
            choices = list(divisions(format))
            for choice in choices[:1] if smoke else choices:
                tokens = TOKENS_SMALL if smoke else TOKENS
                found += [Repeat(choice, format.name, n, smoke) for n in tokens]
    return found


def repeat(run: "Run") -> list[dict[str, Any]]:
    """Repeat all divisions in several processes; ends at the first that is wrong.

    Raises:
        WrongError: a division gives a wrong sum, or different bits.
        RuntimeError: a division could not be run.
    """
    rows: list[dict[str, Any]] = []
    failed, every = [], repeats(run.smoke, run.strategies)
    for job, found in spread(run, repeat_division, every):
        name = f"{job.format}, {job.n_tokens} tokens, {job.choice}"
        if isinstance(found, Failure):
            if found.error.startswith(WrongError.__name__):
                raise WrongError(found.error.partition(": ")[2])
            print(f"{name}: {found.error}", flush=True)
            failed.append(f"{name}: {found.error}")
            continue
        row = {"form": job.format, "n_tokens": job.n_tokens, "choice": str(job.choice)}
        rows.append(row | {"n_runs": found})
        run.keep(rows)
    n_fit = sum(row["n_runs"] > 0 for row in rows)
    print(f"{n_fit} of {len(every)} products: every run equal to the bit, and to FP64", flush=True)
    print(f"({len(rows) - n_fit} do not run on this GPU)", flush=True)
    if failed:
        raise RuntimeError("; ".join(failed))
    if len(rows) < len(every):
        print(f"no time was left for {len(every) - len(rows)} more")
    return rows


def repeat_division(job: Repeat) -> int:
    """Repeat one division; returns the number of runs, 0 if it does not run on this GPU.

    Raises:
        WrongError: a result differs from the exact one.
    """
    format = WEIGHT_FORMATS[job.format]
    weight, arrays, x, exact = _operands(job.format, job.n_tokens, job.smoke)
    n_runs = N_RUNS_SMALL if job.smoke else N_RUNS
    config = job.choice.config
    if job.choice.strategy is Strategy.STREAM and not is_ready(x.device):
        return 0
    if isinstance(config, MatmulConfig) and config.shares and not choose_dialect(x.device).shares:
        return 0
    what = f"{job.format}, {job.n_tokens} tokens, {job.choice}"
    n_wrong = torch.zeros((), dtype=torch.int64, device=x.device)
    for _ in range(n_runs):
        if job.choice.strategy is Strategy.DECODE:
            # PyTorch's own product may round parts of sums, so only decoding is compared.
            found, expected = decode_weights(arrays, format, x.shape[1]), weight
        else:
            try:
                found = run_choice(job.choice, x, arrays, format, x.shape[1])
            except OutOfResources:
                return 0
            expected = exact
        # Read only at the end, so that runs follow each other as closely as they can.
        n_wrong += (found.view(torch.int16) != expected.view(torch.int16)).any()
    if n_wrong.item():
        raise WrongError(f"{what}: {n_wrong.item()} of {n_runs} runs are not equal to FP64")
    return n_runs


@cache
def _operands(
    format: str, n_tokens: int, smoke: bool
) -> tuple[torch.Tensor, WeightTensors, torch.Tensor, torch.Tensor]:
    """The weight, packed too, the tokens, and their exact product."""
    device = torch.device("cpu" if smoke else "cuda")
    weight, x = exact_operands(*(SIZE_SMALL if smoke else SIZE), n_tokens, device)
    arrays = pack_on(weight, WEIGHT_FORMATS[format], threads=1)
    if not arrays.exceptions.numel():
        raise RuntimeError("the weight has no exceptions: nothing would prove them")
    exact = torch.cat([(x.double() @ part.double().T) for part in weight.split(512)], dim=1)
    # From FP64 over FP32, where these integers are exact, so that there is one rounding.
    return weight, arrays, x, exact.float().bfloat16()


def exact_operands(
    n_rows: int, n_columns: int, n_tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and tokens of integers, whose sums are exact in FP32 in any order.

    Args:
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors.
        device: where they are made.

    Returns:
        BF16, n_rows x n_columns, and BF16, n_tokens x n_columns.

    Raises:
        ValueError: with so many columns a sum might be rounded.
    """
    generator = torch.Generator(device).manual_seed(n_columns)

    def integers(shape: tuple[int, int], low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=generator, device=device)

    weight = integers((n_rows, n_columns), 1, _MAX_WEIGHT)
    is_exception = integers((n_rows, n_columns), 0, _ONE_EXCEPTION_IN - 1) == 0
    weight = torch.where(is_exception, _EXCEPTION, weight)
    weight *= 2 * integers((n_rows, n_columns), 0, 1) - 1
    x = integers((n_tokens, n_columns), -_MAX_TOKEN, _MAX_TOKEN)
    most = int(weight.abs().sum(1).max()) * _MAX_TOKEN
    if most > _MAX_EXACT:
        raise ValueError(f"{n_columns} columns: sums of up to {most} are not exact in FP32")
    return weight.to(torch.bfloat16), x.to(torch.bfloat16)
