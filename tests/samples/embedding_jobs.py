"""Jobs of ranks that exchange embeddings, and what PyTorch makes of the same batches alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from packhorse.codecs.bounded import Rounding
from packhorse.wire.bounds import TableBounds
from packhorse.wire.embeddings import (
    Bags,
    BoundedRows,
    EmbeddingBags,
    EmbeddingExchange,
    Piece,
    RawRows,
    Request,
    Sending,
    Shard,
    Table,
    by_columns,
    by_rows,
    on_rank,
)

ROWS = (3, 50, 700, 2000)


def tables_of(sharding: str, world: int) -> list[Table]:
    """Four tables, cut in one way; the last one has other rows than the rest."""
    if sharding == "table-wise":
        return [on_rank(f"t{i}", n, 8 if i < 3 else 12, i % world) for i, n in enumerate(ROWS)]
    if sharding == "row-wise":
        return [by_rows(f"t{i}", n, 8 if i < 3 else 12, world) for i, n in enumerate(ROWS)]
    if sharding == "column-wise":
        ranks = list(range(world))
        return [by_columns(f"t{i}", n, 8 if i < 3 else 12, ranks) for i, n in enumerate(ROWS)]
    assert sharding == "mixed"
    grid = tuple(
        Shard((i + j) % world, (1000 * i, 1000 * i + 1000), (6 * j, 6 * j + 6))
        for i in range(2)
        for j in range(2)
    )
    return [
        on_rank("t0", ROWS[0], 8, world - 1),
        by_columns("t1", ROWS[1], 8, [0, world - 1]),
        by_rows("t2", ROWS[2], 8, world, mean=True),
        Table("t3", ROWS[3], 12, grid),
    ]


def batch_of(
    kind: str, rows: Sequence[int], rank: int, step: int, size: int | None = None
) -> list[Bags]:
    """The part of a batch that a rank has; sizes differ by rank unless one is named."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    size = 20 + 7 * rank if size is None else size
    batch = []
    for n in rows:
        lengths = torch.ones(size, dtype=torch.int64)
        if kind != "one-hot":
            lengths = torch.randint(0, 9 if kind == "many" else 4, (size,), generator=generator)
        n_ids = int(lengths.sum())
        ids = (torch.rand(n_ids, generator=generator) ** 3 * n).long()
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        weights = torch.rand(n_ids, generator=generator) if kind == "weighted" else None
        batch.append(Bags(ids, None if kind == "one-hot" else offsets, weights))
    return batch


def table_values(table: Table, seed: int = 0) -> Tensor:
    """[rows, dim]"""
    generator = torch.Generator().manual_seed(seed + table.rows)
    return torch.randn(table.rows, table.dim, generator=generator)


def output_grad(feature: int, rank: int, step: int, n_bags: int, dim: int) -> Tensor:
    """The gradient of a feature's bags on a rank."""
    generator = torch.Generator().manual_seed(100_000 + 1000 * feature + 10 * rank + step)
    return torch.randn(n_bags, dim, generator=generator)


def train(sharding: str, kind: str, features: Sequence[int], n_steps: int) -> dict[str, Any]:
    """Steps of SGD with the exchange. Returns all bags, gradients of weights, and shards."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tables = tables_of(sharding, world)
    module = EmbeddingBags(tables, [f"t{t}" for t in features])
    fill(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    bags, of_weights, choices = [], [], []
    for step in range(n_steps):
        batch = batch_of(kind, [ROWS[t] for t in features], rank, step)
        for one in batch:
            if one.weights is not None:
                one.weights.requires_grad_()
        optimizer.zero_grad()
        found = module(batch)
        grads = [output_grad(f, rank, step, *part.shape) for f, part in enumerate(found)]
        torch.autograd.backward(found, grads)
        optimizer.step()
        bags.append([part.detach() for part in found])
        of_weights.append([None if one.weights is None else one.weights.grad for one in batch])
        choices.append(module.exchange.explain())
    return {
        "bags": bags,
        "of_weights": of_weights,
        "choices": choices,
        "shards": shards_of(module),
        "nbytes": module.exchange.traffic.nbytes,
    }


def check(
    sharding: str, kind: str, features: Sequence[int], n_steps: int
) -> tuple[list[str], list[str], int]:
    """Trains, and compares with PyTorch on one rank. Returns what differs, the choices of the last
    batch, and the bytes sent."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = train(sharding, kind, features, n_steps)
    wanted = expected(sharding, kind, features, n_steps, world)
    wrong = []
    for step in range(n_steps):
        for feature in range(len(features)):
            place = f"feature {feature} in step {step}"
            if not torch.equal(found["bags"][step][feature], wanted["bags"][rank][step][feature]):
                wrong.append(f"bags of {place}")
            ours = found["of_weights"][step][feature]
            theirs = wanted["of_weights"][rank][step][feature]
            if ours is not None and not torch.allclose(ours, theirs, atol=1e-5):
                wrong.append(f"gradients of the weights of {place}")
    shards = [(t, s) for t, table in enumerate(tables_of(sharding, world)) for s in table.shards]
    for number, value in found["shards"].items():
        t, shard = shards[number]
        if not torch.equal(value, wanted["values"][t][slice(*shard.rows), slice(*shard.columns)]):
            wrong.append(f"shard {number} after the last step")
    return wrong, [str(choice) for choice in found["choices"][-1]], found["nbytes"]


def fill(module: EmbeddingBags) -> None:
    """Gives the shards their part of `table_values`."""
    with torch.no_grad():
        for number, value in zip(module.exchange.held, module.parameters(), strict=True):
            table, shard = _place(module.exchange, number)
            value.copy_(table_values(table)[slice(*shard.rows), slice(*shard.columns)])


def shards_of(module: EmbeddingBags) -> dict[int, Tensor]:
    """What this rank holds, by number of the shard."""
    return {
        number: value.detach().clone()
        for number, value in zip(module.exchange.held, module.parameters(), strict=True)
    }


def expected(
    sharding: str, kind: str, features: Sequence[int], n_steps: int, world: int
) -> dict[str, Any]:
    """What `train` must return on each rank: bags by PyTorch, gradients summed in order."""
    tables = tables_of(sharding, world)
    values = [table_values(table) for table in tables]
    bags: list[list[list[Tensor]]] = [[] for _ in range(world)]
    of_weights: list[list[Any]] = [[] for _ in range(world)]
    for step in range(n_steps):
        sums = [torch.zeros_like(value) for value in values]
        for rank in range(world):
            batch = batch_of(kind, [ROWS[t] for t in features], rank, step)
            found = [
                _bags(tables[t], values[t], one) for t, one in zip(features, batch, strict=True)
            ]
            bags[rank].append([part for part, _ in found])
            grads = [output_grad(f, rank, step, *part.shape) for f, (part, _) in enumerate(found)]
            for t in range(len(tables)):
                of_table = [
                    (one, grad) for f, (one, grad) in enumerate(zip(batch, grads, strict=True))
                    if features[f] == t
                ]  # fmt: skip
                sums[t] += _summed(tables[t], of_table)
            of_weights[rank].append(
                [
                    None
                    if one.weights is None
                    else (grad[_sample(one)] * values[t][one.ids]).sum(1)
                    for t, one, grad in zip(features, batch, grads, strict=True)
                ]
            )
        for value, part in zip(values, sums, strict=True):
            value -= 0.5 * part
    return {"bags": bags, "of_weights": of_weights, "values": values}


def _bags(table: Table, value: Tensor, one: Bags) -> tuple[Tensor, None]:
    mean = table.mean and one.weights is None
    found = functional.embedding_bag(
        one.ids, value, one.starts, mode="mean" if mean else "sum", include_last_offset=True,
        per_sample_weights=None if one.weights is None else one.weights.detach(),
    )  # fmt: skip
    if table.mean and not mean:
        found = found / one.starts.diff().clamp(min=1)[:, None]
    return found, None


def _summed(table: Table, parts: Sequence[tuple[Bags, Tensor]]) -> Tensor:
    """The gradient of a table on one rank: rows added one by one, in the order of the batch."""
    total = torch.zeros(table.rows, table.dim)
    for one, grad in parts:
        if table.mean:
            grad = grad / one.starts.diff().clamp(min=1)[:, None]
        rows = grad[_sample(one)]
        if one.weights is None:
            for i, row in zip(one.ids.tolist(), rows, strict=True):
                total[i] += row
        else:
            for i, row, weight in zip(one.ids.tolist(), rows, one.weights.detach(), strict=True):
                total[i] = torch.addcmul(total[i], row, weight)
    return total


def _sample(one: Bags) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(one.starts) - 1), one.starts.diff())


def _place(exchange: EmbeddingExchange, number: int) -> tuple[Table, Shard]:
    layout = exchange.layout
    return layout.tables[layout.table_of[number]], layout.shards[number]


def check_all(
    sharding: str, kinds: Sequence[str], features: Sequence[int], n_steps: int
) -> dict[str, list[str]]:
    """`check` for several kinds of batches: what differs."""
    return {kind: check(sharding, kind, features, n_steps)[0] for kind in kinds}


def count_bytes() -> tuple[int, int]:
    """Bytes that this rank sends for skewed ids: a row for each bag, and each distinct row."""
    tables = [on_rank(f"t{i}", 1000, 16, i % dist.get_world_size()) for i in range(4)]
    found = []
    for sending in (Sending.BAGS, Sending.DISTINCT):
        module = EmbeddingBags(tables, sending=sending)
        batch = batch_of("one-hot", [1000] * 4, dist.get_rank(), 0, size=2000)
        bags = module(batch)
        torch.cat(bags, 1).sum().backward()
        found.append(module.exchange.traffic.nbytes)
    return found[0], found[1]


def fail(how: str) -> str:
    """Rank 1 misbehaves in the second batch. Returns this rank's error."""
    rank = dist.get_rank()
    tables = tables_of("table-wise", dist.get_world_size())
    if how == "other tables" and rank == 1:
        tables = tables[:3]
    module = EmbeddingBags(tables, ["t0"], timeout=20)
    ids = torch.tensor([0, 1, 2])
    try:
        module([Bags(ids)])
        if how == "dies" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        module([Bags(ids + 1 if how == "bad id" and rank == 1 else ids)])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def bounded() -> dict[str, Any]:
    """Batches of which rows and gradients travel within bounds: by how much a bag is off beyond
    the largest bound of its table, and the bytes of both ways of sending."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tables = [on_rank(f"t{i}", 2000, 16, i % world) for i in range(4)]

    def run(**codecs: Any) -> tuple[list[list[Tensor]], EmbeddingBags]:
        module = EmbeddingBags(tables, **codecs)
        fill(module)
        found = []
        for step in range(3):
            bags = module(batch_of("one-hot", [2000] * 4, rank, step, size=400))
            torch.cat(bags, 1).sum().backward()
            found.append([part.detach() for part in bags])
        return found, module

    def make() -> dict[str, BoundedRows]:
        return {
            "forward": BoundedRows(TableBounds()),
            "backward": BoundedRows(TableBounds(rounding=Rounding.STOCHASTIC)),
        }

    exact, plain = run()
    ours, module = run(**make())
    again, _ = run(**make())
    spreads = [float(table_values(table).abs().max()) for table in tables]
    limit = 2 * 0.03 * 2  # the multiplier, the relative bound of 2,000 rows, both sides of zero
    excess = max(
        float((a - b).abs().max()) - limit * spread
        for of_step, ours_of_step in zip(exact, ours, strict=True)
        for a, b, spread in zip(of_step, ours_of_step, spreads, strict=True)
    )
    pairs = zip(chain(*ours), chain(*again), strict=True)
    return {
        "excess": excess,
        "is_repeated": all(torch.equal(a, b) for a, b in pairs),
        "nbytes": module.exchange.traffic.nbytes,
        "raw_nbytes": plain.exchange.traffic.nbytes,
    }


class _TooFew(RawRows):
    """Leaves out the last byte of what travels."""

    def encode(self, pieces: Sequence[Sequence[Piece]]) -> list[Any]:
        return [message[:-1] for message in super().encode(pieces)]


def send_falsely(what: str) -> tuple[str, int]:
    """Rank 1 sends a false message to rank 0, which has the only table.

    Returns:
        The error of this rank in this batch or the next, and how often it looked up rows.
    """
    rank = dist.get_rank()
    tables = [on_rank("t0", 3, 8, 0), on_rank("t1", 3, 8, 1)]
    exchange = EmbeddingExchange(tables, timeout=20)
    if rank == 1 and what == "request":
        pack = exchange._pack

        def lie(route: Any, to: int) -> Any:
            message = pack(route, to)
            message[:1] = 4  # one row more than the table has
            return message

        exchange._pack = lie  # type: ignore[method-assign]
    if rank == 1 and what == "rows":
        exchange.forward_codec = _TooFew()
    if rank == 1 and what == "gradients":
        exchange.backward_codec = _TooFew()
    n_lookups = 0

    def gather(requests: Sequence[Request]) -> list[Tensor]:
        nonlocal n_lookups
        n_lookups += 1
        return [torch.ones(one.n, 8, requires_grad=True) for one in requests]

    ids = torch.arange(3)
    try:
        bags = exchange.fetch(exchange.plan([Bags(ids), Bags(ids)]), gather)
        torch.cat(bags).sum().backward()
        exchange.plan([Bags(ids), Bags(ids)])  # a rank may hear of an error one call later
    except Exception as error:
        return f"{type(error).__name__}: {error}", n_lookups
    return "", n_lookups
