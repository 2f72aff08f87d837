"""Reads and writes manifests and the store's own file (docs/snapshots.md).

A manifest lists what a snapshot holds: the state as JSON, its tensors, and the frames that restore
them, with the place and the base of each frame. It is read as if an attacker had written it. The
first key is the checksum of all other bytes, so a flipped bit is distinguished from a broken rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from packhorse.disk.snapshots.names import ManifestFile, is_pack
from packhorse.disk.state import decode_state
from packhorse.errors import CorruptionError
from packhorse.layout import DTYPE_BY_NAME, FRAME_ALIGNMENT, MAX_BITS
from packhorse.storage.documents import CRC_END, Document, read_checksum, sign
from packhorse.storage.frames.refs import Content, FrameRef
from packhorse.storage.strict_json import shortened, shown

__all__ = [
    "MAX_CHAIN",
    "MAX_MANIFEST_NBYTES",
    "Manifest",
    "TensorRef",
    "find_packs",
    "parse_manifest",
    "parse_store_file",
    "render_manifest",
    "render_store_file",
    "sharing",
]

MAX_MANIFEST_NBYTES = 1 << 28
MAX_CHAIN = 64  # deltas in a chain; a reader refuses longer chains

_VERSION = 1
_FIRST_RELEASE = "0.1.0"  # the first release of Packhorse that reads this version
_STORE_KIND = "packhorse snapshot store"
_KIND = "packhorse snapshot"
# Not strptime, whose first call imports a module: a child that another thread forks meanwhile would
# wait for that import forever.
_TIME = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2}):([0-9]{2})\.([0-9]{1,6})Z"
)
_TIME_WORDS = "YYYY-MM-DDThh:mm:ss.ffffffZ"
_HEAD = f'","kind":"{_KIND}","version":{_VERSION},"reader":"'.encode()
_PACKS_KEY = b',"packs":['
_PACKS = re.compile(rb'(?:"[0-9a-f]{32}"(?:,"[0-9a-f]{32}")*)?')


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of a snapshot.

    Attributes:
        path: its path in the state.
        dtype: safetensors' name of the dtype.
        shape: the dimensions.
        frame: the frame that restores it.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    frame: FrameRef


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checked manifest.

    Attributes:
        file: its name.
        time: when the snapshot was taken, in UTC.
        metadata: the caller's metadata, as JSON values.
        stored_nbytes: bytes of the pack that was written when it was taken.
        state: the state as JSON values.
        tensors: its tensors, in the order of the state.
    """

    file: ManifestFile
    time: datetime
    metadata: dict[str, Any]
    stored_nbytes: int
    state: Any
    tensors: tuple[TensorRef, ...]

    def frames(self) -> list[FrameRef]:
        """All frames that it needs, each once; a frame comes before its base."""
        unique = {
            (frame.pack, frame.offset): frame
            for tensor in self.tensors
            for frame in tensor.frame.chain
        }
        return sorted(unique.values(), key=lambda frame: -frame.n_deltas)

    def packs(self) -> set[str]:
        """All packs that it needs."""
        return {frame.pack for frame in self.frames()}


def sharing() -> Callable[[FrameRef], FrameRef]:
    """A function that returns an equal frame that it was called with before, so that manifests
    share frames."""
    known: dict[tuple[str, int], FrameRef] = {}

    def share(frame: FrameRef) -> FrameRef:
        first = known.setdefault((frame.pack, frame.offset), frame)
        return first if first == frame else frame

    return share


def render_store_file() -> bytes:
    """The text of `store.json`."""
    return sign({"kind": _STORE_KIND, "version": _VERSION, "reader": _FIRST_RELEASE})


def parse_store_file(text: bytes, label: str) -> None:
    """Check the text of `store.json`.

    Raises:
        CorruptionError: the file is damaged.
        CompatibilityError: the store has a newer version.
    """
    read_checksum(text, label)
    Document(text, label).check_kind("kind", _STORE_KIND, _VERSION)


def render_manifest(manifest: Manifest) -> bytes:
    """The text of a manifest.

    Raises:
        ValueError: it would be too long.
    """
    frames = manifest.frames()
    places = {(frame.pack, frame.offset): i for i, frame in enumerate(frames)}
    packs = {pack: i for i, pack in enumerate(dict.fromkeys(frame.pack for frame in frames))}

    def place(frame: FrameRef | None) -> int | None:
        return None if frame is None else places[frame.pack, frame.offset]

    text = sign(
        {
            "kind": _KIND,
            "version": _VERSION,
            "reader": _FIRST_RELEASE,
            "name": manifest.file.snapshot,
            "order": manifest.file.order,
            "generation": manifest.file.generation,
            # Unlike strftime, this has four digits of any year.
            "time": manifest.time.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z",
            "metadata": manifest.metadata,
            "stored_nbytes": manifest.stored_nbytes,
            "state": manifest.state,
            "tensors": [[t.path, t.dtype, t.shape, place(t.frame)] for t in manifest.tensors],
            "frames": [
                [
                    packs[f.pack],
                    f.offset,
                    f.nbytes,
                    f.content.digest.hex(),
                    *f.content[1:3],
                    place(f.base),
                ]
                for f in frames
            ],
            "packs": list(packs),
        }
    )
    if len(text) > MAX_MANIFEST_NBYTES:
        raise ValueError(
            f"the manifest would take {len(text)} bytes, but at most {MAX_MANIFEST_NBYTES} are "
            "allowed; keep large lists of numbers as tensors"
        )
    return text


def parse_manifest(
    text: bytes,
    file: ManifestFile,
    label: str,
    intern: Callable[[FrameRef], FrameRef] = lambda frame: frame,
) -> Manifest:
    """Parse and check a manifest.

    Args:
        text: all bytes of the file.
        file: the name that it was found under.
        label: what messages call it.
        intern: returns an equal frame that is known already, so that manifests share frames.

    Raises:
        CorruptionError: a rule of docs/snapshots.md is broken.
        CompatibilityError: the manifest has a newer version, or an unknown dtype.
    """
    read_checksum(text, label)
    reader = _Reader(text, label)
    reader.check_kind("kind", _KIND, _VERSION)
    for key, value in (
        ("name", file.snapshot),
        ("order", file.order),
        ("generation", file.generation),
    ):
        found = reader.field(key, type(value))
        if found != value:
            raise CorruptionError(
                f"{label}: {key} is {shown(found)}, but the file's name says {shown(value)}"
            )
    frames = reader.frames(reader.packs(), intern)
    manifest = Manifest(
        file,
        reader.time(),
        reader.field("metadata", dict),
        reader.count("stored_nbytes"),
        reader.get("state"),
        reader.tensors(frames),
    )
    _check_state(manifest, label)
    return manifest


def find_packs(text: bytes) -> bytes | None:
    """Find the names of all packs in the text of a manifest, without parsing it.

    Args:
        text: the text of a good manifest.

    Returns:
        32 digits for each pack, in order. None if the text does not begin and end as
        `render_manifest` writes it, with the packs last. No string in a manifest can look like the
        list of packs, because each quotation mark in a string has a backslash before it.
    """
    start = text.rfind(_PACKS_KEY) + len(_PACKS_KEY)
    is_ours = text.startswith(_HEAD, CRC_END)  # a newer version may also name packs elsewhere
    if not is_ours or start < len(_PACKS_KEY) or not text.endswith(b"]}"):
        return None
    packs = text[start:-2]
    return packs[1:-1].replace(b'","', b"") if _PACKS.fullmatch(packs) else None


def _check_state(manifest: Manifest, label: str) -> None:
    """Check that the state names exactly the tensors that are listed."""
    tensors = manifest.tensors

    def check(index: int, path: str) -> None:
        if index >= len(tensors) or tensors[index].path != path:
            raise CorruptionError(
                f"{shortened(path)}: tensor {index} does not have this path in the list of tensors"
            )

    try:
        _, n_tensors = decode_state(manifest.state, check)
        if n_tensors != len(tensors):
            raise CorruptionError(f"it has {n_tensors} tensors, but {len(tensors)} are listed")
    except CorruptionError as error:
        raise CorruptionError(f"{label}: state: {error}") from error


class _Reader(Document):
    """Reads and checks the fields of a manifest."""

    def time(self) -> datetime:
        text = self.field("time", str)
        match = _TIME.fullmatch(text)
        try:
            if match is None:
                raise ValueError("the form does not match")
            year, month, day, hour, minute, second = map(int, match.groups()[:6])
            fraction = int(match[7].ljust(6, "0"))
            return datetime(year, month, day, hour, minute, second, fraction, UTC)
        except ValueError as error:
            raise self.fail(f"time is {shown(text)}, not a valid {_TIME_WORDS}") from error

    def packs(self) -> list[str]:
        packs: list[str] = self.field("packs", list)
        for pack in packs:
            if not is_pack(pack):
                raise self.fail(f"packs: {shown(pack)} is not the name of a pack")
        if len(set(packs)) != len(packs):
            raise self.fail("packs: a name occurs twice")
        return packs

    def frames(
        self, packs: Sequence[str], intern: Callable[[FrameRef], FrameRef]
    ) -> list[FrameRef]:
        rows = self.field("frames", list)
        frames: list[FrameRef | None] = [None] * len(rows)
        places: set[tuple[str, int]] = set()
        for i in reversed(range(len(rows))):  # a base comes after the frames that need it
            frames[i] = frame = intern(self._frame(i, rows[i], packs, frames))
            if (frame.pack, frame.offset) in places:
                raise self.fail(f"frame {i}: another frame is at the same place")
            places.add((frame.pack, frame.offset))
        return [frame for frame in frames if frame is not None]

    def _frame(
        self, i: int, row: object, packs: Sequence[str], frames: Sequence[FrameRef | None]
    ) -> FrameRef:
        where = f"frame {i}"
        if not isinstance(row, list) or len(row) != 7:
            raise self.fail(f"{where} is {shown(row)}, not a list of 7 members")
        pack, offset, nbytes, digest, dtype, numel, base = row
        self.integer(pack, 0, len(packs) - 1, f"{where}: pack")
        self.integer(offset, FRAME_ALIGNMENT, MAX_BITS, f"{where}: offset")
        self.integer(nbytes, FRAME_ALIGNMENT, MAX_BITS, f"{where}: nbytes")
        if offset % FRAME_ALIGNMENT or nbytes % FRAME_ALIGNMENT:
            raise self.fail(f"{where}: offset and nbytes must be multiples of {FRAME_ALIGNMENT}")
        bits = DTYPE_BY_NAME[self.dtype(dtype, where)].bits
        self.integer(numel, 0, MAX_BITS // bits - 1, f"{where}: numel")
        if numel * bits % 8:
            raise self.fail(f"{where}: {numel} elements of {dtype} do not fill whole bytes")
        content = Content(self.digest(digest, where), dtype, numel)
        if base is None:
            return FrameRef(packs[pack], offset, nbytes, content, None, 0)
        self.integer(base, i + 1, len(frames) - 1, f"{where}: base")
        below = frames[base]
        assert below is not None
        if below.content.numel != numel:
            raise self.fail(f"{where}: its base has {below.content.numel} elements, not {numel}")
        if below.n_deltas >= MAX_CHAIN:
            raise self.fail(f"{where}: it has a chain of more than {MAX_CHAIN} deltas")
        return FrameRef(packs[pack], offset, nbytes, content, below, below.n_deltas + 1)

    def tensors(self, frames: Sequence[FrameRef]) -> tuple[TensorRef, ...]:
        rows = self.field("tensors", list)
        return tuple(self._tensor(i, row, frames) for i, row in enumerate(rows))

    def _tensor(self, i: int, row: object, frames: Sequence[FrameRef]) -> TensorRef:
        if not isinstance(row, list) or len(row) != 4 or not isinstance(row[0], str):
            raise self.fail(f"tensor {i} is {shown(row)}, not [path, dtype, shape, frame]")
        path, dtype, sizes, place = row
        where = f"tensor {shown(path)}"
        shape = self.shape(sizes, where)
        frame = frames[self.integer(place, 0, len(frames) - 1, f"{where}: frame")]
        if (dtype, math.prod(shape)) != frame.content[1:3]:
            raise self.fail(
                f"{where}: it has dtype {shown(dtype)} and shape {shown(sizes)}, but its frame "
                f"holds {frame.content.numel} elements of {frame.content.dtype}"
            )
        return TensorRef(path, dtype, shape, frame)
