"""Predict the speed of packed weights on an H200: `python benchmarks/gpu.py predict`.

Every printed figure is a prediction by `packhorse.device.cost`, from bytes, counted instructions
and assumptions; nothing is measured here. `gpu.py device` measures, and compares. `--counts`
compiles the kernels and prints the table of instructions on which the model is based.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from packhorse.device.autotune import tune
from packhorse.device.cost import predict_decode, predict_plain
from packhorse.device.strategy import bucket_of
from packhorse.gpu.models import PRESETS, DeviceModel
from packhorse.layout import W11, W12, WeightFormat

__all__ = ["MODELS", "TOKENS", "Llama", "Shape", "document", "predict_row", "predict_step"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks_gpu.md"
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
BATCHES = (1, 8, 32)
H200 = PRESETS[0]


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
WAYS = ("plain", "W12", "W11", "decode")
HEADS = ("BF16", "W12", "W11", "W12 decoded first")


@cache
def _tuned(
    n_rows: int, n_columns: int, format: WeightFormat, device: DeviceModel
) -> dict[int, Any]:
    return dict(tune(n_rows, n_columns, format, device))


def predict_row(shape: Shape, n_tokens: int, device: DeviceModel = H200) -> dict[str, float]:
    """Seconds of a product in each way; packed products run as they are chosen without tuning."""
    size = shape.n_rows, shape.n_columns
    bucket = bucket_of(n_tokens)
    return {
        "plain": predict_plain(*size, n_tokens, device),
        "W12": _tuned(*size, W12, device)[bucket].seconds,
        "W11": _tuned(*size, W11, device)[bucket].seconds,
        "decode": predict_decode(*size, n_tokens, W12, device),
    }


def predict_step(model: Llama, n_tokens: int, device: DeviceModel = H200) -> dict[str, float]:
    """Seconds of a step of a whole model, for a batch of this size."""
    rows = [(shape.count, predict_row(shape, n_tokens, device)) for shape in model.shapes]
    return {way: model.rest + sum(count * row[way] for count, row in rows) for way in WAYS}


def _cells(row: dict[str, float]) -> str:
    """Microseconds, and how many times as fast as BF16."""
    plain = row["plain"]
    others = (f"{row[way] * 1e6:.1f} ({plain / row[way]:.2f})" for way in WAYS[1:])
    return " | ".join([f"{plain * 1e6:.1f}", *others])


def _table(heads: Iterable[str], rows: Iterable[str]) -> Iterator[str]:
    names = list(heads)
    yield f"| {' | '.join(names)} |"
    yield "|" + "--:|" * len(names)
    yield from (f"| {row} |" for row in rows)
    yield ""


def _model_section(model: Llama) -> Iterator[str]:
    yield f"### {model.name}"
    yield ""
    for shape in model.shapes:
        yield f"{shape.name}, {shape.n_rows} x {shape.n_columns}:"
        yield ""
        rows = (f"{n} | {_cells(predict_row(shape, n))}" for n in TOKENS)
        yield from _table(["tokens", *HEADS], rows)
    rest = f"{model.rest * 1e3:.1f} ms a step without the matrices"
    yield f"The whole model, tokens a second ({rest}):"
    yield ""
    rows = (f"{batch} | {_speeds(predict_step(model, batch), batch)}" for batch in BATCHES)
    yield from _table(["batch", *HEADS], rows)


def _speeds(step: dict[str, float], batch: int) -> str:
    plain = step["plain"]
    others = (f"{batch / step[way]:.0f} ({plain / step[way]:.2f})" for way in WAYS[1:])
    return " | ".join([f"{batch / plain:.0f}", *others])


_HEAD = """# Benchmarks of packed weights on GPUs

Written by `python benchmarks/gpu.py predict --write`; do not edit by hand.

## What is not measured

**Nothing on this page was measured on a GPU yet.** Formats and kernels are proven without one:
every bit and every sum in Triton's interpreter; instructions, registers and shared memory in the
machine code of offline compilation. Their speed is not proven. Not measured yet are:

- the speed of decoding, and of fused products of W12 and W11, compared with BF16;
- tokens a second and memory of a whole model on a GPU;
- how fast a packed file is loaded to a GPU, uploaded packed or decoded on the host;
- what the autotuner finds, and how far the model of time is from it;
- DFloat11 and nvCOMP on the same card.

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

**Predictions, not yet measured on a GPU**, by the model of time (`device/cost.py`): bytes at the
4.3 TB/s that copies reach on this card, instructions as counted in the machine code, tensor
throughput, L2, and 2.5 us a launch. Figures are microseconds for a product; in parentheses is the
speed relative to BF16. W12 and W11 run as they are chosen where nothing was tuned. BF16 is
predicted by the same model: the best of the tiles that cuBLAS may take, which read tokens from L2
again as ours do, but in pairs.

From 64 tokens on W12 is predicted to be slower than BF16 for some matrices, from 128 on for all:
`pack_model_(model, for_tokens=128)` leaves such layers plain. The weights of the smaller model take
15.0 GiB in BF16 and 11.2 in W12; those of the larger one 131 of the card's 140 GiB, which leaves
little for a cache of keys and values, and 99 in W12.
"""


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
        rows = kept["parts"].get("table", [])
        if isinstance(rows, dict):  # the rows that a part had before it failed
            rows = rows["rows"]
        if rows:
            heads = ["matrix", "tokens", "way", "us", "predicted", "times BF16"]
            yield from _table(heads, (_measured_cells(row) for row in rows))


def _measured_cells(row: dict[str, Any]) -> str:
    cells = [row["shape"], row["n_tokens"], row["way"], f"{row['seconds'] * 1e6:.1f}"]
    cells += [f"{row['predicted'] * 1e6:.1f}", f"{row['speedup']:.2f}"]
    return " | ".join(map(str, cells))


def document() -> str:
    """The page."""
    lines = [*_measured(), *(line for model in MODELS for line in _model_section(model))]
    return "\n".join([_HEAD, _PREDICTED, *lines]).rstrip() + "\n"


_FEW_SPILLS = 64
_TILES = [(1, rows) for rows in (16, 32, 64, 128)] + list(product((2, 3, 4), (32, 64)))


def print_counts() -> None:
    """Print the tables of `device/counts.py`, which have kernels that spill nothing in the loop and
    little elsewhere."""
    from benchmarks.gpu import sass
    from packhorse.kernels.matmul import MatmulConfig
    from packhorse.kernels.matmul_many import ManyConfig

    for format in (W12, W11):
        for (tiles, rows), tokens, steps in product(_TILES, (8, 16, 32), (16, 32, 64, 128)):
            if rows * max(tiles * tokens, steps) > 4096 or (tiles > 1 and steps not in (32, 64)):
                continue
            if format is W11 and tiles > 2:  # too much shared memory
                continue
            found = sass.count_matmul(format, MatmulConfig(rows, tokens, steps, 4, 1, 3, tiles), 90)
            # Beyond 8, loads of single bytes.
            if _hardly_spills(found) and found.instructions < 8:
                key = f'("{format.name}", {rows}, {tokens}, {steps}, {tiles})'
                print(f"    {key}: {round(found.instructions, 2)},", flush=True)
    for rows, tokens, steps, warps in product((64, 128, 256), (16, 32, 64, 128), (32, 64), (4, 8)):
        if rows * tokens > 1 << 15 or warps == 8 > rows // 16:
            continue
        found = sass.count_many(ManyConfig(rows, tokens, steps, warps, 1, 3), 90)
        if _hardly_spills(found):
            key = f"({rows}, {tokens}, {steps}, {warps})"
            print(f"    {key}: {round(found.instructions, 2)},", flush=True)


def _hardly_spills(found: Any) -> bool:
    return found.loop_spills == 0 and found.spills <= _FEW_SPILLS


def main(argv: list[str]) -> int:
    """Print the page, write it, or count instructions.

    Args:
        argv: the arguments after `predict`.

    Returns:
        The exit status: 0.
    """
    parser = argparse.ArgumentParser(
        prog="gpu.py predict", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--counts", action="store_true", help="count instructions instead")
    args = parser.parse_args(argv)
    if args.counts:
        print_counts()
    elif args.write:
        PAGE.write_text(document())
    else:
        print(document())
    return 0
