"""The pack files of a checkpoint (docs/dcp.md): names, layout, and how many there are."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from itertools import count

from packhorse.disk.safetensors_header import METADATA_KEY
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.layout import MAX_FILE_HEADER_NBYTES
from packhorse.storage.frames.pack_store import PackLayout, PackStore
from packhorse.storage.frames.refs import Content, FrameRef
from packhorse.storage.interface import Object, Storage
from packhorse.storage.strict_json import check_text

__all__ = ["CheckpointFrames", "is_pack_name", "max_file_nbytes", "split_volumes"]

_NAME = re.compile(r"shards-[0-9a-f]{16}-(\d+)-\d+\.safetensors")
_METADATA = {"format": "packhorse.dcp"}
# What a row of the header takes besides the name: fixed words, and three numbers below 2^63.
_ROW_NBYTES = len(',:{"dtype":"U8","shape":[],"data_offsets":[,]}') + 3 * 19
# A file of more tensors would have an unwieldy header, far below safetensors' own limit.
_MAX_ENTRIES = 50_000
_MAX_LOCAL_NBYTES = 1 << 36
_MAX_REMOTE_NBYTES = 1 << 28  # several files are uploaded at the same time


def is_pack_name(name: str, rank: int | None = None) -> bool:
    """Whether a file in the folder of a checkpoint is a pack file, and of this rank if given."""
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
    start = nbytes = n_tensors = 0
    for i, sizes in enumerate(groups):
        is_full = nbytes + sum(sizes) > max_nbytes or n_tensors + len(sizes) > _MAX_ENTRIES
        if i > start and is_full:
            yield range(start, i)
            start = i
            nbytes = n_tensors = 0
        nbytes += sum(sizes)
        n_tensors += len(sizes)
    if start < len(groups):
        yield range(start, len(groups))


class CheckpointFrames(PackStore):
    """The frames of a checkpoint, and those of other checkpoints that it builds upon.

    The names of packs are paths, relative to the folder of the checkpoint.
    """

    def __init__(self, storage: Storage, rank: int = 0) -> None:
        """
        Args:
            storage: the folder of the checkpoint.
            rank: of this process, for people who look into the folder.
        """
        numbers = count()

        def new_pack() -> str:
            return f"shards-{secrets.token_hex(8)}-{rank}-{next(numbers)}.safetensors"

        layout = PackLayout(new_pack, str, _header_nbytes, lambda ref, name: name, _METADATA)
        super().__init__(storage, layout)
        self._known: dict[Content, FrameRef] = {}

    def know(self, ref: FrameRef) -> None:
        """From now on, this frame serves for every tensor of the same content."""
        self._known[ref.content] = ref

    def find(self, contents: Sequence[Content]) -> dict[Content, FrameRef]:
        """Frames that `know` was called with."""
        return {content: self._known[content] for content in contents if content in self._known}

    def file(self, pack: str, nbytes: int = 0) -> Object:
        """A pack file.

        Args:
            pack: its path.
            nbytes: its length, if that is known.

        Raises:
            CorruptionError: it does not exist.
            TruncationError: its length is another one.
        """
        try:
            return super().file(pack, nbytes)
        except FileNotFoundError as error:
            raise CorruptionError(
                f"{self.label(pack)}: the file does not exist, and the checkpoint "
                f"{self.storage.label()} needs it"
            ) from error


def _header_nbytes(names: Sequence[str], nbytes: int) -> int:
    """The longest header that a file of tensors of these names may have."""
    for name in names:
        check_text(name)
    text = len(_json({METADATA_KEY: _METADATA})) + len(_json(list(names)))
    room = text + _ROW_NBYTES * len(names)
    if room > MAX_FILE_HEADER_NBYTES:
        raise CompatibilityError(
            f"the names of {len(names)} tensors would make a header of {room} bytes, and at most "
            f"{MAX_FILE_HEADER_NBYTES} are allowed"
        )
    return room


def _json(document: object) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
