"""Functions that ranks run in tests of the benchmarks' launcher."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["die", "hang", "refuse", "total"]


def total(rank: int, world: int, group: dist.ProcessGroup, options: dict[str, Any]) -> Any:
    """The sum of all ranks and a value of the options."""
    value = torch.tensor([rank + options["value"]])
    dist.all_reduce(value, group=group)
    return {"rank": rank, "sum": int(value), "device": options["device"]}


def refuse(rank: int, world: int, group: dist.ProcessGroup, options: dict[str, Any]) -> Any:
    """Rank 1 fails while rank 0 waits for it."""
    if rank == 1:
        raise ValueError("no such row: 17")
    dist.barrier(group)


def die(rank: int, world: int, group: dist.ProcessGroup, options: dict[str, Any]) -> Any:
    """Rank 1 is killed while rank 0 waits for it."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group)


def hang(rank: int, world: int, group: dist.ProcessGroup, options: dict[str, Any]) -> Any:
    """All ranks leave their process ids and wait for nothing."""
    Path(options["folder"], str(rank)).write_text(str(os.getpid()))
    time.sleep(1000)
