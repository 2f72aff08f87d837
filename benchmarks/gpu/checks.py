"""Prove that kernels are right on this GPU before any kernel is timed: part `check` of gpu.py.

- Decoding is compared bit for bit, with all 65,536 patterns among the decoded values.
- Products are compared with FP64, by the chosen divisions and by the launchers' own.
- The inline assembly is compared with its version in plain Triton.
- Up to 32 tokens, the first token's result in each batch must equal its result alone.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import packhorse.kernels.matmul as matmul_module
import packhorse.kernels.matmul_many as many_module
import packhorse.kernels.weights as weights_module
from benchmarks.gpu.workers import Failure, spread
from packhorse.device.choices import choose
from packhorse.device.matrix_tuning import pack_on, random_weight
from packhorse.device.product_check import ExactProduct
from packhorse.device.products import run_choice
from packhorse.device.strategy import INVARIANT_TOKENS, Choice, Strategy
from packhorse.device.stream import is_ready
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.launch import Dialect, choose_dialect
from packhorse.kernels.stream_product import MAX_STREAM_TOKENS
from packhorse.kernels.weights import decode_weights
from packhorse.layout import W12, WEIGHT_FORMATS, WeightFormat

if TYPE_CHECKING:
    from benchmarks.gpu.run import Run

__all__ = ["WrongError", "check", "check_case"]

# Rows, columns and tokens that are checked: odd numbers, and more than one block of each.
CHECKED = ((4096, 14336), (63, 1000), (6144, 4096), (257, 4096), (130, 96), (1, 333), (40, 1))
CHECKED_SMALL = ((20, 70),)
CHECKED_TOKENS = (1, 7, 32, 100)
CHECKED_TOKENS_SMALL = (1, 7, 40)
PATTERNS = ("patterns in order", "patterns mixed")


class WrongError(Exception):
    """A kernel gives a wrong result."""


class Case(NamedTuple):
    """One case: what one process checks at a time.

    Attributes:
        format: name of a format.
        weight: one of `PATTERNS`, or rows and columns.
        smoke: on a tiny scale, on the CPU.
    """

    format: str
    weight: str
    smoke: bool


def check(run: "Run") -> list[dict[str, Any]]:
    """Check all cases in several processes, even if some cases fail.

    Raises:
        WrongError: a result is wrong.
        RuntimeError: something could not be run; the rest may still be timed.
    """
    sizes = CHECKED_SMALL if run.smoke else CHECKED
    names = [*PATTERNS, *(f"{n_rows} x {n_columns}" for n_rows, n_columns in sizes)]
    cases = [Case(format, name, run.smoke) for format in WEIGHT_FORMATS for name in names]
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for case, found in spread(run, check_case, cases):
        row = {"weight": case.weight, "form": case.format}
        if isinstance(found, Failure):
            print(f"{case.weight}, {case.format}: {found.trace}", flush=True)
            failed.append(f"{case.weight}, {case.format}: {found.error}")
            rows.append(row | {"failed": found.error})
        else:
            print(f"{case.weight}, {case.format}: every bit, {found} products", flush=True)
            rows.append(row | {"n_products": found})
        run.keep(rows)
    if any(WrongError.__name__ in error for error in failed):
        raise WrongError("; ".join(failed))
    if failed:
        raise RuntimeError("; ".join(failed))
    if len(rows) < len(cases):
        print(f"no time was left for {len(cases) - len(rows)} more of {len(cases)} checks")
    return rows


def check_case(case: Case) -> int:
    """Check one case; returns how many products were checked.

    Raises:
        WrongError: a result is wrong.
    """
    format = WEIGHT_FORMATS[case.format]
    weight = _make_weight(case.weight, case.smoke)
    sizes = CHECKED_TOKENS_SMALL if case.smoke else CHECKED_TOKENS
    name, weights = f"{case.weight}, {case.format}", pack_on(weight, format)
    check_decoding(name, weight, weights, format)
    finite = bool(weight.isfinite().all())
    return check_products(name, weight, weights, format, sizes) if finite else 0


def _make_weight(name: str, smoke: bool) -> torch.Tensor:
    """A weight of all 65,536 patterns, in order or mixed, or of rows like those of models."""
    device = torch.device("cpu" if smoke else "cuda")
    if name not in PATTERNS:
        n_rows, n_columns = map(int, name.split(" x "))
        return random_weight(n_rows, n_columns, device)
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    if name == PATTERNS[1]:
        bits = bits[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))]
    some = (bits[::16] if smoke else bits).contiguous()
    side = math.isqrt(len(some))
    return some.view(torch.bfloat16).reshape(side, side).to(device)


def check_decoding(
    name: str, weight: torch.Tensor, weights: WeightTensors, format: WeightFormat
) -> None:
    """Compare decoding bit for bit, with inline assembly and without."""
    plain, n_columns = bits_of(weight), weight.shape[1]
    decoded = decode_weights(weights, format, n_columns)
    require(torch.equal(bits_of(decoded), plain), f"{name}: decoding")
    decoded = with_twin(partial(decode_weights, weights, format, n_columns))
    require(torch.equal(bits_of(decoded), plain), f"{name}: decoding without assembly")


def check_products(
    name: str,
    weight: torch.Tensor,
    weights: WeightTensors,
    format: WeightFormat,
    sizes: Sequence[int],
) -> int:
    """Check products of a number of tokens, in all ways; returns the number of products."""
    n_rows, n_columns = weight.shape
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(sizes[-1], n_columns, generator=generator)
    tokens = tokens.to(torch.bfloat16).to(weight.device)
    n_products, first = 0, None
    for n_tokens in sizes:
        x, what = tokens[:n_tokens].contiguous(), f"{name}, {n_tokens} tokens"
        chosen = choose(n_rows, n_columns, n_tokens, format, weight.device)
        own = launchers_own(format, n_tokens, x.device) if n_tokens in sizes[1::2] else []
        for choice in {chosen, Choice(Strategy.DECODE), *own}:
            y = run_choice(choice, x, weights, format, n_columns)
            check_product(f"{what}, {choice}", choice, y, x, weight)
            n_products += 1
        y = run_choice(chosen, x, weights, format, n_columns)
        twin = with_twin(partial(run_choice, chosen, x, weights, format, n_columns))
        check_product(f"{what}, without assembly", chosen, twin, x, weight)
        if n_tokens <= INVARIANT_TOKENS:
            first = y[0] if first is None else first
            same = torch.equal(bits_of(first), bits_of(y[0]))
            require(same, f"{what}: the first token has another result than alone")
    return n_products


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def launchers_own(format: WeightFormat, n_tokens: int, device: torch.device) -> list[Choice]:
    """The products that the launchers make without a config."""
    own = [Choice(Strategy.FUSED)]
    if format is W12:
        own.append(Choice(Strategy.MANY))
    if n_tokens <= MAX_STREAM_TOKENS and is_ready(device):
        own.append(Choice(Strategy.STREAM))
    return own


def check_product(
    name: str, choice: Choice, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> None:
    """Compare some rows with FP64, by the error bound that the tuner uses, too."""
    exact = ExactProduct(x, weight[:512])
    require(exact.allows(y[:, :512], choice), f"{name}: the product")


def require(holds: bool, what: str) -> None:
    if not holds:
        raise WrongError(what)


def with_twin(call: Callable[[], Any]) -> Any:
    """Make a call whose kernels use no assembly."""
    modules = (weights_module, matmul_module, many_module)

    def choose_plain(device: torch.device) -> Dialect:
        return choose_dialect(device)._replace(assembly=False)

    for module in modules:
        module.choose_dialect = choose_plain
    try:
        return call()
    finally:
        for module in modules:
            module.choose_dialect = choose_dialect
