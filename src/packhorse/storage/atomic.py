"""Writes files and folders that are complete or absent.

A file is written under a temporary name beside its destination, flushed to the disk and renamed to
the destination in one step; then the folder is flushed. If the work ends before that (by an
exception, Ctrl-C or a full disk), the temporary file is removed. A folder is treated in the same
way: it is built under a temporary name, then renamed.

Existing output is replaced only if the caller allows it. The input is never replaced, even if the
output's path leads to it by a link. This is checked before any work, and again in the last step,
because another process may have written there in the meantime. A killed process can leave a
`.packhorse-*.tmp` behind; nothing ever reads it, and it may be deleted.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from packhorse.storage.output_file import OutputFile, naming_output
from packhorse.storage.rename import exchange, rename_new
from packhorse.storage.system import OPEN_FLAGS

__all__ = [
    "atomic_file",
    "atomic_folder",
    "check_output_file",
    "is_temporary",
    "remove_temporaries",
    "sync_folder",
    "temporary_beside",
]

_TEMPORARY = (".packhorse-", ".tmp")
_IN_THE_WAY = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF, errno.EPERM)


def check_output_file(
    destination: Path, *, source: Path | None = None, force: bool = False
) -> None:
    """Refuse a destination that must not be written, before any work is done.

    Args:
        destination: the path of the output.
        source: the input; the output must not be the same file, not even by a link.
        force: whether an existing file may be replaced.

    Raises:
        ValueError: the output is the input, or is not a regular file.
        FileExistsError: the output exists and `force` is False.
        IsADirectoryError: the output is a folder.
        FileNotFoundError: the output's folder does not exist.
    """
    if not destination.parent.is_dir():
        raise FileNotFoundError(
            f"{destination}: there is no folder {destination.parent}; create it, or name another"
        )
    if not os.path.lexists(destination):
        return
    if source is not None and destination.exists() and destination.samefile(source):
        raise ValueError(f"{destination}: the output is the input itself; name another output")
    if destination.is_dir():
        raise IsADirectoryError(f"{destination}: is a folder; name a file in it")
    if destination.exists() and not destination.is_file():
        raise ValueError(f"{destination}: not a regular file; name another output")
    if not force:
        raise _exists(destination)


@contextmanager
def atomic_file(
    destination: Path,
    *,
    source: Path | None = None,
    force: bool = False,
    like: os.stat_result | None = None,
) -> Iterator[OutputFile]:
    """Write a file that appears under its name only when the block ends without an exception.

    Args:
        destination: the path of the file. A link there is replaced, not followed.
        source: the input, which the destination must not be.
        force: whether an existing file may be replaced.
        like: the status of a file whose permission bits the new file gets; None for the usual ones.

    Yields:
        The file to write to.

    Raises:
        OSError, ValueError: as for `check_output_file`; or the file cannot be written.
    """
    check_output_file(destination, source=source, force=force)
    temporary = temporary_beside(destination)
    try:
        with naming_output(destination):
            descriptor = os.open(
                temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, _mode(like)
            )
        try:
            output = OutputFile(descriptor, destination, will_sync=True)
            yield output
            if like is not None and hasattr(os, "fchmod"):  # not on Windows before Python 3.13
                os.fchmod(descriptor, stat.S_IMODE(like.st_mode) & 0o777)
            output.sync()
        finally:
            os.close(descriptor)
        _commit_file(temporary, destination, force=force)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    # `atomic_folder` flushes its folders when all files are there.
    if not any(is_temporary(part) for part in destination.parts[:-1]):
        sync_folder(destination.parent)


def _commit_file(temporary: Path, destination: Path, *, force: bool) -> None:
    with naming_output(destination):
        if force:
            os.replace(temporary, destination)
            return
        try:
            rename_new(temporary, destination)
        except FileExistsError:
            raise _exists(destination) from None


def _exists(destination: Path, what: str = "") -> FileExistsError:
    return FileExistsError(
        f"{destination}: already exists{what}; allow replacing it (force, --force) or name another"
    )


@contextmanager
def atomic_folder(destination: Path, replaceable: Iterable[Path] | None) -> Iterator[Path]:
    """Build a folder that appears under its name only when the block ends without an exception.

    Args:
        destination: the path of the folder. An empty folder may be there, or a folder to replace.
        replaceable: paths below the destination that may be removed with an old folder; None if an
            old folder must be empty.

    Yields:
        The temporary folder to build in, beside the destination.

    Raises:
        FileExistsError: the destination contains a path that may not be removed.
        OSError: the folder cannot be written.
    """
    _check_folder(destination, replaceable)
    temporary, built = temporary_beside(destination), None
    try:
        with naming_output(destination):
            temporary.mkdir()
        built = _identity(temporary)
        with _renaming(temporary, destination):
            yield temporary
        for folder, _, _ in os.walk(temporary):
            sync_folder(Path(folder))
        _commit_folder(temporary, destination, replaceable)
    except BaseException:
        # Not if this is the old folder, which a failed swap did not put back.
        if built is None or _identity(temporary) in (built, None):
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(destination.parent)


def _check_folder(destination: Path, replaceable: Iterable[Path] | None) -> None:
    if not destination.parent.is_dir():
        raise FileNotFoundError(
            f"{destination}: there is no folder {destination.parent}; create it, or name another"
        )
    if not os.path.lexists(destination):
        return
    if not destination.is_dir() or destination.is_symlink():
        raise FileExistsError(f"{destination}: exists and is not a folder; name another output")
    _check_replaceable(destination, destination, replaceable)


def _check_replaceable(folder: Path, destination: Path, replaceable: Iterable[Path] | None) -> None:
    """Refuse to replace a folder, which is or was at the destination, if it has a path that may not
    be removed."""
    allowed = set(replaceable or ())
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name).relative_to(folder) for name in names):
            if replaceable is None:
                raise _exists(destination, " and is not empty")
            if path not in allowed:
                raise FileExistsError(
                    f"{destination}: contains {path}, which the new folder would not have; move it "
                    "away or name another output"
                )


def _commit_folder(temporary: Path, destination: Path, replaceable: Iterable[Path] | None) -> None:
    with naming_output(destination):
        try:
            os.rename(temporary, destination)  # replaces only an empty folder
            return
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
        if replaceable is None or not destination.is_dir() or destination.is_symlink():
            _check_folder(destination, replaceable)
            raise _exists(destination)
        _swap(temporary, destination, replaceable)


def _swap(temporary: Path, destination: Path, replaceable: Iterable[Path]) -> None:
    """Replace the folder `destination` by `temporary`. The old folder is put back if it has gained
    a path that may not be removed, or if anything fails."""
    built, old = _identity(temporary), temporary_beside(destination)
    try:
        if exchange(temporary, destination):
            os.rename(temporary, old)
        else:
            os.rename(destination, old)
            os.rename(temporary, destination)
        _check_replaceable(old, destination, replaceable)
    except BaseException:
        _put_back(built, temporary, destination, old)
        raise
    try:
        shutil.rmtree(old)
    except BaseException:
        shutil.rmtree(old, ignore_errors=True)  # interrupted: try once more
        raise


def _put_back(built: tuple[int, int] | None, temporary: Path, destination: Path, old: Path) -> None:
    """Move the old folder back to its place, and the new one to `temporary`, at whatever step the
    swap failed."""
    if os.path.lexists(old):
        if _identity(destination) == built:
            os.rename(destination, temporary)
        os.rename(old, destination)
    elif _identity(temporary) != built:
        exchange(temporary, destination)


def _identity(path: Path) -> tuple[int, int] | None:
    """An identity of a folder that does not depend on its name; None if there is no folder."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def temporary_beside(destination: Path) -> Path:
    """A new hidden name in the folder of `destination`."""
    return destination.parent / f"{_beginning(destination)}{os.urandom(6).hex()}{_TEMPORARY[1]}"


def remove_temporaries(destination: Path) -> None:
    """Remove what killed processes have left of a file; only the one that writes this file may call
    it."""
    for path in destination.parent.glob(f"{_beginning(destination)}*{_TEMPORARY[1]}"):
        path.unlink(missing_ok=True)


def _beginning(destination: Path) -> str:
    """How the temporary names of a file begin."""
    return f"{_TEMPORARY[0]}{zlib.crc32(os.fsencode(destination.name)):08x}-"


def is_temporary(name: str) -> bool:
    """Whether a name could have come from `temporary_beside`."""
    return name.startswith(_TEMPORARY[0]) and name.endswith(_TEMPORARY[1])


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, if the file system can do that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def _mode(like: os.stat_result | None) -> int:
    """The permissions to create a file with: private if `like` sets others when it is complete."""
    return 0o666 if like is None else 0o600


@contextmanager
def _renaming(temporary: Path, destination: Path) -> Iterator[None]:
    """Make the system's errors name files by their final paths."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and Path(error.filename).is_relative_to(temporary):
            relative = Path(error.filename).relative_to(temporary)
            error.filename = os.fspath(destination / relative)
        raise
