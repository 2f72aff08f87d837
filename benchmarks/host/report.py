"""The tables of a measurement of tables in host memory as Markdown: for the terminal and for
docs/benchmarks_host.md.

They are a function of the JSON that `run.py host` keeps; nothing is measured here.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.common import figures
from benchmarks.host import kv

__all__ = ["document", "part", "targets"]

Result = dict[str, Any]

INTRODUCTION = """# Benchmarks of tables in host memory

Written by `make bench ARGS="host --write"` from `benchmarks/results/host.json`; do not edit by
hand.

- Every table that is listed was packed, and all its rows were gathered in another order and
  compared bit for bit, before a figure was kept.
- "Ratio" is bytes of the plain table over all bytes of the packed one, with exceptions.
- "Pulled" is bytes of a plain row over bytes of the granules that a fetch of a packed row touches,
  of 32 bytes (sectors) or 128 (lines). This is what a link carries.
- "Fast" is the share of the plain table that exceptions take in fast memory.
- IBP is Invariant Bit Packing by its published rules (EuroSys 2026), with the best of its
  thresholds and of words of 32 and 64 bits. Its rows stay at their places, so it saves no memory:
  its "ratio" is of the bytes that are read.
- The bound is the ratio if exponents took their entropy, and all other bits were stored.
"""


def part(result: Result, name: str) -> str:
    """The section of one part of a run: "ratios", "gathers", "packing" or "kv"."""
    title, text = {
        "ratios": ("What a fetch of a row touches", _ratios),
        "gathers": ("Gathers on the CPU", _gathers),
        "packing": ("Packing", _packing),
        "kv": ("Keys and values", kv.section),
    }[name]
    found = result.get(name)
    return f"## {title}\n\n{text(found) if found else 'Not in this run.'}"


def document(result: Result) -> str:
    """The whole of docs/benchmarks_host.md."""
    parts = [
        INTRODUCTION,
        f"## Machine\n\n{figures.conditions(result)}\n",
        f"## Targets\n\n{targets(result)}\n",
        *(
            f"{part(result, name)}\n"
            for name in ("ratios", "gathers", "packing", "kv")
            if name in result
        ),
    ]
    return "\n".join(parts)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _pair(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return f"{found['ratio']:.3g} ({found['pulled']['32']:.3g} / {found['pulled']['128']:.3g})"


def _ratios(found: list[Result]) -> str:
    names = ("codes of 4 bits", "codes of 3 bits", "bitmap", "list")
    lines = [
        "Ratio, and in brackets how many times less is pulled, at 32 and at 128 bytes.",
        "",
        _line(["table", "row, B", "chosen", "what it is", "fast", "IBP", *names, "bound"]),
        _line(["---", "--:", "--:", "---", *["--:"] * (3 + len(names))]),
    ]
    for row in found:
        chosen = row["ways"]["chosen for 32"]
        bound = row["exponent_bound"]
        cells = [
            row["table"],
            str(row["row_nbytes"]),
            f"**{_pair(chosen)}**",
            chosen["words"],
            f"{100 * chosen['fast_share']:.2f} %",
            _pair(row["ibp"]),
            *(_pair(row["ways"].get(name)) for name in names),
            "-" if bound is None else f"{bound:.2f}",
        ]
        lines.append(_line(cells))
    return "\n".join(lines)


def _gathers(found: list[Result]) -> str:
    lines = [
        "GB/s of plain rows. Rows are gathered at random, from few rows that stay in the cache, "
        "and from a table of 512 MB. Times is ours over `torch.index_select`, in seconds: below 1 "
        "ours is faster.",
        "",
        _line(["table", "row, B", "rows", "threads", "packhorse", "index_select", "take", "times"]),
        _line(["---", "--:", "---", *["--:"] * 5]),
    ]
    for row in found:
        speeds = [f"{row['gbps'][name]:.1f}" for name in ("packhorse", "index_select", "take")]
        lines.append(
            _line(
                [
                    row["table"],
                    str(row["row_nbytes"]),
                    row["what"],
                    str(row["threads"]),
                    *speeds,
                    f"{row['times']:.2f}",
                ]
            )
        )
    return "\n".join(lines)


def _packing(found: list[Result]) -> str:
    lines = [
        "GB/s of plain rows on one core, and milliseconds for the choice from a sample.",
        "",
        _line(["table", "way", "GB/s", "choice, ms"]),
        _line(["---", "---", "--:", "--:"]),
    ]
    for row in found:
        cells = [row["table"], row["way"], f"{row['gbps']:.2f}", f"{row['plan_ms']:.0f}"]
        lines.append(_line(cells))
    return "\n".join(lines)


def targets(result: Result) -> str:
    """What was aimed at, what was measured."""
    lines = [_line(["target", "measured", "limit", ""]), _line(["---", "--:", "--:", "---"])]
    for name, measured, limit, met in _targets(result):
        lines.append(_line([name, measured, limit, "met" if met else "MISSED"]))
    return "\n".join(lines)


def _targets(result: Result) -> Iterator[tuple[str, str, str, bool]]:
    rows = {row["table"]: row for row in result.get("ratios", [])}
    wanted = {
        "MiniLM words, BF16": 1.333,
        "WordNet, 3,703 words, 1 / n": 450.0,
        "Fashion-MNIST / 255, FP32": 6.0,
    }
    for table, limit in wanted.items():
        if table in rows:
            pulled = rows[table]["ways"]["chosen for 32"]["pulled"]["32"]
            yield (
                f"{table}: times less pulled at 32 B",
                f"{pulled:.4g}",
                f">= {limit:g}",
                pulled >= limit - 5e-4,
            )
    if rows:
        worse = [
            name
            for name, row in rows.items()
            for granule in ("32", "128")
            if row["ibp"] is not None
            and row["ways"][f"chosen for {granule}"]["pulled"][granule]
            < row["ibp"]["pulled"][granule] - 5e-4
        ]
        yield "tables and granules where IBP pulls less", str(len(worse)), "0", not worse
    for what in ("rows in the cache", "larger than the cache"):
        times = [
            row["times"]
            for row in result.get("gathers", [])
            if row["what"] == what and row["row_nbytes"] >= 768
        ]
        if times:
            limit = 1.5 if what == "rows in the cache" else 1.0
            yield (
                f"gather, rows of 768 B and more, {what}: greatest times index_select",
                f"{max(times):.2f}",
                f"<= {limit}",
                max(times) <= limit,
            )
    speeds = [row["gbps"] for row in result.get("packing", [])]
    if speeds:
        slowest = min(speeds)
        yield "packing: slowest, GB/s a core", f"{slowest:.2f}", ">= 1.5", slowest >= 1.5
