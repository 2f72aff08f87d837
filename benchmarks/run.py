"""Measure Packhorse against its rivals: `python benchmarks/run.py`.

The round trip of every codec is proved before it is timed, all codecs run interleaved in one
process on the same named data, and the table that is printed has our losses too. `--write` keeps
the figures in `benchmarks/results/` and writes `docs/benchmarks.md`, and the table in `README.md`,
from all that lie there.
`--check` times nothing: it exits 1 unless the ratios that the project promises hold.

The process starts itself again with a malloc that keeps freed memory, since fresh pages cost more
than most codecs and would hide the differences between them; `--fresh` leaves malloc as it is.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import data
import machine
import peers
import report
from measure import Contender, compete, enter

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
DOCUMENT = HERE.parent / "docs" / "benchmarks.md"
README = HERE.parent / "README.md"
QUICK_NBYTES = 16_000_000
QUICK_ROUNDS = 3
HEAVY = ("array", "shapes")  # of a data set; not kept with the figures
SIMD_VARIABLE = "PACKHORSE_SIMD"
RECYCLING_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
# What the project promises of the default level, on the whole model as a file and on the two
# extremes.
FILE_RATIOS = {"bf16": 1.505, "fp32": 1.215, "fp16": 1.180}
ARRAY_RATIOS = {"zeros_bf16": 1000.0, "random_u8": 0.9995}


def main(argv: list[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status: 1 if `--check` finds a ratio too low, else 0.
    """
    args = _parse(argv)
    _restart(args)
    if args.check:
        return _check()
    result = _measure(args)
    _keep(result, args)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Packhorse against its rivals.")
    parser.add_argument("--quick", action="store_true", help="first 16 MB of each set, 3 rounds")
    parser.add_argument("--data", nargs="+", choices=data.NAMES, help="data sets (default: all)")
    parser.add_argument("--codec", nargs="+", choices=peers.CODECS, help="codecs (default: all)")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--rounds", type=int, metavar="N", help="timed rounds (default: 7)")
    parser.add_argument("--first-mb", type=int, metavar="N", help="only the first N MB of a set")
    parser.add_argument("--simd", choices=["portable", "avx2", "avx512"], help="force a code path")
    parser.add_argument("--fresh", action="store_true", help="leave malloc as it is")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    parser.add_argument("--write", action="store_true", help="keep figures, write the document")
    parser.add_argument("--check", action="store_true", help="only check the promised ratios")
    args = parser.parse_args(argv)
    partial = args.quick or args.first_mb or args.data or args.codec or args.threads != [1, 2]
    if args.write and partial and not args.simd and not args.fresh:
        parser.error("--write of the main table needs a whole run; leave out the other options")
    return args


def _restart(args: argparse.Namespace) -> None:
    """Start the same command again under the environment that the measurement needs, once."""
    wanted: dict[str, str] = {} if args.fresh or args.check else dict(RECYCLING_MALLOC)
    if args.simd:
        wanted[SIMD_VARIABLE] = args.simd
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    names = args.data or data.NAMES
    codecs = args.codec or list(peers.CODECS)
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else 7)
    limit = args.first_mb * 1_000_000 if args.first_mb else QUICK_NBYTES if args.quick else None
    result: dict[str, Any] = {
        "kind": "codecs",
        "simd": os.environ.get(SIMD_VARIABLE, "auto"),
        "path": _path() if any(name.startswith("packhorse") for name in codecs) else "",
        "fresh_memory": args.fresh,
        "rounds": rounds,
        "limit_nbytes": limit,
        "machine": machine.describe(),
        "versions": peers.versions(),
        "load_before": os.getloadavg()[0],
        "core_scaling": [machine.core_scaling()],
        "data": [],
        "rows": [],
        "absent": {},
    }
    for name in names:
        dataset = data.make(name, limit_nbytes=limit)
        rows = _one_set(dataset, codecs, args.threads, rounds, result["absent"])
        described = {key: value for key, value in vars(dataset).items() if key not in HEAVY}
        result["data"].append({**described, "nbytes": dataset.array.nbytes})
        result["rows"] += rows
        print(f"\n{report.heading(result['data'][-1])}\n\n{report.table(rows)}", flush=True)
    result["files"] = [] if limit or args.data or args.codec else _packed_files()
    result["load_after"] = os.getloadavg()[0]
    result["core_scaling"].append(machine.core_scaling())
    print("\n" + report.summary(result))
    for name, reason in result["absent"].items():
        print(f"\nnot measured: {name}: {reason}")
    return result


def _path() -> str:
    """The code path that packhorse takes here."""
    from packhorse.codecs.base import choose_isa

    return choose_isa().name.lower()


def _one_set(
    dataset: Any, codecs: list[str], threads: list[int], rounds: int, absent: dict[str, str]
) -> list[dict[str, Any]]:
    contenders = []
    for name in codecs:
        for n in threads:
            entered = enter(name, dataset, n)
            if isinstance(entered, Contender):
                contenders.append(entered)
            elif n == 1:
                absent[name] = entered
    return [asdict(row) for row in compete(contenders, dataset, rounds)]


def _packed_files() -> list[dict[str, Any]]:
    """Pack the model as whole files, unpack them, and compare byte for byte."""
    from packhorse.disk import pack_file, unpack_file

    rows = []
    for kind in data.FILE_KINDS:
        with tempfile.TemporaryDirectory() as folder:
            source, packed, back = (Path(folder) / name for name in ("a", "b", "c"))
            data.write_model_file(kind, source)
            begun = time.perf_counter()
            pack_file(source, packed)
            middle = time.perf_counter()
            unpack_file(packed, back)
            seconds = middle - begun, time.perf_counter() - middle
            if back.read_bytes() != source.read_bytes():
                raise RuntimeError(f"the {kind} model file does not come back byte for byte")
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
    """Compare the ratios with what is promised; print each; exit status."""
    from packhorse.numpy import compress

    found = {f"{row['file']} file": row["ratio"] for row in _packed_files()}
    bars = {f"{kind} file": bar for kind, bar in FILE_RATIOS.items()}
    for name, bar in ARRAY_RATIOS.items():
        array = data.make(name).array
        found[name], bars[name] = array.nbytes / compress(array).nbytes, bar
    for name, bar in bars.items():
        verdict = "ok" if found[name] >= bar else "TOO LOW"
        print(f"{name:12} ratio {found[name]:12.4f}  promised {bar:9.4f}  {verdict}")
    return int(any(found[name] < bar for name, bar in bars.items()))


def _keep(result: dict[str, Any], args: argparse.Namespace) -> None:
    text = json.dumps(result, indent=1) + "\n"
    if args.json:
        args.json.write_text(text)
    if args.write:
        parts = ["cpu", result["simd"], *(["fresh"] if args.fresh else [])]
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{'-'.join(parts)}.json").write_text(text)
        DOCUMENT.write_text(report.document(RESULTS))
        README.write_text(report.readme(README.read_text(), RESULTS))
        print(f"\nwrote {DOCUMENT} and the table in {README}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
