"""Scenario: a training step of a DLRM whose embeddings are spread over the ranks.

    python benchmarks/wire/dlrm.py --world 4     # on this machine, without a shaped link

Every arm runs whole steps of the same model on the same batches: ids to the holders, rows back,
forward and backward pass, gradients to the holders, a step of the optimizer, and the all-reduce of
the dense layers. Before anything is timed, the bags of the lossless arms are compared bit for bit.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn import functional  # noqa: E402

from benchmarks.wire.dlrm_arms import ARMS, options_of  # noqa: E402
from benchmarks.wire.dlrm_model import KAGGLE, Batch, Model, Teacher, capped  # noqa: E402
from benchmarks.wire.rounds import Arm, Marks, combine, interleave, now  # noqa: E402
from packhorse.wire.embeddings import (  # noqa: E402
    Bags,
    BoundedRows,
    EmbeddingBags,
    EmbeddingExchange,
    Traffic,
    on_rank,
)

__all__ = ["merge", "run"]

LOSSLESS = ("fp32", "dedup")
_N_BATCHES = 4  # drawn in advance, and used in turn
_N_SETTLING = 9
_DEFAULTS = {"batch": 8192, "dim": 32, "cap": 100_000, "rounds": 5, "arms": None, "device": "lo"}


def run(
    rank: int, world: int, group: dist.ProcessGroup, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure steps by all arms.

    Args:
        rank: this process.
        world: the number of ranks; 1, 2 or 4.
        group: all ranks.
        options: "rounds", "device" whose bytes are counted, "arms" (names, or None); also
            "batch" (samples of all ranks), "dim" and "cap" (most rows of a table).
    """
    options = _DEFAULTS | dict(options)
    options["arms"] = [name for name in ARMS if name in (options["arms"] or ARMS)]
    steps = _Steps(rank, world, group, options)
    steps.prove()
    arms = {name: steps.arm(name) for name in options["arms"]}
    steps.settle(arms)
    report = interleave(
        arms, options["rounds"], device=options["device"], barrier=lambda: dist.barrier(group)
    )
    counted = {name: steps.exchanges[name].traffic for name in arms}
    runs = options["rounds"] + 1
    return {
        "report": report,
        "batch": options["batch"],
        "nbytes": {name: traffic.nbytes / runs for name, traffic in counted.items()},
        "phases": {
            name: {phase: seconds / runs for phase, seconds in traffic.seconds.items()}
            for name, traffic in counted.items()
        },
    }


def merge(results: Sequence[Mapping[str, Any]], *, shared: bool) -> dict[str, Any]:
    """The figures of all ranks as one table.

    Args:
        results: of `run`, by rank.
        shared: whether all ranks count the bytes of one interface.
    """
    rows = combine([result["report"] for result in results], shared=shared)
    for name, row in rows.items():
        row["payload"] = round(sum(result["nbytes"][name] for result in results))
        row["phases"] = {
            phase: max(result["phases"][name].get(phase, 0.0) for result in results)
            for phase in results[0]["phases"][name]
        }
    return {"cases": [{"name": "DLRM step", "batch": results[0]["batch"], "rows": rows}]}


class _Steps:
    """The model, its tables, and an exchange for each arm, which all use the same tables."""

    def __init__(
        self, rank: int, world: int, group: dist.ProcessGroup, options: Mapping[str, Any]
    ) -> None:
        self._world, self._group = world, group
        rows = capped(KAGGLE, options["cap"])
        teacher = Teacher(rows)
        self._batches = [teacher.batch(i, options["batch"], rank, world) for i in range(_N_BATCHES)]
        tables = [on_rank(f"t{i}", n, options["dim"], i % world) for i, n in enumerate(rows)]
        torch.manual_seed(0)
        self._model = Model(len(rows), options["dim"])
        self._bags = EmbeddingBags(tables, group=group)
        self._optimizer = torch.optim.SGD(
            [*self._model.parameters(), *self._bags.parameters()], 0.1
        )
        self.exchanges = {
            name: EmbeddingExchange(tables, group=group, **options_of(name, iterations=1))
            for name in options["arms"]
        }

    def prove(self) -> None:
        """Compares the bags of the lossless arms with those of the plain exchange."""
        with torch.no_grad():
            wanted = self._bags(_bags(self._batches[0]))
            for name in self.exchanges:  # in one order on all ranks, which a set would not have
                if name not in LOSSLESS:
                    continue
                found = self._fetch(self.exchanges[name], self._batches[0])
                if not all(map(torch.equal, found, wanted)):
                    raise RuntimeError(f"{name}: the bags are not those of the tables")

    def settle(self, arms: Mapping[str, Arm]) -> None:
        """Runs the first steps of arms with bounds, which look at all values; later ones do not.
        Then all arms begin to count."""
        for name, exchange in self.exchanges.items():
            if isinstance(exchange.forward_codec, BoundedRows):
                for _ in range(_N_SETTLING):
                    arms[name]()
        for exchange in self.exchanges.values():
            exchange.traffic = Traffic()

    def arm(self, name: str) -> Arm:
        """Runs a step; the batches take turns."""
        exchange, count = self.exchanges[name], iter(range(1 << 30))
        return lambda: self._step(exchange, self._batches[next(count) % _N_BATCHES])

    def _fetch(self, exchange: EmbeddingExchange, batch: Batch) -> list[torch.Tensor]:
        return exchange.fetch(exchange.plan(_bags(batch)), self._bags.gather)

    def _step(self, exchange: EmbeddingExchange, batch: Batch) -> Marks:
        self._optimizer.zero_grad()
        bags = self._fetch(exchange, batch)
        fetched = now()
        logits = self._model(batch.dense, bags)
        loss = functional.binary_cross_entropy_with_logits(logits, batch.labels)
        torch.autograd.backward(loss)
        returned = now()
        self._average_dense()
        for parameter in self._bags.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad / self._world
        self._optimizer.step()
        if not bool(loss.isfinite()):
            raise RuntimeError(f"the loss is {float(loss)}")
        return {"rows": fetched, "gradients": returned}

    def _average_dense(self) -> None:
        """Averages the gradients of the dense layers, joined as DDP joins them."""
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=self._group)
        flat /= self._world
        means = torch.split(flat, [grad.numel() for grad in grads])
        for grad, mean in zip(grads, means, strict=True):
            grad.copy_(mean.view_as(grad))


def _bags(batch: Batch) -> list[Bags]:
    return [Bags(ids) for ids in batch.ids]


def _rank(rank: int, world: int, folder: str, options: Mapping[str, Any], queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    group = dist.group.WORLD
    assert group is not None
    queue.put((rank, run(rank, world, group, options)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--world", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS))
    args = parser.parse_args()
    options = {"rounds": args.rounds, "batch": args.batch, "arms": args.arms}
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        ranks = [
            context.Process(target=_rank, args=(rank, args.world, folder, options, queue))
            for rank in range(args.world)
        ]
        for rank in ranks:
            rank.start()
        found = dict(queue.get(timeout=600) for _ in ranks)
        for rank in ranks:
            rank.join()
    (case,) = merge([found[rank] for rank in range(args.world)], shared=True)["cases"]
    for name, row in case["rows"].items():
        median, least, most = row["seconds"]
        phases = " ".join(f"{k} {1e3 * v:.0f}" for k, v in row["phases"].items())
        print(
            f"{name:20} {1e3 * median:6.0f} ms [{1e3 * least:.0f}, {1e3 * most:.0f}] "
            f"{row['payload']:>12,} B  cpu {row['cpu']:.2f} s  ms: {phases}"
        )


if __name__ == "__main__":
    main()
