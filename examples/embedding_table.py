"""Trains a recommender whose table of items stays packed in memory of the host.

python examples/embedding_table.py             # its losses are those of torch.nn.EmbeddingBag
"""

import argparse
import copy

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from packhorse.host import HotRows, RowOptimizer, pack_embedding_

BAGS, BAG, COLUMNS = 256, 10, 128


class Recommender(nn.Module):
    """What people like, by the items they have seen."""

    def __init__(self, n_items: int) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(n_items, COLUMNS, mode="mean", sparse=True)
        self.items.weight.data.mul_(0.05)
        self.top = nn.Linear(COLUMNS, 1)

    def forward(self, seen: Tensor) -> Tensor:
        return self.top(self.items(seen))[:, 0]


def train(model: Recommender, optimizer: Optimizer, batches: list[Tensor]) -> list[float]:
    """The losses."""
    losses = []
    for seen in batches:
        liked = (seen % 7 < 3).float().mean(1).round()
        loss = nn.functional.binary_cross_entropy_with_logits(model(seen), liked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=50_000)
    rows = parser.parse_args().rows
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # Adagrad would warn that it is so
    batches = [(torch.rand(BAGS, BAG) ** 4 * rows).long() for _ in range(20)]
    plain = Recommender(rows)
    pack_embedding_((packed := copy.deepcopy(plain)).items)  # from_pretrained takes files, too
    print(packed.items)
    losses = train(packed, RowOptimizer(packed, Adagrad, lr=0.01), batches)
    same = losses == train(plain, Adagrad(plain.items.parameters(), lr=0.01), batches)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the losses are the same: {same}")
    hot = HotRows.of_batches(packed.items.table, batches[:-1], nbytes=1 << 20, device="cpu")
    hot.gather(batches[-1])
    print(f"1 MiB of packed hot rows has {hot.hit_rate:.0%} of what the last batch looks up")
