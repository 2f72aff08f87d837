"""docs/benchmarks.md: what the kept runs say, on at most two screens.

Everything here is a function of the JSON that run.py keeps; report.py makes the page with the rest.
"""

from pathlib import Path

from benchmarks.codecs import report
from benchmarks.codecs.report import OURS, Result, Row

__all__ = ["page"]

# A rival that packs at least this share of what we pack may be compared in speed.
NEAR_RATIO = 0.99
PATH_DATA = ("model_bf16", "model_fp32", "model_fp16", "fp8_e4m3", "llm_bf16")

INTRODUCTION = """# Benchmarks

Written by `make bench ARGS="--full --write"`; do not edit by hand. Ratio is original over packed
bytes. Speeds are 10^9 bytes of the original a second, through Python, as medians of interleaved
rounds; pairs are encode / decode. `x zipnn` is our speed over zipnn's, `of copy` over a copy's,
`two threads` over that of one.
"""
LOSSES = """## Where rivals lead

The best rival with a better ratio than our default level, and the fastest one whose ratio is at
least 99 % of ours, on one thread. [Benchmarks of codecs](benchmarks_codecs.md) lists every loss.
"""
PATHS = """## With fewer instruction sets

The same machine, forced to a weaker path: our speed over zipnn's, one thread. Ratios are the same.
On 64-bit ARM we have only instruction counts ([decisions](decisions.md)).
"""
REST = """## The rest

[Every codec, target and loss](benchmarks_codecs.md) ·
[checkpoints](benchmarks_snapshots.md) · [arrays on disk](benchmarks_shelf.md) ·
[the wire](benchmarks_wire.md) · [tables in host memory](benchmarks_host.md) ·
[packed layers on a GPU](benchmarks_gpu.md), [on a CPU](benchmarks_layers.md)
"""


def page(results: Path) -> str:
    """The whole of docs/benchmarks.md.

    Args:
        results: the folder of JSON files that `--write` keeps.
    """
    run = report.main_run(results)
    if run is None:
        return f"{INTRODUCTION}\n{REST}"
    machine = f"{run['machine']['cpu']}, {run['path']} path, {run['rounds']} rounds."
    parts = [INTRODUCTION, machine, ""]
    if report.of_set(run, report.PLOTTED):
        parts += [f"![{report.PICTURE_ALT}]({report.PICTURE})", ""]
    parts += ["## Our default level", "", report.glance(run), ""]
    parts += [LOSSES, _leaders(run), "", PATHS, _paths(results), "", REST]
    return "\n".join(parts)


def _leaders(run: Result) -> str:
    lines = ["| data | ratio | encode | decode |", "|---|---|---|---|"]
    for dataset in run["data"]:
        rows = [r for r in report.of_set(run, dataset["name"]) if r["threads"] == 1]
        ours = report.find_row(rows, OURS, 1)
        rivals = [r for r in rows if not r["codec"].startswith((OURS, report.CEILING))]
        if ours is None:
            continue
        near = [r for r in rivals if r["ratio"] >= NEAR_RATIO * ours["ratio"]]
        cells = [
            _best_ratio(rivals, ours),
            *(_fastest(near, ours, way) for way in ("encode", "decode")),
        ]
        if any(cells):
            lines.append(f"| {dataset['name']} | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else "Nowhere in this run."


def _best_ratio(rivals: list[Row], ours: Row) -> str:
    """The rival with the best ratio, if that is better than ours."""
    best = max(rivals, key=lambda row: row["ratio"], default=ours)
    theirs, mine = (report.written_ratio(row["ratio"]) for row in (best, ours))
    return f"{best['codec']} {theirs}" if best["ratio"] > ours["ratio"] and theirs != mine else ""


def _fastest(rivals: list[Row], ours: Row, way: str) -> str:
    """The fastest rival, if it is faster than we are, in one `way`."""
    best = max(rivals, key=lambda row: row[way][0], default=ours)
    theirs, mine = (report.written_speed(row[way][0]) for row in (best, ours))
    return f"{best['codec']} {theirs}" if best[way][0] > ours[way][0] and theirs != mine else ""


def _paths(results: Path) -> str:
    lines = [f"| path | {' | '.join(PATH_DATA)} |", "|---|" + "--:|" * len(PATH_DATA)]
    runs = [run for run in report.load(results) if run["kind"] == "codecs"]
    for run in runs:
        if report.is_special(run) and not run["fresh_memory"]:
            cells = []
            for name in PATH_DATA:
                rows = report.of_set(run, name)
                ours, rival = (report.find_row(rows, codec, 1) for codec in (OURS, report.RIVAL))
                cells.append(report.relative(ours, rival, "{:.2f}") if ours else "")
            lines.append(f"| {run['path']} | {' | '.join(cells)} |")
    return "\n".join(lines)
