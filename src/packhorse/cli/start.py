"""Where the command `packhorse` begins, before anything that takes time is imported.

NumPy and what draws tables take half a second to import, and Ctrl-C in that time would show where
the import was. Nothing is being written yet, so the program just ends, and tells that in one line.
What is imported before this, `packhorse` and `packhorse.cli`, needs the standard library alone.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

__all__ = ["main"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Run the command line, as `packhorse.cli.main` does.

    Returns:
        The exit code.
    """
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a job in the background
            signal.signal(number, _end)
    try:
        from packhorse.cli import main as run

        return run()
    finally:
        for number in _ENDING:
            if signal.getsignal(number) is _end:
                signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    message = f"stopped by {signal.Signals(number).name}; nothing was begun"
    if "--json" in sys.argv:
        error = {"path": "", "exit_code": 128 + number, "message": message}
        _print(1, json.dumps({"results": [], "errors": [error]}, indent=2))
    _print(2, f"packhorse: error: {message}")
    os._exit(128 + number)


def _print(descriptor: int, text: str) -> None:
    with suppress(OSError):  # it is closed, and there is no other place
        os.write(descriptor, f"{text}\n".encode())
