"""Measure layers whose weights stay packed, on the CPU: `python benchmarks/run.py layers`.

- **products**: packed layers against the plain one, by shape, tokens, format and size of the tiles;
- **packing**: `pack_weight`, the choice of "auto", and `unpack`;
- **model**: a trained model as a whole, plain and packed, and packing it;
- **plan**: the host's work on a frame before kernels can decode it;
- **memory**: the peak while models are loaded, each in a separate process.

Every result is compared with the plain one bit for bit first. Then everything in one table runs
in turn, round after round, on one core and by its processor time; the best round counts. All
memory is fresh, as it is for users.

With `--write` the figures are kept in `benchmarks/results/layers.json` and make
`docs/benchmarks_layers.md`. With `--part` as well, the other parts keep their figures, and the page
says when and under which load each part was measured by itself. `--render` only makes the document
again. `--smoke` runs everything on a tiny scale, and its times mean nothing.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from benchmarks.codecs import peers
from benchmarks.codecs.measure import cores, time_call
from benchmarks.common import figures
from benchmarks.common.process import SIMD_VARIABLE, code_path, restart
from benchmarks.data import sets
from benchmarks.layers import loading, report

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["MODE", "main"]

MODE = "layers"
ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "layers.json"
DOCUMENT = ROOT / "docs" / "benchmarks_layers.md"
PARTS = ("products", "packing", "model", "plan", "memory")
FORMATS = ("W12", "W11")
MIB = 1 << 20
SEED = 20240607

Work = Callable[[], Any]


class Scale(NamedTuple):
    """How much is measured.

    Attributes:
        shapes: rows and columns of the matrices.
        tokens: numbers of them.
        tiles: sizes of decoded tiles, in MiB.
        rounds: how often everything is timed.
        model_tokens: of the trained model.
        model_layers: how many of its layers.
        plan_units: BF16 elements of the frame that is planned.
        memory: of what is loaded.
        ways: of loading.
    """

    shapes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    tiles: tuple[int, ...]
    rounds: int
    model_tokens: int
    model_layers: int
    plan_units: int
    memory: loading.Sizes
    ways: tuple[str, ...]


WHOLE = Scale(
    shapes=((4096, 4096), (14336, 4096)),
    tokens=(1, 16, 256),
    tiles=(2, 4, 8, 16),
    rounds=30,
    model_tokens=32,
    model_layers=6,
    plan_units=32 * MIB,
    memory=loading.Sizes(6, 4096, 1024, 4096, 8, 32000),
    ways=tuple(loading.LOADERS),
)
SMOKE = Scale(
    shapes=((129, 256),),
    tokens=(1, 3),
    tiles=(1, 4),
    rounds=1,
    model_tokens=4,
    model_layers=1,
    plan_units=1 << 18,
    memory=loading.Sizes(2, 256, 64, 128, 1, 500),
    ways=("packed file to packed weights",),
)


def main(argv: list[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: the arguments after the mode.

    Returns:
        The exit status: 0.
    """
    args = _parse(argv)
    if args.render:
        _write_document(json.loads(RESULT.read_text()))
        return 0
    restart(recycle=False, simd=args.simd)
    result = _measure(args, SMOKE if args.smoke else WHOLE)
    figures.keep(result, args.json)
    if args.write:
        whole = result if args.part is PARTS else _merged(json.loads(RESULT.read_text()), result)
        figures.keep(whole, RESULT)
        _write_document(whole)
    return 0


def _merged(kept: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The kept figures with the parts of a later run, and that run's conditions beside them."""
    load = max(result["load_before"], result["load_after"])
    apart = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "load": load}
    conditions = {name: apart | {"cpu": result["machine"]["cpu"]} for name in result["parts"]}
    return kept | {
        "parts": kept["parts"] | result["parts"],
        "apart": kept.get("apart", {}) | conditions,
    }


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"run.py {MODE}", description="Measure layers whose weights stay packed, on the CPU."
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default {WHOLE.rounds}")
    parser.add_argument("--simd", help="force a code path")
    parser.add_argument("--smoke", action="store_true", help="tiny; times mean nothing")
    figures.add_outputs(parser)
    args = parser.parse_args(argv)
    if args.write and (args.smoke or args.rounds or args.simd):
        parser.error("--write needs a whole run, or whole parts")
    return args


def _write_document(result: dict[str, Any]) -> None:
    DOCUMENT.write_text(report.document(result))
    print(f"\nwrote {DOCUMENT}")


def _measure(args: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    scale = scale._replace(rounds=args.rounds or scale.rounds)
    result: dict[str, Any] = {
        "kind": MODE,
        "simd": os.environ.get(SIMD_VARIABLE, "auto"),
        "path": code_path(),
        "rounds": scale.rounds,
        "limit_nbytes": None,
        "versions": peers.versions() | loading.versions(),
        **figures.begin(),
        "parts": {},
        "absent": {},
    }
    for name in args.part:
        try:
            # Processes that load may use all cores, as they do for users.
            with cores(2 if name == "memory" else 1), torch.no_grad():
                result["parts"][name] = _MEASURES[name](scale)
        except ImportError as reason:
            result["absent"][name] = str(reason)
            continue
        print(f"\n{report.section(name, result)}", flush=True)
    figures.end(result)
    return result


def _best_of(work: Mapping[str, Work], rounds: int) -> dict[str, float]:
    """The fewest processor seconds of each, all in turn."""
    best = dict.fromkeys(work, float("inf"))
    for _ in range(rounds):
        for name, call in work.items():
            best[name] = min(best[name], time_call(lambda _, call=call: call(), None)[1][0])
    return best


def _matrix(n_rows: int, n_columns: int) -> "Tensor":
    """Normal rows whose scales are log-normal, as in trained projection matrices."""
    import torch

    rng = np.random.default_rng([SEED, n_rows, n_columns])
    matrix = torch.empty(n_rows, n_columns, dtype=torch.bfloat16)
    scales = 0.02 * np.exp(sets.ROW_SCALE_SIGMA * rng.standard_normal(n_rows, np.float32))
    for row, scale in zip(matrix, scales, strict=True):
        row.copy_(torch.from_numpy(scale * rng.standard_normal(n_columns, np.float32)))
    return matrix


def _require_same(ours: "Tensor", theirs: "Tensor", what: str) -> None:
    import torch

    if not torch.equal(ours.view(torch.int16), theirs.view(torch.int16)):
        raise RuntimeError(f"{what}: the result is not that of the plain weight, bit for bit")


# Products.


def _products(scale: Scale) -> list[dict[str, Any]]:
    return [row for shape in scale.shapes for row in _products_of(*shape, scale)]


def _products_of(n_rows: int, n_columns: int, scale: Scale) -> list[dict[str, Any]]:
    import torch
    from torch.nn import functional

    from packhorse.device import pack_weight

    plain = _matrix(n_rows, n_columns)
    packed = {name: pack_weight(plain, name) for name in FORMATS}
    rows = []
    for n_tokens in scale.tokens:
        x = torch.randn(n_tokens, n_columns, generator=torch.manual_seed(SEED)).bfloat16()
        ways = list(itertools.product(packed, scale.tiles))
        work = {f"{name} {tile}": _tiled(x, packed[name], tile) for name, tile in ways}
        expected = functional.linear(x, plain)
        for name, call in work.items():
            _require_same(call(), expected, f"{n_rows} x {n_columns}, {n_tokens} tokens, {name}")
        work["plain"] = lambda x=x: functional.linear(x, plain)
        best = _best_of(work, scale.rounds)
        rows += [
            {
                "n_rows": n_rows,
                "n_columns": n_columns,
                "form": name,
                "bits": packed[name].bits_per_weight,
                "n_tokens": n_tokens,
                "plain": best["plain"],
                "tiles": {str(tile): best[f"{name} {tile}"] for tile in scale.tiles},
            }
            for name in FORMATS
        ]
    return rows


def _tiled(x: "Tensor", weight: Any, tile_mib: int) -> Work:
    """A product with tiles of another size than the library's."""
    from packhorse.device import operators

    def multiply() -> "Tensor":
        before = operators.TILE_NBYTES
        operators.TILE_NBYTES = tile_mib * MIB
        try:
            return operators.multiply(x, weight.arrays, None, weight.format, weight.shape[1])
        finally:
            operators.TILE_NBYTES = before

    return multiply


# Packing.


def _packing(scale: Scale) -> list[dict[str, Any]]:
    from packhorse.device import pack_weight
    from packhorse.device.formats import pack_if_smaller

    plain = _matrix(*scale.shapes[0])
    work: dict[str, Work] = {"copy": plain.clone}
    for name in FORMATS:
        packed = pack_weight(plain, name)
        _require_same(packed.unpack(), plain, name)
        work[f"pack_weight, {name}"] = lambda name=name: pack_weight(plain, name)
        work[f"unpack, {name}"] = packed.unpack
    work["pack as auto"] = lambda: pack_if_smaller(plain, None)
    best = _best_of(work, scale.rounds)
    return [{"what": name, "nbytes": plain.nbytes, "seconds": best[name]} for name in best]


# The model.


def _model(scale: Scale) -> dict[str, Any]:
    """The trained model."""
    import copy

    import torch

    from packhorse.device import pack_model_

    plain = _trained_model(scale.model_layers)
    models = {name: copy.deepcopy(plain) for name in ("auto", *FORMATS)}
    reports = {name: pack_model_(model, name) for name, model in models.items()}
    ids = torch.arange(1000, 1000 + scale.model_tokens)[None]
    expected = plain(ids).last_hidden_state
    work: dict[str, Work] = {"plain": lambda: plain(ids)}
    for name, model in models.items():
        _require_same(model(ids).last_hidden_state, expected, f"the model in {name}")
        work[name] = lambda model=model: model(ids)
    best = _best_of(work, scale.rounds)
    return {
        "name": sets.MODEL_PACKAGE,
        "n_tokens": scale.model_tokens,
        "plain": best.pop("plain"),
        "packed": best,
        "nbytes": {name: report.nbytes for name, report in reports.items()},
        "plain_nbytes": reports["auto"].plain_nbytes,
        "layers_nbytes": sum(weight.plain_nbytes for weight in reports["auto"].packed),
        "packing": _time_packing(plain, scale.rounds),
    }


def _trained_model(n_layers: int) -> "nn.Module":
    import torch
    from safetensors.torch import load_file

    transformers = loading.require_transformers()
    folder = sets.model_path().parent
    config = transformers.BertConfig.from_pretrained(folder, num_hidden_layers=n_layers)
    model: nn.Module = transformers.BertModel(config)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return model.to(torch.bfloat16).eval()


def _time_packing(plain: "nn.Module", rounds: int) -> dict[str, float]:
    """Seconds of pack_model_, which needs a copy of the model each time."""
    import copy

    from packhorse.device import pack_model_

    best: dict[str, float] = dict.fromkeys(("auto", *FORMATS), float("inf"))
    for _, name in itertools.product(range(rounds), best):
        model = copy.deepcopy(plain)
        best[name] = min(
            best[name], time_call(lambda m, name=name: pack_model_(m, name), model)[1][0]
        )
    return best


# The host's work for frames that kernels decode.


def _plan(scale: Scale) -> dict[str, Any]:
    from packhorse import _core
    from packhorse.codecs.base import as_bytes
    from packhorse.gpu.plans import plan_chunks
    from packhorse.numpy import compress

    rng = np.random.default_rng(SEED)
    values = (0.02 * rng.standard_normal(scale.plan_units, np.float32)).astype(ml_dtypes.bfloat16)
    frame = compress(values)
    header = frame.header
    payload = as_bytes(frame.buffer(), "frame")[header.header_nbytes :]
    plan = plan_chunks(payload, header.table, header.geometry)
    best = _best_of(
        {
            "plan": lambda: plan_chunks(payload, header.table, header.geometry),
            "crc": lambda: _core.crc32c(payload),
        },
        10 * scale.rounds,
    )
    return {
        "nbytes": header.nbytes,
        "packed_nbytes": payload.nbytes,
        "n_chunks": len(header.table),
        "plan_nbytes": sum(array.nbytes for array in plan.arrays()),
        "seconds": best["plan"],
        "crc_seconds": best["crc"],
    }


def _memory(scale: Scale) -> list[dict[str, Any]]:
    return loading.measure(scale.memory, scale.ways)


_MEASURES: dict[str, Callable[[Scale], Any]] = {
    "products": _products,
    "packing": _packing,
    "model": _model,
    "plan": _plan,
    "memory": _memory,
}
