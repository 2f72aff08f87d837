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

__all__ = ["main"]

MISSING_PACKAGE_EXIT_CODE = 4


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
        _tell_missing(error.name, sys.argv[1:] if args is None else args)
        return MISSING_PACKAGE_EXIT_CODE
    return app.run(args)


def _tell_missing(package: str, words: list[str]) -> None:
    message = (
        f"the command line needs {package}, which is not installed: run `pip install "
        "packhorse[cli]`"
    )
    sys.stderr.write(f"packhorse: error: {message}\n")
    if "--json" in words:
        row = {"path": "", "exit_code": MISSING_PACKAGE_EXIT_CODE, "message": message}
        sys.stdout.write(json.dumps({"results": [], "errors": [row]}, indent=2) + "\n")
