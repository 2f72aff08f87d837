"""Scenario: a training step of a language model that FSDP2 shards over all ranks.

Weights are gathered in bf16 for the forward and again for the backward pass, gradients are reduced
in bf16, and AdamW moves the fp32 shards. Every arm trains a model of its own from the same seed on
the same ids, so after as many steps all weights must have the same bits as those of plain FSDP2.
With more than two ranks PyTorch adds gradients in an order of its own; then it is only reported
whether the bits are the same. To add an arm, add a line to `ARMS`.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.data.language_model import LanguageModel, ModelShape
from benchmarks.wire.rounds import Marks, combine, interleave

__all__ = ["ARMS", "FsdpArm", "merge", "run"]

PLAIN = "plain"
LAYER_NBYTES = 1 << 22  # one more layer for so many bytes that the command line asks for
VOCABULARY, WIDTH, HIDDEN, N_HEADS = 2048, 256, 704, 4
BATCH, CONTEXT = 2, 32
SEED = 11
WARM_UPS = 26  # in which ours measures all of its ways, for each kind of call


@dataclass(frozen=True)
class FsdpArm:
    """An entry of the comparison.

    Attributes:
        how: what it is.
        attach: changes a sharded model, given the group.
    """

    how: str
    attach: Callable[[nn.Module, dist.ProcessGroup], None]


def _packhorse(model: nn.Module, group: dist.ProcessGroup, *, choice: str) -> None:
    wire = import_module("packhorse.wire")
    wire.shard_traffic(model, wire.Collectives(group, choice=choice, timeout=60), ahead=True)


def _ahead(model: Any, group: dist.ProcessGroup) -> None:
    """FSDP2 with gathers that do not block: gloo blocks unless it is told not to."""
    del group
    model._set_unshard_async_op(True)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module, following in pairwise(modules):
        module.set_modules_to_forward_prefetch([following])


ARMS = {
    PLAIN: FsdpArm("FSDP2 as it comes, on gloo", lambda model, group: None),
    "plain, ahead": FsdpArm(
        "the same with weights gathered while the part before computes, by a private switch", _ahead
    ),
    "packhorse packed": FsdpArm(
        '`shard_traffic` with `Collectives(choice="packed")`', partial(_packhorse, choice="packed")
    ),
    "packhorse": FsdpArm(
        "`shard_traffic` with `Collectives()`, which takes the faster way; both gather ahead",
        partial(_packhorse, choice="auto"),
    ),
}


def run(rank: int, world: int, group: dist.ProcessGroup, options: dict[str, Any]) -> dict[str, Any]:
    """Measure steps by all arms.

    Args:
        rank: this process.
        world: the number of ranks.
        group: all ranks.
        options: "rounds", "nbytes", from which the number of layers follows, and "arms" (names, or
            None); also "warm_ups", steps before any is timed.
    """
    shape = ModelShape(
        VOCABULARY, WIDTH, HIDDEN, max(1, options["nbytes"] // LAYER_NBYTES), N_HEADS
    )
    runs, absent = {}, {}
    for name, arm in ARMS.items():
        if options["arms"] is not None and name not in options["arms"]:
            continue
        try:
            runs[name] = _Training(shape, rank, arm)
        except (ImportError, AttributeError) as reason:
            absent[name] = str(reason)
    states: dict[int, dict[str, str]] = defaultdict(dict)

    def check(name: str) -> None:
        states[runs[name].n_steps][name] = runs[name].digest()

    for _ in range(options.get("warm_ups", WARM_UPS) - 1):
        for name, training in runs.items():
            training.step()
            check(name)
    report = interleave(
        {name: training.step for name, training in runs.items()},
        options["rounds"],
        device=options["device"],
        barrier=lambda: dist.barrier(group),
        check=check,
    )
    equal = {n: all(n in s and s[n] == s.get(PLAIN, s[n]) for s in states.values()) for n in runs}
    if world == 2 and not all(equal.values()):
        raise RuntimeError(f"the weights of rank {rank} differ from plain FSDP2: {equal}")
    found = {"report": report, "equal": equal, "absent": absent}
    return found | {"parameters": _n_parameters(shape) if rank == 0 else 0}


def _n_parameters(shape: ModelShape) -> int:
    return sum(p.numel() for p in LanguageModel(shape, seed=SEED).parameters())


class _Training:
    """A model and its optimizer, and as many steps as were taken."""

    def __init__(self, shape: ModelShape, rank: int, arm: FsdpArm) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = LanguageModel(shape, seed=SEED)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        layers: Any = self.model.model.layers
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        arm.attach(self.model, mesh.get_group())
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._rank, self.n_steps = rank, 0

    def step(self) -> Marks:
        # The model turns its heads in fp32, and attention wants one dtype.
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(self._ids())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.n_steps += 1
        return {}

    def _ids(self) -> Tensor:
        rng = np.random.default_rng((SEED, self._rank, self.n_steps))
        return torch.from_numpy(rng.integers(0, VOCABULARY, (BATCH, CONTEXT + 1)))

    def digest(self) -> str:
        """A hash of this rank's shards."""
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            local: Any = parameter
            found.update(local.to_local().detach().numpy().view(np.uint8))
        return found.hexdigest()


def merge(results: Sequence[Mapping[str, Any]], *, shared: bool) -> dict[str, Any]:
    """The figures of all ranks as one table.

    Args:
        results: of `run`, by rank.
        shared: whether all ranks count the bytes of one interface.
    """
    rows = combine([result["report"] for result in results], shared=shared)
    for name, row in rows.items():
        row["equal"] = all(result["equal"][name] for result in results)
    case = {"name": "step", "parameters": results[0]["parameters"], "rows": rows}
    return {"cases": [case], "absent": results[0]["absent"]}
