"""The verbs of `packhorse shelf` and their options."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer

from packhorse.cli.failures import ExitCode
from packhorse.cli.options import Force, Json, Level, LevelName, Threads
from packhorse.cli.render import progress
from packhorse.cli.runs import each
from packhorse.cli.shelf import actions, exchange, render
from packhorse.cli.shelf.exchange import FormatName
from packhorse.cli.shelf.rows import (
    CompactedShelf,
    ExportedTensors,
    ListedShelf,
    ShownState,
    ShownTensor,
    VerifiedShelf,
)

__all__ = ["shelf_app"]

shelf_app = typer.Typer(
    help="Look after shelves: packed arrays that live on the disk.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Folder = Annotated[
    str, typer.Argument(metavar="SHELF", help="The folder of a shelf.", show_default=False)
]
Tag = Annotated[
    str | None,
    typer.Option(
        "--tag", metavar="TAG", show_default=False,
        help="The shelf as it was at this tag, instead of as it is.",
    ),
]  # fmt: skip
Format = Annotated[
    FormatName | None,
    typer.Option(
        "--format", help="The format; by default, what the name ends in.", show_default=False
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Show what would be done; write nothing.")
]

_Row = TypeVar("_Row")


@dataclass(frozen=True)
class _Shelf:
    """The shelf of a command line, as a job for `each`."""

    src: str


def _once(path: str, work: Callable[[], _Row], show: Callable[[_Row], None], json: bool) -> _Row:
    """Do one piece of work on a shelf, with errors and JSON as for all verbs."""
    return each([_Shelf(path)], lambda job: [work()], show, json)[0]


@shelf_app.command("list", no_args_is_help=True)
def list_(shelf: Folder, tag: Tag = None, json: Json = False) -> None:
    """List the tensors, states and tags of a shelf, and its size on the disk.

    Examples:

    - `packhorse shelf list runs/data.shelf`
    - `packhorse shelf list runs/data.shelf --tag epoch-3 --json`
    """

    def work() -> ListedShelf:
        with actions.open_shelf(shelf) as opened:
            return actions.listed(opened, shelf, tag)

    _once(shelf, work, render.list_table, json)


@shelf_app.command(no_args_is_help=True)
def show(
    shelf: Folder,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A tensor, or a saved state.", show_default=False),
    ],
    index: Annotated[
        str | None,
        typer.Argument(
            metavar="INDEX", show_default=False,
            help="Which values to show: integers, slices and `...`, with commas between. Write -- "
            "in front of one that begins with a minus.",
        ),
    ] = None,
    tag: Tag = None,
    stats: Annotated[
        bool,
        typer.Option("--stats", "-s", help="Read the whole tensor for minimum, maximum and mean."),
    ] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Show one tensor and its first values, or the tensors of a saved state.

    Examples:

    - `packhorse shelf show runs/data.shelf x`
    - `packhorse shelf show runs/data.shelf x 10:20,0 --stats`
    - `packhorse shelf show runs/data.shelf x --tag epoch-3 -- -1`
    """

    def work() -> ShownTensor | ShownState:
        with actions.open_shelf(shelf) as opened:
            return actions.show(opened, shelf, name, index, tag, stats=stats, watch=progress)

    _once(shelf, work, render.show_lines, json)


@shelf_app.command(no_args_is_help=True)
def verify(shelf: Folder, json: Json = False) -> None:
    """Decode every chunk, of all tags too, and list all problems (exit code 1).

    Examples:

    - `packhorse shelf verify runs/data.shelf`
    """

    def work() -> VerifiedShelf:
        with actions.open_shelf(shelf) as opened:
            return actions.verify(opened, shelf, progress)

    row = _once(shelf, work, render.verify_lines, json)
    if not row.ok:
        raise typer.Exit(ExitCode.BAD_DATA)


@shelf_app.command(no_args_is_help=True)
def compact(shelf: Folder, dry_run: DryRun = False, json: Json = False) -> None:
    """Make the file of a shelf shorter by the space that nothing uses any more.

    Examples:

    - `packhorse shelf compact runs/data.shelf --dry-run`
    - `packhorse shelf compact runs/data.shelf`
    """

    def work() -> CompactedShelf:
        with actions.open_shelf(shelf, "r" if dry_run else "r+") as opened:
            return actions.compact(opened, shelf, progress, dry_run=dry_run)

    _once(shelf, work, render.compacted_line, json)


@shelf_app.command(no_args_is_help=True)
def export(
    shelf: Folder,
    dest: Annotated[
        str,
        typer.Argument(
            metavar="DEST", show_default=False,
            help="What to write: a folder X.zarr, or a file X.npy or X.safetensors.",
        ),
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Tensors; by default all.", show_default=False),
    ] = None,
    format: Format = None,
    tag: Tag = None,
    dry_run: DryRun = False,
    force: Force = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Write tensors of a shelf to a file or folder of another format.

    Tensors are written chunk by chunk, so they may be larger than memory. An .npy file has one
    tensor.

    Examples:

    - `packhorse shelf export runs/data.shelf data.zarr`
    - `packhorse shelf export runs/data.shelf x.npy x --tag epoch-3`
    - `packhorse shelf export runs/data.shelf some.safetensors mean std`
    """

    def work() -> ExportedTensors:
        with actions.open_shelf(shelf) as opened:
            return exchange.export(
                opened, shelf, dest, names or [], format=format, tag=tag, dry_run=dry_run,
                force=force, watch=progress,
            )  # fmt: skip

    _once(shelf, work, render.exported_lines, json)


@shelf_app.command("import", no_args_is_help=True)
def import_(
    shelf: Folder,
    src: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC", show_default=False,
            help="Folders X.zarr, files X.npy and X.safetensors, packed or plain, or URLs of them.",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", show_default=False,
            help="The tensor's name. Tensors that have names get it in front: NAME/weight.",
        ),
    ] = None,
    format: Format = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace tensors that have these names.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="DTYPE", show_default=False,
            help="What the elements of .npy files are that do not say so: bfloat16, ...",
        ),
    ] = None,
    level: Level = LevelName.DEFAULT,
    threads: Threads = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Put tensors from files and folders into a shelf, which the first import creates.

    A tensor gets the name that it has in the file; that of an .npy file is called like the file.
    Tensors are read part by part, so they may be larger than memory. Each source is imported as a
    whole or not at all.

    Examples:

    - `packhorse shelf import runs/data.shelf x.npy y.npy`
    - `packhorse shelf import runs/data.shelf old.npy --name x --replace`
    - `packhorse shelf import runs/data.shelf model.safetensors --name model`
    """
    jobs = exchange.incoming(src, format, name, dtype)
    with exchange.receiver(shelf, dry_run=dry_run, level=level.value, threads=threads) as opened:
        each(
            jobs,
            lambda job: [
                exchange.import_(
                    opened, shelf, job, dry_run=dry_run, replace=replace, watch=progress
                )
            ],
            render.imported_lines,
            json,
        )
