"""Tables that fit a terminal of any width, and a pipe: one line for each row.

A pipe gets all columns at full width. On a terminal, names are shortened in the middle, because
their two ends tell them apart; if that is not enough, the least important columns are left out.
Numbers are cut only if the terminal is narrower than one of them. The note of a row (its planes, a
reason) stands behind the row if there is room, otherwise in a line of its own below the row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size
from rich.text import Text

__all__ = ["Grid", "cut", "shorten"]

_GAP = 3  # blanks between columns
_EDGES = 2  # a blank before the first and after the last
_MIN_NAME = 24  # cells of a name; columns of `drops` are left out before it gets shorter
_SHORT_NAME = 8  # the same, for columns of `last_drops`
_INDENT = 4  # of a note below its row
_MIN_NOTE = 80  # cells that a note of this length or more needs to stand behind its row


@dataclass
class Grid:
    """A table.

    Attributes:
        title: the line above the table.
        columns: the columns' names. A column whose name begins with `>` holds numbers; one whose
            name begins with `~` holds names, which can be shortened.
        drops: columns that are left out on a narrow terminal, in this order.
        last_drops: columns that are left out only once names are very short, too.
        note: heading of the rows' notes; empty if rows have none.
    """

    title: str
    columns: Sequence[str]
    drops: Sequence[str] = ()
    last_drops: Sequence[str] = ()
    note: str = ""
    _rows: list[tuple[dict[str, Text], Text]] = field(default_factory=list)

    def row(self, *cells: str | Text, note: Text | str = "") -> None:
        """Add a row, with a cell for each column."""
        texts = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        named = dict(zip(self.columns, texts, strict=True))
        self._rows.append((named, note if isinstance(note, Text) else Text(note)))

    def section(self) -> None:
        """Add an empty line."""
        self._rows.append(({}, Text()))

    def lines(self, width: int | None, mark: str) -> Iterator[Text]:
        """The table drawn.

        Args:
            width: cells of the terminal; None for a pipe.
            mark: replaces text that was cut off.
        """
        for line in self._lines(width, mark):
            yield line if width is None else cut(line, width, mark)

    def _lines(self, width: int | None, mark: str) -> Iterator[Text]:
        widths = self._widths(width)
        room = self._note_room(widths, width)
        yield Text(self.title if width is None else shorten(self.title, width, mark))
        yield Text()
        heads = {name: Text(name.lstrip(">~")) for name in self.columns}
        yield self._line(heads, Text(self.note if room else ""), widths, mark)
        rule = _total(widths) - _EDGES + (_GAP + room if room else 0)
        yield Text(" " + ("─" if mark == "…" else "-") * rule)
        for cells, note in self._rows:
            if not cells:
                yield Text()
                continue
            yield self._line(cells, cut(note, room, mark) if room else Text(), widths, mark)
            if note.plain and not room:
                below = cut(note, max(0, (width or 0) - _INDENT - 1), mark)
                below.stylize("dim")
                yield Text(" " * _INDENT).append_text(below)
        yield Text()

    def _widths(self, width: int | None) -> dict[str, int]:
        """The width of each column that is shown."""
        widths = {name: cell_len(name.lstrip(">~")) for name in self.columns}
        for cells, _ in self._rows:
            for name, cell in cells.items():
                widths[name] = max(widths[name], cell_len(cell.plain))
        if width is None:
            return widths
        names = [name for name in widths if name.startswith("~")]
        for columns, shortest in ((self.drops, _MIN_NAME), (self.last_drops, _SHORT_NAME)):
            for dropped in columns:
                cuts = (max(0, widths[name] - shortest) for name in names if name in widths)
                if _total(widths) - sum(cuts) <= width:
                    break
                del widths[dropped]
        names = [name for name in names if name in widths]
        for name in names:
            over = max(0, _total(widths) - width)
            widths[name] -= min(over, widths[name] - 1)
        return widths

    def _note_room(self, widths: dict[str, int], width: int | None) -> int:
        """The cells for notes behind their rows; 0 if notes stand below."""
        if not self.note:
            return 0
        wanted = max(
            cell_len(text) for text in (self.note, *(note.plain for _, note in self._rows))
        )
        if width is None:
            return wanted
        room = min(wanted, width - _total(widths) - _GAP)
        return room if room >= min(wanted, _MIN_NOTE) else 0

    def _line(self, cells: dict[str, Text], note: Text, widths: dict[str, int], mark: str) -> Text:
        line = Text()
        for name, width in widths.items():
            line.append(" " * (_GAP if line else 1))
            cell = cells[name]
            blanks = " " * max(0, width - cell_len(cell.plain))
            if cell_len(cell.plain) > width:
                cell = Text(shorten(cell.plain, width, mark))
            is_number = name.startswith(">")
            line.append(blanks if is_number else "").append_text(cell)
            line.append("" if is_number else blanks)
        return line.append(" " * _GAP).append_text(note) if note.plain else line


def _total(widths: dict[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1) + _EDGES


def cut(text: Text, width: int, mark: str) -> Text:
    """A text in at most `width` cells: the whole text, or its beginning and the mark."""
    if cell_len(text.plain) <= width:
        return text
    found = text.copy()
    found.truncate(max(0, width - len(mark)))
    return found.append(mark[:width])


def shorten(text: str, width: int, mark: str) -> str:
    """A name in at most `width` cells: the whole name, or its two ends with the mark between."""
    if cell_len(text) <= width:
        return text
    room = max(0, width - len(mark))
    head, tail = set_cell_size(text, room // 2), set_cell_size(text[::-1], room - room // 2)
    return head + mark + tail[::-1]
