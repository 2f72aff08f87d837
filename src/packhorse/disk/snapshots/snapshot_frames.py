"""The packs of a snapshot store (docs/snapshots.md): their layout, and finding frames in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from packhorse.disk.snapshots.finder import Finder
from packhorse.disk.snapshots.names import new_pack, pack_path
from packhorse.errors import CorruptionError
from packhorse.layout import LENGTH_NBYTES, MAX_FILE_HEADER_NBYTES
from packhorse.storage.frames.pack_store import PackLayout, PackStore
from packhorse.storage.frames.refs import Content, FrameRef
from packhorse.storage.interface import Storage
from packhorse.storage.safetensors_header import parse_header

__all__ = ["SnapshotFrames"]

_ROW_NBYTES = 92  # the most bytes of a header's entry without its three numbers: see `_room`


class SnapshotFrames(PackStore):
    """The frames of a snapshot store."""

    def __init__(self, storage: Storage, finder: Callable[[], Finder] | None = None) -> None:
        """
        Args:
            storage: the storage of the store.
            finder: returns a `Finder`; None for a reader, which does not look for contents.
        """
        super().__init__(storage, _LAYOUT)
        self._finder = finder

    def find(self, contents: Sequence[Content]) -> dict[Content, FrameRef]:
        """Frames of these contents that a snapshot has and that can be read."""
        if self._finder is None:
            return {}
        finder, found = self._finder(), {}
        finder.look_up(contents)
        for content in contents:
            ref = finder.find(content)
            if ref is not None and self.is_there(ref):
                found[content] = ref
            elif ref is not None:
                finder.drop(content)
        return found

    def check_header(self, pack: str, refs: list[FrameRef]) -> None:
        """Check that a pack is a safetensors file that has these frames.

        Raises:
            CorruptionError: the pack is not such a file.
            FileNotFoundError: there is no such pack.
        """
        label = self.label(pack)
        whole = self.file(pack)
        length = int.from_bytes(whole.region(0, LENGTH_NBYTES), "little")
        if length > MAX_FILE_HEADER_NBYTES:
            raise CorruptionError(
                f"{label}: declares a header of {length} bytes; at most {MAX_FILE_HEADER_NBYTES} "
                "are allowed"
            )
        text = bytes(whole.region(LENGTH_NBYTES, length))
        rest = whole.nbytes - LENGTH_NBYTES - length
        header = parse_header(text, data_nbytes=rest, label=label)
        entries = {entry.name: entry for entry in header.entries}
        for ref in refs:
            entry = entries.get(ref.name)
            place = None if entry is None else (header.data_offset + entry.start, entry.nbytes)
            if place != (ref.offset, ref.nbytes):
                raise CorruptionError(
                    f"{label}: the header has no frame {ref.name} of {ref.nbytes} bytes at byte "
                    f"{ref.offset}"
                )


def _room(names: Sequence[str], nbytes: int) -> int:
    """The most bytes of a pack's header: for each frame 44 bytes of name, three numbers, and 48
    bytes around them."""
    room = 2 + len(names) * (_ROW_NBYTES + 3 * len(str(nbytes)))
    if room > MAX_FILE_HEADER_NBYTES:
        raise ValueError(
            f"{len(names)} tensors are too many for one pack; join small tensors into larger ones"
        )
    return room


_LAYOUT = PackLayout(new_pack, pack_path, _room, lambda ref, name: ref.name)
