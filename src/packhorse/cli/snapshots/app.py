"""The verbs of `packhorse snapshot` and their options."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

import typer

from packhorse.cli.failures import ExitCode, UsageError
from packhorse.cli.options import Force, Json, Level, LevelName, MaxNbytes, Threads
from packhorse.cli.render import progress
from packhorse.cli.runs import each
from packhorse.cli.snapshots import actions, render
from packhorse.cli.snapshots.rows import PrunedStore
from packhorse.disk import SnapshotStore

__all__ = ["snapshot_app"]

snapshot_app = typer.Typer(
    help="Keep the states of a training run as small increments.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Store = Annotated[
    str,
    typer.Argument(
        metavar="STORE", help="A folder, or a URL such as s3://bucket/run.", show_default=False
    ),
]
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the snapshot.", show_default=False)
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Show what would be removed; remove nothing.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")]

_Row = TypeVar("_Row")


@dataclass(frozen=True)
class _Store:
    """The store of a command line, as a job for `each`."""

    src: str


def _once(url: str, work: Callable[[], _Row], show: Callable[[_Row], None], json: bool) -> _Row:
    """Do one piece of work on a store, with errors and JSON as for all verbs."""
    return each([_Store(url)], lambda job: [work()], show, json)[0]


@snapshot_app.command(no_args_is_help=True)
def take(
    store: Store,
    name: Name,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Safetensors files, packed or plain, or folders of shards: paths or URLs.",
            show_default=False,
        ),
    ],
    base: Annotated[
        str,
        typer.Option(
            "--base", "-b", metavar="auto|none|NAME",
            help="The snapshot to make deltas against: the newest (auto), none, or NAME.",
        ),
    ] = "auto",
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            "--metadata", "-m", metavar="K=V",
            help="Metadata to store; V is JSON or a string. May be repeated.", show_default=False,
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a snapshot of this name, in one step.")
    ] = False,
    level: Level = LevelName.DEFAULT,
    threads: Threads = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Take a snapshot of the tensors of safetensors files; the first take creates the store.

    Examples:

    - `packhorse snapshot take runs/7 step-100 model.safetensors`
    - `packhorse snapshot take runs/7 step-200 checkpoint-200 -m loss=2.31`
    - `packhorse snapshot take tunes chat-v1 chat.safetensors --base llama`
    """

    def work() -> Any:
        pairs = actions.read_pairs(metadata or [])
        opened = SnapshotStore(store, level=level.value, threads=threads)
        row = actions.take(
            opened, store, name, files, base=None if base == "none" else base, metadata=pairs,
            replace=replace, watch=progress,
        )  # fmt: skip
        render.growth_warning(row)
        return row

    _once(store, work, render.taken_line, json)


@snapshot_app.command("list", no_args_is_help=True)
def list_(store: Store, json: Json = False) -> None:
    """List the snapshots of a store, the oldest first: what each added, and what it builds on.

    Examples:

    - `packhorse snapshot list runs/7`
    - `packhorse snapshot list s3://bucket/run --json`
    """
    row = _once(
        store, lambda: actions.listed(actions.open_store(store), store), render.list_table, json
    )
    if row.damaged:
        raise typer.Exit(ExitCode.BAD_DATA)


@snapshot_app.command(no_args_is_help=True)
def show(
    store: Store,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show only this snapshot.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Plot the size and ratio of snapshots; for one snapshot, show what each kind of tensor cost.

    Examples:

    - `packhorse snapshot show runs/7`
    - `packhorse snapshot show runs/7 step-200`
    """
    if name is not None:
        only = name
        _once(
            store,
            lambda: actions.show(actions.open_store(store), store, only),
            render.show_table,
            json,
        )
        return
    row = _once(
        store, lambda: actions.listed(actions.open_store(store), store), render.show_plot, json
    )
    if row.damaged:
        raise typer.Exit(ExitCode.BAD_DATA)


@snapshot_app.command(no_args_is_help=True)
def diff(
    store: Store,
    old: Annotated[
        str, typer.Argument(metavar="A", help="The older snapshot.", show_default=False)
    ],
    new: Annotated[
        str,
        typer.Argument(metavar="B", help="The snapshot to compare with A.", show_default=False),
    ],
    limit: Annotated[
        int, typer.Option("--limit", min=0, help="How many tensors to show at most.")
    ] = 50,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Show which tensors changed from one snapshot to another, how many of their values, and by
    how much.

    Examples:

    - `packhorse snapshot diff runs/7 step-100 step-200`
    - `packhorse snapshot diff runs/7 step-100 step-200 --json`
    """

    def work() -> Any:
        return actions.diff(actions.open_store(store, threads=threads), store, old, new, progress)

    _once(store, work, partial(render.diff_table, limit=limit), json)


@snapshot_app.command(no_args_is_help=True)
def restore(
    store: Store,
    name: Name,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="DST", show_default=False,
            help="The file to write, at a path or a URL; packed if it ends in .ph.safetensors.",
        ),
    ],
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--keys", "-k", metavar="PATH", show_default=False,
            help="Only the values at this path or below it. May be repeated.",
        ),
    ] = None,
    level: Level = LevelName.DEFAULT,
    threads: Threads = None,
    force: Force = False,
    max_nbytes: MaxNbytes = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Write a snapshot as a safetensors file: tensors by their paths, other values as metadata.

    Examples:

    - `packhorse snapshot restore runs/7 step-200 -o model.safetensors`
    - `packhorse snapshot restore runs/7 step-200 -o weights.ph.safetensors --keys model`
    """

    def work() -> Any:
        opened = actions.open_store(store, level=level.value, threads=threads)
        return actions.restore(
            opened, store, name, output, keys=keys or None, force=force, max_nbytes=max_nbytes,
            watch=progress,
        )  # fmt: skip

    _once(store, work, render.restored_line, json)


@snapshot_app.command(no_args_is_help=True)
def verify(
    store: Store,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="Snapshots to check; by default all.", show_default=False
        ),
    ] = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Decode everything, check every checksum, and list all problems (exit code 1).

    Examples:

    - `packhorse snapshot verify runs/7`
    - `packhorse snapshot verify runs/7 step-200`
    """

    def work() -> Any:
        opened = actions.open_store(store, threads=threads)
        return actions.verify(opened, store, names or [], progress)

    row = _once(store, work, render.verify_lines, json)
    if not row.ok:
        raise typer.Exit(ExitCode.BAD_DATA)


@snapshot_app.command(no_args_is_help=True)
def delete(
    store: Store,
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="Names of the snapshots.", show_default=False),
    ],
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Delete snapshots. Frames that other snapshots need stay; `prune` frees more space.

    Examples:

    - `packhorse snapshot delete runs/7 step-100`
    - `packhorse snapshot delete runs/7 step-100 step-200 --yes`
    """

    def work() -> PrunedStore:
        opened = actions.open_store(store)
        planned = actions.delete(opened, store, names, dry_run=True)
        if dry_run:
            return planned
        _ask(planned.removed, yes)
        return actions.delete(opened, store, names, dry_run=False)

    _once(store, work, render.pruned_lines, json)


@snapshot_app.command(no_args_is_help=True)
def prune(
    store: Store,
    keep: Annotated[
        list[str],
        typer.Option(
            "--keep", "-k", metavar="N|NAME", show_default=False,
            help="How many of the newest to keep, or the name of one; may be repeated.",
        ),
    ],
    level: Level = LevelName.DEFAULT,
    threads: Threads = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Remove all snapshots except some, and free the space that only the removed ones needed.

    Examples:

    - `packhorse snapshot prune runs/7 --keep 5`
    - `packhorse snapshot prune runs/7 --keep step-100 --keep step-900 --dry-run`
    """

    def work() -> PrunedStore:
        opened = actions.open_store(store, level=level.value, threads=threads)
        removed = actions.doomed(opened, keep)
        if removed and not dry_run:
            _ask(removed, yes)
        return actions.prune(opened, store, removed, dry_run=dry_run)

    _once(store, work, render.pruned_lines, json)


def _ask(names: list[str], yes: bool) -> None:
    """Ask on the terminal whether to remove snapshots.

    Raises:
        UsageError: there is no terminal to ask on, or the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            "this removes snapshots, and there is no terminal to ask on; confirm with --yes"
        )
    question = render.removal_line(names)
    try:
        is_meant = typer.confirm(question[0].upper() + question[1:] + "?", err=True)
    except typer.Abort:  # the end of the input
        is_meant = False
    if not is_meant:
        raise UsageError("the answer was not yes; nothing was removed")
