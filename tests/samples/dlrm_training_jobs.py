"""Jobs of ranks that train the DLRM of the benchmarks for a few steps."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from benchmarks.wire.dlrm_arms import options_of
from benchmarks.wire.dlrm_model import Model, Teacher
from benchmarks.wire.dlrm_ranks import InOneProcess, OverGloo, Ranks
from packhorse.wire.embeddings import on_rank

ROWS = (50, 3, 400, 1200, 90)
DIM, BATCH, STEPS = 8, 64, 4


def over_gloo(arms: list[str]) -> dict[str, list[str]]:
    """What `trained` returns on this rank, for each arm."""
    return {arm: trained(arm, OverGloo(dist.get_rank(), dist.get_world_size())) for arm in arms}


def in_one_process(arms: list[str], world: int) -> dict[str, list[str]]:
    """The same with all ranks in this process."""
    return {arm: trained(arm, InOneProcess(world)) for arm in arms}


def trained(arm: str, ranks: Ranks) -> list[str]:
    """Trains an arm. Returns losses in hexadecimal, and a hash of the weights of the dense layers
    and of each rank's tables."""
    teacher = Teacher(ROWS)
    tables = [on_rank(f"t{i}", n, DIM, i % ranks.world) for i, n in enumerate(ROWS)]
    torch.manual_seed(0)
    model = Model(len(ROWS), DIM)
    ranks.set_up(tables, 0, lambda: options_of(arm, iterations=STEPS))
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        model.zero_grad()
        parts = [teacher.batch(step, BATCH, rank, ranks.world) for rank in ranks.own]
        found.append(ranks.backward(model, parts).hex())
        dense.step()
        ranks.adagrad(lr=0.05)
    found.append(_hash(list(model.parameters())))
    return found + [_hash(list(bags.parameters())) for bags in ranks.bags]


def _hash(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()[:16]
