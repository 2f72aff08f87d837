"""Measure packed collectives on the GPUs of this machine: `python benchmarks/gpu.py collectives`.

One process for each GPU, over NCCL. Every collective of `packhorse.wire.Collectives` runs raw
(PyTorch's own) and packed, in turns, on normal weights, and the slowest rank counts. Before any is
timed, all ranks compare bits: values that only move with those of PyTorch, sums with sums in the
order of the ranks. With one GPU only the codecs are measured: exponents of four bits, and bounded
codes. The result goes to `benchmarks/results/gpu/collectives.json`, with date, card and command.

`--smoke` runs two ranks on a tiny scale in Triton's interpreter, over gloo; its times mean nothing,
and are written only to `--out`.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import command

OPERATIONS = ("all_gather", "all_to_all_single", "broadcast", "reduce_scatter", "all_reduce")
MIBS = (1, 16, 128)  # that a rank holds in all
CODEC_MIB = 256
BOUND, BITS = 0.002, 6


def main(argv: list[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: the arguments after `collectives`.

    Returns:
        The exit status: 3 without a GPU.
    """
    parser = command.make_parser("collectives", __doc__, 15)
    parser.add_argument("--gpus", type=int, metavar="N", help="how many (default: all)")
    parser.add_argument("--mib", type=int, nargs="+", default=list(MIBS), help="bytes of a rank")
    return command.run("collectives", argv, parser.parse_args(argv), _measure_all)


def _measure_all(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    n_gpus = 2 if args.smoke else torch.cuda.device_count()
    world = min(args.gpus or n_gpus, n_gpus)
    codecs = _codecs(args.smoke, args.rounds)
    _print_codecs(codecs)
    if world == 1:
        print("one GPU: nothing travels, so only the codecs were measured")
        return {"gpus": world, "codecs": codecs, "rows": []}
    rows = _launch(world, args)
    _print_rows(rows)
    return {"gpus": world, "codecs": codecs, "rows": rows}


def _timed(work: Callable[[], object], smoke: bool) -> float:
    """Seconds of some work, on the device."""
    import torch

    if smoke:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _codecs(smoke: bool, rounds: int) -> list[dict[str, Any]]:
    """Encoding and decoding alone, on the first GPU."""
    import torch

    from packhorse.torch_dtypes import short_name

    device = torch.device("cpu" if smoke else "cuda:0")
    nbytes = 1 << 15 if smoke else CODEC_MIB << 20
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        generator = torch.Generator(device).manual_seed(1)
        n = nbytes // dtype.itemsize
        x = (0.02 * torch.randn(n, generator=generator, device=device)).to(dtype)
        for name, make in (("exponents", _exponents), ("bounded", _bounded)):
            encode, decode, message_nbytes, is_right = make(x)
            encode()
            decode()
            if not is_right():
                raise SystemExit(f"{name} of {dtype} gave back other values")
            times = [[_timed(work, smoke) for _ in range(rounds)] for work in (encode, decode)]
            rates = [nbytes / statistics.median(found) / 1e9 for found in times]
            row = {"codec": name, "dtype": short_name(dtype), "nbytes": nbytes}
            row |= {"ratio": nbytes / message_nbytes(), "encode": rates[0], "decode": rates[1]}
            rows.append(row)
    return rows


Coder = tuple[
    Callable[[], object], Callable[[], object], Callable[[], int], Callable[[], bool]
]  # encode, decode, bytes of the message, whether what came back is right


def _exponents(x: Any) -> Coder:
    import torch

    from packhorse.kernels.exponents import decode_exponents, encode_exponents, sections_of

    sections = sections_of(x.numel(), x.dtype)
    message = torch.empty(sections.capacity, dtype=torch.uint8, device=x.device)
    out = torch.empty_like(x)
    n_escapes = int(encode_exponents(x, message))
    return (
        lambda: encode_exponents(x, message),
        lambda: decode_exponents(message, n_escapes, out),
        lambda: sections.escapes + n_escapes,
        lambda: torch.equal(out.view(torch.uint8), x.view(torch.uint8)),
    )


def _bounded(x: Any) -> Coder:
    import numpy as np
    import torch

    from packhorse.kernels.bounded import (
        Quantiser,
        collect_escapes,
        decode_codes,
        encode_codes,
        n_code_words,
    )
    from packhorse.layout import BOUNDED_BLOCK

    # A step of a power of two: products with it and its inverse are exact.
    step = 2.0 ** np.floor(np.log2(2 * BOUND))
    by = Quantiser(BITS, step, 0.0, 1 / step, BOUND * (1 - 2**-20), BOUND)
    words = torch.empty(n_code_words(x.numel(), BITS), dtype=torch.int32, device=x.device)
    counts = torch.empty(-(-x.numel() // BOUNDED_BLOCK), dtype=torch.int32, device=x.device)
    escapes = torch.empty(x.numel() // 8, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)

    def encode() -> None:
        encode_codes(x, by, words, counts)
        collect_escapes(x, BITS, words, counts, escapes)

    encode()
    n_escapes = int(counts.sum())
    return (
        encode,
        lambda: decode_codes(words, by, out, counts, escapes[:n_escapes]),
        lambda: words.nbytes + 2 * counts.numel() + n_escapes * x.itemsize,
        lambda: bool((out.double() - x.double()).abs().max() <= BOUND),
    )


def _launch(world: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the ranks; rank 0 writes what they found."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as name:
        mp.spawn(_rank, (world, name, args), nprocs=world)
        rows: list[dict[str, Any]] = json.loads((Path(name) / "rows.json").read_text())
        return rows


def _rank(rank: int, world: int, folder: str, args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cpu" if args.smoke else f"cuda:{rank}")
    if not args.smoke:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if args.smoke else "nccl",
        store=dist.FileStore(f"{folder}/store", world),
        rank=rank,
        world_size=world,
    )
    if args.smoke:
        _let_the_host_be_a_device()
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for mib in [1 / 64] if args.smoke else args.mib:
            n = int(mib * 2**20) // dtype.itemsize // world * world
            for operation in OPERATIONS:
                rows.append(_measure(operation, n, dtype, device, args))
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _let_the_host_be_a_device() -> None:
    from packhorse.wire import collectives, ways

    for module in (collectives, ways):
        module.is_on_device = lambda tensor: True


def _measure(
    operation: str, n: int, dtype: Any, device: Any, args: argparse.Namespace
) -> dict[str, Any]:
    """One collective, raw and packed in turns."""
    import torch
    import torch.distributed as dist

    from packhorse.torch_dtypes import short_name
    from packhorse.wire import Collectives

    rank, world = dist.get_rank(), dist.get_world_size()
    arms = {choice: Collectives(choice=choice, timeout=60) for choice in ("raw", "packed")}
    calls = {}
    for choice, one in arms.items():
        calls[choice] = _call(operation, one, n, dtype, device, rank, world)
    results = {choice: make().view(torch.uint8) for choice, make in calls.items()}
    is_sum = operation in ("reduce_scatter", "all_reduce")
    same = bool(torch.equal(results["raw"], results["packed"]))
    if not same and not (is_sum and world > 2):  # on more ranks NCCL adds in an order of its own
        raise SystemExit(f"{operation} of {n} {dtype}: rank {rank} got other bits packed")
    times: dict[str, list[float]] = {choice: [] for choice in calls}
    for _ in range(args.rounds):
        for choice, call in calls.items():
            dist.barrier()
            seconds = torch.tensor([_timed(call, args.smoke)], device=device, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            times[choice].append(float(seconds))
    (row,) = arms["packed"].rows()
    medians = {choice: statistics.median(found) for choice, found in times.items()}
    return {
        "operation": operation,
        "dtype": short_name(dtype),
        "nbytes": n * dtype.itemsize,
        "ratio": row.ratio,
        "same_bits": same,
        "seconds": medians,
        "range": {choice: [min(found), max(found)] for choice, found in times.items()},
        "gain": medians["raw"] / medians["packed"],
    }


def _call(
    operation: str, one: Any, n: int, dtype: Any, device: Any, rank: int, world: int
) -> Callable[[], Any]:
    """A collective on weights, which can be called again and again; returns its result."""
    import torch

    generator = torch.Generator(device).manual_seed(rank)
    x = (0.02 * torch.randn(n, generator=generator, device=device)).to(dtype)
    out = torch.empty_like(x)
    if operation == "broadcast":

        def broadcast() -> Any:
            one.broadcast(x, 0)
            return x

        return broadcast
    if operation == "all_reduce":

        def all_reduce() -> Any:
            out.copy_(x)
            one.all_reduce(out)
            return out

        return all_reduce

    def other() -> Any:
        if operation == "all_gather":
            one.all_gather(out, x[: n // world])
            return out
        if operation == "all_to_all_single":
            one.all_to_all_single(out, x)
            return out
        one.reduce_scatter(out[: n // world], x)
        return out[: n // world].clone()

    return other


def _print_codecs(rows: list[dict[str, Any]]) -> None:
    print("| codec | dtype | ratio | encode, GB/s | decode, GB/s |\n|---|---|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row['codec']} | {row['dtype']} | {row['ratio']:.2f} | {row['encode']:.4g} "
            f"| {row['decode']:.4g} |"
        )


def _print_rows(rows: list[dict[str, Any]]) -> None:
    print("\n| operation | dtype | MB | ratio | raw, ms | packed, ms | times raw |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for row in rows:
        raw, packed = (row["seconds"][choice] * 1e3 for choice in ("raw", "packed"))
        print(
            f"| {row['operation']} | {row['dtype']} | {row['nbytes'] / 1e6:.3g} "
            f"| {row['ratio']:.2f} | {raw:.3g} | {packed:.3g} | {row['gain']:.2f} |"
        )
