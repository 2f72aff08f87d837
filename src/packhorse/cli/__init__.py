"""The `packhorse` command: pack, unpack, inspect, verify, bench, and snapshot with its own verbs.

This module is the entry point; the installed command comes here by way of `start`, which answers
Ctrl-C meanwhile. Both import nothing outside the standard library until they are called, so that a
missing extra is told in one line. The rest of the folder: `app` declares the verbs and `options`
what several have; `runs` does one source after the other; `jobs` turns the paths of a command line
into work; `actions` does the work on the disk hop; `measure` times codecs in memory; `render` draws
tables, bars and progress, `grid` makes tables fit, and `streams` makes standard output safe; `help`
names types; `failures` holds the exit codes and words every error as one line; `snapshots` has all
of these for `packhorse snapshot`. Actions never draw, and `render` never touches a file.

What was asked for goes to standard output; progress and errors go to standard error, progress on
a terminal alone.
"""

import json
import sys

from packhorse.cli.failures import ExitCode, describe, is_lack_of_memory

__all__ = ["main", "tell_lack_of_memory"]


def main(args: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: words of the command line without the program's name; None takes those of the process.

    Returns:
        The exit code; `packhorse --help` lists them.
    """
    try:
        from packhorse.cli import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"typer", "rich"}:
            raise
        return _tell(ExitCode.MISSING_PACKAGE, _missing(error.name), args)
    except Exception as error:
        if not is_lack_of_memory(error):
            raise
        # What was imported half way goes with the traceback; there may be no memory to tell before.
        error.__traceback__ = None
        return tell_lack_of_memory(args)
    return app.run(args)


def _missing(package: str) -> str:
    return (
        f"the command line needs {package}, which is not installed; run `pip install "
        "packhorse[cli]`"
    )


def tell_lack_of_memory(args: list[str] | None = None) -> int:
    """Tell that there is too little memory to import what the program needs.

    Args:
        args: as of `main`.

    Returns:
        The exit code.
    """
    return _tell(ExitCode.IO, describe(MemoryError(), doing="start"), args)


def _tell(code: ExitCode, message: str, args: list[str] | None) -> int:
    """One line, and a JSON document if it is wanted."""
    sys.stderr.write(f"packhorse: error: {message}\n")
    if "--json" in (sys.argv[1:] if args is None else args):
        row = {"path": "", "exit_code": int(code), "message": message}
        sys.stdout.write(json.dumps({"results": [], "errors": [row]}, indent=2) + "\n")
    return int(code)
