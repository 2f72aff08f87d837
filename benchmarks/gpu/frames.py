"""The card's ceilings, and frames decoded on it: the rest of part `decode` of gpu.py.

The ceilings are the speeds of a large copy and a large product on this card; compare all other
figures with them. A frame is uploaded packed: its whole decoding is timed by the host's clock, and
the kernels alone by PyTorch's profiler.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from packhorse.device.matrix_tuning import random_weight
from packhorse.frame import compress_buffer
from packhorse.gpu.decode import decode_frame
from packhorse.gpu.timing import time_chain

if TYPE_CHECKING:
    from benchmarks.gpu.run import Run

__all__ = ["DifferentError", "ceilings", "frames"]

_COPY_NBYTES = 4 << 30
_SIDE = 8192  # of the matrices that are multiplied
_KERNELS = ("decode_rans", "decode_palettes", "resolve_escapes", "merge_planes")


class DifferentError(Exception):
    """A frame is decoded to wrong bytes."""


def ceilings(run: "Run") -> list[dict[str, Any]]:
    """Bytes a second of a copy, read and written, and BF16 operations a second of a product."""
    if run.smoke:
        return []
    source = torch.empty(_COPY_NBYTES, dtype=torch.uint8, device="cuda").random_()
    seconds = time_chain([partial(torch.empty_like(source).copy_, source)])
    bandwidth = 2 * _COPY_NBYTES / seconds
    a, b = (torch.randn(_SIDE, _SIDE, device="cuda").bfloat16() for _ in range(2))
    torch.nn.functional.linear(a, b)
    rate = 2 * _SIDE**3 / time_chain([partial(torch.nn.functional.linear, a, b)])
    print(f"ceilings: copies {bandwidth / 1e12:.2f} TB/s, BF16 {rate / 1e12:.0f} TFLOP/s\n")
    return [{"ceiling": "copy", "per_s": bandwidth}, {"ceiling": "BF16", "per_s": rate}]


def frames(run: "Run") -> list[dict[str, Any]]:
    """Measure a matrix as a frame: seconds until it is on the GPU, and of the kernels alone.

    Raises:
        DifferentError: the decoded matrix differs.
    """
    shape = (4, 70) if run.smoke else (14336, 4096)
    device = torch.device("cpu" if run.smoke else "cuda")
    weight = random_weight(*shape, device)
    packed = compress_buffer(weight.cpu().view(torch.uint8).numpy(), "BF16", shape).buffer()
    found = decode_frame(packed, device)
    if not torch.equal(found.view(torch.int16), weight.view(torch.int16)):
        raise DifferentError("a frame is decoded to other bytes")
    if run.smoke:
        return [{"frame": "small", "nbytes": weight.nbytes, "packed": len(packed)}]
    decode = partial(decode_frame, packed, device)
    seconds, kernels = min(_wall_time(decode) for _ in range(5)), _kernel_times(decode)
    of_kernels, nbytes = sum(kernels.values()), weight.nbytes
    print(f"\na frame of {nbytes / 1e6:.0f} MB: {nbytes / seconds / 1e9:.1f} GB/s from host memory")
    if of_kernels:
        print(f"its kernels alone: {nbytes / of_kernels / 1e9:.0f} GB/s; seconds: {kernels}")
    row = {"frame": f"BF16 {shape[0]} x {shape[1]}", "nbytes": nbytes, "packed": len(packed)}
    return [row | {"seconds": seconds, "kernel_seconds": kernels}]


def _wall_time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _kernel_times(call: Callable[[], object]) -> dict[str, float]:
    """Seconds of each of our kernels in a call; empty where the profiler sees none."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    found = {event.key: event.self_device_time_total / 1e6 for event in seen.key_averages()}
    return {name: s for name, s in found.items() if any(known in name for known in _KERNELS)}
