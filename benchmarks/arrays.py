"""Measure codecs on the chunks of arrays, as zarr stores them: `python benchmarks/arrays.py`.

Each tensor of a data set is an array. It is cut along its first axis into chunks of at most 4 MiB,
and every chunk is encoded and decoded by itself, through numcodecs. All codecs prove their round
trips before they are timed, and then take turns on the same data. `--write` keeps the figures in
`benchmarks/results/arrays.json` and writes `docs/benchmarks_arrays.md`; `--render` only writes the
page again.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
from numpy.typing import NDArray

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.codecs import peers, report
from benchmarks.codecs.measure import Contender, compete, enter
from benchmarks.codecs.peers import CODECS, PCODEC_DTYPES, Entry, Packed, Setup
from benchmarks.common import figures, machine
from benchmarks.common.process import code_path, restart
from benchmarks.data import sets

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "arrays.json"
DOCUMENT = HERE.parent / "docs" / "benchmarks_arrays.md"
CHUNK_NBYTES = 1 << 22
DATA = ("model_fp32", "model_bf16", "model_fp16", "fp8_e4m3", "token_ids_int64")
TRAINED = ("train_w32", "train_m32", "train_v32")  # if there is a training run
ROUNDS = 5
RIVAL = "blosc-zstd"
INTRODUCTION = """# Benchmarks of chunks of arrays

Written by `python benchmarks/arrays.py --write` from `benchmarks/results/arrays.json`; do not edit
by hand. [arrays.md](arrays.md) says how the codecs are used.

- Each tensor is an array, cut along its first axis into chunks of at most 4 MiB. Every chunk is
  encoded by itself and decoded into the caller's memory, through numcodecs, as zarr does it.
- Every codec proves its round trip bit for bit first. Then the rounds go from codec to codec in one
  process, pinned to one core. Speeds are 10^9 bytes of the original a second of processor time: the
  median of the rounds, with the least and the greatest in brackets.
- `x blosc-zstd`: encode / decode speed over that of Blosc with zstd and its byte shuffle, which
  zarr's format 2 is known for. `of copy`: the share of np.copyto's speed.
"""


class ChunkCodec:
    """A codec of numcodecs, on one chunk after the other. Dtypes that it does not know are handed
    over as unsigned integers; `dtypes` are those that it knows, and None means all."""

    def __init__(
        self,
        data: sets.DataSet,
        setup: Setup,
        *,
        make: Callable[[], Any],
        dtypes: Collection[str] | None = (),
        min_nbytes: int = 1,
    ) -> None:
        if data.array.itemsize < min_nbytes:
            raise peers.UnsupportedError(f"it refuses elements of {data.array.itemsize} byte")
        self._codec, self._dtypes = make(), dtypes
        self._outs = [np.full_like(chunk, 0) for chunk in self.prepare(data)]

    def prepare(self, data: sets.DataSet) -> list[NDArray[Any]]:
        tensors = [tensor for _, tensor in data.tensors]
        if self._dtypes is not None and data.array.dtype.name not in self._dtypes:
            tensors = [tensor.view(f"u{tensor.itemsize}") for tensor in tensors]
        return [chunk for tensor in tensors for chunk in chunks_of(tensor)]

    def encode(self, source: Any) -> Packed:
        return [self._codec.encode(chunk) for chunk in source]

    def decode(self, packed: Packed) -> Packed:
        for data, out in zip(packed, self._outs, strict=True):
            self._codec.decode(data, out=out)
        return [out.reshape(-1).view(np.uint8) for out in self._outs]


def chunks_of(tensor: NDArray[Any]) -> list[NDArray[Any]]:
    """A tensor in runs of rows, each of at most `CHUNK_NBYTES` unless one row is longer."""
    if tensor.nbytes <= CHUNK_NBYTES:
        return [tensor]
    rows = max(1, CHUNK_NBYTES // tensor[0].nbytes)
    return [tensor[start : start + rows] for start in range(0, len(tensor), rows)]


def _packhorse(level: str) -> Callable[..., ChunkCodec]:
    make = partial(import_module("packhorse.numcodecs").Packhorse, level)
    return partial(ChunkCodec, make=make, dtypes=None)


def _blosc(cname: str, shuffle: int) -> Callable[..., ChunkCodec]:
    return partial(
        ChunkCodec, make=partial(numcodecs.Blosc, cname=cname, clevel=5, shuffle=shuffle)
    )


CONTENDERS = {
    "np.copyto": CODECS["np.copyto"],
    "packhorse-fast": Entry(_packhorse("fast"), "`Packhorse(level='fast')`"),
    "packhorse": Entry(_packhorse("default"), "`Packhorse()`"),
    "packhorse-max": Entry(_packhorse("max"), "`Packhorse(level='max')`"),
    "blosc-zstd": Entry(
        _blosc("zstd", numcodecs.Blosc.SHUFFLE),
        "`Blosc(cname='zstd', clevel=5, shuffle=Blosc.SHUFFLE)`",
    ),
    "blosc-zstd-bitshuffle": Entry(
        _blosc("zstd", numcodecs.Blosc.BITSHUFFLE),
        "`Blosc(cname='zstd', clevel=5, shuffle=Blosc.BITSHUFFLE)`",
    ),
    "blosc-lz4-bitshuffle": Entry(
        _blosc("lz4", numcodecs.Blosc.BITSHUFFLE),
        "`Blosc(cname='lz4', clevel=5, shuffle=Blosc.BITSHUFFLE)`",
    ),
    "zstd": Entry(
        partial(ChunkCodec, make=partial(numcodecs.Zstd, level=0)),
        "`Zstd(level=0)`, what zarr takes if nothing is said",
    ),
    "pcodec": Entry(
        partial(ChunkCodec, make=numcodecs.PCodec, dtypes=PCODEC_DTYPES, min_nbytes=2),
        "`PCodec()`; bf16 as unsigned integers; it refuses elements of one byte",
    ),
}


def main(argv: list[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description="Measure codecs on chunks of arrays.")
    parser.add_argument("--data", nargs="+", metavar="SET", help=f"default: {', '.join(DATA)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="timed rounds")
    figures.add_outputs(parser)
    args = parser.parse_args(argv)
    if not args.render:
        restart(recycle=True)
        trained = [name for name in TRAINED if name in sets.NAMES]
        result = measure(args.data or [*DATA, *trained], args.rounds)
        figures.keep(result, args.json)
        figures.keep(result, RESULT if args.write else None)
    if args.write or args.render:
        DOCUMENT.write_text(document(json.loads(RESULT.read_text())))
        print(f"\nwrote {DOCUMENT}")
    return 0


def measure(names: list[str], rounds: int) -> dict[str, Any]:
    """Time all codecs on the data sets of these names; prints a table of each."""
    numcodecs.blosc.set_nthreads(1)
    result: dict[str, Any] = {
        "kind": "arrays",
        "date": time.strftime("%Y-%m-%d"),
        "path": code_path(),
        "rounds": rounds,
        "limit_nbytes": None,
        "machine": machine.describe(),
        "versions": peers.versions() | {"numcodecs": numcodecs.__version__},
        "codecs": {name: entry.how for name, entry in CONTENDERS.items()},
        "load_before": os.getloadavg()[0],
        "data": [],
        "rows": [],
        "absent": {},
    }
    for name in names:
        dataset = sets.make(name)
        entered = {codec: enter(codec, dataset, Setup(), CONTENDERS) for codec in CONTENDERS}
        contenders = [found for found in entered.values() if isinstance(found, Contender)]
        rows = [asdict(row) for row in compete(contenders, dataset, rounds)]
        about = {"name": name, "dtype": dataset.dtype, "sha256": dataset.sha256}
        about |= {"source": dataset.source, "nbytes": dataset.array.nbytes}
        result["data"].append(about | {"n_tensors": len(dataset.tensors)})
        result["rows"] += rows
        print(f"\n{report.section(result['data'][-1], rows, RIVAL)}", flush=True)
    result["load_after"] = os.getloadavg()[0]
    return result


def document(result: dict[str, Any]) -> str:
    """The whole of docs/benchmarks_arrays.md."""
    sections = [
        report.section(dataset, report.of_set(result, dataset["name"]), RIVAL)
        for dataset in result["data"]
    ]
    machine_of = f"## Machine\n\nMeasured on {result['date']}. {report.conditions(result)}\n"
    ways = f"## How each codec is made\n\n{report.ways(result)}\n"
    return "\n".join([INTRODUCTION, machine_of, ways, "## Data\n", "\n\n".join(sections), ""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
