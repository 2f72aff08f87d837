"""Train a small network, keep every iterate on a shelf, and predict with the posterior.

Run `python examples/posterior.py FOLDER`, stop it with Ctrl-C or kill -9, and run it again: it goes
on from its checkpoint, and ends with the same posterior as without the interruption.
"""

import argparse

import torch
from torch import nn

from packhorse.disk import Shelf
from packhorse.learn import SWAG


def main(args: argparse.Namespace) -> None:
    """Train to the last step, from the checkpoint on the shelf."""
    torch.manual_seed(0)
    x = torch.randn(1000, 2)
    y = (x[:, 0] * x[:, 1] > 0).long() ^ (torch.rand(1000) < 0.1)  # a tenth of the labels is wrong
    wide = nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
    model = nn.Sequential(*wide, nn.Linear(256, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = 0
    with Shelf(args.shelf) as shelf, SWAG(model, shelf) as swag:
        if shelf.keys("checkpoint"):
            state = shelf.load("checkpoint", framework="pt")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
            first = state["step"]
            print(f"goes on from step {first}, with {swag.n_collected} iterates", flush=True)

        for step in range(first + 1, args.steps + 1):
            batch = torch.randint(len(x), (100,))
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step > args.start:
                swag.collect(step)  # iterates that are on the shelf already are skipped
            if step % 20 == 0:  # checkpoint and iterates in one commit
                with shelf.transaction():
                    swag.flush()
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    shelf.save("checkpoint", state | {"rng": torch.get_rng_state(), "step": step})
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        far = torch.tensor([[1.0, 1.0], [-6.0, 0.1]])  # an easy point, and one far from all data
        print("network:  ", model(far).softmax(-1)[:, 1].tolist())
        print("posterior:", swag.predict([far], 30, seed=0)[:, 1].tolist())
        print(f"{swag.rank} iterates take {shelf['swag/rows'].packed_nbytes:,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shelf", help="folder of the shelf")
    parser.add_argument("--steps", type=int, default=300, help="train to this step")
    parser.add_argument("--start", type=int, default=100, help="collect after this step")
    main(parser.parse_args())
