"""The signals that end a run, and what they do before it has begun; the standard library alone."""

import json
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

__all__ = ["ENDING", "stop_start"]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_start(number: int, frame: FrameType | None) -> NoReturn:
    """End the program by a signal before it has begun anything."""
    message = f"stopped by {signal.Signals(number).name}; nothing was begun"
    if "--json" in sys.argv:
        error = {"path": "", "exit_code": 128 + number, "message": message}
        _print(1, json.dumps({"results": [], "errors": [error]}, indent=2))
    _print(2, f"packhorse: error: {message}")
    os._exit(128 + number)


def _print(descriptor: int, text: str) -> None:
    with suppress(OSError):  # it is closed, and there is no other place
        os.write(descriptor, f"{text}\n".encode())
