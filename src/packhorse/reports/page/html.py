"""Draws a report as one HTML file that needs nothing else: no network, no server.

The texts of a report come from files that somebody else may have made. They are safe in three ways:
Jinja escapes all that it inserts; the specifications of the plots lie in a block of JSON, in which
no `<` is left; and the page's policy (Content-Security-Policy) lets only our own scripts and styles
run, by their hashes, and lets nothing be fetched. Vega's expressions are interpreted, not compiled,
so the policy needs no `unsafe-eval`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from base64 import b64encode
from functools import cache
from importlib.resources import files
from typing import Any

from packhorse.errors import MissingBackendError
from packhorse.late_import import import_late
from packhorse.reports.page import words
from packhorse.reports.page.charts import config
from packhorse.reports.page.outline import Cell, Name, Table
from packhorse.reports.page.sections import sections
from packhorse.reports.results import Findings

__all__ = ["render_html"]

# The largest rows of a table are kept: so many, and so many bytes of HTML of each table and of all.
# With Vega and the plots that is less than 5 MB.
_MAX_ROWS = 1000
_MAX_TABLE_NBYTES = 700_000
_MAX_TABLES_NBYTES = 3_000_000
_ROW_NBYTES = 30
_CELL_NBYTES = 34
_NAME_NBYTES = 100  # of one that is cut
_MAX_NAME_NCHARS = 12_000
_MAX_TEXT_NCHARS = 1000
# What would end a block of JSON in HTML, or a line of JavaScript.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def render_html(findings: Findings) -> str:
    """A report as one HTML file.

    Args:
        findings: what the report says.

    Returns:
        The file's text, to be written as UTF-8.

    Raises:
        MissingBackendError: Jinja or vl-convert is not installed.
    """
    jinja, markup = _needed("jinja2"), import_late("markupsafe").Markup
    shown = sections(findings)
    pictures = [picture for section in shown for picture in section.pictures()]
    data = {"config": config(), "specs": [picture.spec for picture in pictures]}
    style, script = _asset("page.css"), _asset("page.js")
    vega = _vega() if pictures else ""
    environment = jinja.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja.StrictUndefined,
        finalize=lambda value: value if isinstance(value, markup) else words.printable(str(value)),
        loader=jinja.FunctionLoader(_asset),
    )
    return str(
        environment.get_template("page.html").render(
            title=words.shorten(findings.title, 120),
            made=words.printable(findings.made)[:16].replace("T", " "),
            version=findings.version,
            sections=shown,
            number={id(picture): at for at, picture in enumerate(pictures)}.__getitem__,
            policy=_policy((style,), (script, vega)),
            style=markup(style),
            script=markup(script),
            vega=markup(vega),
            data=markup(_json(data)),
            is_name=lambda cell: isinstance(cell, Name),
            block_type=lambda block: type(block).__name__,
            id=id,
            kept=_Tables().kept,
            licences=markup(markup.escape(_asset("licences.txt"))) if vega else "",
            share=words.share,
            short=words.shorten,
            full=_full,
        )
    )


def _needed(name: str) -> Any:
    """A module of the extra `report`."""
    try:
        return import_late(name)
    except ModuleNotFoundError as error:
        raise MissingBackendError(
            "the page of a report needs Jinja and vl-convert; install them with: "
            "pip install 'packhorse[report]'"
        ) from error


def _asset(name: str) -> str:
    """A file that lies beside this module."""
    return files(__package__).joinpath(name).read_text("utf-8")


@cache
def _vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, in a block of its own so that its names do not
    meet others."""
    bundle: str = _needed("vl_convert").javascript_bundle()
    if re.search(r"</script|<!--", bundle, re.I):
        raise ValueError("the script of vl-convert cannot stand in HTML; install another version")
    return f"{{{bundle}}}"


def _policy(styles: tuple[str, ...], scripts: tuple[str, ...]) -> str:
    """The Content-Security-Policy: nothing but these styles and scripts."""
    style, script = (" ".join(map(_hash, texts)) for texts in (styles, scripts))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; base-uri 'none'; "
        "form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(data: Any) -> str:
    """Data as JSON that can stand in a script element."""
    text = json.dumps(_printable(data), separators=(",", ":"), allow_nan=False)
    return text.translate(_ESCAPES)


def _printable(value: Any) -> Any:
    """A value of JSON whose texts are printable and not too long for a plot, and whose numbers are
    finite."""
    if isinstance(value, str):
        return words.shorten(value, _MAX_TEXT_NCHARS)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list | tuple) else value


# Tables.


class _Tables:
    """Chooses the rows of tables that a page has room for, one table after the other."""

    def __init__(self) -> None:
        self._room = _MAX_TABLES_NBYTES

    def kept(self, table: Table) -> tuple[list[tuple[int, tuple[Cell | Name, ...]]], str]:
        """The rows of a table that are shown, with their numbers, and a sentence about the others.

        Args:
            table: the table.
        """
        order = range(len(table.rows))
        by_size = sorted(order, key=lambda at: -table.sizes[at]) if table.sizes else order
        kept, room = [], min(self._room, _MAX_TABLE_NBYTES)
        for at in by_size[:_MAX_ROWS]:
            nbytes = _row_nbytes(table.rows[at])
            if nbytes > room:
                break
            kept.append(at)
            room, self._room = room - nbytes, self._room - nbytes
        return [(at, table.rows[at]) for at in sorted(kept)], _left_out(table, kept)


def _left_out(table: Table, kept: list[int]) -> str:
    """A sentence about the rows that are not shown; empty if there are none."""
    gone = set(range(len(table.rows))) - set(kept)
    if not gone:
        return ""
    nbytes = sum(table.sizes[at] for at in gone) if table.sizes else 0
    of = f", together {words.size(nbytes)}," if nbytes > 0 else ""
    which = "largest" if nbytes > 0 else "first"
    return (
        f"The {which} {words.count(len(kept))} of {words.count(len(table.rows))} are listed; "
        f"{words.count(len(gone))} more{of} are left out here. The JSON of the report has all."
    )


def _row_nbytes(row: tuple[Cell | Name, ...]) -> int:
    """About how many bytes of HTML a row takes."""
    return _ROW_NBYTES + sum(_CELL_NBYTES + _text_nbytes(cell) for cell in row)


def _text_nbytes(cell: Cell | Name) -> int:
    text = _full(cell.text)
    n_escaped = sum(text.count(c) for c in "<>&\"'")
    is_cut = isinstance(cell, Name) and len(text) > cell.width
    return len(text.encode()) + 5 * n_escaped + (_NAME_NBYTES if is_cut else 0)


def _full(text: str) -> str:
    """A whole text from a file, printable; cut only if it is longer than any name."""
    return words.shorten(text, _MAX_NAME_NCHARS)
