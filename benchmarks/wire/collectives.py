"""Scenario: an all-to-all of embeddings and an all-gather of weights, without loss.

Every arm's result is compared bit for bit with PyTorch's own after every run, before anything is
timed, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.wire.arms_collectives import ARMS, Collective, available
from benchmarks.wire.collective_data import VALUES
from benchmarks.wire.rounds import Arm, Marks, combine, interleave

__all__ = ["merge", "run"]


def run(rank: int, world: int, group: dist.ProcessGroup, options: dict[str, Any]) -> dict[str, Any]:
    """Measure all arms on all values.

    Args:
        rank: this process.
        world: the number of ranks.
        group: all ranks.
        options: "rounds", "threads", "nbytes" that a rank sends, "arms" (names, or None).
    """
    arms, absent = available(group, options["threads"], options["arms"])
    cases = []
    for name, (kind, make, dtype) in VALUES.items():
        source = make(rank, world, options["nbytes"], dtype)
        calls = _Calls(arms, kind, source, group)
        calls.warm_up()
        report = interleave(
            calls.arms(),
            options["rounds"],
            device=options["device"],
            barrier=lambda: dist.barrier(group),
            check=calls.check,
        )
        nbytes = source.numel() * source.element_size()
        cases.append({"name": name, "kind": kind, "nbytes": nbytes, "report": report})
    return {"cases": cases, "absent": absent}


class _Calls:
    """One collective on one rank's values, by every arm."""

    def __init__(
        self, arms: Mapping[str, Collective], kind: str, source: Tensor, group: dist.ProcessGroup
    ) -> None:
        self._arms, self._kind, self._source = arms, kind, source
        self._wanted = getattr(ARMS["raw, one piece"].make(group, 1), kind)(source)
        self._found = torch.empty(0)

    def arms(self) -> dict[str, Arm]:
        def one(collective: Collective) -> Arm:
            return lambda: self._call(collective)

        return {name: one(collective) for name, collective in self._arms.items()}

    def warm_up(self) -> None:
        for name, collective in self._arms.items():
            for _ in range(ARMS[name].warm_ups - 1):
                self._call(collective)

    def _call(self, collective: Collective) -> Marks:
        self._found = getattr(collective, self._kind)(self._source)
        return {}

    def check(self, name: str) -> None:
        same = torch.equal(self._found.view(torch.uint8), self._wanted.view(torch.uint8))
        if not same:
            raise RuntimeError(f"{name}: {self._kind} does not give the values of PyTorch's own")


def merge(results: Sequence[Mapping[str, Any]], *, shared: bool) -> dict[str, Any]:
    """The figures of all ranks as one table for each set of values.

    Args:
        results: of `run`, by rank.
        shared: whether all ranks count the bytes of one interface.
    """
    cases = []
    for number, case in enumerate(results[0]["cases"]):
        reports = [result["cases"][number]["report"] for result in results]
        nbytes = sum(result["cases"][number]["nbytes"] for result in results)
        rows = combine(reports, shared=shared)
        cases.append({"name": case["name"], "kind": case["kind"], "nbytes": nbytes, "rows": rows})
    return {"cases": cases, "absent": results[0]["absent"]}
