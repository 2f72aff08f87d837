"""Verifies whole packed files: every checksum and content hash, even after a bad tensor.

Threads take the tensors in the order of the file, several small ones or a part of a large one at
a time, and decode them to memory of 4 MiB, which stays in a core's cache. The threads last as long
as the file, because on a busy machine it takes milliseconds until a new thread runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from packhorse import _core
from packhorse.arguments import resolve_threads
from packhorse.codecs.base import ByteArray
from packhorse.disk.base_files import BaseLike, Lender, open_bases, place_base
from packhorse.disk.packed_frames import check_frame
from packhorse.disk.packed_header import parse_packed_header
from packhorse.disk.results import Problem, Progress
from packhorse.disk.short_frames import ShortFrames, decode_short, frames_of
from packhorse.errors import ChangedError, PackhorseError, blaming
from packhorse.frame import Frame
from packhorse.storage.frames.scratch import Scratch
from packhorse.storage.locations import open_place
from packhorse.storage.safetensors_header import FileHeader, TensorEntry
from packhorse.storage.source import open_source
from packhorse.storage.source_file import Source, SourceFile
from packhorse.storage.strict_json import has_capital_escape, shortened
from packhorse.threads import batches, in_order

__all__ = ["verify_file"]

# What a thread checks at a time: whole chunks, and whole leaves of the content hash.
_PART_NBYTES = 1 << 22
# A tensor that is said to be larger is checked as a whole, so that a lie does not make a long list.
_MAX_IN_PARTS_NBYTES = 1 << 38
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
        for nbytes, found in verifier.run(n_threads):
            problems.extend(found)
            if progress is not None:
                progress(nbytes if originals else 0)
        return problems + verifier.missing_bases() + _changes(source)


def _changes(source: Source) -> list[Problem]:
    try:
        source.check()
    except OSError as error:
        return [Problem(source.path, None, None, str(error))]
    return []


class _Job(NamedTuple):
    """Several small tensors, or a part of a large one."""

    entries: Sequence[TensorEntry]
    nbytes: int
    start: int
    is_part: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class _Verifier:
    """Checks tensors, against the recorded header if that is good."""

    source: Source
    header: FileHeader
    originals: Mapping[str, TensorEntry]
    max_nbytes: int | None
    lender: Lender
    scratch: Scratch = field(default_factory=Scratch)
    # The frames of large tensors that are being checked, by offset.
    frames: dict[int, Frame] = field(default_factory=dict)
    opening: threading.Lock = field(default_factory=threading.Lock)
    # The tensors that need a base although none was given, by offset.
    unlent: dict[int, TensorEntry] = field(default_factory=dict)

    def run(self, threads: int) -> Iterator[tuple[int, list[Problem]]]:
        """Check all tensors.

        Yields:
            How many bytes have been checked since the last time, and the problems of tensors that
            are done.
        """
        jobs = list(self._jobs())
        parts: list[ByteArray] = []
        problem: Problem | None = None
        for job, found in zip(
            jobs, in_order(lambda i: self._do(jobs[i]), len(jobs), threads), strict=True
        ):
            if not job.is_part:
                yield job.nbytes, found
                continue
            parts += [found] if isinstance(found, np.ndarray) else []
            problem = problem or (found if isinstance(found, Problem) else None)
            if job.is_last:
                entry = job.entries[0]
                problem = problem or (self._check(entry, partial(self._join, entry, parts)))
                self.frames.pop(entry.start, None)
                yield job.nbytes, [] if problem is None else [problem]
                parts, problem = [], None
            else:
                yield job.nbytes, []

    def _jobs(self) -> Iterator[_Job]:
        # Without a record, only a frame itself knows the size of its tensor.
        entries = self.header.entries
        sizes = [self.originals.get(entry.name, entry).nbytes for entry in entries]
        for run in batches(sizes, _PART_NBYTES):
            nbytes = sum(sizes[run.start : run.stop])
            some = entries[run.start : run.stop]
            in_parts = _PART_NBYTES < nbytes <= _MAX_IN_PARTS_NBYTES
            if not in_parts or not self.originals:
                yield _Job(some, nbytes, 0, is_part=False, is_last=True)
                continue
            for start in range(0, nbytes, _PART_NBYTES):
                rest = nbytes - start
                yield _Job(
                    some, min(rest, _PART_NBYTES), start, is_part=True,
                    is_last=rest <= _PART_NBYTES,
                )  # fmt: skip

    def _do(self, job: _Job) -> Any:
        """The problems of small tensors; the leaves or the problem of a part."""
        if not job.is_part:
            rest = self._left_of(job.entries)
            found = [self._check(entry, partial(self._whole, entry)) for entry in rest]
            return [problem for problem in found if problem is not None]
        leaves: list[ByteArray] = []
        problem = self._check(job.entries[0], lambda: leaves.extend(self._part(job)))
        return problem or (leaves[0] if leaves else None)

    def _left_of(self, entries: Sequence[TensorEntry]) -> Sequence[TensorEntry]:
        """The tensors that are left when the short ones have been checked together: those of a file
        at a URL, which is read in order, and those that only their frames describe."""
        source = self.source
        if not isinstance(source, SourceFile) or not self.originals:
            return entries
        described = [self.originals[entry.name] for entry in entries]
        sizes = [entry.nbytes for entry in described]

        def open_some(numbers: Sequence[int]) -> ShortFrames:
            data = source.map_all([self._place(entries[i]) for i in numbers])
            found = frames_of(numbers, [described[i] for i in numbers], data)
            rooms = [sizes[i] for i in found]
            places = _core.views_of_rooms(self.scratch.take(0, sum(rooms)), rooms)
            return ShortFrames(list(found), list(found.values()), places)

        parts = decode_short(range(len(entries)), sizes, open_some, 1)
        done = {i for part in parts for i in part}
        return [entry for i, entry in enumerate(entries) if i not in done]

    def _check(self, entry: TensorEntry, work: Callable[[], None]) -> Problem | None:
        try:
            with blaming(str(self.source.path)):
                work()
        except ChangedError:  # the base changed, so nothing is known about the file
            raise
        except PackhorseError as error:
            return Problem(self.source.path, entry.name, self._offset(entry), str(error))
        return None

    def _whole(self, entry: TensorEntry, frame: Frame | None = None) -> None:
        frame = frame or self._open(entry)
        if frame.base_hash is not None and self.lender.bases is None:
            self.unlent[self._offset(entry)] = entry
            return
        window = self.scratch.take(0, frame.window_nbytes)
        with self.lender.lend(entry.name, frame, 1) as loan:
            frame.verify(threads=1, window=window, base=loan.data)

    def _part(self, job: _Job) -> list[ByteArray]:
        """The leaves of a part. The first part of a tensor that has no parts is all of it."""
        entry = job.entries[0]
        with self.opening:  # from a URL, opening reads the whole frame
            frame = self.frames.get(entry.start)
            if frame is None:
                frame = self.frames[entry.start] = self._open(entry)
        if frame.has_parts:
            window = self.scratch.take(0, job.nbytes)
            return [frame.verify_part(job.start, job.start + job.nbytes, window)]
        if job.start == 0:
            self._whole(entry, frame)
        return []

    def _join(self, entry: TensorEntry, leaves: Sequence[ByteArray]) -> None:
        if leaves:
            self.frames[entry.start].verify_parts(leaves)

    def missing_bases(self) -> list[Problem]:
        """One problem for all tensors that were not decoded because there is no base."""
        if not self.unlent:
            return []
        offset = min(self.unlent)
        entry = self.unlent[offset]
        frame = self._open(entry)
        error = self.lender.missing(entry.name, frame, n_more=len(self.unlent) - 1)
        return [Problem(self.source.path, entry.name, offset, f"{self.source.path}: {error}")]

    def _offset(self, entry: TensorEntry) -> int:
        return self.header.data_offset + entry.start

    def _place(self, entry: TensorEntry) -> tuple[int, int]:
        return self._offset(entry), entry.nbytes

    def _open(self, entry: TensorEntry) -> Frame:
        offset, name = self._offset(entry), shortened(entry.name)
        data = self.source.map(*self._place(entry))
        frame = Frame.from_buffer(data, name=name, offset=offset, max_nbytes=self.max_nbytes)
        if self.originals:
            check_frame(frame, self.originals[entry.name], offset)
        return frame
