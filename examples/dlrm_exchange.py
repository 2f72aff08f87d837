"""Trains embeddings that lie on several processes: each distinct row travels once, both ways.

python examples/dlrm_exchange.py                # exactly
python examples/dlrm_exchange.py --bounded      # rows and gradients within error bounds
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from packhorse.codecs.bounded import Rounding
from packhorse.wire.bounds import Schedule, TableBounds
from packhorse.wire.embeddings import Bags, BoundedRows, EmbeddingBags, by_rows, on_rank

USERS, ITEMS, DIM, STEPS = 50_000, 400, 16, 60


def codecs() -> dict[str, BoundedRows]:
    """Codecs of rows and of gradients."""
    schedule = Schedule(iterations=STEPS // 2)  # bounds start at twice their size
    gradients = TableBounds(schedule=schedule, rounding=Rounding.STOCHASTIC)
    rows = TableBounds(schedule=schedule)
    return {"forward": BoundedRows(rows), "backward": BoundedRows(gradients)}


def train(rank: int, world: int, file: str, bounded: bool) -> None:
    """One process: a part of each batch, and a part of the tables."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    torch.sparse.check_sparse_tensor_invariants.disable()  # Adagrad would warn that it is so
    torch.manual_seed(rank)
    tables = [by_rows("user", USERS, DIM, world), on_rank("item", ITEMS, DIM, rank=0)]
    bags = EmbeddingBags(tables, **(codecs() if bounded else {}))
    optimizer = torch.optim.Adagrad(bags.parameters(), lr=0.3)
    for step in range(STEPS):
        users = (torch.rand(1024) ** 4 * USERS).long()  # a few users are seen often
        items = torch.randint(0, ITEMS, (1024,))
        liked = ((users % 7 + items % 5) % 2).float()
        user, item = bags([Bags(users), Bags(items)])
        loss = torch.nn.functional.binary_cross_entropy_with_logits((user * item).sum(1), liked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if rank == 0:
        print(*bags.exchange.explain(), sep="\n")
        print(f"{bags.exchange.traffic.nbytes / STEPS:,.0f} B sent in a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bounded", action="store_true")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (2, f"{folder}/ranks", parser.parse_args().bounded), nprocs=2)
