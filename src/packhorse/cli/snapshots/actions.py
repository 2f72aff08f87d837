"""The work of the verbs for snapshots: each takes a store and returns a row.

Nothing here draws, prints or exits.
"""

import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from packhorse.cli.actions import Watch
from packhorse.cli.failures import UsageError
from packhorse.cli.rows import gb_per_s
from packhorse.cli.snapshots.rows import (
    KindRow,
    ListedStore,
    PrunedStore,
    RestoredSnapshot,
    ShownSnapshot,
    SnapshotProblemRow,
    SnapshotRow,
    SnapshotsDiff,
    TakenSnapshot,
    VerifiedStore,
)
from packhorse.disk import (
    Change,
    SnapshotInfo,
    SnapshotStore,
    StoredTensor,
    logical_nbytes,
    model_files,
)

__all__ = [
    "delete",
    "diff",
    "doomed",
    "listed",
    "open_store",
    "prune",
    "read_pairs",
    "restore",
    "show",
    "take",
    "verify",
]

_MAX_KINDS = 24  # a summary should fit on a screen


def open_store(url: str, **options: Any) -> SnapshotStore:
    """Opens an existing store.

    Raises:
        FileNotFoundError: there is none.
    """
    is_path = "://" not in url
    store = None if is_path and not Path(url).exists() else SnapshotStore(url, **options)
    if store is None or not (is_path or store.exists()):
        raise FileNotFoundError(f"{url}: there is no snapshot store here; check the path")
    return store


def read_pairs(words: Iterable[str]) -> dict[str, Any]:
    """Metadata from words `K=V`. A value that is JSON is parsed; any other is a string.

    Raises:
        UsageError: a word has no `=` or an empty key, or a key occurs twice.
    """
    pairs: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or key in pairs:
            raise UsageError(f"--metadata {word!r}: give each key once, as KEY=VALUE")
        try:
            pairs[key] = json.loads(value, parse_constant=_no_number)
        except ValueError:
            pairs[key] = value
    return pairs


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def take(
    store: SnapshotStore,
    url: str,
    name: str,
    sources: Sequence[str],
    *,
    base: str | None,
    metadata: dict[str, Any],
    replace: bool,
    watch: Watch,
) -> TakenSnapshot:
    """Take a snapshot of files."""
    files = [file for source in sources for file in model_files(source)]
    total = sum(logical_nbytes(file) for file in files)
    with watch(f"take {name}", total) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the row's notice says the same
        start = time.perf_counter()
        info = store.take_files(
            name, files, base=base, metadata=metadata, replace=replace, progress=progress
        )
        seconds = time.perf_counter() - start
    return TakenSnapshot(
        url, name, len(info.tensors), info.nbytes, info.stored_nbytes,
        _ratio(info.nbytes, info.stored_nbytes), seconds, gb_per_s(info.nbytes, seconds),
        info.notice,
    )  # fmt: skip


def listed(store: SnapshotStore, url: str) -> ListedStore:
    """All snapshots of a store."""
    found = store.overview()
    nbytes, stored = sum(each.nbytes for each in found.snapshots), store.stored_nbytes()
    rows = [
        SnapshotRow(
            each.name, _time(each.time), each.n_tensors, each.nbytes, each.new_nbytes,
            _ratio(each.nbytes, each.new_nbytes), each.max_deltas, each.base,
        )
        for each in found.snapshots
    ]  # fmt: skip
    damaged = [SnapshotProblemRow(p.snapshot, None, p.file, p.message) for p in found.damaged]
    return ListedStore(url, nbytes, stored, _ratio(nbytes, stored), rows, damaged)


def _time(time: datetime) -> str:
    return time.isoformat(timespec="seconds")


def show(store: SnapshotStore, url: str, name: str) -> ShownSnapshot:
    """One snapshot, with a summary by kinds of tensors."""
    found = store.lineage(name)
    info, stored = found.info, found.new_nbytes
    row = SnapshotRow(
        info.name, _time(info.time), len(info.tensors), info.nbytes, stored,
        _ratio(info.nbytes, stored), info.max_deltas, found.base,
    )  # fmt: skip
    kinds = _kinds(info, set(found.inherited))
    return ShownSnapshot(url, row, info.needed_nbytes, info.metadata, kinds)


def _new(tensors: Iterable[StoredTensor], known: set[bytes]) -> list[StoredTensor]:
    """The tensors whose content is not in `known`; their content is added to it."""
    new = []
    for tensor in tensors:
        if tensor.content_hash not in known:
            known.add(tensor.content_hash)
            new.append(tensor)
    return new


def _ratio(nbytes: int, stored_nbytes: int) -> float | None:
    return nbytes / stored_nbytes if stored_nbytes else None


def _kinds(info: SnapshotInfo, known: set[bytes]) -> list[KindRow]:
    """The tensors by kind: by the part of the state, their role and their dtype. If that gives too
    many kinds, by role and dtype, and then by dtype alone."""
    namings: tuple[Callable[[StoredTensor], str], ...] = (_part_and_role, _role, lambda tensor: "")
    for naming in namings:
        groups: dict[tuple[str, str], list[StoredTensor]] = {}
        for tensor in info.tensors:
            groups.setdefault((naming(tensor), tensor.dtype), []).append(tensor)
        if len(groups) <= _MAX_KINDS:
            break
    return [_kind(kind, dtype, tensors, known) for (kind, dtype), tensors in groups.items()]


def _kind(kind: str, dtype: str, tensors: list[StoredTensor], known: set[bytes]) -> KindRow:
    own = _new(tensors, known)
    n_delta = sum(tensor.base_hash is not None for tensor in own)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    stored = sum(tensor.packed_nbytes for tensor in own)
    return KindRow(
        kind or "all", dtype, len(tensors), len(own) - n_delta, n_delta, len(tensors) - len(own),
        nbytes, stored, _ratio(nbytes, stored),
    )  # fmt: skip


def _parts(path: str) -> list[str]:
    """The names in a path, with a star for each number."""
    return ["*" if part.isdigit() else part for part in re.split(r"[.\[\]]+", path) if part]


def _part_and_role(tensor: StoredTensor) -> str:
    parts = _parts(tensor.path)
    if len(parts) < 3:
        return ".".join(parts)
    return f"{parts[0]}.*.{parts[-1]}"


def _role(tensor: StoredTensor) -> str:
    return "".join(_parts(tensor.path)[-1:])


def diff(store: SnapshotStore, url: str, old: str, new: str, watch: Watch) -> SnapshotsDiff:
    """Compare the tensors of two snapshots."""
    with watch(f"diff {old} {new}", None) as progress:
        tensors = store.diff(old, new, progress=progress)
    counts = Counter(str(tensor.change) for tensor in tensors)
    return SnapshotsDiff(
        url,
        old,
        new,
        {str(change): counts[str(change)] for change in Change},
        tensors,
    )


def restore(
    store: SnapshotStore,
    url: str,
    name: str,
    output: str,
    *,
    keys: Sequence[str] | None,
    force: bool,
    max_nbytes: int | None,
    watch: Watch,
) -> RestoredSnapshot:
    """Write a snapshot to a file."""
    total = None if keys else store.info(name).nbytes
    with watch(f"restore {name}", total) as progress:
        start = time.perf_counter()
        done = store.restore_file(
            name, output, keys=keys, force=force, max_nbytes=max_nbytes, progress=progress
        )
        seconds = time.perf_counter() - start
    return RestoredSnapshot(
        url, name, str(done.output), done.n_tensors, done.nbytes, done.file_nbytes, seconds,
        gb_per_s(done.nbytes, seconds),
    )  # fmt: skip


def verify(store: SnapshotStore, url: str, names: Sequence[str], watch: Watch) -> VerifiedStore:
    """Check all checksums, of some snapshots or of all."""
    wanted: list[str | None] = [*dict.fromkeys(names)] or [None]
    with watch(f"verify {url}", None) as progress:
        start = time.perf_counter()
        problems = [found for name in wanted for found in store.verify(name, progress=progress)]
        seconds = time.perf_counter() - start
    return VerifiedStore(
        url,
        not problems,
        list(names) or store.names(),
        seconds,
        [SnapshotProblemRow(p.snapshot, p.tensor, p.file, p.message) for p in problems],
    )


def doomed(store: SnapshotStore, keep: Sequence[str]) -> list[str]:
    """The snapshots that pruning would remove, the oldest first.

    Args:
        store: the store.
        keep: the words of `--keep`: a number, for that many of the newest, or names.

    Raises:
        UsageError: a snapshot does not exist, none would be left, or the word is both a number and
            a name.
    """
    names = store.names()
    if len(keep) == 1 and keep[0].isdecimal():
        if keep[0] in names:
            raise UsageError(
                f"--keep {keep[0]}: this is a number and also the name of a snapshot; repeat it if "
                f"you mean the name, or write 0{keep[0]} if you mean the number"
            )
        if int(keep[0]) < 1:
            raise UsageError("--keep 0 would remove all; delete snapshots by name instead")
        return names[: -int(keep[0])]
    for name in keep:
        if name not in names:
            raise UsageError(f"--keep {name}: there is no such snapshot; `list` shows all names")
    return [name for name in names if name not in keep]


def prune(store: SnapshotStore, url: str, removed: Sequence[str], *, dry_run: bool) -> PrunedStore:
    """Remove snapshots, and move what the others need of them. Newer ones than planned are kept."""
    kept = [name for name in store.names() if name not in removed]
    if dry_run or not removed:
        return PrunedStore(url, dry_run, list(removed), kept, [], None if removed else 0)
    done = store.prune(remove=removed)
    return PrunedStore(
        url, False, list(done.removed), kept, list(done.rewritten), done.freed_nbytes
    )


def delete(store: SnapshotStore, url: str, names: Sequence[str], *, dry_run: bool) -> PrunedStore:
    """Remove snapshots.

    Raises:
        ValueError: there is no such snapshot; none is removed.
    """
    there, wanted = store.names(), list(dict.fromkeys(names))
    for name in wanted:
        if name not in there:
            raise UsageError(f"{url}: there is no snapshot {name!r}; `list` shows all names")
    kept = [name for name in there if name not in wanted]
    freed = None if dry_run else sum(store.delete(name) for name in wanted)
    return PrunedStore(url, dry_run, wanted, kept, [], freed)
