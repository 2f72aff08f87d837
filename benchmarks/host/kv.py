"""Keys and values of real models: what packed pages and frames take, how fast one core packs and
unpacks them, and what a layer of a cache costs for each token."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.host import kv_data
from packhorse.frame import compress_buffer, max_frame_nbytes
from packhorse.host.kv import KVStore, WorkingMemory
from packhorse.torch_dtypes import NAMES

__all__ = ["measure", "section"]

N_SEQUENCES = 16
ROUNDS = 7
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEVELS = ("fast", "default")
LENGTHS = (2048, 16384)  # tokens of a cache
LAYER = (1, 8, 128)  # sequences, heads and size of a head
FIRST_TOKENS = 128  # from which the packing is chosen


def measure() -> dict[str, list[dict[str, Any]]]:
    """Pages and frames for each model and dtype, and layers for each length."""
    found = [
        (states.model, dtype, [tuple(each.to(dtype) for each in layer) for layer in states.layers])
        for states in kv_data.make(N_SEQUENCES)
        for dtype in DTYPES
    ]
    torch.set_num_threads(1)
    return {
        "pages": [_pages(*each) for each in found],
        "frames": [_frames(*each, level) for each in found for level in LEVELS],
        "layers": [_layer(n_tokens) for n_tokens in LENGTHS],
    }


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _median(call: Callable[[], object]) -> float:
    return float(np.median([_seconds(call) for _ in range(ROUNDS)]))


def _check_same(found: Tensor, wanted: Tensor) -> None:
    if not torch.equal(found.contiguous().view(torch.uint8), wanted.view(torch.uint8)):
        raise AssertionError("keys or values differ")


def _pages(model: str, dtype: torch.dtype, layers: list[Any]) -> dict[str, Any]:
    memory = WorkingMemory()

    def begin(room: int | None = None) -> list[KVStore]:
        """Stores that have chosen their packing."""
        stores = [KVStore(threads=1, room_tokens=room) for _ in layers]
        for store, (keys, values) in zip(stores, layers, strict=True):
            store.append(keys[:, :, :FIRST_TOKENS], values[:, :, :FIRST_TOKENS])
        return stores

    def pack(stores: list[KVStore]) -> None:
        for store, (keys, values) in zip(stores, layers, strict=True):
            store.append(keys[:, :, FIRST_TOKENS:], values[:, :, FIRST_TOKENS:])

    # With room, so that the system's time for new memory is not that of packing.
    begun = [begin(N_SEQUENCES * kv_data.CONTEXT) for _ in range(ROUNDS)]
    packed = [_seconds(lambda stores=stores: pack(stores)) for stores in begun]
    stores = begin()
    pack(stores)
    for store, layer in zip(stores, layers, strict=True):
        for found, wanted in zip(store.read(memory), layer, strict=True):
            _check_same(found, wanted)
    sizes = [store.size for store in stores]
    plain = sum(size.plain_nbytes for size in sizes)
    stored = sum(size.host_nbytes + size.tail_nbytes for size in sizes)
    return {
        "model": model,
        "dtype": NAMES[dtype],
        "nbytes": plain,
        "ratio": plain / stored,
        "refused": sum(size.n_refused for size in sizes) / sum(size.n_pages for size in sizes),
        "first_ms": 1e3 * _median(begin) / len(layers),
        "pack_gbps": (1 - FIRST_TOKENS / kv_data.CONTEXT) * plain / np.median(packed) / 1e9,
        "unpack_gbps": plain / _median(lambda: [store.read(memory) for store in stores]) / 1e9,
    }


def _frames(model: str, dtype: torch.dtype, layers: list[Any], level: str) -> dict[str, Any]:
    """A chunk of LMCache's: (2, layers, tokens, heads * size of a head), here of one sequence."""
    sides = zip(*layers, strict=True)
    chunk = torch.stack([torch.stack([each[0] for each in side]) for side in sides])
    chunk = chunk.transpose(2, 3).flatten(3).contiguous()
    name, shape = NAMES[dtype], tuple(chunk.shape)
    data = chunk.view(torch.uint8).numpy().reshape(-1)
    out, back = np.empty(max_frame_nbytes(name, shape), np.uint8), np.empty_like(data)

    def pack() -> Any:
        return compress_buffer(data, name, shape, level=level, threads=1, out=out)

    frame = pack()
    frame.decompress_into(back, threads=1)
    if not np.array_equal(back, data):
        raise AssertionError("a chunk differs")
    packed, unpacked = _median(pack), _median(lambda: frame.decompress_into(back, threads=1))
    return {
        "model": model,
        "dtype": name,
        "level": level,
        "ratio": data.nbytes / frame.nbytes,
        "pack_gbps": data.nbytes / packed / 1e9,
        "unpack_gbps": data.nbytes / unpacked / 1e9,
    }


def _layer(n_tokens: int) -> dict[str, Any]:
    """One more token for a layer: unpacked, or copied as `DynamicCache` does."""
    from transformers.cache_utils import DynamicLayer

    from packhorse.integrations.transformers.cache import PackedHostLayer

    n, heads, size = LAYER
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(n, heads, n_tokens, size, generator=generator).to(torch.bfloat16)
    new = states[:, :, :1]
    milliseconds = {}
    for name, layer in (("packed", PackedHostLayer(threads=1)), ("plain", DynamicLayer())):
        layer.update(states, states)
        milliseconds[name] = 1e3 * _median(lambda layer=layer: layer.update(new, new))
    return {"n_tokens": n_tokens, "nbytes": 2 * states.nbytes, "ms": milliseconds}


def section(found: dict[str, list[dict[str, Any]]]) -> str:
    """The tables of a measurement, as Markdown."""
    lines = [
        "Keys and values of real models for real text, by one core. Pages of 64 tokens in slots of",
        "one size; a page that no slot takes is refused and kept plain. GB/s of plain bytes. The",
        f"way is chosen from the first {FIRST_TOKENS} tokens: milliseconds for them, for a layer.",
        "",
        "| model | dtype | ratio | refused | first, ms | pack, GB/s | unpack, GB/s |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    for row in found["pages"]:
        speeds = f"{row['pack_gbps']:.2f} | {row['unpack_gbps']:.2f}"
        first = f"{row['model']} | {row['dtype']} | {row['ratio']:.3f}"
        began = f"{100 * row['refused']:.1f} % | {row['first_ms']:.1f}"
        lines.append(f"| {first} | {began} | {speeds} |")
    lines += [
        "",
        "The same as frames of 512 tokens of all layers, as `packhorse.lmcache` stores them.",
        "",
        "| model | dtype | level | ratio | pack, GB/s | unpack, GB/s |",
        "| --- | --- | --- | --: | --: | --: |",
    ]
    for row in found["frames"]:
        speeds = f"{row['pack_gbps']:.2f} | {row['unpack_gbps']:.2f}"
        first = f"{row['model']} | {row['dtype']} | {row['level']} | {row['ratio']:.3f}"
        lines.append(f"| {first} | {speeds} |")
    lines += [
        "",
        "One more token for a layer of BF16, in milliseconds: `PackedHostCache` unpacks the layer,",
        "`DynamicCache` copies it.",
        "",
        "| tokens | MB | packed | plain |",
        "| --: | --: | --: | --: |",
    ]
    for row in found["layers"]:
        times = f"{row['ms']['packed']:.2f} | {row['ms']['plain']:.2f}"
        lines.append(f"| {row['n_tokens']} | {row['nbytes'] / 1e6:.0f} | {times} |")
    return "\n".join(lines)
