"""The parts of `gpu.py host`: each prints a table, and returns its rows."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu.checks import WrongError
from benchmarks.gpu.host_tables import (
    KINDS,
    Pair,
    device_of,
    in_turns,
    let_the_host_be_a_device,
    make_pair,
    numbers,
    require_same,
    sync,
)
from benchmarks.gpu.parts import print_head, print_row
from packhorse.gpu.detect import describe_device
from packhorse.gpu.host_memory import host_memory
from packhorse.host import PackedTable, pack_table, plan_table
from packhorse.host.device_cost import predict_gather
from packhorse.kernels.tables import INTEGERS, gather_rows, kernel_of, upload_table
from packhorse.reference.ibp import fit_best, row_nbytes

if TYPE_CHECKING:
    from benchmarks.gpu.run import Run

__all__ = ["WrongError", "big", "check", "decode", "interference", "link", "rows", "views"]

Rows = list[dict[str, Any]]
_NOTHING = (  # the arrays of a table without exceptions, which plain rows do not use
    *(np.zeros(1, np.uint32) for _ in range(3)),
    np.zeros(0, np.uint16),
    np.zeros(0, np.uint8),
)
_BUDGETS = (4, 8, 12, 16, 24, 32, 64, 132)
_COPIES = tuple(1 << log for log in range(12, 29, 2))
_LEAST_GAIN, _MOST_PROGRAMS = 1.38, 32  # the target of BF16 rows
_MEMORY_SHARE = 0.6  # of the speed of a fill that sparse rows must reach
_IBP = "the bytes of IBP, not decoded"
_FITTED_ROWS = 512
_SIDE = 8192  # of the product that gathers run beside


def views(run: "Run") -> Rows:
    """Whether the device reads the host's memory at its address."""
    device, found = device_of(run), []
    kinds: dict[str, dict[str, Any]] = {
        "huge pages": {},
        "small pages": {"huge_pages": False},
        "shared": {"shared": True},
    }
    print_head("memory", "kind", "bytes in huge pages", "notes")
    for name, options in kinds.items():
        memory = host_memory(8 << 20, device=device, **options)
        held = memory.numpy()
        held[:] = np.arange(len(memory), dtype=np.uint8)
        view = memory.tensor(device)
        require_same(name, view.clone().cpu(), memory.tensor())
        held[: 1 << 20] ^= 0xFF  # written by the host, after the device has read
        require_same(f"{name}, changed", view.clone().cpu(), memory.tensor())
        if view.data_ptr() != memory.address:
            raise WrongError(f"{name}: the view is at another address")
        row = {"memory": name, "kind": str(memory.kind), "huge_nbytes": memory.huge_nbytes}
        found.append(row | {"notes": list(memory.notes)})
        print_row(name, row["kind"], str(row["huge_nbytes"]), "; ".join(memory.notes))
    return found


def check(run: "Run") -> Rows:
    """All ways of small tables, bit for bit: gathered, read, changed, and in a graph."""
    let_the_host_be_a_device(run)
    device, found = device_of(run), []
    for name, make in KINDS.items():
        base = make(*((30, 40) if run.smoke else (5000, 1 << 16)))
        ways = plan_table(base)
        for way in ways[:: len(ways) - 1] if run.smoke and len(ways) > 1 else ways:
            table = pack_table(base, way=way, device=device)
            _check_table(run, f"{name}, {way.words}", table, base.clone())
            found.append({"table": name, "way": way.words, "n_rows": len(base)})
        print(f"{name}: every bit, {len(ways)} ways", flush=True)
    return found


def _check_table(run: "Run", what: str, table: PackedTable, base: torch.Tensor) -> None:
    device = device_of(run)
    ids = torch.randint(0, len(base), (len(base) // 2,), device=device)
    out = table.gather(ids)
    require_same(what, out.cpu(), base[ids.cpu()])
    for copies in (False, True):
        block = table.read(1, len(base) - 1, device=device, copies=copies)
        require_same(f"{what}, copies={copies}", block.cpu(), base[1:-1])
    graph = None
    if not run.smoke:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            table.gather(ids, out)
    changed = torch.arange(0, len(base), 3)
    base[changed] = base[changed] * 1e4 + 1  # most no longer fit
    table.update_(changed, base[changed])
    require_same(f"{what}, changed", table.gather(ids).cpu(), base[ids.cpu()])
    require_same(f"{what}, once", table.gather(ids, unique=True).cpu(), base[ids.cpu()])
    if graph is not None:
        graph.replay()
        require_same(f"{what}, graph", out.cpu(), base[ids.cpu()])


def link(run: "Run") -> Rows:
    """Copies by their size; plain rows in place, by programs and pages."""
    device, found = device_of(run), []
    sizes = _COPIES[:2] if run.smoke else _COPIES
    print_head("what", "bytes or row", "multiprocessors", "pages", "GB/s")
    memory = host_memory(sizes[-1], device=device)
    source, target = memory.tensor(), torch.empty(sizes[-1], dtype=torch.uint8, device=device)
    for nbytes in sizes:
        copy = partial(target[:nbytes].copy_, source[:nbytes], non_blocking=True)
        found.append(_link_row("copy", nbytes, 0, "huge", nbytes / in_turns(run, {"": copy})[""]))
    del memory, source, target
    run.keep(found)
    for huge in (True, False):
        found += _link_reads(run, huge)
        run.keep(found)
    return found


def _link_reads(run: "Run", huge: bool) -> Rows:
    """Random plain rows of two lengths from one piece of memory."""
    device, found = device_of(run), []
    nbytes = 1 << 18 if run.smoke else 8 << 30
    memory = host_memory(nbytes, device=device, huge_pages=huge)
    for length in (512, 4096):
        format = plan_table(torch.zeros(1, length // 4))[0].format
        n_rows = nbytes // length
        n = 8 if run.smoke else (256 << 20) // length
        ids = numbers(run, n_rows, n, "uniform")
        out = torch.empty((n, length // 4), dtype=torch.int32, device=device)
        held = memory.tensor(device).view(n_rows, length)
        tensors = upload_table(held, _NOTHING, format)
        for budget in _BUDGETS[:2] if run.smoke else _BUDGETS:
            call = partial(gather_rows, tensors, format, ids, out, n_programs=budget)
            rate = out.nbytes / in_turns(run, {"": call})[""]
            pages = "huge" if huge else "small"
            found.append(_link_row("rows in place", length, budget, pages, rate))
    return found


def _link_row(what: str, nbytes: int, budget: int, pages: str, rate: float) -> dict[str, Any]:
    print_row(what, str(nbytes), str(budget), pages, f"{rate / 1e9:.1f}")
    return {"what": what, "nbytes": nbytes, "programs": budget, "pages": pages, "per_s": rate}


def decode(run: "Run") -> Rows:
    """Packed rows in device memory: GB/s of plain rows, by programs."""
    device, found = device_of(run), []
    print_head("table", "way", "multiprocessors", "GB/s of plain rows")
    for name, make in KINDS.items():
        base = make(*((40, 48) if run.smoke else (1 << 16, 1 << 16)))
        table = pack_table(base, device=device)
        format, arrays = table.way.format, table.arrays
        tensors = upload_table(torch.from_numpy(arrays.rows).to(device), arrays[1:], format)
        ids = torch.randperm(len(base), device=device)
        kind = INTEGERS[format.element_bits]
        out = torch.empty((len(base), format.n_columns), dtype=kind, device=device)
        for budget in (3,) if run.smoke else (16, 32, describe_device(device).n_processors):
            call = partial(gather_rows, tensors, format, ids, out, n_programs=budget)
            seconds = in_turns(run, {"": call})[""]
            require_same(name, out.view(base.dtype).cpu(), base[ids.cpu()])
            row = {"table": name, "way": table.way.words, "programs": budget}
            found.append(row | {"per_s": out.nbytes / seconds})
            print_row(name, table.way.words, str(budget), f"{out.nbytes / seconds / 1e9:.0f}")
        run.keep(found)
    return found


def big(run: "Run") -> Rows:
    """A block of rows as long as a layer: copied or read in place, plain or packed."""
    device, found = device_of(run), []
    print_head("table", "MB", "way", "GB/s of plain rows", "times a plain copy")
    for name in list(KINDS)[:1] if run.smoke else list(KINDS)[:2]:
        pair = make_pair(run, name)
        limit = len(pair.packed) if run.smoke else (1 << 30) // pair.row_nbytes
        for n in (limit,) if run.smoke else (limit // 64, limit // 8, limit):
            out = torch.empty((n, pair.base.shape[1]), dtype=pair.base.dtype, device=device)
            source = pair.view(torch.device("cpu"))[:n]
            arms: dict[str, Callable[[], object]] = {
                "plain, copied": partial(out.copy_, source, non_blocking=True),
                "plain, in place": partial(pair.plain.read, 0, n, out, copies=False),
                "packed, copied": partial(pair.packed.read, 0, n, out, copies=True),
                "packed, in place": partial(pair.packed.read, 0, n, out, copies=False),
            }
            found += _arm_rows(run, pair, arms, out, torch.arange(n, device=device), "block")
            run.keep(found)
    return found


def _arm_rows(
    run: "Run",
    pair: Pair,
    arms: dict[str, Callable[[], object]],
    out: torch.Tensor,
    ids: torch.Tensor,
    law: str,
    bounds: Mapping[str, Callable[[], object]] | None = None,
    **facts: Any,
) -> Rows:
    """Proves arms right, times them in turns, and prints them; the first one is compared with.
    Bounds are timed with them; they do not give rows."""
    wanted = pair.rows(ids)
    for name, call in arms.items():
        out.zero_()
        call()
        sync(run)
        require_same(f"{pair.name}, {name}", out, wanted)
    del wanted
    seconds = in_turns(run, {**(bounds or {}), **arms})
    first = seconds[next(iter(arms))]
    found = []
    for name, time in seconds.items():
        rate, gain = out.nbytes / time, first / time
        row = {"table": pair.name, "ids": law, "n": len(ids), "way": name, "seconds": time}
        found.append(row | {"per_s": rate, "gain": gain} | facts)
        print_row(pair.name, f"{out.nbytes / 1e6:.0f}", name, f"{rate / 1e9:.1f}", f"{gain:.2f}")
    return found


def rows(run: "Run") -> Rows:
    """Random rows in all ways; then the targets."""
    device, found = device_of(run), []
    print_head("table", "MB", "way", "GB/s of plain rows", "times plain in place")
    for name in list(KINDS)[::4] if run.smoke else KINDS:
        pair = make_pair(run, name)
        for law, n in (("uniform", 1 << 12), ("uniform", 1 << 17), ("zipf", 1 << 17)):
            if run.is_late():
                break
            ids = numbers(run, len(pair.packed), 16 if run.smoke else n, law)
            out = torch.empty((len(ids), pair.base.shape[1]), dtype=pair.base.dtype, device=device)
            ibp = _ibp_bytes(pair, ids)
            for budget in (3,) if run.smoke else (16, 32):
                arms = _gathers(run, pair, ids, out, budget)
                bounds = {_IBP: partial(ibp, budget)}
                found += _arm_rows(run, pair, arms, out, ids, law, bounds, programs=budget)
                found[-1]["predicted"] = _predicted(run, pair, len(ids), budget)
            run.keep(found)
        del pair
    return found if run.smoke else found + _targets(run, found)


def _gathers(
    run: "Run", pair: Pair, ids: torch.Tensor, out: torch.Tensor, budget: int
) -> dict[str, Callable[[], object]]:
    """The ways to gather; those on the CPU begin with ids that are there."""
    held, view = ids.cpu(), pair.view(device_of(run))
    plain = pair.view(torch.device("cpu"))
    pinned = torch.empty(out.shape, dtype=out.dtype, pin_memory=not run.smoke)

    def on_host(gather: Callable[[], object]) -> None:
        gather()
        out.copy_(pinned, non_blocking=True)

    arms: dict[str, Callable[[], object]] = {
        "plain, in place": partial(pair.plain.gather, ids, out, sm_budget=budget),
        "plain, in place, index_select": partial(torch.index_select, view, 0, ids, out=out),
        "plain, CPU and copy": partial(
            on_host, partial(torch.index_select, plain, 0, held, out=pinned)
        ),
        "packed, each row once": partial(
            pair.packed.gather, ids, out, sm_budget=budget, unique=True
        ),
        "packed, default": partial(pair.packed.gather, ids, out),
    }
    if len(ids) <= 1 << 12:
        sources = [plain[i] for i in held.tolist()]
        targets = list(out.unbind())
        copy = partial(torch._foreach_copy_, targets, sources, non_blocking=True)
        arms["plain, a copy for each row"] = copy
    return arms | {"packed": partial(pair.packed.gather, ids, out, sm_budget=budget)}


def _ibp_bytes(pair: Pair, ids: torch.Tensor) -> Callable[[int], None]:
    """Reads as many bytes of each row as Invariant Bit Packing would, by its published rules, and
    decodes nothing: it cannot be faster. Its rows stay where plain ones were."""
    words = pair.base[:_FITTED_ROWS].contiguous().view(torch.uint8).numpy().view(np.uint32)
    nbytes = float(row_nbytes(words, fit_best(words)).mean())
    raw = pair.plain.way.format
    columns = min(raw.n_columns, 32 * math.ceil(nbytes / 32) // raw.element_nbytes)
    format = replace(raw, n_columns=columns)
    rows = pair.plain.memory.tensor(ids.device)[: len(pair.plain) * raw.stride]
    tensors = upload_table(rows.view(len(pair.plain), raw.stride), _NOTHING, format)
    kind = INTEGERS[raw.element_bits]
    out = torch.empty((len(ids), columns), dtype=kind, device=ids.device)
    return lambda budget: gather_rows(tensors, format, ids, out, n_programs=budget)


def _predicted(run: "Run", pair: Pair, n: int, budget: int) -> float:
    way = pair.packed.way
    block_rows = kernel_of(way.format, True).constants["BLOCK_ROWS"]
    model = describe_device(device_of(run))
    pulled = way.pulled.get(32)
    return predict_gather(way.format, n, budget, block_rows, model, pulled_nbytes=pulled).seconds


def _targets(run: "Run", found: Rows) -> Rows:
    """What was aimed at."""
    device = device_of(run)
    nbytes = 1 << 30
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    fill = nbytes / in_turns(run, {"": memory.zero_})[""]
    gains = [
        row["gain"]
        for row in found
        if row["way"] == "packed" and row["table"] == next(iter(KINDS)) and row["ids"] == "uniform"
        and row["programs"] <= _MOST_PROGRAMS
    ]  # fmt: skip
    sparse = [
        row["per_s"] for row in found
        if row["table"] == list(KINDS)[-1] and row["way"] == "packed, default"
    ]  # fmt: skip
    limits = {
        f"BF16 rows, times plain rows in place, {_MOST_PROGRAMS} multiprocessors at most": (
            max(gains, default=0.0), _LEAST_GAIN,
        ),
        "sparse rows, share of the speed of a fill": (
            max(sparse, default=0.0) / fill, _MEMORY_SHARE,
        ),
    }  # fmt: skip
    rows = []
    for name, (measured, limit) in limits.items():
        met = measured >= limit
        print(f"target: {name}: {measured:.2f}, at least {limit}: {'met' if met else 'MISSED'}")
        rows.append({"target": name, "measured": measured, "limit": limit, "met": met})
    return rows


def interference(run: "Run") -> Rows:
    """A product beside gathers: how much slower it becomes, and how fast they are."""
    device, found = device_of(run), []
    pair = make_pair(run, next(iter(KINDS)))
    ids = numbers(run, len(pair.packed), 16 if run.smoke else 1 << 20, "uniform")
    out = torch.empty((len(ids), pair.base.shape[1]), dtype=pair.base.dtype, device=device)
    side = 16 if run.smoke else _SIDE
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    n_products = 1 if run.smoke else 30

    def products() -> None:
        for _ in range(n_products):
            torch.mm(a, b)

    alone = in_turns(run, {"": products})[""]
    print_head("table", "multiprocessors", "times the product alone", "GB/s of plain rows")
    n_processors = describe_device(device).n_processors
    for packed in (False, True):
        table = pair.packed if packed else pair.plain
        for budget in (3,) if run.smoke else (8, 16, 32, n_processors):
            both, gathers = _side_by_side(run, products, partial(
                table.gather, ids, out, sm_budget=budget
            ), alone)  # fmt: skip
            rate, name = out.nbytes / gathers, "packed" if packed else "plain"
            row = {"table": name, "programs": budget, "slowdown": both / alone, "per_s": rate}
            found.append(row)
            print_row(name, str(budget), f"{both / alone:.2f}", f"{rate / 1e9:.1f}")
    return found


def _side_by_side(
    run: "Run", products: Callable[[], None], gather: Callable[[], object], alone: float
) -> tuple[float, float]:
    """Seconds of the products while gathers run, and of a gather meanwhile."""
    if run.smoke:
        return in_turns(run, {"": products})[""], in_turns(run, {"": gather})[""]
    n = max(2, int(1.5 * alone / in_turns(run, {"": gather})[""]))  # they outlast the products
    other = torch.cuda.Stream()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    sync(run)
    with torch.cuda.stream(other):
        marks[0].record()
        for _ in range(n):
            gather()
        marks[1].record()
    marks[2].record()
    products()
    marks[3].record()
    sync(run)
    return marks[2].elapsed_time(marks[3]) / 1e3, marks[0].elapsed_time(marks[1]) / 1e3 / n
