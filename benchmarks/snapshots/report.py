"""The tables of a measurement of checkpoints as Markdown, for the terminal and
docs/benchmarks_snapshots.md.

They are a function of the JSON that `run.py snapshots` keeps; nothing is measured here.
"""

from benchmarks.codecs import report
from benchmarks.codecs.report import Result, Row
from benchmarks.codecs.targets import SNAPSHOT_TARGETS, judge
from benchmarks.snapshots import history_report

__all__ = ["document", "section", "summary"]

RIVAL = "zipnn-delta"
# Columns of the short table, beside ours and the best of all others.
GLANCE = (RIVAL, "bitx-like", "xor+pcodec")

INTRODUCTION = """# Benchmarks of checkpoints

Written by `make bench ARGS="snapshots --write"` from `benchmarks/results/snapshots.json`; do not
edit by hand. Ratio, speed and memory mean the same as in
[benchmarks_codecs.md](benchmarks_codecs.md).

- A pair is two checkpoints of the run that `make training` makes: a model of 18.3 million
  parameters that learns with AdamW. The newer one is packed; the older one is at hand for packing
  and unpacking.
- One thread, pinned to a core and timed by processor time. The XOR is part of a rival's time.
- Every codec packs each part of a whole state by itself. A rival uses the older part as base only
  where that is shorter; finding that out is not timed. Ours finds it out itself.
- Naming and checking the base by its hash is part of our time. No rival checks its base.
- [Below](#a-history-of-checkpoints) whole stores, ours and others, keep the checkpoints of a run
  that saves every few steps.
- `x zipnn-delta`: encode / decode speed over zipnn's with its own delta. `of copy`: the share of
  np.copyto's speed.
"""


def section(pair: Row, rows: list[Row]) -> str:
    """The heading and the table of one pair.

    Args:
        pair: its entry in a run's figures.
        rows: those of the pair, in the order of the table.
    """
    return report.section(pair, rows, RIVAL)


def summary(result: Result) -> str:
    """Our default level on every pair beside the rivals' ratios, then the targets.

    Args:
        result: what `run.py snapshots` keeps of a run.
    """
    verdicts = judge(result["rows"], forced=False, targets=SNAPSHOT_TARGETS)
    targets = report.verdict_table(verdicts)
    return "\n".join(["## At a glance", "", _glance(result), "", "## Targets", "", targets])


def _glance(result: Result) -> str:
    head = ["pair", "ratio", "encode GB/s", "decode GB/s", "without base", *GLANCE, "best rival"]
    lines = [f"| {' | '.join(head)} |", "|---|" + "--:|" * (len(head) - 2) + "---|"]
    for pair in result["data"]:
        rows = report.of_set(result, pair["name"])
        ours = report.find_row(rows, report.OURS, 1)
        if ours is None:
            continue
        speeds = (report.written_speed(ours[way][0]) for way in ("encode", "decode"))
        others = (_ratio(rows, name) for name in (f"{report.OURS}-full", *GLANCE))
        cells = [pair["name"], report.written_ratio(ours["ratio"]), *speeds, *others, _best(rows)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(rows: list[Row], codec: str) -> str:
    row = report.find_row(rows, codec, 1)
    return report.written_ratio(row["ratio"]) if row else ""


def _best(rows: list[Row]) -> str:
    """The rival with the greatest ratio."""
    rivals = [r for r in rows if not r["codec"].startswith((report.OURS, report.CEILING))]
    best = max(rivals, key=lambda row: row["ratio"], default=None)
    return f"{best['codec']} {report.written_ratio(best['ratio'])}" if best else ""


def _parts(result: Result) -> str:
    """The ratio of each part of the whole state."""
    parts = next((pair["parts"] for pair in result["data"] if pair["parts"]), [])
    names = [f"{report.KINDS[kind]}, {nbytes / 1e6:.1f} MB" for kind, nbytes in parts]
    lines = [f"| codec | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for codec, packed in result["parts"].items():
        pairs = zip(parts, packed, strict=True)
        ratios = (report.written_ratio(nbytes / size) for (_, nbytes), size in pairs)
        lines.append(f"| {codec} | {' | '.join(ratios)} |")
    return "\n".join(lines) if result["parts"] else "Not in this run."


def _history(result: Result) -> str:
    known = result.get("history")
    return history_report.section(known) if known else "Not in this run."


def document(result: Result) -> str:
    """The whole of docs/benchmarks_snapshots.md.

    Args:
        result: what `run.py snapshots` keeps of a run.
    """
    sections = [section(pair, report.of_set(result, pair["name"])) for pair in result["data"]]
    parts = [
        INTRODUCTION,
        f"## Machine\n\n{report.conditions(result)}\n",
        f"## A history of checkpoints\n\n{_history(result)}\n",
        f"{summary(result)}\n",
        f"## How each codec is run\n\n{report.ways(result)}\n",
        "## Every codec\n",
        *(f"{text}\n" for text in sections),
        f"## What each part of the whole state costs\n\n{_parts(result)}\n",
        f"## Where a rival is ahead of our default level\n\n{report.losses(result)}\n",
        f"## Data\n\n{_hashes(result)}\n",
    ]
    return "\n".join(parts)


def _hashes(result: Result) -> str:
    lines = ["| pair | dtype | bytes | SHA-256 | SHA-256 of the base |", "|---|---|--:|---|---|"]
    lines += [
        f"| {p['name']} | {p['dtype']} | {p['nbytes']:,} | `{p['sha256']}` | `{p['base_sha256']}` |"
        for p in result["data"]
    ]
    return "\n".join(lines)
