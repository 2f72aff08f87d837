"""Measure layers whose weights lie in host memory: `python benchmarks/gpu.py layers`.

A stack of equal layers takes turns, as the layers of a model do, with 1 to 64 tokens:

- `device`: packed, in device memory; what the link costs is what the others take more;
- `views`: packed, kernels read the planes in host memory;
- `ring`: packed, the copy engine brings the next layer while this one runs;
- `plain views`: BF16, cuBLAS reads the matrix in host memory;
- `plain ring`: BF16, brought by the same ring, from the same kind of memory.

Before anything is timed, all layers are compared: packed ones with those in device memory, plain
ones with cuBLAS in device memory, bit for bit. The rate is that of the bytes in host memory. The
result goes to `benchmarks/results/gpu/layers.json`, with date, card and command.

`--smoke` runs it on a tiny scale in Triton's interpreter; its times mean nothing, and are written
only to `--out`.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from benchmarks.gpu import command

SHAPE = (14336, 4096)  # the largest matrix of a layer of a Llama of 8B
N_LAYERS = 8  # .9 GB of BF16, far more than any cache
TOKENS = (1, 2, 4, 8, 16, 32, 64)


def main(argv: list[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: the arguments after `layers`.

    Returns:
        The exit status: 3 without a GPU.
    """
    args = command.make_parser("layers", __doc__, 10).parse_args(argv)
    return command.run("layers", argv, args, _measure_all)


def _measure_all(args: argparse.Namespace) -> dict[str, Any]:
    return {"rows": measure(args.smoke, args.rounds)}


def measure(smoke: bool, n_rounds: int) -> list[dict[str, Any]]:
    """Seconds of a layer for each way and number of tokens, which are printed as they come.

    Args:
        smoke: on a tiny scale, on the host.
        n_rounds: timed passes over all layers.

    Returns:
        Rows with the way, the number of tokens, seconds, and bytes of the layer in host memory.

    Raises:
        SystemExit: a way gives other bits than the same kernels on device memory.
    """
    import torch

    from packhorse.gpu.timing import time_calls

    device = torch.device("cpu" if smoke else "cuda:0")
    n_rows, n_columns = (16, 96) if smoke else SHAPE
    ways = _ways(device, n_rows, n_columns, 2 if smoke else N_LAYERS)
    print_head(name for name in ways if name != "plain device")
    rows = []
    for n_tokens in (3,) if smoke else TOKENS:
        x = torch.randn(n_tokens, n_columns, generator=torch.Generator().manual_seed(n_tokens))
        x = x.to(device, torch.bfloat16)
        expected: dict[bool, Any] = {}
        found = []
        for name, (layers, nbytes) in ways.items():
            calls = [partial(layer, x) for layer in layers]
            same = expected.setdefault("plain" in name, calls[0]())
            if not all(torch.equal(call(), same) for call in calls):
                raise SystemExit(f"{name} with {n_tokens} tokens gives other bits")
            if name != "plain device":
                seconds = time_calls(calls, device, n_rounds=n_rounds)
                row = {"way": name, "n_tokens": n_tokens, "seconds": seconds, "nbytes": nbytes}
                found.append(row)
        print_rows(found)
        rows += found
    return rows


Ways = dict[str, tuple[Sequence[Callable[[Any], Any]], int]]


def _ways(device: Any, n_rows: int, n_columns: int, n_layers: int) -> Ways:
    """The layers of each way, and bytes of a layer in host memory; the first way of packed and of
    plain weights is in device memory. All layers have the same weight, each in memory of its own:
    a layer that is still in a cache would be read faster than those of a model."""
    import torch
    import torch.nn.functional as F

    from packhorse.device import pack_weight
    from packhorse.device.host_planes import HostPlanes, planes_nbytes
    from packhorse.device.matrix_tuning import random_weight
    from packhorse.gpu.copy_ring import CopyRing
    from packhorse.layout import W12

    plain = random_weight(n_rows, n_columns, torch.device("cpu"))
    packed = pack_weight(plain, W12).arrays
    ring = CopyRing(planes_nbytes(packed), device)
    planes = [HostPlanes(packed, device, ring, 0) for _ in range(n_layers)]
    views = [each.on_device(packed) for each in planes]
    ring.expect(planes)
    stored = [_Plain(plain, device) for _ in range(n_layers)]
    plain_ring = CopyRing(plain.nbytes, device)
    plain_ring.expect(stored)
    resident = [
        type(packed)(*(array.to(device, copy=True) for array in packed)) for _ in range(n_layers)
    ]
    matrices = [plain.to(device, copy=True) for _ in range(n_layers)]

    def through_ring(of: HostPlanes, arrays: Any, x: Any) -> Any:
        with of.lend(arrays, len(x)) as lent:
            return _multiply(lent, n_columns, x)

    def through_plain_ring(of: _Plain, x: Any) -> Any:
        with plain_ring.lend(of) as copied:
            return F.linear(x, copied.view(torch.bfloat16).view(n_rows, n_columns))

    nbytes = planes[0].nbytes
    return {
        "device": ([partial(_multiply, arrays, n_columns) for arrays in resident], 0),
        "views": ([partial(_multiply, arrays, n_columns) for arrays in views], nbytes),
        "ring": (
            [partial(through_ring, *pair) for pair in zip(planes, views, strict=True)],
            nbytes,
        ),
        "plain device": ([lambda x, of=of: F.linear(x, of) for of in matrices], 0),
        "plain views": ([lambda x, of=of: F.linear(x, of.view) for of in stored], plain.nbytes),
        "plain ring": ([partial(through_plain_ring, of) for of in stored], plain.nbytes),
    }


def _multiply(arrays: Any, n_columns: int, x: Any) -> Any:
    from packhorse.device.products import multiply
    from packhorse.layout import W12

    return multiply(x, arrays, W12, n_columns)


class _Plain:
    """A plain matrix in memory of the same kind as that of packed planes."""

    def __init__(self, plain: Any, device: Any) -> None:
        import torch

        from packhorse.gpu.host_memory import host_memory

        memory = host_memory(plain.nbytes, device=device)
        self.name, self.stored = "a plain matrix", memory.tensor()
        self.stored.view(torch.bfloat16).copy_(plain.view(-1))
        self.view = memory.tensor(device).view(torch.bfloat16).view(plain.shape)


def print_head(names: Iterable[str]) -> None:
    """Print what `print_rows` prints for each number of tokens."""
    print("microseconds of a layer (GB/s of its bytes in host memory)")
    print("tokens", *(f"{name:>20}" for name in names), flush=True)


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print the ways of one number of tokens."""
    cells = []
    for row in rows:
        rate = f" ({row['nbytes'] / row['seconds'] / 1e9:.1f})" if row["nbytes"] else ""
        cells.append(f"{row['seconds'] * 1e6:.0f}{rate}".rjust(20))
    print(f"{rows[0]['n_tokens']:6}", *cells, flush=True)
