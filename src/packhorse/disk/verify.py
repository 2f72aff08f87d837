"""Verifies whole packed files: every checksum and content hash, even after a bad tensor.

Tensors are decoded in batches to a buffer of 32 MiB, and a large tensor window by window.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packhorse.arguments import resolve_threads
from packhorse.disk.base_files import BaseLike, Lender, open_bases, place_base
from packhorse.disk.packed_frames import check_frame
from packhorse.disk.packed_header import parse_packed_header
from packhorse.disk.results import Problem, Progress
from packhorse.errors import ChangedError, PackhorseError, blaming
from packhorse.frame import Frame
from packhorse.storage.frames.scratch import Window
from packhorse.storage.locations import open_place
from packhorse.storage.safetensors_header import FileHeader, TensorEntry
from packhorse.storage.source import open_source
from packhorse.storage.source_file import Source
from packhorse.storage.strict_json import has_capital_escape, shortened
from packhorse.threads import batches, map_tensors

__all__ = ["verify_file"]

_CAPITAL_ESCAPE = (
    "a JSON escape in the header has upper-case digits, which Packhorse does not write; probably "
    "one bit has flipped, and the rest is intact: unpack the file, and pack it again"
)


def verify_file(
    src: str | os.PathLike[str],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    max_nbytes: int | None = None,
    base: BaseLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Problem]:
    """Check every checksum and content hash of a packed file, and continue after a bad tensor.

    Args:
        src: a packed file, at a path or a URL of fsspec.
        threads: the number of threads; None for one per core, at most 8.
        progress: called with the number of tensor bytes checked since the last call.
        max_nbytes: report a file whose tensors take more bytes in total as bad, without decoding
            any; None for no limit. The limit saves time; memory is bounded without it.
        base: as for `unpack_file`. Without it, tensors that need a base are not decoded, and one
            problem reports them.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        All problems; an empty list if the file is good.

    Raises:
        ValueError: `src` is a plain safetensors file, or `threads` is wrong.
        CorruptionError, CompatibilityError: the base is bad.
        ChangedError: the base was written to while it was used.
        OSError: a file cannot be read.

    Example:
        >>> from packhorse.disk import verify_file
        >>> verify_file("model.ph.safetensors")
        []
    """
    path = open_place(src, storage_options)
    n_threads = resolve_threads(threads)
    with open_source(path) as source, open_bases(place_base(base, storage_options)) as bases:
        try:
            header = source.header()
        except PackhorseError as error:
            return [Problem(path, None, None, str(error))]
        originals: dict[str, TensorEntry] = {}
        lender = Lender(bases, None)
        problems = []
        if has_capital_escape(header.text):
            problems.append(Problem(path, None, None, f"{path}: {_CAPITAL_ESCAPE}"))
        try:
            packed = parse_packed_header(header, label=str(path))
        except PackhorseError as error:
            # Frames describe themselves, so they can be checked without the recorded header.
            problems.append(Problem(path, None, None, str(error)))
        else:
            try:
                packed.original.check_limit(max_nbytes, str(path))
            except PackhorseError as error:
                return [Problem(path, None, None, str(error))]
            originals = {entry.name: entry for entry in packed.original.entries}
            lender = Lender(bases, packed.base_name)
        verifier = _Verifier(source, header, originals, max_nbytes, lender)
        sizes = [verifier.nbytes_of(entry) for entry in header.entries]
        for run in batches(sizes):
            found = verifier.batch(header.entries[run.start : run.stop], n_threads)
            problems.extend(problem for problem in found if problem is not None)
            if progress is not None:
                progress(sum(sizes[run.start : run.stop]) if originals else 0)
        return problems + verifier.missing_bases() + _changes(source)


def _changes(source: Source) -> list[Problem]:
    try:
        source.check()
    except OSError as error:
        return [Problem(source.path, None, None, str(error))]
    return []


@dataclass(frozen=True, slots=True)
class _Verifier:
    """Checks tensors batch by batch, against the recorded header if that is good."""

    source: Source
    header: FileHeader
    originals: Mapping[str, TensorEntry]
    max_nbytes: int | None
    lender: Lender
    window: Window = field(default_factory=Window)
    # The tensors that need a base although none was given, by offset.
    unlent: dict[int, TensorEntry] = field(default_factory=dict)

    def nbytes_of(self, entry: TensorEntry) -> int:
        """The recorded size of a tensor; the size of its frame if there is no record."""
        return self.originals.get(entry.name, entry).nbytes

    def batch(self, entries: Sequence[TensorEntry], threads: int) -> list[Problem | None]:
        """The problem of each tensor, or None."""
        sizes = [self.nbytes_of(entry) for entry in entries]
        # Without a record, only a frame itself knows the size of its tensor.
        places = self.window.cut(sizes) if self.originals and len(entries) > 1 else None

        def check(i: int, threads: int) -> Problem | None:
            offset = self.header.data_offset + entries[i].start
            try:
                with blaming(str(self.source.path)):
                    frame = self._open(entries[i], offset)
                    if frame.base_hash is not None and self.lender.bases is None:
                        self.unlent[offset] = entries[i]
                        return None
                    place = self.window.take(frame.window_nbytes) if len(entries) == 1 else None
                    window = places[i] if places else place
                    with self.lender.lend(entries[i].name, frame, threads) as loan:
                        frame.verify(threads=threads, window=window, base=loan.data)
            except ChangedError:  # the base changed, so nothing is known about the file
                raise
            except PackhorseError as error:
                return Problem(self.source.path, entries[i].name, offset, str(error))
            return None

        return map_tensors(check, sizes, threads)

    def missing_bases(self) -> list[Problem]:
        """One problem for all tensors that were not decoded because there is no base."""
        if not self.unlent:
            return []
        offset = min(self.unlent)
        entry = self.unlent[offset]
        frame = self._open(entry, offset)
        error = self.lender.missing(entry.name, frame, n_more=len(self.unlent) - 1)
        return [Problem(self.source.path, entry.name, offset, f"{self.source.path}: {error}")]

    def _open(self, entry: TensorEntry, offset: int) -> Frame:
        data = self.source.map(offset, entry.nbytes)
        name = shortened(entry.name)
        frame = Frame.from_buffer(data, name=name, offset=offset, max_nbytes=self.max_nbytes)
        if self.originals:
            check_frame(frame, self.originals[entry.name], offset)
        return frame
