"""What one step does, on a worker or in this process.

A step that writes an output first looks whether it is there already. Outputs are written as
everywhere: they are complete or absent. What a killed process has left beside an output is removed
when the output is written again, and when its folder is complete.

A folder is marked as unfinished, as at a URL, until all its files are there (`folder_output.py`);
the index comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from packhorse.disk.base_files import Bases, open_parts
from packhorse.disk.batches import AHEAD_NBYTES, WHOLE_NBYTES
from packhorse.disk.cluster.existing import fault_of_copy, fault_of_pair
from packhorse.disk.cluster.results import FileReport
from packhorse.disk.cluster.steps import (
    Clean,
    Cut,
    Finish,
    Folder,
    Found,
    Job,
    Join,
    Look,
    One,
    Part,
    Settings,
    Shard,
    Step,
    is_left_over,
    part_of,
)
from packhorse.disk.container import (
    Packed,
    join_parts,
    logical_nbytes,
    pack_file,
    pack_range,
)
from packhorse.disk.folder import refuse_base, require_parts
from packhorse.disk.folder_items import RECORD_NAME, Item, Kind, files_in, items_by_name
from packhorse.disk.folder_output import (
    Task,
    copy_item,
    read_record,
    refuse_others,
    save_record,
)
from packhorse.disk.index_file import original_index, packed_index, read_index, verify_index
from packhorse.disk.packed_header import is_packed
from packhorse.disk.results import FileResult
from packhorse.disk.unpack import unpack_file
from packhorse.disk.verify import verify_file
from packhorse.storage.atomic import remove_temporaries
from packhorse.storage.locations import Place, is_within
from packhorse.storage.source import header_at
from packhorse.storage.source_file import AnyStamp, stamp_of
from packhorse.storage.tasks import check_wanted, holding

__all__ = ["clean_up", "do"]

# A file this short needs no more memory than that: its header need not be read to know.
_SHORT_NBYTES = 1 << 26
_FIXED_NBYTES = 1 << 27  # two batches, and what a task needs besides
_REMOTE_NBYTES = 3 << 26  # blocks read ahead, and parts of an upload

_DONE = {"pack": "packed", "unpack": "unpacked", "verify": "verified"}


def do(settings: Settings, step: Step) -> Any:
    """Do a step.

    Returns:
        For `Look` a list with a `Found` or an exception for each job; for `One` a `FileReport` or
        a `Cut`; for `Part` what `pack_range` returns; for `Join` a `FileReport`; for `Finish` a
        list of reports.

    Raises:
        Exception: the file at fault cannot be read, written or checked.
    """
    if isinstance(step, Look):
        return [_found(number, job, settings) for number, job in step.jobs]
    if isinstance(step, Finish):
        return _finish(step.folder, settings)
    if isinstance(step, Clean):
        return _clean(step.shard)
    with open_parts(settings.base) as part:
        if isinstance(step, One):
            return _one(step.shard, settings, part)
        base = part(step.shard.relative.parent)
        return (_part if isinstance(step, Part) else _join)(step, settings, base)  # type: ignore


# Listing.


def _found(number: int, job: Job, settings: Settings) -> Found | Exception:
    try:
        return (_look_into if job.is_folder else _look_at)(number, job, settings)
    except Exception as error:
        return error


def _look_at(number: int, job: Job, settings: Settings) -> Found:
    nbytes = stamp_of(job.source).nbytes
    name = PurePosixPath(job.source.name)
    return Found([
        Shard(number, job.source, job.output, name, Kind.MODEL, nbytes, settings.force)
    ])  # fmt: skip


def _look_into(number: int, job: Job, settings: Settings) -> Found:
    items = items_by_name(job.source, settings.verb)
    if settings.verb == "pack":
        with open_parts(settings.base) as part:
            require_parts(items, part, job.source, settings.base)
    folder = Folder(number, job.source, job.output, items)
    if job.output is not None:
        folder = replace(folder, may_write=_begin(job, job.output, items, settings))
    shards = [
        Shard(
            number, item.source, None if job.output is None else job.output / item.output,
            item.relative, item.kind, item.nbytes,
            may_replace=folder.may_write, may_write=folder.may_write,
        )
        for item in items
        if item.kind is Kind.MODEL or (item.kind is Kind.OTHER and job.output is not None)
    ]  # fmt: skip
    return Found(shards, folder)


def _begin(job: Job, output: Place, items: Sequence[Item], settings: Settings) -> bool:
    """Prepare the output folder; whether files may be written there. A complete folder, which may
    not be replaced, is only compared."""
    if is_within(output, job.source) or is_within(job.source, output):
        raise ValueError(
            f"{output}: the output and the input {job.source} must not contain each other; name "
            "another output"
        )
    refuse_base(output, settings.base)
    for item in items:
        if item.kind is Kind.LINK:
            raise ValueError(
                f"{item.source}: a link to a folder elsewhere in the tree, which a cluster does "
                "not follow; remove the link, or pack this folder without a cluster"
            )
    there = _names_in(output)
    task = Task(settings.verb, job.source, output, items, settings.base, _level_of(settings))
    refuse_others(task, [name for name in there if not is_left_over(PurePosixPath(name))])
    if RECORD_NAME in there:
        read_record(task, force=settings.force)
    elif there and not settings.force:
        return False
    if not settings.is_dry:
        if isinstance(output, Path):
            _make_folders(output, items)
        save_record(task, {})
    return True


def _make_folders(output: Path, items: Sequence[Item]) -> None:
    if not output.parent.is_dir():
        raise FileNotFoundError(
            f"{output}: there is no folder {output.parent}; create it, or name another"
        )
    for item in items:
        path = output / item.output
        (path if item.kind is Kind.FOLDER else path.parent).mkdir(parents=True, exist_ok=True)


def _level_of(settings: Settings) -> str:
    return settings.level if settings.verb == "pack" else ""


def _names_in(folder: Place) -> set[str]:
    try:
        return {path.as_posix() for _, path, _ in files_in(folder)}
    except FileNotFoundError:
        return set()


# One file.


def _one(
    shard: Shard, settings: Settings, part: Callable[[PurePath], Bases | None]
) -> FileReport | Cut:
    if shard.kind is Kind.OTHER:
        return _copy(shard, settings)
    base = part(shard.relative.parent)
    if settings.verb == "verify" or shard.output is None:
        return _verify(shard, settings, base)
    known = _known(shard, shard.output, settings, base)
    if known is not None:
        return known
    runs = _runs(shard, settings)
    if settings.is_dry:
        nbytes = shard.nbytes if settings.verb == "pack" else logical_nbytes(shard.source)
        return FileReport(shard.source, shard.output, "planned", nbytes, n_parts=len(runs))
    _prepare(shard.output)
    if len(runs) > 1:
        return Cut(runs, _mark(stamp_of(shard.source)))
    convert: Any = partial(pack_file, level=settings.level)
    if settings.verb == "unpack":
        convert = partial(unpack_file, max_nbytes=settings.max_nbytes)
    with holding(_needed(shard, settings), settings.threads) as threads:
        result = convert(
            shard.source, shard.output, threads=threads, force=shard.may_replace,
            progress=check_wanted, base=base,
        )  # fmt: skip
    return _report(result, settings)


def _known(
    shard: Shard, output: Place, settings: Settings, base: Bases | None
) -> FileReport | None:
    """The report for an output that is there already; None if there is none to keep.

    Raises:
        FileExistsError: what is there is not wanted, and may not be replaced.
    """
    if not output.exists():
        if not shard.may_write:
            raise FileExistsError(
                f"{output}: missing in a folder that exists; allow writing into it (force, "
                "--force) or name another"
            )
        return None
    packing = settings.verb == "pack"
    plain, packed = (shard.source, output) if packing else (output, shard.source)
    fault = fault_of_pair(plain, packed, settings, base)
    if fault and not shard.may_replace:
        raise FileExistsError(
            f"{output}: already exists, and {fault}; allow replacing it (force, --force) or name "
            "another"
        )
    if fault:
        return None
    tensors = len(header_at(packed).entries)
    sizes = stamp_of(plain).nbytes, stamp_of(packed).nbytes
    return FileReport(shard.source, output, "skipped", *sizes, n_tensors=tensors)


def _runs(shard: Shard, settings: Settings) -> list[range]:
    """The runs of tensors that tasks of their own pack; a single one for most files."""
    if settings.verb != "pack" or (shard.nbytes <= settings.part_nbytes and not settings.is_dry):
        return [range(0)]
    header = header_at(shard.source)
    if is_packed(header):
        raise ValueError(f"{shard.source}: already packed; unpack it first, or use it as it is")
    runs, start, nbytes = [], 0, 0
    for i, entry in enumerate(header.entries):
        if i > start and nbytes + entry.nbytes > settings.part_nbytes:
            runs.append(range(start, i))
            start, nbytes = i, 0
        nbytes += entry.nbytes
    return [*runs, range(start, len(header.entries))]


def _prepare(output: Place) -> None:
    """Remove what an earlier try has left, and create the folder of the output."""
    if isinstance(output, Path):
        remove_temporaries(output)


def _needed(shard: Shard, settings: Settings) -> int:
    """An estimate of the memory that a task needs, in bytes: mapped pages count, as Dask counts
    them."""
    largest = shard.nbytes
    if largest > _SHORT_NBYTES:
        largest = max((entry.nbytes for entry in header_at(shard.source).entries), default=0)
    is_packed, has_base = settings.verb == "pack", settings.base is not None
    times, ahead = 1 + has_base, 0
    if is_packed and has_base:  # the frame of a whole tensor, and the one before
        times, ahead = 3, min(largest, AHEAD_NBYTES)
    elif is_packed:  # a longer tensor is packed in parts
        ahead = 2 * min(largest, WHOLE_NBYTES)
    places = (shard.source, shard.output)
    is_local = all(place is None or isinstance(place, Path) for place in places)
    return times * largest + ahead + _FIXED_NBYTES + (0 if is_local else _REMOTE_NBYTES)


def _report(result: FileResult, settings: Settings, n_parts: int = 1) -> FileReport:
    return FileReport(
        result.source, result.output, _DONE[settings.verb], result.original_nbytes,
        result.packed_nbytes, len(result.tensors),
        sum(tensor.base_hash is not None for tensor in result.tensors), n_parts,
    )  # fmt: skip


def _verify(shard: Shard, settings: Settings, base: Bases | None) -> FileReport:
    with holding(_needed(shard, settings), settings.threads) as threads:
        problems = tuple(
            verify_file(
                shard.source, threads=threads, progress=check_wanted,
                max_nbytes=settings.max_nbytes, base=base,
            )
        )  # fmt: skip
    status = "damaged" if problems else "verified"
    nbytes = n_tensors = 0
    if not problems:
        nbytes, n_tensors = logical_nbytes(shard.source), len(header_at(shard.source).entries)
    return FileReport(
        shard.source, None, status, nbytes, shard.nbytes, n_tensors, problems=problems
    )


def _copy(shard: Shard, settings: Settings) -> FileReport:
    output = shard.output
    assert output is not None  # only outputs have copies
    report = FileReport(shard.source, output, "copied", shard.nbytes, shard.nbytes)
    if output.exists():
        fault = fault_of_copy(shard.source, output, settings)
        if not fault:
            return replace(report, status="skipped")
        if not shard.may_replace:
            raise FileExistsError(
                f"{output}: already exists, and {fault}; allow replacing it (force, --force)"
            )
    elif not shard.may_write:
        raise FileExistsError(f"{output}: missing in a folder that exists; allow replacing it "
                              "(force, --force) or name another")  # fmt: skip
    if settings.is_dry:
        return replace(report, status="planned")
    _prepare(output)
    item = Item(shard.source, shard.relative, shard.relative, Kind.OTHER, None, shard.nbytes)
    copy_item(item, output, None, force=True)
    return report


# Large files.


def _part(step: Part, settings: Settings, base: Bases | None) -> Packed:
    shard, output = step.shard, step.shard.output
    assert output is not None  # only outputs have parts
    entries = header_at(shard.source).entries[step.run.start : step.run.stop]
    largest = replace(shard, nbytes=max(entry.nbytes for entry in entries))
    target = output.with_name(part_of(output, step.number))
    _prepare(target)
    with holding(_needed(largest, settings), settings.threads) as threads:
        packed = pack_range(
            shard.source, target, step.run, output=output, level=settings.level, threads=threads,
            progress=check_wanted, base=base,
        )  # fmt: skip
    _check_mark(shard.source, step.mark)
    return packed


def _join(step: Join, settings: Settings, base: Bases | None) -> FileReport:
    shard, output = step.shard, step.shard.output
    assert output is not None  # only outputs have parts
    known = None if shard.may_replace else _joined(shard, output, settings, base)
    if known is not None:  # by an earlier try, whose worker died before it could say so
        return known
    _prepare(output)
    places = [output.with_name(part_of(output, i)) for i in range(len(step.parts))]
    parts = list(zip(places, step.parts, strict=True))
    _check_mark(shard.source, step.mark)
    result = join_parts(shard.source, output, parts, force=shard.may_replace)
    _clean(shard)
    return _report(result, settings, len(parts))


def _joined(
    shard: Shard, output: Place, settings: Settings, base: Bases | None
) -> FileReport | None:
    with suppress(FileExistsError):
        return _known(shard, output, settings, base)
    return None


def _clean(shard: Shard) -> None:
    """Remove the parts of an output, and what killed processes have left of it."""
    if shard.output is None or not shard.output.parent.exists():
        return
    _prepare(shard.output)
    beginning = part_of(shard.output)
    for path in shard.output.parent.iterdir():
        if path.name.startswith(beginning):
            _remove(path)


def clean_up(job: Job) -> None:
    """Remove all that unfinished tasks have left of a job, when no worker is at work any more. The
    output folder stays marked as unfinished, so the same run can go on."""
    if job.output is None:
        return
    if not job.is_folder:
        _clean(Shard(0, job.source, job.output, PurePosixPath(), Kind.MODEL, 0))
        return
    with suppress(FileNotFoundError):
        _remove_left_overs(job.output)


def _remove_left_overs(folder: Place) -> None:
    for place, relative, _ in files_in(folder):
        if is_left_over(relative) and relative.name != RECORD_NAME:
            _remove(place)


def _remove(place: Place) -> None:
    with suppress(FileNotFoundError):
        place.unlink() if isinstance(place, Path) else place.remove()


# The end of a folder.


def _finish(folder: Folder, settings: Settings) -> list[FileReport]:
    indexes = [item for item in folder.items if item.kind is Kind.INDEX]
    if folder.output is None:
        return [_verified_index(item) for item in indexes]
    _check_source(folder, settings)
    reports = [_write_index(folder, folder.output, item, settings) for item in indexes]
    if folder.may_write and not settings.is_dry:
        _remove_left_overs(folder.output)
        _remove(folder.output / RECORD_NAME)  # last of all: now the folder is complete
    return reports


def _check_source(folder: Folder, settings: Settings) -> None:
    """Check that no file of the source was changed, added or removed meanwhile."""
    before = {item.source: _mark(item.stamp) for item in folder.items}
    now = {item.source: _mark(item.stamp) for item in items_by_name(folder.source, settings.verb)}
    for place in before.keys() | now.keys():
        if before.get(place) != now.get(place):
            raise _changed(place, "changed, added or removed")


def _check_mark(place: Place, mark: tuple[int, ...]) -> None:
    if _mark(stamp_of(place)) != mark:
        raise _changed(place, "changed")


def _changed(place: Place, what: str) -> OSError:
    return OSError(
        f"{place}: {what} while it was being read, so the output is not complete; try again when "
        "nothing writes to it, or use a copy"
    )


def _mark(stamp: AnyStamp | None) -> tuple[int, ...]:
    """What is the same of a stamp for all machines that share a file system."""
    if stamp is None:  # of a folder
        return (0,)
    return stamp.nbytes, getattr(stamp, "modified_ns", 0) or getattr(stamp, "changed", 0)


def _write_index(
    folder: Folder, folder_output: Place, item: Item, settings: Settings
) -> FileReport:
    original = packed_index(item.source) if settings.verb == "pack" else original_index(item.source)
    text = read_index(item.source) if original is None else original
    output = folder_output / item.output
    sizes = (item.nbytes, len(text)) if settings.verb == "pack" else (len(text), item.nbytes)
    report = FileReport(item.source, output, "copied", *sizes)
    if output.exists() and read_index(output) == text:
        return replace(report, status="skipped")
    if not folder.may_write:
        raise FileExistsError(
            f"{output}: not the index that this folder would have; allow replacing it (force, "
            "--force)"
        )
    if settings.is_dry:
        return replace(report, status="planned")
    _prepare(output)
    copy_item(replace(item, text=text), output, None, force=True)
    return report


def _verified_index(item: Item) -> FileReport:
    problems = tuple(verify_index(item.source))
    status = "damaged" if problems else "verified"
    return FileReport(item.source, None, status, item.nbytes, item.nbytes, problems=problems)
