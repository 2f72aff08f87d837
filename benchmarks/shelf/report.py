"""The tables of a measurement of shelves as Markdown: for the terminal and for
docs/benchmarks_shelf.md.

They are a function of the JSON that `run.py shelf` keeps; nothing is measured here.
"""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.common import figures
from benchmarks.shelf.picture import ALT, NAME, picture

__all__ = ["PICTURE", "document", "part", "picture", "targets"]

Result = dict[str, Any]
PICTURE = NAME
OURS, MEMMAP, OTHER_LAYOUT = "packhorse", "memmap (K, n)", "memmap (n, K)"
RAW = ("lmdb-row", "lmdb-chunk")

INTRODUCTION = """# Benchmarks of arrays that live on disk

Written by `make bench ARGS="shelf --write"` from `benchmarks/results/shelf.json`; do not edit by
hand.

- All stores take turns in one process, in an order that changes from round to round, with the
  threads that they choose themselves. Every store shows every row bit for bit.
- Milliseconds are by the clock. A write ends when it is on the disk: stores that do not wait for
  that themselves are flushed within the time.
- Sizes are the blocks that the files take of the disk. Ratio is raw bytes over those.
- "Cold": the store was opened again and its files have left the system's cache
  (`posix_fadvise`). A virtual machine's host may still have them.
- A shelf and LMDB commit all of a write or nothing; so does TensorStore with OCDBT. The other
  stores may be left with a part of a write when the machine stops, and the memmaps with a part of a
  row.
"""

LAYOUTS = """The paper "Non-Volatile Memory Accelerated Posterior Estimation" reports 37,927 s with
a memmap on NVMe against 4,547 s in memory, 8.3 times as much. That is no gain of ours: the paper
keeps one iterate in each *column* of its file, so every update touches all pages of the file.
`memmap (K, n)` keeps it in a row; this alone removes the penalty, without any library. All
comparisons here are with that memmap, and `memmap (n, K)` is listed to show the difference. It gets
{few} rows only, in a file for {columns} columns."""

LIMIT = """{rows} rows, with half the memory that they take. The limit is imitated, as a real one
needs rights on the system. Each store is there twice; after every {limit:.0f} MB of rows all files
of one of the two leave the system's cache. A real limit would keep the pages that are used most.
The memory of the process itself is not limited."""


def part(result: Result, name: str) -> str:
    """The section of one part of a run: "rows", "limited", "table" or "training"."""
    title, text = {
        "rows": ("Iterates of a training run", _rows),
        "limited": ("The same with less memory than data", _limited),
        "training": ("Training beside the collection", _training),
        "table": ("Short rows: gathered and overwritten at random", _table),
    }[name]
    found = result.get(name)
    return f"## {title}\n\n{text(found) if found else 'Not in this run.'}"


def document(result: Result) -> str:
    """The whole of docs/benchmarks_shelf.md.

    Args:
        result: what `run.py shelf` keeps of a run.
    """
    parts = [
        INTRODUCTION,
        f"## Machine\n\n{figures.conditions(result, where=', virtual disk')}\n",
        f"## Targets\n\n{targets(result)}\n",
        *(f"{part(result, name)}\n" for name in ("rows", "limited", "training", "table")),
        f"## Where a rival is ahead of ours\n\n{losses(result)}\n",
        f"## How each store is run\n\n{_ways(result)}\n",
    ]
    return "\n".join(parts)


def _rows(found: Result) -> str:
    raw = found["nbytes"]
    lines = [
        f"Every iterate of the paper's network ({found['width']:,} parameters, {raw / 1e6:.1f} MB "
        "a row; batches of 100, SGD with a rate of 1e-4) on Fashion-MNIST: "
        f"{found['rows']:,} rows. "
        "Training and appending take turns, and only appending is timed. The sum is the pass that "
        "draws a sample: all rows, each times a weight.",
        "",
        f"![{ALT}]({PICTURE})",
        "",
        "| store | rows | MB a row | ratio | append, ms | median (greatest) | processor, ms | "
        "sum, ms a row, cold | warm |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found["stores"]:
        add = row["append"]
        cells = [
            f"{row['rows']:,}",
            f"{row['nbytes_per_row'] / 1e6:.2f}",
            f"{raw / row['nbytes_per_row']:.2f}",
            _ms(add["mean"]),
            f"{_ms(add['median'])} ({_ms(add['greatest'])})",
            _ms(add["cpu"]),
            _ms(row["sum, cold"]["median"]),
            _ms(row["sum, warm"]["median"]),
        ]
        lines.append(_line(row["store"], cells))
    few = next((r["rows"] for r in found["stores"] if r["store"] == OTHER_LAYOUT), 0)
    columns = min(found["rows"], 600)
    return "\n".join([*lines, "", LAYOUTS.format(few=few, columns=columns)])


def _limited(found: Result) -> str:
    lines = [
        LIMIT.format(rows=found["rows"], limit=found["limit_nbytes"] / 1e6),
        "",
        "| store | append, ms | without the limit, ms | times |",
        "|---|--:|--:|--:|",
    ]
    for row in found["stores"]:
        limited, free = row["limited"]["mean"], row["free"]["mean"]
        cells = [_ms(limited), _ms(free), f"{limited / free:.2f}"]
        lines.append(_line(row["store"], cells))
    return "\n".join(lines)


def _training(found: Result) -> str:
    lines = [
        f"One run goes on in turns of {found['steps']} steps; a turn ends when all its "
        "iterates are on the disk. `packhorse` is `SWAG.collect` after every step, which packs and "
        f"writes in the background, {found['settings'][0]['nbytes_per_row'] / 1e6:.2f} MB a row. "
        "`memmap` writes each iterate to a row of a memmap and waits for the disk.",
        "",
        "Threads of PyTorch that wait for another one spin for some milliseconds. Beside any other "
        "work, they take more of the processor than that work does, unless "
        "`OMP_WAIT_POLICY=passive` is set before Python starts, or PyTorch leaves a core free "
        "(`torch.set_num_threads`).",
        "",
        "| setting | training | a step, ms | median of turns | times | processor, ms |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for setting in found["settings"]:
        turns = setting["turns"]
        for name, step in turns.items():
            times = f"{step['median'] / turns['alone']['median']:.2f}"
            cells = [_ms(step["mean"]), _ms(step["median"]), times, _ms(step["cpu"])]
            lines.append(_line(setting["setting"], [name, *cells]))
    return "\n".join(lines)


def _table(found: Result) -> str:
    lines = [
        f"Fashion-MNIST as {found['rows']:,} rows of {found['width']} fp32, "
        f"{found['nbytes'] / 1e6:.0f} MB. A gather takes 1,000 random rows; an overwrite replaces "
        "16 random rows in one durable commit. Medians.",
        "",
        "| store | MB | ratio | fill, s | gather warm, ms | cold, ms | overwrite, ms (greatest) | "
        "MB after |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found["stores"]:
        cells = [
            f"{row['nbytes_filled'] / 1e6:.1f}",
            f"{found['nbytes'] / row['nbytes_filled']:.2f}",
            f"{row['fill_seconds']:.2f}",
            _ms(row["gather, warm"]["median"]),
            _ms(row["gather, cold"]["median"]),
            f"{_ms(row['overwrite']['median'])} ({_ms(row['overwrite']['greatest'])})",
            f"{row['nbytes'] / 1e6:.1f}",
        ]
        lines.append(_line(row["store"], cells))
    return "\n".join(lines)


def _line(name: str, cells: list[str]) -> str:
    name = f"**{name}**" if name.startswith(OURS) else name
    return f"| {' | '.join([name, *cells])} |"


def _ms(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def targets(result: Result) -> str:
    """What the project set out to reach, and what was measured."""
    lines = ["| target | measured | limit | |", "|---|--:|--:|---|"]
    for what, found, limit, at_least in _targets(result):
        met = found >= limit if at_least else found <= limit
        sign = ">=" if at_least else "<="
        lines.append(
            f"| {what} | {found:.2f} | {sign} {limit:.2f} | {'met' if met else 'MISSED'} |"
        )
    return "\n".join(lines)


def _targets(result: Result) -> Iterator[tuple[str, float, float, bool]]:
    """What, the figure, its limit, and whether the limit is the least that is wanted."""
    rows, limited, table = (_by_store(result, name) for name in ("rows", "limited", "table"))
    if OURS in rows:
        ours = rows[OURS]
        ratio = result["rows"]["nbytes"] / ours["nbytes_per_row"]
        yield "long rows: raw bytes over ours", ratio, 3.0, True
        if MEMMAP in rows:
            for what, key, clock in (
                ("append", "append", "mean"),
                ("sum, cold", "sum, cold", "median"),
            ):
                times = ours[key][clock] / rows[MEMMAP][key][clock]
                yield f"long rows: {what}, times `{MEMMAP}`", times, 1.0, False
    if OURS in limited:
        times = limited[OURS]["limited"]["mean"] / limited[OURS]["free"]["mean"]
        yield "long rows: append with less memory, times without a limit", times, 1.1, False
    for setting in result["training"]["settings"] if "training" in result else ():
        turns = setting["turns"]
        times = turns[OURS]["median"] / turns["alone"]["median"]
        yield f"training and collection, {setting['setting']}, times alone", times, 1.3, False
    if OURS in table and MEMMAP in table:
        for temperature, limit in (("warm", 2.0), ("cold", 1.0)):
            key = f"gather, {temperature}"
            times = table[OURS][key]["median"] / table[MEMMAP][key]["median"]
            yield f"short rows: gather {temperature}, times `{MEMMAP}`", times, limit, False
    for rival in RAW if OURS in table else ():
        if rival in table:
            times = table[OURS]["overwrite"]["median"] / table[rival]["overwrite"]["median"]
            yield f"short rows: overwrite, times `{rival}`", times, 1.3, False


def _by_store(result: Result, name: str) -> dict[str, Any]:
    return {row["store"]: row for row in result.get(name, {}).get("stores", [])}


def losses(result: Result) -> str:
    """Every figure in which a rival is better than our default."""
    sized: dict[str, Callable[[Any], float]] = {
        "rows/bytes": lambda row: row["nbytes_per_row"],
        "table/bytes": lambda row: row["nbytes_filled"],
        "table/bytes after overwriting": lambda row: row["nbytes"],
        "table/fill": lambda row: row["fill_seconds"],
        "rows/append": lambda row: row["append_common"]["mean"],
    }
    for name, kind in (("rows", "sum, "), ("table", "gather, ")):
        for temperature in ("cold", "warm"):
            key = f"{kind}{temperature}"
            sized[f"{name}/{key}"] = lambda row, key=key: row[key]["median"]
    sized["table/overwrite"] = lambda row: row["overwrite"]["median"]
    words = {"rows": "long rows", "table": "short rows"}
    lines = []
    for what, size in sized.items():
        name, _, figure = what.partition("/")
        stores = _by_store(result, name)
        if OURS not in stores:
            continue
        ours = size(stores[OURS])
        ahead = {s: size(row) for s, row in stores.items() if not s.startswith(OURS)}
        told = [f"{s} {value / ours:.2f}" for s, value in ahead.items() if value < ours]
        if told:
            lines.append(f"- {words[name]}, {figure}, times ours: {', '.join(told)}.")
    return "\n".join(lines) or "Nowhere in this run."


def _ways(result: Result) -> str:
    absent: dict[str, str] = {}
    for name in ("rows", "table"):
        absent |= result.get(name, {}).get("absent", {})
    lines = [f"- `{name}`: {how}." for name, how in result["stores"].items()]
    lines += [f"- `{name}` was not measured: {why}." for name, why in absent.items()]
    return "\n".join(lines)
