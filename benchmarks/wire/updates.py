"""Scenario: a weight update from a trainer (rank 0) to its workers (all other ranks).

Each arm packs the difference of two states on rank 0, broadcasts it, unpacks it on the workers
beside the weights (background), and applies it (pause). Steps follow each other without overlap.
The weights are compared bit for bit after every run, and none is timed before that.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.wire.arms_updates import PIECE, Codec, UpdateArm, available
from benchmarks.wire.rounds import Arm, Marks, combine, interleave, now, slowest
from benchmarks.wire.transport import broadcast
from benchmarks.wire.update_data import Update, updates

__all__ = ["merge", "run"]


def run(rank: int, world: int, group: dist.ProcessGroup, options: dict[str, Any]) -> dict[str, Any]:
    """Measure all arms on all updates.

    Args:
        rank: this process; 0 is the trainer.
        world: the number of ranks.
        group: all ranks.
        options: "rounds", "threads", "arms" (names, or None for all), and those of
            update_data.updates.
    """
    cases: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    for update in updates(options):
        ends = _Ends(rank, group, update, options)
        report = interleave(
            ends.arms(),
            options["rounds"],
            device=options["device"],
            barrier=lambda: dist.barrier(group),
            prepare=ends.prepare,
            check=ends.check,
        )
        case = {"name": update.name, "source": update.source, "nbytes": update.new.nbytes}
        case |= {"density": update.density, "byte_density": update.byte_density}
        cases.append(case | {"report": report, "payload": ends.payload})
        absent = ends.absent
    return {"cases": cases, "absent": absent}


class _Ends:
    """The trainer's or a worker's end of every arm, for one update."""

    def __init__(
        self, rank: int, group: dist.ProcessGroup, update: Update, options: dict[str, Any]
    ) -> None:
        self._rank, self._group, self._update = rank, group, update
        self._target = update.base.copy()
        self._arms, self.absent = available(options["arms"])
        self._codecs = {
            name: arm.make(update, options["threads"], self._target)
            for name, arm in self._arms.items()
        }
        self.payload: dict[str, int] = {}

    def arms(self) -> dict[str, Arm]:
        def one(name: str) -> Arm:
            return lambda: self._send(name, self._arms[name], self._codecs[name])

        return {name: one(name) for name in self._arms}

    def prepare(self, name: str) -> None:
        np.copyto(self._target, self._update.base)
        self._codecs[name].prepare(self._share)

    def _share(self, parts: list[Any]) -> list[Any]:
        return broadcast(parts if self._rank == 0 else None, self._group, piece=PIECE)

    def _send(self, name: str, arm: UpdateArm, codec: Codec) -> Marks:
        marks = {}
        parts = None
        if self._rank == 0:
            parts = codec.encode()
            self.payload[name] = sum(part.nbytes for part in parts)
            marks["encoded"] = now()
        parts = broadcast(parts, self._group, piece=arm.piece)
        marks["sent" if self._rank == 0 else "received"] = now()
        if self._rank:
            staged = codec.decode(parts)
            marks["decoded"] = now()
            codec.apply(staged, self._target)
            marks["applied"] = now()
        return marks

    def check(self, name: str) -> None:
        if self._rank and not np.array_equal(self._target, self._update.new):
            raise RuntimeError(
                f"{name}: the weights of rank {self._rank} are not those of the trainer after "
                f"the update {self._update.name}"
            )


def merge(results: Sequence[Mapping[str, Any]], *, shared: bool) -> dict[str, Any]:
    """The figures of all ranks as one table for each update.

    Args:
        results: of `run`, by rank.
        shared: whether all ranks count the bytes of one interface.
    """
    cases = []
    for number, case in enumerate(results[0]["cases"]):
        reports = [result["cases"][number]["report"] for result in results]
        rows = combine(reports, shared=shared)
        for name, row in rows.items():
            row |= _steps(reports, name)
            row["payload"] = case["payload"][name]
        known = ("name", "source", "nbytes", "density", "byte_density")
        cases.append({key: case[key] for key in known} | {"rows": rows})
    return {"cases": cases, "absent": results[0]["absent"]}


def _steps(reports: Sequence[Any], name: str) -> dict[str, float | None]:
    """Seconds of each step: medians over the rounds of the slowest rank."""
    workers = range(1, len(reports))
    # The wire's time ends when the last worker has everything; it begins on the trainer.
    for number, found in enumerate(reports[0][name]):
        for rank in workers:
            marks = reports[rank][name][number]["marks"]
            marks["encoded"] = found["marks"]["encoded"]
    return {
        "encode": slowest(reports, name, "encoded", "begin", [0]),
        "wire": slowest(reports, name, "received", "encoded", workers),
        "decode": slowest(reports, name, "decoded", "received", workers),
        "apply": slowest(reports, name, "applied", "decoded", workers),
    }
