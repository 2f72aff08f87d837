"""Train a small model with a snapshot every few steps, and resume after an interruption.

Run `python examples/train_with_snapshots.py FOLDER`, stop it with Ctrl-C or kill -9, and run it
again: it resumes from the newest snapshot, with the same losses as without the interruption.
"""

import argparse
import os
import signal

import torch
from torch import nn

from packhorse.disk import SnapshotStore


def main(args: argparse.Namespace) -> None:
    """Train to the last step, from the newest snapshot of the store."""
    torch.manual_seed(0)
    data = torch.randn(4096, 64).cumsum(dim=1)  # random walks; the model predicts the last step
    model = nn.Sequential(nn.Linear(63, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    with SnapshotStore(args.store) as store:
        first = 0
        if names := store.names():
            state = store.restore(names[-1], framework="pt")
            for name, part in parts.items():
                part.load_state_dict(state[name])
            torch.set_rng_state(state["rng"])
            first = state["step"]
            print(f"resumed from {names[-1]} of {len(names)} snapshots", flush=True)

        for step in range(first + 1, args.steps + 1):
            batch = data[torch.randint(len(data), (64,))]
            loss = nn.functional.mse_loss(model(batch[:, :63]), batch[:, 63:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            print(f"step {step}: loss {loss.item()!r}", flush=True)
            if step == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % args.every == 0:  # the state is copied now and packed in the background
                state = {name: part.state_dict() for name, part in parts.items()}
                state |= {"rng": torch.get_rng_state(), "step": step}
                store.take_async(f"step-{step}", state, metadata={"loss": loss.item()})
    print(f"{len(store.names())} snapshots take {store.stored_nbytes():,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", help="folder or URL of the snapshots")
    parser.add_argument("--steps", type=int, default=200, help="train to this step")
    parser.add_argument("--every", type=int, default=10, help="steps between snapshots")
    parser.add_argument("--kill-at", type=int, help="step after which the process kills itself")
    main(parser.parse_args())
