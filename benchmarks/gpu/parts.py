"""The parts of gpu.py, which measure and tune.

Each prints a table and returns its rows. It also keeps them after each matrix, so that they survive
whatever ends the run.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu import llama, loading, peers
from benchmarks.gpu.checks import WrongError, check
from benchmarks.gpu.frames import DifferentError, frames
from benchmarks.gpu.kept_simulations import simulated_seconds
from benchmarks.gpu.predictions import H200, MODELS, TOKENS, Shape
from benchmarks.gpu.reading import ceilings
from benchmarks.gpu.repeats import repeat
from benchmarks.gpu.tools import profile, sanitize, tests, versions
from benchmarks.gpu.workers import Product, compile_ahead, likely_products
from packhorse.device.autotune import predictor
from packhorse.device.choices import choose
from packhorse.device.cost import predict_decoding, predict_plain
from packhorse.device.matrix_tuning import (
    measure_choices,
    order_in,
    pack_on,
    random_weight,
    tune_on_gpu,
    tuned_before,
)
from packhorse.device.product_timer import ProductTimer
from packhorse.device.strategy import BUCKETS, Choice, Strategy
from packhorse.device.stream import is_ready
from packhorse.device.tune_cache import Key, Measured
from packhorse.gpu.detect import describe_device
from packhorse.gpu.search import Search
from packhorse.kernels.arrays import WeightTensors
from packhorse.layout import W11, W12, WEIGHT_FORMATS, WeightFormat

if TYPE_CHECKING:
    from benchmarks.gpu.run import Run

__all__ = [
    "WrongError",
    "ceilings",
    "check",
    "decode",
    "load",
    "model",
    "profile",
    "repeat",
    "rivals",
    "sanitize",
    "table",
    "tests",
    "tune",
    "versions",
]

SMALL = (Shape("odd", 24, 70, 1),)
SMALL_TOKENS = (1, 40)
MAX_W11_TOKENS = 32


def device_of(run: "Run") -> torch.device:
    """The GPU, or the host for a smoke run."""
    return torch.device("cpu" if run.smoke else "cuda")


def shapes_of(run: "Run") -> tuple[Shape, ...]:
    """The matrices of all models."""
    return SMALL if run.smoke else tuple(shape for model in MODELS for shape in model.shapes)


def tokens_of(run: "Run", format: WeightFormat | None = None) -> tuple[int, ...]:
    """The numbers of tokens that are measured."""
    tokens = SMALL_TOKENS if run.smoke else TOKENS
    return tuple(n for n in tokens if n <= MAX_W11_TOKENS) if format is W11 else tokens


class HostTimer(ProductTimer):
    """The timer of a smoke run: it makes each call once, and uses the host's clock."""

    def time(self, calls: Any) -> float:
        start = time.perf_counter()
        calls[0]()
        return time.perf_counter() - start


def timer_of(
    run: "Run", weights: WeightTensors, format: WeightFormat, n_columns: int
) -> ProductTimer:
    """A timer of products with a matrix."""
    if run.smoke:
        return HostTimer(weights, format, n_columns, chain_nbytes=1)
    return ProductTimer(weights, format, n_columns)


# Speed.


def decode(run: "Run") -> list[dict[str, Any]]:
    """Decoding alone (bytes read and written a second), and a frame."""
    rows: list[dict[str, Any]] = []
    print_head("matrix", "format", "us", "predicted", "GB/s moved", "bits a weight")
    for shape, format in itertools.product(shapes_of(run), WEIGHT_FORMATS.values()):
        if run.is_late():
            break
        size = shape.n_rows, shape.n_columns
        weights = pack_on(random_weight(*size, device_of(run)), format)
        nbytes = sum(tensor.nbytes for tensor in weights)
        seconds = timer_of(run, weights, format, shape.n_columns).decoding()
        predicted = predict_decoding(*size, format, describe_device(device_of(run)))
        moved = nbytes + 2 * math.prod(size)
        row = {"shape": name_of(shape), "form": format.name, "seconds": seconds}
        row |= {"predicted": predicted, "moved_nbytes": moved, "bits": 8 * nbytes / math.prod(size)}
        rows.append(row)
        print_row(
            name_of(shape), format.name, us(seconds), us(predicted), f"{moved / seconds / 1e9:.0f}",
            f"{row['bits']:.2f}",
        )  # fmt: skip
        run.keep(rows)
        del weights
        release(run)
    try:
        return rows + frames(run)
    except DifferentError as error:
        raise WrongError(str(error)) from error


def tune(run: "Run") -> list[dict[str, Any]]:
    """Tune all matrices and keep the results; tuned matrices are not measured again."""
    device = device_of(run)
    rows: list[dict[str, Any]] = []
    compile_ahead(run, products_to_tune(run))
    print_head("matrix", "format", "tokens", "choice", "us", "predicted", "simulated", "times BF16")
    for format, shape in itertools.product(WEIGHT_FORMATS.values(), shapes_of(run)):
        limit = limited_search(run)
        if run.is_late():
            found = before_of(run, shape, format)
        else:
            found = tune_shape(run, shape, format, limit)
        rows += [tuned_row(shape, format, n, measured, device) for n, measured in found.items()]
        print(f"({limit.n_measured} measurements)", flush=True)
        run.keep(rows)
        release(run)
    return rows


def buckets_of(run: "Run", format: WeightFormat) -> list[int]:
    """Numbers of tokens that are tuned."""
    buckets = [n for n in BUCKETS if format is W12 or n <= MAX_W11_TOKENS]
    return [n for n in buckets if n in tokens_of(run, format)] if run.smoke else buckets


def products_to_tune(run: "Run") -> Iterator[Product]:
    """The products that tuning is likely to measure."""
    streams = is_ready(device_of(run))
    for format, shape in itertools.product(WEIGHT_FORMATS.values(), shapes_of(run)):
        before = {} if run.again else before_of(run, shape, format)
        buckets = [n for n in buckets_of(run, format) if n not in before]
        if buckets:
            yield from likely_products(
                shape, format, model_of(run), buckets, order_in(before), streams
            )


def before_of(run: "Run", shape: Shape, format: WeightFormat) -> dict[int, Measured]:
    """The choices that earlier calls have measured."""
    key = Key(shape.n_rows, shape.n_columns, format.name)
    return {} if run.smoke else tuned_before(key, device_of(run), run.cache)


def tune_shape(
    run: "Run", shape: Shape, format: WeightFormat, limit: Search
) -> dict[int, Measured]:
    device, size, buckets = device_of(run), (shape.n_rows, shape.n_columns), buckets_of(run, format)
    if run.smoke:
        timer = partial(timer_of, run)
        return measure_choices(
            *size, format, device, buckets=buckets, search=limit, make_timer=timer
        )
    return tune_on_gpu(
        *size, format, device, folder=run.cache, again=run.again, buckets=buckets, search=limit
    )


def limited_search(run: "Run") -> Search:
    """A search that ends when the part has to end, or soon after."""
    search = Search(is_late=run.is_late)
    if run.smoke:
        search.is_late = lambda: search.n_measured >= 3
    return search


def tuned_row(
    shape: Shape, format: WeightFormat, n_tokens: int, measured: Measured, device: torch.device
) -> dict[str, Any]:
    predicted = predict(shape, n_tokens, format, measured.choice, device)
    plain = measured.plain_seconds or math.nan
    text = describe_choice(measured.choice)
    simulated = simulate(shape, n_tokens, format, measured.choice, device)
    print_row(
        name_of(shape), format.name, str(n_tokens), text,
        us(measured.seconds), us(predicted), us(simulated), f"{plain / measured.seconds:.2f}",
    )  # fmt: skip
    return {
        "shape": name_of(shape),
        "form": format.name,
        "n_tokens": n_tokens,
        "choice": text,
        "seconds": measured.seconds,
        "predicted": predicted,
        "simulated": simulated,
        "speedup": plain / measured.seconds,
    }


def table(run: "Run") -> list[dict[str, Any]]:
    """Compare each way with BF16, for all matrices and numbers of tokens, tuned where possible."""
    rows: list[dict[str, Any]] = []
    compile_ahead(run, chosen_products(run, shapes_of(run), tokens_of))
    print_head(
        "matrix", "tokens", "way", "choice", "us", "TB/s", "predicted", "simulated", "times BF16"
    )
    for shape in shapes_of(run):
        weight = random_weight(shape.n_rows, shape.n_columns, device_of(run))
        plain: dict[int, float] = {}
        for format in WEIGHT_FORMATS.values():
            weights = pack_on(weight, format)
            timer = timer_of(run, weights, format, shape.n_columns)
            for n in tokens_of(run, format):
                if run.is_late():
                    return rows
                if n not in plain:
                    plain[n] = timer.plain(n)
                    predicted = predict_plain(shape.n_rows, shape.n_columns, n, model_of(run))
                    rows.append(table_row(shape, n, "BF16", "", plain[n], predicted, plain[n], 2.0))
                rows += product_rows(run, shape, format, n, timer, plain[n])
            run.keep(rows)
            del weights, timer
            release(run)
    return rows


def chosen_products(
    run: "Run",
    shapes: Iterable[Shape],
    tokens: Callable[["Run", WeightFormat], Sequence[int]],
) -> Iterator[Product]:
    """The products with their chosen kernels."""
    device = device_of(run)
    for format, shape in itertools.product(WEIGHT_FORMATS.values(), shapes):
        for n in tokens(run, format):
            choice = choose(shape.n_rows, shape.n_columns, n, format, device)
            yield Product(choice, format.name, shape.n_columns, n)


def product_rows(
    run: "Run", shape: Shape, format: WeightFormat, n: int, timer: ProductTimer, plain: float
) -> list[dict[str, Any]]:
    device = device_of(run)
    chosen = choose(shape.n_rows, shape.n_columns, n, format, device)
    ways = [(format.name, chosen)]
    if format is W12 and chosen.strategy is not Strategy.DECODE:
        ways.append(("W12 decoded first", Choice(Strategy.DECODE)))
    rows = []
    for way, choice in ways:
        seconds, predicted = timer(choice, n), predict(shape, n, format, choice, device)
        text = describe_choice(choice)
        simulated = simulate(shape, n, format, choice, device)
        rows.append(
            table_row(shape, n, way, text, seconds, predicted, plain, format.bits / 8, simulated)
        )
    return rows


def table_row(
    shape: Shape, n: int, way: str, choice: str, seconds: float, predicted: float, plain: float,
    weight_nbytes: float, simulated: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    tb_per_s = shape.n_rows * shape.n_columns * weight_nbytes / seconds / 1e12
    print_row(
        name_of(shape), str(n), way, choice, us(seconds), f"{tb_per_s:.2f}", us(predicted),
        us(simulated), f"{plain / seconds:.2f}",
    )  # fmt: skip
    return {
        "shape": name_of(shape), "n_tokens": n, "way": way, "choice": choice, "seconds": seconds,
        "predicted": predicted, "simulated": simulated, "speedup": plain / seconds,
    }  # fmt: skip


def rivals(run: "Run") -> list[dict[str, Any]]:
    """Rivals, where they are installed; none in a smoke run."""
    rows = []
    print_head("matrix", "tokens", "way", "decoding", "us", "TB/s", "bits a weight")
    for name in () if run.smoke else peers.PEERS:
        if run.is_late():
            break
        row = peers.measure(name, device_of(run))
        rows.append(row)
        release(run)
        if "seconds" not in row:
            print(f"{name}: {row.get('missing') or row['error']}: not measured", flush=True)
            continue
        packed_nbytes = math.prod(peers.SHAPE) * row["bits"] / 8
        print_row(
            row["shape"], "1", name, us(row["decoding"]), us(row["seconds"]),
            f"{packed_nbytes / row['seconds'] / 1e12:.2f}", f"{row['bits']:.2f}",
        )  # fmt: skip
    return rows


def model(run: "Run") -> list[dict[str, Any]]:
    """A whole model with random weights: tokens a second and memory, plain and packed."""
    shapes = SMALL if run.smoke else MODELS[0].shapes
    compile_ahead(run, chosen_products(run, shapes, lambda *_: llama.BATCHES))
    return llama.measure(run, device_of(run))


def load(run: "Run") -> list[dict[str, Any]]:
    """Compare loading a packed file, uploaded packed or decoded on the host, with a plain file.

    Raises:
        WrongError: a way gives other bits.
    """
    try:
        rows = loading.measure(run, device_of(run))
    except ValueError as error:
        raise WrongError(str(error)) from error
    print_head("way", "seconds", "GB/s of tensors", "MiB beside the tensors")
    for row in rows:
        speed = row["nbytes"] / row["seconds"] / 1e9
        print_row(
            row["way"], f"{row['seconds']:.3f}", f"{speed:.1f}", f"{row['extra_nbytes'] >> 20}"
        )
    return rows


# What parts share.


def model_of(run: "Run") -> Any:
    return describe_device(device_of(run))


def predict(
    shape: Shape, n_tokens: int, format: WeightFormat, choice: Choice, device: torch.device
) -> float:
    """The seconds that the model of time predicts for a choice; infinity if it cannot."""
    if choice.config is None and choice.strategy is not Strategy.DECODE:
        return math.inf  # the launcher chooses
    model = describe_device(device)
    return predictor(shape.n_rows, shape.n_columns, format, model)(choice, n_tokens)


def simulate(
    shape: Shape, n_tokens: int, format: WeightFormat, choice: Choice, device: torch.device
) -> float | None:
    """The seconds that the simulation kept for a choice; None on all cards but the whole one that
    it simulates."""
    model = describe_device(device)
    if (model.name, model.n_processors) != (H200.name, H200.n_processors):
        return None
    text = describe_choice(choice)
    return simulated_seconds(shape.n_rows, shape.n_columns, n_tokens, format.name, text)


def describe_choice(choice: Choice) -> str:
    """Its strategy, and the fields of its division in their order."""
    if choice.config is None:
        return choice.strategy.value
    numbers = "/".join(str(value) for value in vars(choice.config).values())
    return f"{choice.strategy.value} {numbers}"


def name_of(shape: Shape) -> str:
    return f"{shape.n_rows} x {shape.n_columns}"


def us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"


def print_head(*names: str) -> None:
    print_row(*names)
    print("|" + "---|" * len(names), flush=True)


def print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def release(run: "Run") -> None:
    """Release memory for the next matrix."""
    if not run.smoke:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
