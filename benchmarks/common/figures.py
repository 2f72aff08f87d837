"""Figures that a benchmark writes: the arguments for that, and what they say of the machine."""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import machine

__all__ = ["add_outputs", "begin", "end", "finish", "keep"]

Result = dict[str, Any]


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, `--write` and `--render` to the arguments."""
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    parser.add_argument("--write", action="store_true", help="keep figures, write the document")
    parser.add_argument("--render", action="store_true", help="only write the document again")


def begin() -> Result:
    """The machine and how busy it is, before anything is timed; `end` completes it."""
    return {
        "machine": machine.describe(),
        "load_before": os.getloadavg()[0],
        "core_scaling": [machine.core_scaling()],
    }


def end(result: Result) -> None:
    """Add how busy the machine is once all is timed to what `begin` has made."""
    result["load_after"] = os.getloadavg()[0]
    result["core_scaling"].append(machine.core_scaling())


def keep(result: Result, place: Path | None) -> None:
    """Writes figures as JSON.

    Args:
        result: the figures.
        place: the file; None to write nothing.
    """
    if place is not None:
        place.write_text(json.dumps(result, indent=1) + "\n")


def finish(
    result: Result, args: argparse.Namespace, place: Path, write: Callable[[Result], None]
) -> None:
    """Do with figures what the arguments of `add_outputs` say.

    Args:
        result: the figures.
        args: the arguments.
        place: the file of the figures that are kept.
        write: writes the document.
    """
    keep(result, args.json)
    if args.write:
        keep(result, place)
        write(result)
