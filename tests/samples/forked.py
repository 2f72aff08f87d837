"""Processes that are forked from a server which has imported what this process has.

Each test process starts one such server, when a test first asks for it, and all tests share it. A
list of modules for each test would not do: the first one starts the server, with its list alone.
The server imports what tests need that is slow to import, as far as this process has imported it,
so that the tests of one file wait only for what that file needs.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

__all__ = ["fork_context"]

# None of them starts a thread when it is imported.
_PRELOADED = (
    *("numpy", "packhorse.disk", "torch", "torch.distributed.fsdp", "packhorse.disk.dcp"),
    *("packhorse.wire.exchange", "packhorse.wire.embeddings", "torchrec", "packhorse.torchrec"),
    *("killed_writer", "shelf_workload", "snapshot_child", "dcp_ranks", "wire_ranks", "wire_jobs"),
    *(
        "wire_device_jobs",
        "wire_exchange_jobs",
        "wire_fault_jobs",
        "wire_training",
        "embedding_jobs",
        "torchrec_jobs",
    ),
)


def fork_context() -> ForkServerContext:
    """The context of such processes. Its server runs when this function returns."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in _PRELOADED if name in sys.modules])
    # Up to Python 3.13 at least, a server does not get `sys.path`: it would not find the samples.
    before = os.environ.get("PYTHONPATH")
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = here if before is None else os.pathsep.join((here, before))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context
