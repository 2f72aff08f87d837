"""Finds out whether a plain and a packed file belong together, so that nothing is done twice.

The quick check reads the headers of both files, and compares the content hashes of a few small
tensors, spread over the file; of all tensors, unless the output is certainly newer than its source.
It does not notice damage in the data of frames. The whole check reads every byte of both files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from packhorse.disk.base_files import Bases
from packhorse.disk.cluster.steps import Settings
from packhorse.disk.packed_frames import open_frame, sketch_frames
from packhorse.disk.packed_header import PackedHeader, is_packed, parse_packed_header
from packhorse.disk.verify import verify_file
from packhorse.errors import PackhorseError
from packhorse.storage.locations import Place
from packhorse.storage.safetensors_header import TensorEntry
from packhorse.storage.source import open_source
from packhorse.storage.source_file import Source, stamp_of
from packhorse.storage.strict_json import shown
from packhorse.threads import batches

__all__ = ["fault_of_copy", "fault_of_pair"]

_N_SAMPLED = 8
_SAMPLED_NBYTES = 1 << 18  # a larger tensor is not sampled
_COMPARED_NBYTES = 1 << 24
_SKEW_S = 300.0  # between the clocks of this machine and of a server


def fault_of_pair(plain: Place, packed: Place, settings: Settings, base: Bases | None) -> str:
    """Why a packed file is not that of a plain file, in words; empty if it is.

    Raises:
        OSError: a file cannot be read.
    """
    output, source = (packed, plain) if settings.verb == "pack" else (plain, packed)
    try:
        every = settings.whole or not _is_newer(output, source)
        fault = _fault_of_tensors(plain, packed, settings, every)
        if not fault and settings.whole:
            problems = verify_file(packed, threads=settings.threads, base=base)
            fault = f"is damaged: {problems[0].message}" if problems else ""
    except (PackhorseError, ValueError) as error:
        return f"is not the wanted one: {error}"
    return fault


def _is_newer(output: Place, source: Place) -> bool:
    """Whether an output was certainly written after its source: equal times tell nothing, because
    the clock of a file system has steps of some milliseconds."""
    written, changed = _times(output)[0], _times(source)[1]
    slack = 0.0 if type(output) is type(source) else _SKEW_S
    return None not in (written, changed) and written > changed + slack  # type: ignore[operator]


def _times(place: Place) -> tuple[float | None, float | None]:
    """When a file was written, and when it was last written or put in place, in seconds. The latter
    of a local file cannot be set back."""
    if isinstance(place, Path):
        found = place.stat()
        return found.st_mtime, max(found.st_mtime, found.st_ctime)
    modified = place.modified()
    return modified, modified


def _fault_of_tensors(plain: Place, packed: Place, settings: Settings, every: bool) -> str:
    with open_source(plain) as original, open_source(packed) as source:
        header = source.header()
        if not is_packed(header):
            return "is not packed"
        found = parse_packed_header(header, label=str(packed))
        if found.original.text != original.header().text:
            return "was made from a file with other tensors"
        if found.base_name is not None and settings.base is None:
            return "was packed against a base"
        entries = found.original.entries
        chosen = entries if every else _sample(entries)
        for run in batches([entry.nbytes for entry in chosen]):
            fault = _compare(original, source, found, chosen[run.start : run.stop], settings)
            if fault:
                return fault
    return ""


def _sample(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """A few small tensors, spread over the file; the smallest one, if none is small."""
    filled = [entry for entry in entries if entry.nbytes]
    small = [entry for entry in filled if entry.nbytes <= _SAMPLED_NBYTES]
    small = small or sorted(filled, key=lambda entry: entry.nbytes)[:1]
    step = max(1, len(small) // _N_SAMPLED)
    return small[::step][:_N_SAMPLED]


def _compare(
    original: Source,
    source: Source,
    packed: PackedHeader,
    entries: Sequence[TensorEntry],
    settings: Settings,
) -> str:
    """What differs between some tensors and their frames, in words."""
    start = packed.original.data_offset
    parts = [original.sketch(start + entry.start, entry.nbytes) for entry in entries]
    places = [start + entry.start for entry in entries]
    original.fill(list(zip(parts, places, strict=True)))
    frames = sketch_frames(source, packed, entries)
    for entry, data, part in zip(entries, frames, parts, strict=True):
        frame = open_frame(data, packed, entry)
        level = frame.level.name.lower() if frame.level else settings.level
        if settings.verb == "pack" and level != settings.level:
            return f"was packed at level {level}"
        if frame.digest_of(part, settings.threads or 1) != frame.content_hash:
            return f"has other values in tensor {shown(entry.name)}"
    return ""


def fault_of_copy(source: Place, output: Place, settings: Settings) -> str:
    """Why a file is not a copy of another, in words; empty if it is. Bytes are compared only if
    the settings say so, or if the times tell nothing."""
    if stamp_of(output).nbytes != (nbytes := stamp_of(source).nbytes):
        return "has another size"
    if not settings.whole and (_is_newer(output, source) or _times(output)[0] == _times(source)[0]):
        return ""  # copies on this machine have the time of their source
    with open_source(source) as one, open_source(output) as other:
        for start in range(0, nbytes, _COMPARED_NBYTES):
            piece = min(_COMPARED_NBYTES, nbytes - start)
            if one.map(start, piece) != other.map(start, piece):
                return "has other bytes"
    return ""
