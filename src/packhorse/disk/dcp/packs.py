"""Pack files: safetensors files whose tensors are frames, each a U8 tensor of one dimension.

A file gets a new random name and is written once, front to back, with room for the header that is
filled in at the end. So no file of an older checkpoint is ever touched, and every frame begins at a
multiple of 64 bytes. A file that would hold no frame is not made.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from packhorse.disk.safetensors_header import LENGTH_NBYTES, METADATA_KEY
from packhorse.errors import CompatibilityError
from packhorse.frame import Frame
from packhorse.layout import FILE_ALIGNMENT, MAX_FILE_HEADER_NBYTES
from packhorse.storage.interface import Sink, Storage
from packhorse.storage.strict_json import check_text

__all__ = ["PackFile", "is_pack_name", "max_file_nbytes", "split_volumes"]

_NAME = re.compile(r"shards-[0-9a-f]{16}-(\d+)-\d+\.safetensors")
_METADATA = {"format": "packhorse.dcp"}
# What an entry of the header takes beside the name: fixed words, and three numbers below 2^63.
_ENTRY_NBYTES = len(',:{"dtype":"U8","shape":[],"data_offsets":[,]}') + 3 * 19
# A file of more tensors would have an unwieldy header, far below safetensors' own limit.
_MAX_ENTRIES = 50_000
_MAX_LOCAL_NBYTES = 1 << 36
_MAX_REMOTE_NBYTES = 1 << 28  # as many are put at once


def is_pack_name(name: str, rank: int | None = None) -> bool:
    """Whether a file in the folder of a checkpoint is one of these, and of this rank if given."""
    match = _NAME.fullmatch(name)
    return match is not None and (rank is None or int(match[1]) == rank)


def max_file_nbytes(storage: Storage) -> int:
    """How many bytes of tensors go to one file."""
    return _MAX_LOCAL_NBYTES if storage.is_local else _MAX_REMOTE_NBYTES


def split_volumes(groups: Sequence[Sequence[int]], max_nbytes: int) -> Iterator[range]:
    """Runs of groups of tensors that go to a file each.

    Args:
        groups: bytes of each tensor, for each group that must not be parted.
        max_nbytes: of a run of more than one group.

    Yields:
        The indices of the groups of the next run.
    """
    start = nbytes = count = 0
    for i, sizes in enumerate(groups):
        is_full = nbytes + sum(sizes) > max_nbytes or count + len(sizes) > _MAX_ENTRIES
        if i > start and is_full:
            yield range(start, i)
            start = i
            nbytes = count = 0
        nbytes += sum(sizes)
        count += len(sizes)
    if start < len(groups):
        yield range(start, len(groups))


class PackFile:
    """A pack file being written; a context manager. It is there only once the block ends well.

    Attributes:
        name: of the file.
        nbytes: bytes so far; 0 as long as there is no frame.
    """

    def __init__(self, storage: Storage, rank: int, number: int, names: Sequence[str]) -> None:
        """
        Args:
            storage: the folder.
            rank: of this process, for people who look at the folder.
            number: of the file among those of the process.
            names: what may be added, each at most once.
        """
        self.name = f"shards-{secrets.token_hex(8)}-{rank}-{number}.safetensors"
        self.nbytes = 0
        self._storage = storage
        self._room = _room_for(names)
        self._entries: list[tuple[str, int]] = []
        self._context: AbstractContextManager[Sink] | None = None
        self._sink: Sink | None = None

    def __enter__(self) -> PackFile:
        return self

    def add(self, name: str, frame: Frame) -> int:
        """Append a frame, and return its offset."""
        if self._sink is None:
            self._context = self._storage.create(self.name)
            self._sink = self._context.__enter__()
            self._sink.write(bytes(self._room))
            self.nbytes = self._room
        self._sink.write(frame.buffer())
        self._entries.append((name, frame.nbytes))
        self.nbytes += frame.nbytes
        return self.nbytes - frame.nbytes

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._context is None or self._sink is None:
            return
        if kind is None:
            try:
                self._sink.patch(0, self._prefix())
            except BaseException as failure:
                self._context.__exit__(type(failure), failure, failure.__traceback__)
                raise
        self._context.__exit__(kind, error, trace)

    def _prefix(self) -> bytes:
        document: dict[str, object] = {METADATA_KEY: _METADATA}
        stop = 0
        for name, nbytes in self._entries:
            start, stop = stop, stop + nbytes
            document[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [start, stop]}
        text = _json(document).ljust(self._room - LENGTH_NBYTES, b" ")
        return len(text).to_bytes(LENGTH_NBYTES, "little") + text


def _room_for(names: Sequence[str]) -> int:
    """Bytes before the first frame, enough for all of these names."""
    for name in names:
        check_text(name)
    text = len(_json({METADATA_KEY: _METADATA})) + len(_json(list(names)))
    room = LENGTH_NBYTES + text + _ENTRY_NBYTES * len(names)
    if room > MAX_FILE_HEADER_NBYTES:
        raise CompatibilityError(
            f"the names of {len(names)} tensors would make a header of {room} bytes, and at most "
            f"{MAX_FILE_HEADER_NBYTES} are allowed"
        )
    return room + -room % FILE_ALIGNMENT


def _json(document: object) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
