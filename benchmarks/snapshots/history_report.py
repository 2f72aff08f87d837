"""The figures of history.py as Markdown and as a picture: functions of its JSON."""

import statistics
from collections.abc import Iterator
from html import escape
from typing import Any

from benchmarks.codecs.report import KINDS, OURS, Result, written_ratio
from benchmarks.common.svg import FAINT, GREY, RIVAL, TEAL, label_places, opening

__all__ = ["PICTURE", "picture", "section"]

History = dict[str, Any]
PICTURE = "benchmarks_snapshots.svg"
PICTURE_ALT = "Size of each store after each checkpoint"
LABELS = {
    "safetensors": "safetensors",
    "dcp": "PyTorch DCP",
    "dcp-zstd": "PyTorch DCP, zstd",
    "zipnn-delta": "zipnn delta",
    "bitx-like": "BitX-like",
    "packhorse": "Packhorse",
    "packhorse-dcp": "Packhorse in DCP",
}
UNDRAWN = ("packhorse-cache",)  # the same bytes as without
WIDTH, HEIGHT = 880, 500
LEFT, RIGHT, TOP, BOTTOM = 64, 624, 74, 442
LINE_HEIGHT = 20  # between two labels
NOTES = """One process and one thread, pinned to a core, for every store. Seconds are those of the
processor, and by the clock in brackets: of all takes together; of restoring one checkpoint into
tensors that exist, the median of {rounds} rounds. A take ends when its files are on the disk
(`fsync`), which not every store waits for by itself. Restored files come from the system's cache.
Each of the three was compared with the run's files bit for bit. A full checkpoint comes after
{max_deltas} differences in a row, and in `packhorse-dcp` after one less, because rounded copies are
differences from their masters. The oldest checkpoint is a full one; the long chain, which all
stores have, ends with the {last} checkpoint."""


def section(history: History) -> str:
    """The text below the heading in docs/benchmarks_snapshots.md.

    Args:
        history: the figures that history.py returns.
    """
    chain = min(history["max_deltas"], len(history["steps"])) - 1
    rounds = len(history["rows"][0]["restore"]["newest"])
    notes = NOTES.format(rounds=rounds, max_deltas=history["max_deltas"], last=_ordinal(chain + 1))
    ways = [f"- `{name}`: {how}." for name, how in history["stores"].items()]
    ways += [f"- `{name}` was not measured: {why}." for name, why in history["absent"].items()]
    parts = [
        f"{_what(history)}.",
        f"![{PICTURE_ALT}]({PICTURE})",
        _table(history),
        notes,
        f"`packhorse` packs the second checkpoint, a difference from the first: {_kinds(history)}.",
        "\n".join(ways),
        f"SHA-256 over those of the run's files: `{history['sha256']}`.",
    ]
    return "\n\n".join(parts)


def _kinds(history: History) -> str:
    ratios = history["ratios"].items()
    return ", ".join(f"{KINDS[kind]} {written_ratio(ratio)}" for kind, ratio in ratios)


def _what(history: History) -> str:
    steps = history["steps"]
    whole = len(steps) * history["nbytes"] / 1e9
    return (
        f"{len(steps)} checkpoints, {steps[1] - steps[0]} steps apart, of a whole state: "
        f"{history['n_tensors']} tensors, {history['nbytes'] / 1e6:.1f} MB each, {whole:.2f} GB "
        "together. fp32 masters, their bf16 copy and both moments, at the learning rate that the "
        "run ended with"
    )


def _ordinal(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")


def _table(history: History) -> str:
    whole = len(history["steps"]) * history["nbytes"]
    restored = list(history["rows"][0]["restore"])
    head = ["store", "GB", "of the raw", "ratio", "take all, s"]
    head += [f"restore the {what}, s" for what in restored]
    lines = [f"| {' | '.join(head)} |", "|---|" + "--:|" * (len(head) - 1)]
    for row in history["rows"]:
        name, nbytes = row["store"], row["sizes"][-1]
        cells = [f"**{name}**" if name.startswith(OURS) else name]
        cells += [f"{nbytes / 1e9:.3f}", f"{nbytes / whole:.0%}", f"{whole / nbytes:.3f}"]
        cells.append(_seconds([sum(clock) for clock in zip(*row["take"], strict=True)], 1))
        for what in restored:
            clocks = zip(*row["restore"][what], strict=True)
            cells.append(_seconds([statistics.median(clock) for clock in clocks], 2))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _seconds(clocks: list[float], n_digits: int) -> str:
    cpu, wall = (f"{seconds:.{n_digits}f}" for seconds in clocks)
    return f"{cpu} ({wall})"


def picture(result: Result) -> str:
    """The SVG of docs/: how each store grows.

    Args:
        result: the figures of a run of `run.py snapshots`, with a history.
    """
    history = result["history"]
    rows = [row for row in history["rows"] if row["store"] not in UNDRAWN]
    highest = max(row["sizes"][-1] for row in rows)
    n = len(history["steps"])
    gap = history["steps"][1] - history["steps"][0]
    title = f"{n} checkpoints of a training run, {gap} steps apart"
    size = f"whole states of {history['nbytes'] / 1e6:.0f} MB"
    lines = [
        *opening(
            (WIDTH, HEIGHT),
            f"{PICTURE_ALT}: {title}",
            title,
            f"{size}; size of each store; lower is better",
            left=LEFT,
        ),
        *_grid(n, highest),
        *_lines(rows, n, highest),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _x(i: int, n: int) -> float:
    return LEFT + (RIGHT - LEFT) * (i + 1) / n


def _y(nbytes: float, highest: int) -> float:
    return BOTTOM - (BOTTOM - TOP) * nbytes / highest


def _grid(n: int, highest: int) -> Iterator[str]:
    step = next(s for s in _round_numbers() if highest / s <= 7)
    marks = [step * k for k in range(int(highest / step) + 1)]
    rules = "".join(f"M{LEFT} {_y(mark, highest):.1f}H{RIGHT}" for mark in marks[1:])
    yield f'  <path d="{rules}" stroke="{FAINT}" stroke-opacity="0.25"/>'
    yield f'  <path d="M{LEFT} {BOTTOM}H{RIGHT}" stroke="{FAINT}"/>'
    yield f'  <g fill="{GREY}" text-anchor="end">'
    for mark in marks:
        yield f'    <text x="{LEFT - 10}" y="{_y(mark, highest) + 5:.1f}">{mark / 1e9:g}</text>'
    yield "  </g>"
    yield f'  <g fill="{GREY}" text-anchor="middle">'
    for i in range(n):
        yield f'    <text x="{_x(i, n):.1f}" y="{BOTTOM + 23}">{i + 1}</text>'
    yield f'    <text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 48}">checkpoint</text>'
    yield f'    <text transform="translate(18 {(TOP + BOTTOM) / 2}) rotate(-90)">GB</text>'
    yield "  </g>"


def _round_numbers() -> Iterator[float]:
    """1, 2 and 5 times the powers of ten."""
    for power in range(20):
        yield from (digit * 10.0**power for digit in (1, 2, 5))


def _lines(rows: list[dict[str, Any]], n: int, highest: int) -> Iterator[str]:
    """A line for each store with its name at the end, ours above the others."""
    rows = sorted(rows, key=lambda row: row["store"].startswith(OURS))
    wanted = [_y(row["sizes"][-1], highest) for row in rows]
    places = label_places(wanted, BOTTOM, LINE_HEIGHT)
    for row, place in zip(rows, places, strict=True):
        ours = row["store"].startswith(OURS)
        points = [f"{LEFT} {BOTTOM}"]
        points += [f"{_x(i, n):.1f} {_y(s, highest):.1f}" for i, s in enumerate(row["sizes"])]
        colour, width = (TEAL, 3) if ours else (RIVAL, 2)
        yield (
            f'  <path d="M{"L".join(points)}" fill="none" stroke="{colour}" '
            f'stroke-width="{width}" stroke-linejoin="round"/>'
        )
        end = _y(row["sizes"][-1], highest)
        if abs(end - place) > 1:
            yield f'  <path d="M{RIGHT} {end:.1f}L{RIGHT + 14} {place:.1f}" stroke="{colour}"/>'
        weight = ' font-weight="bold"' if ours else ""
        label = f"{LABELS.get(row['store'], row['store'])}, {row['sizes'][-1] / 1e9:.2f} GB"
        yield (
            f'  <text x="{RIGHT + 18}" y="{place + 5:.1f}" fill="{colour}"{weight}>'
            f"{escape(label)}</text>"
        )
