"""Rivals in the table of gpu.py, where they are installed: DFloat11 and nvCOMP's ANS.

Both decode a whole matrix to device memory, and PyTorch then multiplies with it. Two times are
measured: decoding alone, and decoding with the product of one token. The rivals' calls go through
Python and cannot be captured in a graph. So several copies of the matrix, which together are larger
than the caches, are decoded one after the other between two events; the matrix is so large that the
GPU takes most of the time. Each rival must first restore every bit.

    pip install nvidia-nvcomp-cu13 dfloat11 dahuffman cupy-cuda13x
"""

import contextlib
import importlib.util
import io
import statistics
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.device.matrix_tuning import random_weight
from packhorse.gpu.timing import chain_copies

__all__ = ["PEERS", "SHAPE", "dfloat11_arrays", "measure"]

SHAPE = (4096, 14336)
N_RUNS = 10
_DFLOAT11_BYTES = 8  # of packed data for a thread
_DFLOAT11_THREADS = 512

Decode = Callable[[], Tensor]  # the matrix, in device memory


def measure(name: str, device: torch.device) -> dict[str, Any]:
    """Measure a rival: seconds of decoding and of a product of one token, and bits a weight; or the
    reason why it was not measured.

    Args:
        name: name of the rival, one of `PEERS`.
        device: the GPU.
    """
    n_rows, n_columns = SHAPE
    row: dict[str, Any] = {"way": name, "shape": f"{n_rows} x {n_columns}", "n_tokens": 1}
    try:
        weight = random_weight(n_rows, n_columns, device)
        nbytes, decodes = PEERS[name](weight, chain_copies(weight.nbytes))
        for decode in decodes:
            if not torch.equal(decode().view(torch.int16), weight.view(torch.int16)):
                raise ValueError("the decoded matrix differs")
        x = torch.randn(1, n_columns, device=device).to(torch.bfloat16)
        products = [lambda d=decode: F.linear(x, d()) for decode in decodes]
        row |= {"bits": 8 * nbytes / weight.numel(), "decoding": time_calls(decodes)}
        return row | {"seconds": time_calls(products)}
    except ImportError as error:
        return row | {"missing": str(error)}
    except Exception as error:  # a rival that fails must not stop the measurement
        return row | {"error": f"{type(error).__name__}: {error}"}


def time_calls(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of one call: the median over runs through all calls."""
    times = []
    for _ in range(1 + N_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times[1:])


def nvcomp_ans(weight: Tensor, n_copies: int) -> tuple[int, list[Decode]]:
    """nvCOMP's ANS for numbers of two bytes. No decoding config is made beforehand, so decoding
    waits for the GPU, as it does in calls of users."""
    from nvidia import nvcomp

    codec = nvcomp.Codec(algorithm="ANS", data_type="<f2")
    flat = weight.view(torch.uint8).flatten()
    packed = [codec.encode(nvcomp.as_array(flat)) for _ in range(n_copies)]

    def decode(each: Any) -> Tensor:
        found = torch.as_tensor(codec.decode(each, data_type="|u1"), device=weight.device)
        return found.view(torch.bfloat16).view(weight.shape)

    return packed[0].buffer_size, [lambda each=each: decode(each) for each in packed]


def dfloat11(weight: Tensor, n_copies: int) -> tuple[int, list[Decode]]:
    """DFloat11, by the hook that it puts in front of a layer; its encoder takes half a minute."""
    _shim_pkg_resources()
    from dfloat11.dfloat11 import get_hook

    arrays = dfloat11_arrays(weight)

    hook = get_hook((_DFLOAT11_THREADS,), _DFLOAT11_BYTES)
    widths = arrays["output_positions"].view(torch.int32).diff()
    shared = _DFLOAT11_THREADS * 4 + 4 + 2 * int(widths.max())

    def layer() -> torch.nn.Linear:
        made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        del made.weight
        for name, array in arrays.items():
            made.register_buffer(name, array.to(weight.device, copy=True))
        made.shared_mem_size = shared
        return made

    def decode(module: torch.nn.Linear) -> Tensor:
        hook(module, None)
        return module.weight

    layers = [layer() for _ in range(n_copies)]
    return sum(array.nbytes for array in arrays.values()), [
        lambda module=module: decode(module) for module in layers
    ]


def dfloat11_arrays(weight: Tensor) -> dict[str, Tensor]:
    """A matrix as DFloat11's own encoder packs it, by the names that its layers use."""
    from dfloat11.dfloat11_utils import encode_weights, get_32bit_codec, get_codec, get_luts

    flat = weight.cpu().flatten()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        codec, _, table = get_32bit_codec(get_codec(flat)[1])
        encoded, others, positions, gaps, _ = encode_weights(
            [flat], codec, _DFLOAT11_BYTES, _DFLOAT11_THREADS
        )
        luts = get_luts(table)
    return {
        "luts": luts,
        "encoded_exponent": encoded,
        "sign_mantissa": others,
        "output_positions": positions,
        "gaps": gaps,
    }


def _shim_pkg_resources() -> None:
    """DFloat11 finds its kernel by a module that setuptools no longer has."""
    found = importlib.util.find_spec("dfloat11")
    if found is not None and "pkg_resources" not in sys.modules:
        folder = Path(str(found.origin)).parent
        shim: Any = types.ModuleType("pkg_resources")
        shim.resource_filename = lambda _, name: str(folder / name)
        sys.modules["pkg_resources"] = shim


PEERS: dict[str, Callable[[Tensor, int], tuple[int, list[Decode]]]] = {
    "nvCOMP ANS": nvcomp_ans,
    "DFloat11": dfloat11,
}
