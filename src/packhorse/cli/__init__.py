"""The `packhorse` command: pack, unpack, inspect, verify, bench, tune, snapshot and shelf.

`main` here runs the command line. The installed command begins in `start`, which handles Ctrl-C
while the imports run. Until their `main` is called, both modules import only the standard library,
so that a missing extra can be reported in one line.

The other modules: `app` declares the verbs, and `options` the options that several verbs have.
`jobs` turns the paths of a command line into jobs, and `runs` does one job after the other.
`actions` does the work through the disk hop; `measure` does the work of `bench`, and `tune` its
own. `render` draws tables, bars and progress, `grid` fits tables to the terminal,
`standard_streams` makes standard output and error safe to write to, and `help` names types in the
help. `failures` holds the exit codes and words each error as one line. `snapshots` and `shelf` have
modules of the same names for `packhorse snapshot` and `packhorse shelf`. Actions never draw, and
`render` never opens a file.

Results go to standard output; progress and errors go to standard error. Progress appears only on a
terminal.
"""

import json
import sys

from packhorse.cli.failures import ExitCode, describe, is_lack_of_memory

__all__ = ["main", "tell_lack_of_memory"]


def main(args: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: the words of the command line after the program's name; None for those of the process.

    Returns:
        The exit code; `packhorse --help` lists the codes.
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
        # The traceback keeps half-imported modules alive. Freeing them gives back memory, which the
        # message may need.
        error.__traceback__ = None
        return tell_lack_of_memory(args)
    return app.run(args)


def _missing(package: str) -> str:
    return (
        f"the command line needs {package}, which is not installed; run `pip install "
        "packhorse[cli]`"
    )


def tell_lack_of_memory(args: list[str] | None = None) -> int:
    """Report that there is too little memory to import the program's libraries.

    Args:
        args: as for `main`.

    Returns:
        The exit code.
    """
    return _tell(ExitCode.IO, describe(MemoryError(), doing="start"), args)


def _tell(code: ExitCode, message: str, args: list[str] | None) -> int:
    """Print one line, and a JSON document if the command line asks for it."""
    sys.stderr.write(f"packhorse: error: {message}\n")
    if "--json" in (sys.argv[1:] if args is None else args):
        row = {"path": "", "exit_code": int(code), "message": message}
        sys.stdout.write(json.dumps({"results": [], "errors": [row]}, indent=2) + "\n")
    return int(code)
