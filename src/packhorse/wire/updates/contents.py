"""What an update is about: which tensors, how they are cut into units, and the hash of their state.

A unit is what one frame packs: a large tensor, a flat range of one, or many small tensors of one
dtype end to end. A frame takes some 200 bytes and some 50 microseconds, so a model of hundreds of
small tensors would otherwise cost more for its frames than for its changes. Names are sorted, so
two processes cut the same tensors in the same way.

The contents travel in every update as compressed JSON (docs/updates.md, "Format of an update"). An
update can therefore be read without any other, and a receiver needs no list of tensors beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from packhorse.errors import CorruptionError
from packhorse.frame.header import checked_nbytes
from packhorse.layout import DTYPE_BY_NAME
from packhorse.storage.documents import compact_json
from packhorse.storage.strict_json import check_text, parse_json, shown

__all__ = ["Contents", "Form", "Part", "Unit", "make_contents", "parse_contents", "state_hash"]

# A smaller tensor shares its unit with others; a unit of small tensors grows to about a chunk.
_SMALL_NBYTES = 1 << 16
_GROUP_NBYTES = 1 << 20
_LABEL = "the contents of the update"


class Form(NamedTuple):
    """A tensor to send, without its values.

    Attributes:
        dtype: safetensors' name, such as "BF16".
        shape: of the whole tensor.
        start: the first element that is sent, in C order.
        stop: one past the last one.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return (self.stop - self.start) * DTYPE_BY_NAME[self.dtype].bits // 8


class Part(NamedTuple):
    """A tensor, or a flat range of one, in a unit.

    Attributes:
        name: the tensor's name.
        form: dtype, shape and range.
        offset: of its bytes in the unit.
    """

    name: str
    form: Form
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.form.nbytes

    @property
    def is_whole(self) -> bool:
        """Whether the part is all of its tensor."""
        return self.form.stop - self.form.start == math.prod(self.form.shape)


class Unit(NamedTuple):
    """What one frame packs.

    Attributes:
        dtype: of all its parts.
        parts: in the order of their bytes.
        nbytes: of all parts.
    """

    dtype: str
    parts: tuple[Part, ...]
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the unit's frame has: the tensor's if it is one whole tensor, otherwise
        the number of elements."""
        first = self.parts[0]
        if len(self.parts) == 1 and first.is_whole:
            return first.form.shape
        return (sum(part.form.stop - part.form.start for part in self.parts),)

    @property
    def label(self) -> str:
        """The unit in messages."""
        more = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"{self.parts[0].name}{more}"


class Contents(NamedTuple):
    """The tensors of a stream of updates.

    Attributes:
        units: what frames pack, in order.
        aliases: other names of tensors that are there once: from each to the name in a unit.
        text: the JSON.
        digest: XXH3-128 of the JSON, 16 bytes.
    """

    units: tuple[Unit, ...]
    aliases: dict[str, str]
    text: bytes
    digest: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all units."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def parts(self) -> Iterable[Part]:
        """The parts of all units."""
        return (part for unit in self.units for part in unit.parts)


def make_contents(forms: Mapping[str, Form], aliases: Mapping[str, str]) -> Contents:
    """Cuts tensors into units.

    Args:
        forms: each tensor that is sent, by name.
        aliases: further names of some of them.

    Raises:
        ValueError: a name is empty or no Unicode text, or there is no tensor.
    """
    if not forms:
        raise ValueError("there is no tensor to send")
    for name in (*forms, *aliases):
        if not name:
            raise ValueError("a tensor has an empty name")
        check_text(name)
    units: list[list[tuple[str, Form]]] = []
    groups: dict[str, list[tuple[str, Form]]] = {}  # those that are growing, by dtype
    sizes: dict[str, int] = {}
    for name in sorted(forms):
        form = forms[name]
        if form.nbytes >= _SMALL_NBYTES:
            units.append([(name, form)])
            continue
        if sizes.get(form.dtype, _GROUP_NBYTES) >= _GROUP_NBYTES:
            groups[form.dtype], sizes[form.dtype] = [], 0
            units.append(groups[form.dtype])
        groups[form.dtype].append((name, form))
        sizes[form.dtype] += form.nbytes
    document = {
        "aliases": [[alias, aliases[alias]] for alias in sorted(aliases)],
        "units": [
            [members[0][1].dtype, [_row(*member) for member in members]] for members in units
        ],
    }
    text = compact_json(document)
    return Contents(
        tuple(map(_unit, units)), dict(aliases), text, xxhash.xxh3_128_digest(text)
    )  # fmt: skip


def _row(name: str, form: Form) -> list[Any]:
    """A part as JSON; a range is named only if it is not the whole tensor."""
    row = [name, list(form.shape)]
    is_whole = form.stop - form.start == math.prod(form.shape)
    return row if is_whole else [*row, form.start, form.stop]


def _unit(members: Sequence[tuple[str, Form]]) -> Unit:
    parts, offset = [], 0
    for name, form in members:
        parts.append(Part(name, form, offset))
        offset += form.nbytes
    return Unit(members[0][1].dtype, tuple(parts), offset)


def parse_contents(text: bytes) -> Contents:
    """Reads the JSON of contents, and checks every rule of the format.

    Raises:
        CorruptionError: a rule is broken.
    """
    document = parse_json(text, label=_LABEL)
    if set(document) != {"aliases", "units"}:
        raise _fault(f"keys {shown(sorted(document))} instead of aliases and units")
    names: set[str] = set()
    units = tuple(_read_unit(row, names) for row in _list(document["units"]))
    if not units:
        raise _fault("there is no unit")
    aliases: dict[str, str] = {}
    for row in _list(document["aliases"]):
        if not _is_pair_of_texts(row) or row[1] not in names or row[0] in names | aliases.keys():
            raise _fault(f"{shown(row)} is not a new name and the name of a tensor")
        aliases[row[0]] = row[1]
    return Contents(units, aliases, text, xxhash.xxh3_128_digest(text))


def _read_unit(row: object, names: set[str]) -> Unit:
    if not isinstance(row, list) or len(row) != 2 or not _is_dtype(row[0]):
        raise _fault(f"{shown(row)} is not a unit: a dtype and its parts")
    members = [_read_part(part, row[0], names) for part in _list(row[1])]
    if not members:
        raise _fault("a unit has no parts")
    unit = _unit(members)
    try:
        checked_nbytes(unit.dtype, unit.shape)
    except ValueError as error:
        raise _fault(str(error)) from error
    return unit


def _is_dtype(value: object) -> bool:
    return isinstance(value, str) and value in DTYPE_BY_NAME


def _read_part(row: object, dtype: str, names: set[str]) -> tuple[str, Form]:
    if not isinstance(row, list) or len(row) not in (2, 4):
        raise _fault(f"{shown(row)} is not a part")
    name, shape, *ends = row
    if not isinstance(name, str) or not name or name in names:
        raise _fault(f"{shown(name)} is not a new name of a tensor")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in (*shape, *ends)):
        raise _fault(f"{shown(name)}: {shown(row[1:])} is not a shape and a range")
    names.add(name)
    try:
        checked_nbytes(dtype, shape)
        numel = math.prod(shape)
        start, stop = ends or (0, numel)
        if not start <= stop <= numel or (ends and stop - start == numel):
            raise ValueError(f"elements {start}:{stop} are not a part of {numel}")
        if (stop - start) * DTYPE_BY_NAME[dtype].bits % 8:
            raise ValueError(f"elements {start}:{stop} of {dtype} are not whole bytes")
    except ValueError as error:
        raise _fault(f"{shown(name)}: {error}") from error
    return name, Form(dtype, tuple(shape), start, stop)


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _fault(f"{shown(value)} is not a list")
    return value


def _is_pair_of_texts(row: object) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 2
        and all(isinstance(text, str) and text for text in row)
    )


def _fault(words: str) -> CorruptionError:
    return CorruptionError(f"{_LABEL}: {words}")


def state_hash(contents: Contents, hashes: Iterable[bytes]) -> bytes:
    """The hash of a whole state: XXH3-128 of the contents' digest and all units' hashes.

    Args:
        contents: what the state consists of.
        hashes: 16 bytes for each unit.

    Returns:
        16 bytes.
    """
    return xxhash.xxh3_128_digest(b"".join((contents.digest, *hashes)))
