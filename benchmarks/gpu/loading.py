"""Time loading a packed file to a GPU, for gpu.py: packed upload and the other ways."""

import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import packhorse.torch as ph
from packhorse.device.matrix_tuning import random_weight
from packhorse.gpu import uploads

if TYPE_CHECKING:
    from benchmarks.gpu.run import Run

__all__ = ["WAYS", "measure"]

WAYS = ("packed upload", "decoded on the host", "plain, by safetensors")
N_MATRICES = 8
REPEATS = 3

Tensors = dict[str, torch.Tensor]


def measure(run: "Run", device: torch.device) -> list[dict[str, Any]]:
    """Time loading a file that the system has in memory: the best of some, and the most memory that
    the device holds in addition to the tensors. Every way must give the same bits.

    Raises:
        ValueError: a way gives other bits.
    """
    tensors = _tensors(run, device)
    with tempfile.TemporaryDirectory() as folder:
        ways = _ways(Path(folder), tensors, device, "fast" if run.smoke else "default")
        rows = [_row(name, load, tensors, run, device) for name, load in ways.items()]
    return rows


def _tensors(run: "Run", device: torch.device) -> Tensors:
    """Matrices of a large model, FP32, and a small tensor; all small for a smoke run."""
    size = (16, 64) if run.smoke else (14336, 4096)
    n = 1 if run.smoke else N_MATRICES
    tensors = {f"{i}.weight": random_weight(*size, device).cpu() for i in range(n)}
    plain = tensors["0.weight"][:4096].float()
    return tensors | {"moments": plain, "norm": torch.ones(size[1], dtype=torch.bfloat16)}


def _ways(
    folder: Path, tensors: Tensors, device: torch.device, level: str
) -> dict[str, Callable[[], Tensors]]:
    import safetensors.torch

    packed, plain = folder / "m.ph.safetensors", folder / "m.safetensors"
    ph.save_file(tensors, packed, level=level)
    safetensors.torch.save_file(tensors, plain)

    def load_packed(kernel_devices: tuple[str, ...]) -> Tensors:
        before = ph.TorchFramework.kernel_devices, uploads.MIN_NBYTES
        ph.TorchFramework.kernel_devices = kernel_devices
        uploads.MIN_NBYTES = before[1] if device.type == "cuda" else 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)  # kernels that do not start
                return ph.load_file(packed, device=device)
        finally:
            ph.TorchFramework.kernel_devices, uploads.MIN_NBYTES = before

    loads = (
        lambda: load_packed((device.type,)),
        lambda: load_packed(()),
        lambda: safetensors.torch.load_file(plain, device=str(device)),
    )
    return dict(zip(WAYS, loads, strict=True))


def _row(
    name: str, load: Callable[[], Tensors], tensors: Tensors, run: "Run", device: torch.device
) -> dict[str, Any]:
    is_gpu = device.type == "cuda"
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    found = load()  # the first time kernels are compiled, and pages read
    for key, tensor in tensors.items():
        bits = (part.cpu().contiguous().view(torch.uint8) for part in (found[key], tensor))
        if found[key].device.type != device.type or not torch.equal(*bits):
            raise ValueError(f"{name}: {key} is not what was saved")
    del found
    times = []
    if is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(1 if run.smoke else REPEATS):
        start = time.perf_counter()
        found = load()
        if is_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        del found
    peak = torch.cuda.max_memory_allocated() - nbytes if is_gpu else 0
    return {"way": name, "seconds": min(times), "nbytes": nbytes, "extra_nbytes": peak}
