"""Trains a DLRM to convergence with each way of sending its embeddings, on ranks over gloo.

    python benchmarks/wire/dlrm_training.py           # all arms; writes results and curves
    python benchmarks/wire/dlrm_training.py --arms fp32 "bounded, stochastic" --steps 300
    python benchmarks/wire/dlrm_training.py --picture # draws the curves of the results again

Each arm starts from the same weights and sees the same batches. Tables are spread over the ranks,
the batch is split, the dense layers are averaged by all-reduce. Embeddings learn by Adagrad,
dense layers by Adam. The area under the ROC curve (AUC) is that of samples that no arm saw,
with embeddings as they are. The results say how far an arm is from `fp32`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn import functional  # noqa: E402

from benchmarks.wire.dlrm_arms import ARMS, options_of  # noqa: E402
from benchmarks.wire.dlrm_model import KAGGLE, Model, Teacher, auc, capped  # noqa: E402
from packhorse.wire.embeddings import Bags, EmbeddingBags, EmbeddingExchange, on_rank  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "dlrm.json"
PICTURE = ROOT / "docs" / "dlrm_training.svg"


def main() -> None:
    """Runs the command line."""
    args = _arguments()
    found = json.loads(args.output.read_text()) if args.output.exists() else {"runs": {}}
    for arm in [] if args.picture else args.arms:
        start = time.perf_counter()
        run = train_on_ranks(arm, args)
        run["seconds"] = round(time.perf_counter() - start, 1)
        found["runs"][f"{arm} | {args.world} ranks | seed {args.seed}"] = run
        print(f"{arm}: AUC {run['auc']:.5f}, {run['nbytes_per_step']:,} B a step", flush=True)
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    if args.picture or not args.no_picture:
        from benchmarks.wire.dlrm_picture import draw

        draw(found, PICTURE)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=2048, help="samples of all ranks together")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--cap", type=int, default=100_000, help="most rows of a table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--picture", action="store_true")
    parser.add_argument("--no-picture", action="store_true")
    return parser.parse_args()


def train_on_ranks(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Trains one arm in new processes; returns what rank 0 found."""
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        settings = {k: getattr(args, k) for k in ("steps", "batch", "dim", "cap", "seed")}
        ranks = [
            context.Process(target=_rank, args=(rank, args.world, folder, arm, settings, queue))
            for rank in range(args.world)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"{arm}: a rank failed")
        result: dict[str, Any] = json.loads(queue.get())
        return result


def _rank(
    rank: int, world: int, folder: str, arm: str, settings: dict[str, Any], queue: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    result = train(arm, rank, world, settings)
    if rank == 0:
        queue.put(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def train(arm: str, rank: int, world: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains one arm on this rank; all ranks call it."""
    steps, batch, dim = settings["steps"], settings["batch"], settings["dim"]
    rows = capped(KAGGLE, settings["cap"])
    teacher = Teacher(rows)
    tables = [on_rank(f"t{i}", n, dim, i % world) for i, n in enumerate(rows)]
    torch.manual_seed(settings["seed"])
    model = Model(len(rows), dim)
    bags = EmbeddingBags(tables, **options_of(arm, iterations=steps // 2))
    fill(bags, settings["seed"])
    squares = [torch.zeros_like(parameter) for parameter in bags.parameters()]
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses, curve = [], []
    for step in range(steps):
        part = teacher.batch(step, batch, rank, world)
        loss = functional.binary_cross_entropy_with_logits(
            model(part.dense, bags([Bags(ids) for ids in part.ids])), part.labels
        )
        model.zero_grad()
        bags.zero_grad()
        loss.backward()
        _average(model, bags, world)
        dense.step()
        _adagrad(bags, squares, lr=0.05)
        losses.append(_mean(loss.detach(), world))
        if (step + 1) % -(-steps // 3) == 0 or step + 1 == steps:
            found = _test(model, bags, teacher, rank, world)
            curve.append([step + 1, found])
            if rank == 0:
                recent = losses[-50:]
                loss_ = sum(recent) / len(recent)
                print(f"  {arm} {step + 1}: loss {loss_:.5f} AUC {found:.5f}", flush=True)
    traffic = bags.exchange.traffic
    width = max(1, steps // 200)
    return {
        "auc": curve[-1][1],
        "auc_curve": curve,
        "loss_curve": [
            [i + width, round(sum(losses[i : i + width]) / width, 5)]
            for i in range(0, steps - width + 1, width)
        ],
        "nbytes_per_step": round(traffic.nbytes / steps),
        "ids_nbytes_per_step": round(traffic.ids_nbytes / steps),
        "rows_nbytes_per_step": round(traffic.rows_nbytes / steps),
        "gradients_nbytes_per_step": round(traffic.gradients_nbytes / steps),
        "settings": settings | {"world": world, "tables": "Criteo Kaggle, capped"},
    }


@torch.no_grad()
def _adagrad(bags: EmbeddingBags, squares: Sequence[torch.Tensor], lr: float) -> None:
    """A step of Adagrad for the rows that have a gradient, as `torch.optim.Adagrad` does it."""
    for parameter, square in zip(bags.parameters(), squares, strict=True):
        if parameter.grad is not None:
            ids, grads = parameter.grad.indices()[0], parameter.grad.values()
            sums = square[ids] + grads * grads
            square[ids] = sums
            parameter[ids] -= lr * grads / (sums.sqrt() + 1e-10)


@torch.no_grad()
def fill(bags: EmbeddingBags, seed: int) -> None:
    """The same first weights for any number of ranks: U(-1/sqrt(rows), 1/sqrt(rows))."""
    for number, parameter in zip(bags.exchange.held, bags.parameters(), strict=True):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        values = torch.rand(parameter.shape, generator=generator) * 2 - 1
        parameter.copy_(values / parameter.shape[0] ** 0.5)


def _average(model: torch.nn.Module, bags: EmbeddingBags, world: int) -> None:
    """Gradients of the mean over the whole batch: dense ones meet, embeddings' are summed."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for grad in grads:
        grad.copy_(flat[at : at + grad.numel()].view_as(grad))
        at += grad.numel()
    for parameter in bags.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad / world


def _mean(value: torch.Tensor, world: int) -> float:
    total = value.clone()
    dist.all_reduce(total)
    return float(total) / world


@torch.no_grad()
def _test(
    model: Model, bags: EmbeddingBags, teacher: Teacher, rank: int, world: int, n: int = 12
) -> float:
    """The AUC of 12 batches of 8,192 samples that are not for training, without loss on the way."""
    plain = EmbeddingExchange(bags.exchange.layout.tables)
    scores, labels = [], []
    for number in range(-n, 0):
        part = teacher.batch(number, 8192, rank, world)
        plan = plain.plan([Bags(ids) for ids in part.ids])
        scores.append(model(part.dense, plain.fetch(plan, bags.gather)))
        labels.append(part.labels)
    found = [_gathered(torch.cat(parts), world) for parts in (scores, labels)]
    return round(auc(found[0].numpy(), found[1].numpy()), 6)


def _gathered(values: torch.Tensor, world: int) -> torch.Tensor:
    parts = [torch.empty_like(values) for _ in range(world)]
    dist.all_gather(parts, values)
    return torch.cat(parts)


if __name__ == "__main__":
    main()
