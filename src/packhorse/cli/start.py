"""Where the command `packhorse` begins, before anything that takes time or memory is imported.

NumPy, typer and rich take half a second to import, and Ctrl-C in that time would print a traceback
from inside an import. Nothing is being written yet, so the program prints one line and ends. It
does the same if there is not enough memory for the imports.

Modules that are imported earlier (`packhorse`, `packhorse.cli` and `packhorse.cli.failures`) need
only the standard library.
"""

import signal

from packhorse.cli.memory import has_memory_for
from packhorse.cli.signals import ENDING, stop_start

__all__ = ["main"]

_ROOM_NBYTES = 1 << 30  # the imports need a fifth of it


def main() -> int:
    """Run the command line, as `packhorse.cli.main` does.

    Returns:
        The exit code.
    """
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored by nohup, or in the background
            signal.signal(number, stop_start)
    try:
        from packhorse.cli import main as run
        from packhorse.cli import tell_lack_of_memory

        if not has_memory_for("packhorse.cli.app", _ROOM_NBYTES):
            return tell_lack_of_memory()
        return run()
    finally:
        for number in ENDING:
            if signal.getsignal(number) is stop_start:
                signal.signal(number, signal.SIG_DFL)
