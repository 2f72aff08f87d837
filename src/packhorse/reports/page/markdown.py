"""Draws a report as Markdown: the same sentences and findings, and the tables in short."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packhorse.reports.page import words
from packhorse.reports.page.outline import Cell, Figure, Name, Note, Section, Sentence, Table
from packhorse.reports.page.sections import sections
from packhorse.reports.results import Findings

__all__ = ["render_markdown"]

_MAX_ROWS = 24
_SPECIAL = re.compile(r"([\\`*\[\]<>|~$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")


def render_markdown(findings: Findings) -> str:
    """A report as Markdown, without its pictures.

    Args:
        findings: what the report says.

    Returns:
        The text. Long tables are cut to their largest rows, and say so.
    """
    return "\n\n".join(_blocks(findings)) + "\n"


def _blocks(findings: Findings) -> Iterator[str]:
    yield f"# {_text(words.shorten(findings.title, 120))}"
    made = words.printable(findings.made)[:16].replace("T", " ")
    yield f"Made {_text(made)} UTC with Packhorse {_text(findings.version)}."
    for section in sections(findings):
        yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}"
    yield _sentence(section.lead)
    for block in section.blocks:
        if isinstance(block, Note):
            yield from _note(block)
            continue
        yield f"### {_text(block.title)}"
        if isinstance(block, Figure):
            if block.caption.finding:
                yield _text(block.caption.finding)
            block = block.table
        yield from _table(block)


def _note(note: Note) -> Iterator[str]:
    if note.sentence:
        yield _sentence(note.sentence)
    if note.items:
        yield "\n".join(f"- {_text(item)}" for item in note.items)


def _sentence(parts: Sentence) -> str:
    """A sentence with its emphasis. Blanks stand outside of the asterisks, or they mean nothing."""
    return "".join(
        f"**{_text(part)}**" if at % 2 and part else _text(part) for at, part in enumerate(parts)
    )


def _table(table: Table) -> Iterator[str]:
    order = range(len(table.rows))
    first = max((table.marked or 0) - _MAX_ROWS // 2, 0)
    largest = sorted(order, key=lambda at: -table.sizes[at]) if table.sizes else order[first:]
    kept = sorted(largest[:_MAX_ROWS])
    lines = [
        _row([_text(column.title.strip()) for column in table.columns]),
        "|" + "|".join("--:" if column.numeric else "---" for column in table.columns) + "|",
    ]
    for at in kept:
        cells = [_cell(cell) for cell in table.rows[at]]
        if at == table.marked:
            cells[-1] += " **(recommended)**"
        lines.append(_row(cells))
    yield "\n".join(lines)
    if len(kept) < len(table.rows):
        which = "The largest " if table.sizes else "The first " if not first else ""
        yield f"{which}{len(kept)} of {words.count(len(table.rows))} rows."


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell | Name) -> str:
    return _text(words.shorten(cell.text) if isinstance(cell, Name) else cell.text)


def _text(text: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    return _SPECIAL.sub(r"\\\1", words.printable(text))
