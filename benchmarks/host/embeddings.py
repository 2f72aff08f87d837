"""Embedding bags on the CPU: ours with packed rows beside those of PyTorch and of fbgemm, which is
what torchrec runs; look-ups, and steps of training by SGD.

The tables have the sizes of one of a recommender, and rows as they are after training: all of one
scale, and a fifth of them changed. Ids follow a Zipf distribution, or are uniform.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packhorse.host import PackedEmbeddingBag, RowOptimizer

__all__ = ["lines", "measure"]

N_ROWS, COLUMNS = 500_000, (64, 128)
N_BAGS, BAG = 4096, 20
ROUNDS = 7
LEARNING_RATE = 0.01
TRACES = (None, 1.05)  # the exponent of Zipf's law; None for uniform ids
WAYS = ("packhorse", "torch", "fbgemm")
Look = Callable[[Tensor, Tensor], Tensor]


def measure() -> list[dict[str, Any]]:
    """Milliseconds of a batch for each table, trace and way; rows and losses were compared."""
    return [
        _measure(dtype, n_columns, exponent)
        for dtype in (torch.float32, torch.bfloat16)
        for n_columns in COLUMNS
        for exponent in TRACES
    ]


def _rows(dtype: torch.dtype, n_columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    bound = N_ROWS**-0.5
    rows = (torch.rand(N_ROWS, n_columns, generator=generator) * 2 - 1) * bound
    changed = torch.randperm(N_ROWS, generator=generator)[: N_ROWS // 5]
    rows[changed] += 0.02 * torch.randn(len(changed), n_columns, generator=generator)
    return rows.to(dtype)


def _batches(exponent: float | None, n: int) -> list[Tensor]:
    rng = np.random.default_rng(1)
    size = (n, N_BAGS * BAG)
    if exponent is None:
        ids = rng.integers(0, N_ROWS, size)
    else:
        shares = np.cumsum(np.arange(1, N_ROWS + 1) ** -exponent)
        places = rng.permutation(N_ROWS)  # frequent rows are not neighbours
        ids = places[np.searchsorted(shares / shares[-1], rng.random(size))]
    return [*torch.from_numpy(ids)]


def _measure(dtype: torch.dtype, n_columns: int, exponent: float | None) -> dict[str, Any]:
    rows = _rows(dtype, n_columns)
    batches = _batches(exponent, ROUNDS + 1)
    offsets = torch.arange(0, N_BAGS * BAG + 1, BAG)
    packed = PackedEmbeddingBag.from_pretrained(
        rows, mode="sum", freeze=False, include_last_offset=True
    )
    plain = nn.EmbeddingBag.from_pretrained(
        rows.clone(), mode="sum", freeze=False, sparse=True, include_last_offset=True
    )
    looks: dict[str, Look] = {"packhorse": packed, "torch": plain}
    optimizers: list[torch.optim.Optimizer] = [
        RowOptimizer(packed, torch.optim.SGD, lr=LEARNING_RATE),
        torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE),
    ]
    fused = _fbgemm(rows)
    if fused is not None:
        looks["fbgemm"] = fused
    with torch.no_grad():
        found = {name: look(batches[0], offsets) for name, look in looks.items()}
        _compare(found)
        lookup = _time(looks, batches, offsets, lambda look, *batch: look(*batch))

    def train(look: Look, ids: Tensor, offsets: Tensor) -> None:
        (look(ids, offsets) - 1).square().mean().backward()
        for module, optimizer in zip((packed, plain), optimizers, strict=True):
            if look is module:  # that of fbgemm is fused with its backward pass
                optimizer.step()
                optimizer.zero_grad()

    table_nbytes = packed.table.nbytes
    training = _time(looks, batches, offsets, train)
    if not torch.equal(packed.unpacked(), plain.weight.detach()):
        raise AssertionError("the rows that training gives differ")
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "columns": n_columns,
        "zipf": exponent,
        "distinct": float(np.mean([len(batch.unique()) / len(batch) for batch in batches])),
        "way": packed.table.way.words,
        "nbytes": {"packhorse": table_nbytes, "plain": rows.nbytes},
        "lookup_ms": lookup,
        "training_ms": training,
        "unpacked_share": packed.table.n_unpacked_rows / N_ROWS,
    }


def _fbgemm(rows: Tensor) -> Look | None:
    """The bags of fbgemm, where it is installed and has the dtype."""
    if rows.dtype != torch.float32:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns when it is imported
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                SplitTableBatchedEmbeddingBagsCodegen,
            )
    except ModuleNotFoundError:
        return None
    bags: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(*rows.shape, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=LEARNING_RATE,
        device="cpu",
    )
    bags.split_embedding_weights()[0].copy_(rows)
    return bags  # type: ignore[no-any-return]


def _compare(found: dict[str, Tensor]) -> None:
    if not torch.equal(found["packhorse"], found["torch"]):
        raise AssertionError("bags differ from those of PyTorch")
    if "fbgemm" in found:  # it adds in another order
        torch.testing.assert_close(found["fbgemm"], found["torch"])


def _time(
    looks: dict[str, Look], batches: list[Tensor], offsets: Tensor, run: Callable[..., object]
) -> dict[str, float]:
    """Median milliseconds; the first batch is not timed, and ways take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in looks}
    for number, ids in enumerate(batches):
        names = [*looks]
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            run(looks[name], ids, offsets)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * float(np.median(found)) for name, found in seconds.items()}


def lines(found: list[dict[str, Any]]) -> str:
    """The table of this part as Markdown."""
    text = [
        f"Milliseconds for a batch of {N_BAGS:,} bags of {BAG} ids, from a table of {N_ROWS:,} "
        "rows: look-ups, and steps of training by SGD (forward, backward and the update). "
        "fbgemm is what torchrec runs; it has no BF16 on the CPU. Bags and trained rows are those "
        "of PyTorch, bit for bit.",
        "",
        f"| rows | ids | distinct | MB plain | MB packed | {_heads('look-up')} "
        f"| {_heads('training')} | kept plain |",
        f"|{' --- |' * 2}{' --: |' * (4 + 2 * len(WAYS))}",
    ]
    for row in found:
        ids = "uniform" if row["zipf"] is None else f"Zipf {row['zipf']}"
        times = [
            f"{row[part][way]:.1f}" if way in row[part] else "-"
            for part in ("lookup_ms", "training_ms")
            for way in WAYS
        ]
        sizes = [f"{row['nbytes'][name] / 1e6:.0f}" for name in ("plain", "packhorse")]
        cells = [f"{row['columns']} {row['dtype']}", ids, f"{row['distinct']:.0%}", *sizes, *times]
        text.append(f"| {' | '.join(cells)} | {row['unpacked_share']:.1%} |")
    return "\n".join(text)


def _heads(what: str) -> str:
    return " | ".join(f"{what}, {way}" for way in WAYS)
