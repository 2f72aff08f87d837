"""Frames decoded on a GPU: the rest of part `decode` of gpu.py.

A frame is uploaded packed: its whole decoding is timed by the host's clock, and the kernels alone
by PyTorch's profiler.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from packhorse.device.matrix_tuning import random_weight
from packhorse.frame import compress_buffer
from packhorse.gpu.decode import decode_frame

if TYPE_CHECKING:
    from benchmarks.gpu.run import Run

__all__ = ["DifferentError", "frames"]

_KERNELS = ("decode_rans", "decode_palettes", "resolve_escapes", "merge_planes")


class DifferentError(Exception):
    """A frame is decoded to wrong bytes."""


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
