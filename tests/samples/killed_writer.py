"""A writer in a process of its own, which is killed at any moment."""

import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

__all__ = ["run_and_kill"]


def run_and_kill(writer: BaseProcess, log: Path, after_s: float) -> list[str]:
    """Start a process that notes in a log what it does, and kill it some time after its first note.
    Returns the lines that it has completed."""
    log.unlink(missing_ok=True)
    writer.start()
    while not (log.exists() and log.stat().st_size):
        assert writer.is_alive()
        time.sleep(0.0005)
    time.sleep(after_s)
    writer.kill()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    return log.read_text().split("\n")[:-1]
