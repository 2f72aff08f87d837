"""Predict the speed of packed weights on an H200: `python benchmarks/gpu.py predict`.

Every printed figure is a prediction by `packhorse.device.cost`, from bytes, counted instructions
and assumptions; nothing is measured here. Beside predictions are times that `gpu.py simulate` kept.
`gpu.py device` measures, and compares.
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gpu import kept_simulations
from benchmarks.gpu.kept_simulations import StreamRow, read_streams
from packhorse.device.autotune import tune
from packhorse.device.cost import predict_decode, predict_plain
from packhorse.device.strategy import INVARIANT_TOKENS, bucket_of
from packhorse.device.stream_cost import expect_stream
from packhorse.gpu.models import PRESETS, DeviceModel
from packhorse.kernels.stream_product import MAX_STREAM_TOKENS
from packhorse.layout import W11, W12, WeightFormat

__all__ = ["MODELS", "TOKENS", "Llama", "Shape", "document", "predict_row", "predict_step"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks_gpu.md"
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
BATCHES = (1, 8, 32)
H200 = PRESETS[0]
A100 = PRESETS[-1]  # of 80 GB
SHARED_BATCHES = (64, 128, 256)  # of products whose warps share the columns


@dataclass(frozen=True)
class Shape:
    """A matrix of a model.

    Attributes:
        name: its role in the model.
        n_rows: outputs.
        n_columns: inputs.
        count: how many of them a model has.
    """

    name: str
    n_rows: int
    n_columns: int
    count: int


@dataclass(frozen=True)
class Llama:
    """Matrices of a model as inference engines join them, and the rest of a step.

    Attributes:
        name: of the model whose shapes these are.
        shapes: its matrices.
        rest: seconds of a step without its matrices: norms, attention, sampling. Assumed to be
            25 us a layer.
    """

    name: str
    shapes: tuple[Shape, ...]
    rest: float


MODELS = (
    Llama(
        "Llama-3.1-8B",
        (
            Shape("attention output", 4096, 4096, 32),
            Shape("query, key, value", 6144, 4096, 32),
            Shape("down", 4096, 14336, 32),
            Shape("gate and up", 28672, 4096, 32),
            Shape("head", 128256, 4096, 1),
        ),
        32 * 25e-6,
    ),
    Llama(
        "Llama-3.1-70B",
        (
            Shape("attention output", 8192, 8192, 80),
            Shape("query, key, value", 10240, 8192, 80),
            Shape("down", 8192, 28672, 80),
            Shape("gate and up", 57344, 8192, 80),
            Shape("head", 128256, 8192, 1),
        ),
        80 * 25e-6,
    ),
)
WAYS = ("plain", "W12", "W11", "W12 stream", "W11 stream", "decode")
HEADS = (
    "BF16",
    "W12, Triton",
    "W11, Triton",
    "W12, CUDA C++",
    "W11, CUDA C++",
    "W12 decoded first",
)
SIMULATED = ("W12, Triton, simulated", "the same, started early")


@cache
def _tuned(
    n_rows: int, n_columns: int, format: WeightFormat, device: DeviceModel
) -> dict[int, Any]:
    return dict(tune(n_rows, n_columns, format, device))


def predict_row(shape: Shape, n_tokens: int, device: DeviceModel = H200) -> dict[str, float]:
    """Seconds of a product in each way; packed products run as they are chosen without tuning, by
    Triton's kernels, and by those in CUDA C++ up to the number of tokens that they take."""
    size = shape.n_rows, shape.n_columns
    bucket = bucket_of(n_tokens)
    return {
        "plain": predict_plain(*size, n_tokens, device),
        "W12": _tuned(*size, W12, device)[bucket].seconds,
        "W11": _tuned(*size, W11, device)[bucket].seconds,
        "W12 stream": _predict_stream(*size, bucket, W12, device),
        "W11 stream": _predict_stream(*size, bucket, W11, device),
        "decode": predict_decode(*size, n_tokens, W12, device),
    }


def _predict_stream(
    n_rows: int, n_columns: int, n_tokens: int, format: WeightFormat, device: DeviceModel
) -> float:
    """Seconds by the kernels in CUDA C++; infinity for more tokens than they take."""
    if n_tokens > MAX_STREAM_TOKENS:
        return math.inf
    return expect_stream(n_rows, n_columns, n_tokens, format, device)[1]


def predict_step(model: Llama, n_tokens: int, device: DeviceModel = H200) -> dict[str, float]:
    """Seconds of a step of a whole model, for a batch of this size."""
    rows = [(shape.count, predict_row(shape, n_tokens, device)) for shape in model.shapes]
    return {way: model.rest + sum(count * row[way] for count, row in rows) for way in WAYS}


@cache
def _simulations() -> dict[tuple[int, int, int], kept_simulations.Row]:
    """Kept simulations of what is chosen untuned, by rows, columns and tokens."""
    kept = kept_simulations.read().rows
    return {(row.n_rows, row.n_columns, row.n_tokens): row for row in kept}


def _simulated_cells(shape: Shape, n_tokens: int) -> str:
    """Simulated microseconds, and how many times as fast as BF16; empty if there are none."""
    row = _simulations().get((shape.n_rows, shape.n_columns, n_tokens))
    times = () if row is None else (row.simulated, row.early)
    cells = [f"{t * 1e6:.1f} ({row.plain / t:.2f})" for t in times if row is not None]
    return " | ".join(cells or [""] * len(SIMULATED))


def simulate_step(model: Llama, n_tokens: int) -> dict[str, float] | None:
    """Seconds of a step of a whole model with W12 from kept simulations: as "simulated", and as
    "early" where products start early; None if a matrix was not simulated for this batch."""
    found = {
        shape: _simulations().get((shape.n_rows, shape.n_columns, n_tokens))
        for shape in model.shapes
    }
    rows = [(shape.count, row) for shape, row in found.items() if row is not None]
    if len(rows) < len(found):
        return None
    return {
        "simulated": model.rest + sum(count * row.simulated for count, row in rows),
        "early": model.rest + sum(count * row.early for count, row in rows),
    }


def _cells(row: dict[str, float]) -> str:
    """Microseconds, and how many times as fast as BF16; empty where a way does not run."""
    plain = row["plain"]
    times = (row[way] for way in WAYS[1:])
    others = (f"{t * 1e6:.1f} ({plain / t:.2f})" if t < math.inf else "" for t in times)
    return " | ".join([f"{plain * 1e6:.1f}", *others])


def _table(heads: Iterable[str], rows: Iterable[str]) -> Iterator[str]:
    names = list(heads)
    yield f"| {' | '.join(names)} |"
    yield "|" + "--:|" * len(names)
    yield from (f"| {row} |" for row in rows)
    yield ""


def _model_section(model: Llama) -> Iterator[str]:
    simulated = SIMULATED if simulate_step(model, BATCHES[0]) else ()
    yield f"### {model.name}"
    yield ""
    for shape in model.shapes:
        yield f"{shape.name}, {shape.n_rows} x {shape.n_columns}:"
        yield ""
        rows = (f"{n} | {_cells(predict_row(shape, n))}" for n in TOKENS)
        if simulated:
            rows = (
                f"{row} | {_simulated_cells(shape, n)}" for row, n in zip(rows, TOKENS, strict=True)
            )
        yield from _table(["tokens", *HEADS, *simulated], rows)
    rest = f"{model.rest * 1e3:.1f} ms a step without the matrices"
    yield f"The whole model, tokens a second ({rest}):"
    yield ""
    rows = (f"{batch} | {_speeds(model, batch)}" for batch in BATCHES)
    yield from _table(["batch", *HEADS, *simulated], rows)


def _speeds(model: Llama, batch: int) -> str:
    step = predict_step(model, batch)
    plain = step["plain"]
    others = [step[way] for way in WAYS[1:]] + list((simulate_step(model, batch) or {}).values())
    cells = (f"{batch / seconds:.0f} ({plain / seconds:.2f})" for seconds in others)
    return " | ".join([f"{batch / plain:.0f}", *cells])


_HEAD = """# Benchmarks of packed weights on GPUs

Written by `python benchmarks/gpu.py predict --write`; do not edit by hand.

## What is not measured

Formats and kernels are proven without a GPU: every bit and every sum in Triton's interpreter;
instructions, registers and shared memory in the machine code of offline compilation. An H200
has run the rest ([decisions](decisions.md), section 42). Not measured yet are:

- what the autotuner finds for W11, whose products below ran untuned, by clusters of 4; and for the
  largest matrix with W12 and more than 64 tokens;
- compute-sanitizer on the kernels that gather rows as they are now;
- any card but an H200.

One command measures all of it on a machine with a GPU (PyTorch, Triton; no network). A call takes
less than nine minutes, and rivals are measured where they are installed:

    python benchmarks/gpu.py device

It proves products right first, and stops at the first wrong one: tests, every bit of decoding,
products against FP64, each division 200 times on sums that are exact, compute-sanitizer. Then
it measures the card's ceilings, profiles, tunes, and prints its tables together with the
predictions. It keeps the figures in `benchmarks/results/gpu/`. `--part check`, for example,
runs one part, which then has all that time for itself (`--help` lists them); tuning goes on
where it ended. `--smoke` runs everything on a tiny scale without a GPU, as the tests do; its times
mean nothing. For a machine without a network, `python benchmarks/gpu.py wheels FOLDER` downloads
the packages that it may lack, and `device --wheels FOLDER` installs them there.
"""
_PREDICTED = """## Predictions for an H200

**Predictions**, by the model of time (`device/cost.py`): bytes at the 4.3 TB/s that copies reach on
this card, instructions as counted in the machine code, tensor throughput, L2, what one
multiprocessor can draw, and the start and end of programs. The tables above show what an H200 took
beside it. Predictions of the kernels in CUDA C++ are multiplied by the share that it took where a
way is chosen, and in the tables of whole models below, but not in the table of these kernels alone.
Figures are microseconds for a product; in parentheses is the speed relative to BF16. W12 and W11
run as they are chosen where nothing was tuned: by Triton's kernels, and by those in CUDA C++, which
Hopper takes with 1 to 256 tokens where NVRTC is there. The latter have a model of their own
(`device/stream_cost.py`), whose cycles come from the simulation. BF16 is predicted by
`device/cost.py`: the best of the tiles that cuBLAS may take, which read tokens from L2 again
as ours do, but in pairs.

**Simulated, not measured either:** the same divisions of W12 with Triton, instruction by
instruction, from the machine code and its control codes (`python benchmarks/gpu.py simulate`). Once
the kernel begins where the one before it ended, and once it has started early and brought its first
weights to L2, as kernels do on GPUs of compute capability 9.0 and later.

With Triton's kernels, W12 is predicted to be slower than BF16 from 16 tokens on for some matrices,
and from 32 on for all: `pack_model_(model, for_tokens=32)` leaves such layers plain where there is
no NVRTC. W11 is slower throughout with them: it saves memory only. The weights of the smaller
model take 15.0 GiB in BF16 and 11.2 in W12; those of the larger one 131 of the card's 140 GiB,
which leaves little for a cache of keys and values, and 99 in W12.
"""


_STREAMED = """### The kernels in CUDA C++

On Hopper, where NVRTC and a driver are there (`device/stream.py`), products take the kernels in
CUDA C++ with up to 32 tokens, so that all small batches add in the same order, and with 33 to 256
where they are predicted to be faster than decoding first. This table says which way an untuned
product with W12 then takes. **Predicted and simulated** (`python
benchmarks/gpu.py simulate --stream`): after a kernel that ends first, and after one that lets them
start early. A division is rows/tokens/stages of weights/stages of tokens/cluster/splits.
"""


def _stream_section() -> Iterator[str]:
    """What is taken where the kernels with warps that fetch run."""
    yield _STREAMED
    heads = ["matrix", "tokens", "way", "BF16", "predicted", "simulated", "started early"]
    yield from _table(heads, (_stream_cells(row) for row in read_streams()))


def _stream_cells(row: StreamRow) -> str:
    times: tuple[float, ...] = (row.predicted, row.simulated, row.early)
    decoded = predict_decode(row.n_rows, row.n_columns, row.n_tokens, W12, H200)
    way = f"stream {'/'.join(map(str, row.division))}"
    if row.n_tokens > INVARIANT_TOKENS and decoded < row.predicted:
        way, times = "decoded first", (decoded,)
    cells = [row.matrix, row.n_tokens, way, f"{row.plain * 1e6:.1f}"]
    cells += [f"{t * 1e6:.1f} ({row.plain / t:.2f})" for t in times]
    cells += [""] * (3 - len(times))  # decoding first is not simulated
    return " | ".join(map(str, cells))


_SHARED = """### An A100 with 64 to 256 tokens

The kernels in CUDA C++ are Hopper's. On other GPUs, Triton's kernel takes blocks of 64 tokens,
whose warps share the columns of the weight, where that is predicted to be faster than decoding
first. W12 on an A100 of 80 GB; **predicted and simulated, not yet measured on a GPU** (`python
benchmarks/gpu.py simulate --a100`). A division is rows/tokens/steps/warps/splits/stages/tiles.
"""


def _shared_section() -> Iterator[str]:
    """What is taken above 32 tokens where warps share the columns."""
    yield _SHARED
    heads = ["matrix", "tokens", "division", "BF16", "predicted", "simulated", "decoded first"]
    rows = kept_simulations.read(kept_simulations.A100_PATH).rows
    yield from _table(heads, (_shared_cells(row) for row in rows))


def _shared_cells(row: kept_simulations.Row) -> str:
    decoded = predict_decode(row.n_rows, row.n_columns, row.n_tokens, W12, A100)
    cells = [row.matrix, row.n_tokens, "/".join(map(str, row.division)), f"{row.plain * 1e6:.1f}"]
    times = (row.predicted, row.simulated, decoded)
    cells += [f"{t * 1e6:.1f} ({row.plain / t:.2f})" for t in times]
    return " | ".join(map(str, cells))


def _measured() -> Iterator[str]:
    """The sections of kept runs; smoke runs are left out."""
    for path in sorted(RESULTS.glob("*.json")):
        kept = json.loads(path.read_text())
        if kept.get("kind") != "gpu":  # counts of instructions lie in this folder, too
            continue
        yield f"## Measured: {kept['card']}"
        yield ""
        versions = f"PyTorch {kept['torch']}, Triton {kept['triton']}"
        yield f"{kept['date']}, driver {kept['driver']}, {versions}."
        yield ""
        yield from (f"- {note}" for note in kept.get("notes", ()))
        yield ""
        yield from _models_measured(_rows_of(kept, "model"))
        rows = _rows_of(kept, "table")
        yield from _rivals_measured(_rows_of(kept, "rivals"), rows)
        if rows:
            heads = ["matrix", "tokens", "way", "us", "predicted", "times BF16"]
            yield from _table(heads, (_measured_cells(row) for row in rows))


def _rows_of(kept: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """The rows of a part; those that it had before it failed, if it did."""
    found: Any = kept["parts"].get(part, [])
    return found["rows"] if isinstance(found, dict) else found


def _models_measured(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A step of the smaller model; nothing if it was not measured."""
    if not rows:
        return
    yield "A step of a Llama of 8B, with 512 tokens in its cache:"
    yield ""
    heads = ["weights", "batch", "ms a step", "tokens a second", "times BF16", "GiB of weights"]
    cells = (
        f"{row['weights']} | {row['batch']} | {row['seconds'] * 1e3:.2f} | "
        f"{row['tokens_per_s']:.0f} | {row['speedup']:.2f} | {row['weights_gib']:.1f}"
        for row in rows
    )
    yield from _table(heads, cells)


def _rivals_measured(rows: list[dict[str, Any]], own: list[dict[str, Any]]) -> Iterator[str]:
    """Products of one token beside rivals, which decode the whole matrix first."""
    found = [row for row in rows if "seconds" in row]
    if not found:
        return
    yield "A product of one token beside rivals, which decode the matrix to memory, then multiply:"
    yield ""
    shape = found[0]["shape"]
    ours = [row for row in own if row["shape"] == shape and row["n_tokens"] == 1]
    heads = ["matrix", "way", "bits a weight", "us", "decoding alone, us"]
    bits = {"BF16": "16", "W12": f"{W12.bits}", "W12 decoded first": f"{W12.bits}", "W11": "11.4"}
    lines = [f"{shape} | {r['way']} | {bits[r['way']]} | {r['seconds'] * 1e6:.1f} |" for r in ours]
    for row in found:
        times = f"{row['seconds'] * 1e6:.1f} | {row['decoding'] * 1e6:.1f}"
        lines.append(f"{shape} | {row['way']} | {row['bits']:.2f} | {times}")
    yield from _table(heads, lines)


def _measured_cells(row: dict[str, Any]) -> str:
    cells = [row["shape"], row["n_tokens"], row["way"], f"{row['seconds'] * 1e6:.1f}"]
    cells += [f"{row['predicted'] * 1e6:.1f}", f"{row['speedup']:.2f}"]
    return " | ".join(map(str, cells))


def document() -> str:
    """The page."""
    models = (line for model in MODELS for line in _model_section(model))
    lines = [*_measured(), _PREDICTED, *_stream_section(), *_shared_section(), *models]
    return "\n".join([_HEAD, *lines]).rstrip() + "\n"


def main(argv: list[str]) -> int:
    """Print the page, or write it.

    Args:
        argv: the arguments after `predict`.

    Returns:
        The exit status: 0.
    """
    parser = argparse.ArgumentParser(
        prog="gpu.py predict", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    if args.write:
        PAGE.write_text(document())
    else:
        print(document())
    return 0
