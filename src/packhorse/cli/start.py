"""Where the command `packhorse` begins, before anything that takes time or memory is imported.

NumPy and what draws tables take half a second to import, and Ctrl-C in that time would show where
the import was. Nothing is being written yet, so the program just ends, and tells that in one line.
It does so, too, where there is not enough memory for them.

What is imported before this, `packhorse`, `packhorse.cli` and how they tell failures, needs the
standard library alone.
"""

import signal

from packhorse.cli.memory import has_memory_for
from packhorse.cli.signals import ENDING, stop_start

__all__ = ["main"]

_ROOM_NBYTES = 1 << 30  # the imports take a fifth of it


def main() -> int:
    """Run the command line, as `packhorse.cli.main` does.

    Returns:
        The exit code.
    """
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a job in the background
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
