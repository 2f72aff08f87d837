"""Trains a DLRM to convergence with each way of sending its embeddings, on ranks over gloo.

    python benchmarks/wire/dlrm_training.py           # all arms; writes results and curves
    python benchmarks/wire/dlrm_training.py --arms fp32 bounded --steps 300
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.wire.dlrm_arms import ARMS, options_of  # noqa: E402
from benchmarks.wire.dlrm_model import KAGGLE, Model, Teacher, auc, capped  # noqa: E402
from benchmarks.wire.dlrm_ranks import InOneProcess, OverGloo, Ranks  # noqa: E402
from packhorse.wire.embeddings import on_rank  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "dlrm.json"
PAGE = ROOT / "docs" / "dlrm.md"
PICTURE = ROOT / "docs" / "dlrm_training.svg"
DENSE_RATE, SPARSE_RATE = 1e-3, 0.05
# Over this share of the steps, at the end, the learning rates fall to zero: so the AUC of two runs
# does not differ by where their weights happened to be.
DECAY = 1 / 3
CURVE = 8  # so often is the AUC measured


def main() -> None:
    """Runs the command line."""
    args = _arguments()
    empty: dict[str, Any] = {"kind": "dlrm", "runs": {}}
    found = json.loads(args.output.read_text()) if args.output.exists() else empty
    for arm in [] if args.picture else args.arms:
        start = time.perf_counter()
        run = train_alone(arm, args) if args.one_process else train_on_ranks(arm, args)
        run["seconds"] = round(time.perf_counter() - start, 1)
        found["runs"][f"{arm} | {args.world} ranks | seed {args.seed}"] = run
        print(f"{arm}: AUC {run['auc']:.5f}, {run['nbytes_per_step']:,} B a step", flush=True)
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    if args.picture or not args.no_picture:
        from benchmarks.wire.dlrm_picture import draw, write_table

        draw(found, PICTURE)
        write_table(found, PAGE)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--batch", type=int, default=2048, help="samples of all ranks together")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--cap", type=int, default=100_000, help="most rows of a table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--one-process", action="store_true", help="all ranks in one process: the same bits"
    )
    parser.add_argument("--picture", action="store_true")
    parser.add_argument("--no-picture", action="store_true")
    return parser.parse_args()


def train_alone(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Trains one arm with all ranks in this process."""
    torch.set_num_threads(1)
    settings = {k: getattr(args, k) for k in ("steps", "batch", "dim", "cap", "seed")}
    return train(arm, InOneProcess(args.world), settings)


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
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    result = train(arm, OverGloo(rank, world), settings)
    if rank == 0:
        queue.put(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def train(arm: str, ranks: Ranks, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains one arm on the ranks that this process has."""
    steps, batch, dim, world = settings["steps"], settings["batch"], settings["dim"], ranks.world
    rows = capped(KAGGLE, settings["cap"])
    teacher = Teacher(rows)
    tables = [on_rank(f"t{i}", n, dim, i % world) for i, n in enumerate(rows)]
    torch.manual_seed(settings["seed"])
    model = Model(len(rows), dim)
    ranks.set_up(tables, settings["seed"], lambda: options_of(arm, iterations=steps // 2))
    dense = torch.optim.Adam(model.parameters(), lr=DENSE_RATE)
    losses, curve = [], []
    for step in range(steps):
        parts = [teacher.batch(step, batch, rank, world) for rank in ranks.own]
        model.zero_grad()
        losses.append(ranks.backward(model, parts))
        share = min(1, (steps - step) / (steps * DECAY))
        dense.param_groups[0]["lr"] = share * DENSE_RATE
        dense.step()
        ranks.adagrad(lr=share * SPARSE_RATE)
        if (step + 1) % -(-steps // CURVE) == 0 or step + 1 == steps:
            curve.append([step + 1, measure_auc(model, ranks, teacher)])
            recent = losses[-50:]
            text = (
                f"  {arm} {step + 1}: loss {sum(recent) / len(recent):.5f} AUC {curve[-1][1]:.5f}"
            )
            if 0 in ranks.own:
                print(text, flush=True)
    width = max(1, steps // 200)
    means = [sum(losses[i : i + width]) / width for i in range(0, steps - width + 1, width)]
    return {
        "auc": curve[-1][1],
        "auc_curve": curve,
        "loss_curve": [[width * (i + 1), round(mean, 5)] for i, mean in enumerate(means)],
        **{f"{k}_per_step": round(v / steps) for k, v in ranks.sent().items()},
        "settings": settings | {"world": world, "tables": "Criteo Kaggle, capped"},
    }


@torch.no_grad()
def measure_auc(model: Model, ranks: Ranks, teacher: Teacher, n: int = 12) -> float:
    """The AUC of 12 batches of 8,192 samples that no arm learns from; rows travel without loss."""
    scores, labels = [], []
    for number in range(-n, 0):
        parts = [teacher.batch(number, 8192, rank, ranks.world) for rank in ranks.own]
        for part, bags in zip(parts, ranks.exact_bags(parts), strict=True):
            scores.append(model(part.dense, bags))
            labels.append(part.labels)
    found = [ranks.gathered(torch.cat(parts)) for parts in (scores, labels)]
    return round(auc(found[0].numpy(), found[1].numpy()), 6)


if __name__ == "__main__":
    main()
