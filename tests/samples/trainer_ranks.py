"""Two processes that train together: `trainer_ranks.py FOLDER`. They do a run without a stop, a run
that is stopped, and a run that resumes it. The first process writes the logs of the first and last
run to files."""

import json
import os
import sys
from pathlib import Path

import torch
from torch.multiprocessing import spawn
from trainer_samples import Stop, history, make_trainer

from packhorse.transformers import PackhorseCallback

WORLD = 2


def train(rank: int, folder: Path) -> None:
    """What each process does; the environment says what `torchrun` would say there."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # asked for, and not used
    os.environ["OMP_NUM_THREADS"] = "1"  # or accelerate takes all cores for each
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/ranks", rank=rank, world_size=WORLD
    )
    options = {"save_steps": 2, "per_device_train_batch_size": 3}  # 4 steps an epoch

    whole = make_trainer(folder / "own", [], **options)
    whole.train()
    try:
        callback = PackhorseCallback(folder / "store")
        make_trainer(folder / "out", [callback, Stop(7)], **options).train()
    except KeyboardInterrupt:
        callback.store.close()
    torch.distributed.barrier()
    callback = PackhorseCallback(folder / "store")
    resumed = make_trainer(folder / "out", [callback], seed=77 + rank, **options)
    start = callback.checkpoint()
    assert start is not None
    assert start.endswith("checkpoint-6")
    torch.distributed.barrier()
    resumed.train(resume_from_checkpoint=start)
    if rank == 0:
        (folder / "whole").write_text(json.dumps(history(whole)))
        (folder / "resumed").write_text(json.dumps(history(resumed)))
    torch.distributed.destroy_process_group()
    # DistributedDataParallel still holds the process group, so its threads still run. If one of
    # them drops the tensors of its last collective while Python shuts down, PyTorch 2.13 aborts the
    # process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    spawn(train, (Path(sys.argv[1]),), nprocs=WORLD)
