"""The process of one rank: `python -m benchmarks.wire.one_rank FOLDER RANK`; ranks.py starts it.

The ranks find each other through a file in the folder, so that nothing but their own connections
passes the links. The group is gloo, on the interface that the links name.
"""

import ctypes
import datetime
import faulthandler
import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["main"]

PR_SET_PDEATHSIG = 1


def main(folder: Path, rank: int) -> None:
    """Run the function of the job in the folder, and leave its result there.

    Args:
        folder: where ranks.py wrote the job.
        rank: which one to be.
    """
    job = json.loads((folder / "job.json").read_text())
    _die_with(job["parent"])
    # A rank that hangs says where before it is ended.
    faulthandler.dump_traceback_later(0.9 * job["timeout"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=job["world"],
        timeout=datetime.timedelta(seconds=job["timeout"]),
    )
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
    module, _, name = job["function"].partition(":")
    options = job["options"] | {"device": job["device"]}
    result = getattr(import_module(module), name)(rank, job["world"], dist.group.WORLD, options)
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _die_with(parent: int) -> None:
    """End this process as soon as the one that started it has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this rank has ended")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
