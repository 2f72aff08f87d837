"""The program of each of several processes that train together: a run without a stop, a run that is
stopped, and a run that resumes it. The first process writes the logs of the first and last run to
files."""

import json
import os
import sys
from pathlib import Path

import torch
from trainer_samples import Stop, history, make_trainer

from packhorse.transformers import PackhorseCallback

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
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
# DistributedDataParallel still holds the process group, so its threads still run. If one of them
# drops the tensors of its last collective while Python shuts down, PyTorch 2.13 aborts the process.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
