"""Measure Packhorse against its rivals: `python benchmarks/run.py`.

Every codec proves its round trip before it is timed. All codecs run interleaved in one process on
the same named data, and the printed table also shows where rivals are ahead. The short form
measures the real weights and takes a few minutes; `--full` measures all data and all codecs in more
rounds. `--full --write` also runs the variants (fresh memory, forced code paths), keeps the figures
in `benchmarks/results/`, and makes `docs/benchmarks.md`, `docs/benchmarks_codecs.md`, their picture
and the table in `README.md` from all figures there. Two forms time nothing: `--render` only makes
these documents, and `--check` exits 1 if a ratio is below the one that the project promises.

`run.py snapshots` measures pairs of training checkpoints instead, and has a document of its own:
see snapshots/measure.py. `run.py shelf` measures arrays that live on disk: see shelf/measure.py.
`run.py weights` measures weights in memory: see layers/weights.py;
`run.py layers` measures layers that multiply with them: see layers/measure.py.
`run.py host` measures tables in host memory: see host/measure.py.
`run.py wire` measures collectives and weight updates between processes: see wire/measure.py.

The process starts itself again with a malloc that keeps freed memory, since fresh pages cost more
than most codecs and would hide the differences between them; `--fresh` leaves malloc as it is and
gives every output new memory.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.codecs import page, peers, report, targets
from benchmarks.codecs.measure import Contender, compete, enter
from benchmarks.common import figures
from benchmarks.common.process import SIMD_VARIABLE, code_path, restart
from benchmarks.data import sets
from benchmarks.host import measure as host
from benchmarks.layers import measure as layers
from benchmarks.layers import weights
from benchmarks.shelf import measure as shelf
from benchmarks.snapshots import measure as snapshots
from benchmarks.wire import measure as wire

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "benchmarks.md"
DOCUMENT = HERE.parent / "docs" / "benchmarks_codecs.md"
PICTURE = HERE.parent / "docs" / report.PICTURE
README = HERE.parent / "README.md"
SIMD_NAMES = ["portable", "neon", "avx2", "avx512", "avx512_vbmi2"]
# The beginning of a set as a separate set, because other figures are known only for that part.
BEGINNINGS = {targets.FIRST_48_MB: ("model_fp32", 48_000_000)}
NAMES = (*sets.NAMES, *BEGINNINGS)
SHORT_DATA = ("model_bf16", "model_fp32", "model_fp16", "fp8_e4m3")
SHORT_ROUNDS, VARIANT_ROUNDS, FULL_ROUNDS = 3, 5, 7
THREADS = [1, 2]
OWN_CODECS = tuple(name for name in peers.CODECS if name.startswith("packhorse"))
# The ratios that the project promises for the default level: those of the whole model as a file,
# and of the two extremes.
FILE_RATIOS = {"bf16": 1.505, "fp32": 1.215, "fp16": 1.180}
ARRAY_RATIOS = {"zeros_bf16": 1000.0, "random_u8": 0.9995}


def main(argv: list[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status: 1 if `--check` finds a ratio too low, else 0.
    """
    if argv[:1] == [snapshots.MODE]:
        return snapshots.main(argv[1:])
    if argv[:1] == [shelf.MODE]:
        return shelf.main(argv[1:])
    if argv[:1] == [weights.MODE]:
        return weights.main(argv[1:])
    if argv[:1] == [layers.MODE]:
        return layers.main(argv[1:])
    if argv[:1] == [host.MODE]:
        return host.main(argv[1:])
    if argv[:1] == [wire.MODE]:
        return wire.main(argv[1:])
    args = _parse(argv)
    if args.render:
        _write_documents()
        return 0
    restart(recycle=not args.fresh and not args.check, simd=args.simd)
    if args.check:
        return _check()
    result = _measure(args)
    _keep(result, args)
    if args.write and not _is_variant(args):
        _run_variants()
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Packhorse against its rivals.")
    parser.add_argument("--full", action="store_true", help="all data, all codecs, more rounds")
    parser.add_argument("--data", nargs="+", choices=NAMES, metavar="SET", help=", ".join(NAMES))
    parser.add_argument(
        "--codec", nargs="+", choices=peers.CODECS, metavar="CODEC", help=", ".join(peers.CODECS)
    )
    parser.add_argument("--threads", nargs="+", type=int, metavar="N", help="default: 1 2")
    parser.add_argument("--rounds", type=int, metavar="N", help="timed rounds")
    parser.add_argument("--first-mb", type=int, metavar="N", help="only the first N MB of a set")
    parser.add_argument("--simd", choices=SIMD_NAMES, help="force a code path")
    parser.add_argument("--fresh", action="store_true", help="new memory for every output")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    parser.add_argument("--write", action="store_true", help="keep figures, write the document")
    parser.add_argument("--render", action="store_true", help="only write the documents again")
    parser.add_argument("--check", action="store_true", help="only check the promised ratios")
    args = parser.parse_args(argv)
    chosen = (args.data, args.codec, args.threads, args.rounds, args.first_mb)
    if args.write and not _is_variant(args) and (not args.full or any(chosen)):
        parser.error("--write of the main table needs a whole run: --full --write, nothing else")
    return _with_defaults(args)


def _is_variant(args: argparse.Namespace) -> bool:
    return bool(args.simd or args.fresh)


def _with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in what the arguments leave open, for a short run, a full one or a variant of it."""
    quick = tuple(name for name, entry in peers.CODECS.items() if not entry.slow)
    names, codecs, rounds = SHORT_DATA, quick, SHORT_ROUNDS
    if args.full and args.simd:
        names = tuple(name for name in NAMES if name in targets.DATA)
        codecs = tuple(name for name in quick if name in (*targets.RIVALS, *OWN_CODECS))
        rounds = VARIANT_ROUNDS
    elif args.full and args.fresh:
        rounds = VARIANT_ROUNDS
    elif args.full:
        names, codecs, rounds = NAMES, tuple(peers.CODECS), FULL_ROUNDS
    args.data = args.data or names
    args.codec = args.codec or codecs
    args.rounds = args.rounds or rounds
    args.threads = args.threads or ([1] if args.fresh else THREADS)
    return args


def _run_variants() -> None:
    """Measure again with fresh memory and on each weaker code path, each in its own process."""
    from packhorse.codecs.base import available_isas, choose_isa

    weaker = [isa.name.lower() for isa in reversed(available_isas()) if isa < choose_isa()]
    for options in (["--fresh"], *(["--simd", name] for name in weaker)):
        print(f"\n# {' '.join(options)}", flush=True)
        command = [sys.executable, str(HERE / "run.py"), "--full", "--write", *options]
        subprocess.run(command, check=True)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    limit = args.first_mb * 1_000_000 if args.first_mb else None
    result: dict[str, Any] = {
        "kind": "codecs",
        "simd": os.environ.get(SIMD_VARIABLE, "auto"),
        "path": code_path() if set(args.codec) & set(OWN_CODECS) else "",
        "fresh_memory": args.fresh,
        "rounds": args.rounds,
        "limit_nbytes": limit,
        "versions": peers.versions(),
        "codecs": {name: peers.CODECS[name].how for name in args.codec},
        **figures.begin(),
        "data": [],
        "rows": [],
        "absent": {},
    }
    for name in args.data:
        dataset = _make(name, limit)
        rows = _one_set(dataset, args, result["absent"])
        result["data"].append(_described(dataset))
        result["rows"] += rows
        print(f"\n{report.section(result['data'][-1], rows)}", flush=True)
    whole = args.full and not _is_variant(args) and not limit
    result["files"] = _packed_files() if whole else []
    figures.end(result)
    print(f"\n{report.summary(result)}")
    print(f"\n## Targets\n\n{report.targets(result, gaps=False)}")
    missing = sorted(set(sets.TRAINING_NAMES) - set(sets.NAMES))
    if args.full and missing:
        print(f"\nnot measured: {', '.join(missing)}: make them first, with: make training")
    missing = sorted(set(sets.FETCHED_NAMES) - set(sets.NAMES))
    if args.full and missing:
        print(f"\nnot measured: {', '.join(missing)}: fetch them first, with: make data")
    for name, reason in result["absent"].items():
        print(f"\nnot measured: {name}: {reason}")
    return result


def _make(name: str, limit: int | None) -> sets.DataSet:
    source, beginning = BEGINNINGS.get(name, (name, None))
    made = sets.make(source, limit_nbytes=min(filter(None, (limit, beginning)), default=None))
    if beginning is None:
        return made
    return replace(made, name=name, source=f"the beginning of {made.source}")


def _described(dataset: sets.DataSet) -> dict[str, Any]:
    return {
        "name": dataset.name,
        "dtype": dataset.dtype,
        "sha256": dataset.sha256,
        "source": dataset.source,
        "nbytes": dataset.array.nbytes,
        "n_tensors": len(dataset.tensors),
    }


def _one_set(
    dataset: sets.DataSet, args: argparse.Namespace, absent: dict[str, str]
) -> list[dict[str, Any]]:
    contenders = []
    for name in args.codec:
        for n in args.threads:
            entered = enter(name, dataset, peers.Setup(n, args.fresh))
            if isinstance(entered, Contender):
                contenders.append(entered)
            elif n == 1:
                absent[name] = entered
    return [asdict(row) for row in compete(contenders, dataset, args.rounds)]


def _packed_files() -> list[dict[str, Any]]:
    """Pack the model as whole files, unpack them, and compare byte for byte."""
    from packhorse.disk import pack_file, unpack_file

    rows = []
    for kind in sets.FILE_KINDS:
        with tempfile.TemporaryDirectory() as folder:
            source, packed, back = (Path(folder) / name for name in ("a", "b", "c"))
            sets.write_model_file(kind, source)
            begun = time.perf_counter()
            pack_file(source, packed)
            middle = time.perf_counter()
            unpack_file(packed, back)
            seconds = middle - begun, time.perf_counter() - middle
            if back.read_bytes() != source.read_bytes():
                raise RuntimeError(f"the {kind} model file is not restored byte for byte")
            rows.append(_file_row(kind, source, packed, seconds))
    return rows


def _file_row(
    kind: str, source: Path, packed: Path, seconds: tuple[float, float]
) -> dict[str, Any]:
    nbytes, packed_nbytes = source.stat().st_size, packed.stat().st_size
    return {
        "file": kind,
        "nbytes": nbytes,
        "packed_nbytes": packed_nbytes,
        "ratio": nbytes / packed_nbytes,
        "pack": nbytes / seconds[0] / 1e9,
        "unpack": nbytes / seconds[1] / 1e9,
    }


def _check() -> int:
    """Compare the ratios with the promised ones and print each; returns the exit status."""
    from packhorse.numpy import compress

    found = {f"{row['file']} file": row["ratio"] for row in _packed_files()}
    bars = {f"{kind} file": bar for kind, bar in FILE_RATIOS.items()}
    for name, bar in ARRAY_RATIOS.items():
        array = sets.make(name).array
        found[name], bars[name] = array.nbytes / compress(array).nbytes, bar
    for name, bar in bars.items():
        verdict = "ok" if found[name] >= bar else "TOO LOW"
        print(f"{name:12} ratio {found[name]:12.4f}  promised {bar:9.4f}  {verdict}")
    return int(any(found[name] < bar for name, bar in bars.items()))


def _keep(result: dict[str, Any], args: argparse.Namespace) -> None:
    figures.keep(result, args.json)
    if args.write:
        parts = ["cpu", result["simd"], *(["fresh"] if args.fresh else [])]
        RESULTS.mkdir(exist_ok=True)
        figures.keep(result, RESULTS / f"{'-'.join(parts)}.json")
        _write_documents()


def _write_documents() -> None:
    PAGE.write_text(page.page(RESULTS))
    DOCUMENT.write_text(report.document(RESULTS))
    README.write_text(report.readme(README.read_text(), RESULTS))
    picture = report.picture(RESULTS)
    if picture:
        PICTURE.write_text(picture)
    print(f"\nwrote {PAGE}, {DOCUMENT}, their picture and the table in {README}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
