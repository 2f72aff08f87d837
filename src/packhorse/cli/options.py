"""Options that several verbs have."""

from enum import StrEnum
from typing import Annotated

import typer

__all__ = [
    "Base",
    "Check",
    "CheckName",
    "Force",
    "FormatName",
    "Json",
    "Level",
    "LevelName",
    "MaxNbytes",
    "Output",
    "PartNbytes",
    "Scheduler",
    "Threads",
]


class LevelName(StrEnum):
    """Names of the levels on the command line."""

    FAST = "fast"
    DEFAULT = "default"
    MAX = "max"


class CheckName(StrEnum):
    """How an existing output is compared with its source."""

    QUICK = "quick"
    WHOLE = "whole"


class FormatName(StrEnum):
    """Names of the formats of weights in memory."""

    W12 = "W12"
    W11 = "W11"


Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DST",
        help="Where to write the result: a path or a URL; with several sources, a folder.",
        show_default=False,
    ),
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="OLD",
        help="The base model of a fine-tune: a file or folder, packed or not, or its URL.",
        show_default=False,
    ),
]
Level = Annotated[
    LevelName,
    typer.Option("--level", "-l", help="Trades speed for size. Every level is lossless."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", "-t", min=1, help="Number of threads; by default one per core, at most 8.",
        show_default=False,
    ),
]  # fmt: skip
MaxNbytes = Annotated[
    int | None,
    typer.Option(
        "--max-nbytes",
        min=0,
        help="Refuse a source whose tensors take more bytes than this.",
        show_default=False,
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="ADDRESS",
        help="Share the work on a Dask cluster: the scheduler's address; local starts one here.",
        show_default=False,
    ),
]
Check = Annotated[
    CheckName | None,
    typer.Option(
        "--check",
        help="With --scheduler: how to compare outputs that exist, quick by default.",
        show_default=False,
    ),
]
PartNbytes = Annotated[
    int | None,
    typer.Option(
        "--part-nbytes",
        min=1,
        help="With --scheduler: pack larger files by several tasks; 2 GiB by default.",
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace an existing output.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
