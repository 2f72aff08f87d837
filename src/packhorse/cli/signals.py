"""The signals that end a run, and the handler for them while the program starts.

Only the standard library is imported here.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

__all__ = ["ENDING", "stop_start"]

# Windows has no SIGHUP, and another signal for Ctrl-Break.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
ENDING = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


def stop_start(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal that arrives before any work: print a line and end the process."""
    message = f"stopped by {signal.Signals(number).name}; no work was started"
    if "--json" in sys.argv:
        error = {"path": "", "exit_code": 128 + number, "message": message}
        _print(1, json.dumps({"results": [], "errors": [error]}, indent=2))
    _print(2, f"packhorse: error: {message}")
    os._exit(128 + number)


def _print(descriptor: int, text: str) -> None:
    with suppress(OSError):  # the stream is closed, and there is no other place to print
        os.write(descriptor, f"{text}\n".encode())
