"""Figures that a benchmark writes: the arguments for that, and what they say of the machine."""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import machine

__all__ = ["add_outputs", "begin", "conditions", "end", "keep", "run"]

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


def conditions(result: Result, *, how: str = "", where: str = "") -> str:
    """The machine of a measurement, how busy it was, and the versions, for a document.

    Args:
        result: what `begin` and `end` have filled, with "date", "versions" and "path".
        how: what to say behind the date.
        where: what to say behind the memory.
    """
    m = result["machine"]
    packages = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    before, after = result["core_scaling"]
    return (
        f"Measured on {result['date']}{how}. {m['cpu']} (family/model/stepping "
        f"{m['family_model_stepping']}), {m['cores']} cores, {m['memory_gib']} GiB{where}.\n"
        f"{m['system']}, Python {m['python']}; {packages}.\n"
        f"packhorse on its {result['path']} path; load {result['load_before']:.1f} before, "
        f"{result['load_after']:.1f} after.\n"
        f"Two threads of SHA-256 in the cache did {before:.2f} times the work of one before, and "
        f"{after:.2f} after."
    )


def keep(result: Result, place: Path | None) -> None:
    """Writes figures as JSON.

    Args:
        result: the figures.
        place: the file; None to write nothing.
    """
    if place is not None:
        place.write_text(json.dumps(result, indent=1) + "\n")


def run(
    args: argparse.Namespace,
    place: Path,
    measure: Callable[[argparse.Namespace], Result],
    write: Callable[[Result], None],
) -> int:
    """Measure, and do with the figures what the arguments of `add_outputs` say.

    Args:
        args: the arguments.
        place: the file of the figures that are kept.
        measure: prints and returns the figures; it is not called for `--render`.
        write: writes the document.

    Returns:
        The exit status: 0.
    """
    if args.render:
        write(json.loads(place.read_text()))
        return 0
    result = measure(args)
    keep(result, args.json)
    if args.write:
        keep(result, place)
        write(result)
    return 0
