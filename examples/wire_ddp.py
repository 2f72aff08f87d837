"""Train a model by data parallelism on two processes of this machine, with gradients packed.

The losses are the same as without packing, to the last bit. The table at the end tells how each
kind of call ran, and why: on one machine, PyTorch's own transfers are hard to beat.
"""

import argparse
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from packhorse.wire import Collectives, compression_hook


def train(model: torch.nn.Module, n_steps: int) -> list[float]:
    """Some steps of AdamW on the batches of this rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(n_steps):
        torch.manual_seed(2 * step + dist.get_rank())
        x = torch.randn(64, 256)
        loss = (model(x) - x.cumsum(1).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def run(rank: int, n_steps: int, choice: str, store: str) -> None:
    """What each process does."""
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    found = {}
    for how in ("plain", "packed"):
        torch.manual_seed(0)
        layers = torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)
        model = DistributedDataParallel(torch.nn.Sequential(*layers))
        collectives = Collectives(choice=choice)
        if how == "packed":
            model.register_comm_hook(collectives, compression_hook)
        found[how] = train(model, n_steps)
    if rank == 0:
        print(f"loss {found['packed'][0]:.4f}, then {found['packed'][-1]:.4f}")
        print(f"the losses are the same: {found['plain'] == found['packed']}")
        print(collectives.explain())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--choice", default="auto")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        spawn(run, (args.steps, args.choice, f"{folder}/store"), nprocs=2)
