"""The pack files of a checkpoint (docs/dcp.md): their names, layout and sizes."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from itertools import count

from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.layout import MAX_FILE_HEADER_NBYTES, METADATA_KEY
from packhorse.storage.documents import compact_json
from packhorse.storage.frames.pack_store import PackLayout, PackStore
from packhorse.storage.frames.refs import Content, FrameRef
from packhorse.storage.interface import Object, Storage
from packhorse.storage.strict_json import check_text

__all__ = ["CheckpointFrames", "is_pack_name", "max_file_nbytes", "split_volumes"]

_NAME = re.compile(r"shards-[0-9a-f]{16}-(\d+)-\d+\.safetensors")
_METADATA = {"format": "packhorse.dcp"}
# The bytes of a header's entry without the name: fixed words, and three numbers below 2^63.
_ROW_NBYTES = len(',:{"dtype":"U8","shape":[],"data_offsets":[,]}') + 3 * 19
# More tensors would make the header unwieldy, though safetensors' own limit is far above.
_MAX_ENTRIES = 50_000
_MAX_LOCAL_NBYTES = 1 << 36
_MAX_REMOTE_NBYTES = 1 << 28  # several files are uploaded at the same time


def is_pack_name(name: str, rank: int | None = None) -> bool:
    """Whether a file in a checkpoint's folder is a pack file. If `rank` is given, the file must be
    of that rank."""
    match = _NAME.fullmatch(name)
    return match is not None and (rank is None or int(match[1]) == rank)


def max_file_nbytes(storage: Storage) -> int:
    """How many bytes of tensors one file is for."""
    return _MAX_LOCAL_NBYTES if storage.is_local else _MAX_REMOTE_NBYTES


def split_volumes(groups: Sequence[Sequence[int]], max_nbytes: int) -> Iterator[range]:
    """Divide groups of tensors into runs, one for each file.

    Args:
        groups: for each group, which stays together, the bytes of each tensor.
        max_nbytes: the most bytes of a run of more than one group.

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
    """The frames of a checkpoint, and those of other checkpoints that it builds on.

    The name of a pack is its path, relative to the folder of the checkpoint.
    """

    def __init__(self, storage: Storage, rank: int = 0) -> None:
        """
        Args:
            storage: the folder of the checkpoint.
            rank: the rank of this process, for people who look into the folder.
        """
        numbers = count()

        def new_pack() -> str:
            return f"shards-{secrets.token_hex(8)}-{rank}-{next(numbers)}.safetensors"

        layout = PackLayout(new_pack, str, _header_nbytes, lambda ref, name: name, _METADATA)
        super().__init__(storage, layout)
        self._known: dict[Content, FrameRef] = {}

    def know(self, ref: FrameRef) -> None:
        """Let `find` return this frame for its content from now on."""
        self._known[ref.content] = ref

    def find(self, contents: Sequence[Content]) -> dict[Content, FrameRef]:
        """The frames of these contents among those that `know` was called with."""
        return {content: self._known[content] for content in contents if content in self._known}

    def file(self, pack: str, nbytes: int = 0) -> Object:
        """A pack file.

        Args:
            pack: its path.
            nbytes: its length; 0 if it is not known.

        Raises:
            CorruptionError: the file does not exist.
            TruncationError: the file has another length.
        """
        try:
            return super().file(pack, nbytes)
        except FileNotFoundError as error:
            raise CorruptionError(
                f"{self.label(pack)}: the file does not exist, but the checkpoint "
                f"{self.storage.label()} needs it"
            ) from error


def _header_nbytes(names: Sequence[str], nbytes: int) -> int:
    """The most bytes that the header of a file can take, given the names of its tensors."""
    for name in names:
        check_text(name)
    text = len(compact_json({METADATA_KEY: _METADATA})) + len(compact_json(list(names)))
    room = text + _ROW_NBYTES * len(names)
    if room > MAX_FILE_HEADER_NBYTES:
        raise CompatibilityError(
            f"the names of {len(names)} tensors would make a header of {room} bytes, but at most "
            f"{MAX_FILE_HEADER_NBYTES} are allowed; use shorter names"
        )
    return room
