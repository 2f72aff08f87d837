"""What a report shows, before it is a page or Markdown: sections with figures and tables.

The modules of the sections make these objects from the findings; `html.py` and `markdown.py` draw
them. So both say the same, and what is escaped is decided in two places only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = [
    "Caption",
    "Cell",
    "Column",
    "Figure",
    "Name",
    "Note",
    "Picture",
    "Section",
    "Sentence",
    "Table",
    "headings",
]

# Plain words and emphasised ones by turns, plain words first.
Sentence = tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what it shows.
        key: the number that it is sorted by; None if it is sorted by its text.
    """

    text: str
    key: float | None = None


@dataclass(frozen=True)
class Name:
    """A cell with a text that comes from a file: whoever wrote that may mean harm.

    Attributes:
        text: the text, as it is in the file.
        width: characters that are shown at once; the whole text is shown on demand.
    """

    text: str
    width: int = 72


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its heading.
        numeric: whether its cells are numbers, which stand on the right.
    """

    title: str
    numeric: bool = False


def headings(*titles: str, n_text: int = 1) -> tuple[Column, ...]:
    """Columns of which the first ones hold text and the others numbers.

    Args:
        titles: their headings.
        n_text: how many hold text.
    """
    return tuple(Column(title, at >= n_text) for at, title in enumerate(titles))


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: what the rows are; the table's accessible name.
        columns: the columns.
        rows: the rows, each with a cell for each column.
        sizes: bytes that each row stands for, if the table may have too many rows for a page: then
            the largest ones are kept. Empty otherwise.
        marked: the number of the row that is recommended; None if no row is.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell | Name, ...], ...]
    sizes: tuple[int, ...] = ()
    marked: int | None = None


@dataclass(frozen=True)
class Picture:
    """A plot.

    Attributes:
        label: what it shows, for people who do not see it.
        spec: the specification for Vega-Lite or Vega; empty if there is nothing to draw.
        title: the heading above it; empty if the figure has no other picture.
    """

    label: str
    spec: dict[str, Any]
    title: str = ""


class Caption(NamedTuple):
    """What stands below a figure.

    Attributes:
        reading: how to read its pictures.
        finding: what they show this time, in words; empty if there is nothing to say.
    """

    reading: str
    finding: str = ""


@dataclass(frozen=True)
class Figure:
    """One or more pictures with a caption, and their numbers as a table.

    Attributes:
        title: the heading.
        caption: what to see in it.
        pictures: the pictures.
        table: the numbers.
        legend: classes of colours (page.css) with their meaning.
        across: how many pictures stand in a line, where the page is wide: 1 to 3.
        half: whether the figure takes half of the page's width, where that is wide.
    """

    title: str
    caption: Caption
    pictures: tuple[Picture, ...]
    table: Table
    legend: tuple[tuple[str, str], ...] = ()
    across: int = 1
    half: bool = False


@dataclass(frozen=True)
class Note:
    """A paragraph, or a list.

    Attributes:
        sentence: the paragraph, with emphasised words.
        items: the list below it.
        strong: whether it is framed, because it says what to do.
    """

    sentence: Sentence
    items: tuple[str, ...] = ()
    strong: bool = False


@dataclass(frozen=True)
class Section:
    """A section.

    Attributes:
        key: its name in links: a word in lower case.
        title: its heading.
        lead: the sentence that it begins with.
        blocks: what follows.
        left: the share of bytes that packing leaves, which is drawn below the lead; None for no
            drawing.
    """

    key: str
    title: str
    lead: Sentence
    blocks: tuple[Figure | Table | Note, ...]
    left: float | None = None

    def pictures(self) -> Iterator[Picture]:
        """All pictures that show something, in order."""
        figures = [block for block in self.blocks if isinstance(block, Figure)]
        yield from (picture for each in figures for picture in each.pictures if picture.spec)
