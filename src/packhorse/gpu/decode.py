"""Decodes frames on a GPU. Frames are uploaded packed, with a plan of a few KiB that the host
makes.

The host reads and checks the header, the chunk table and the fields of every stream; kernels do the
rest. Frames that no kernel decodes (classed rANS, differences from a base, Zstandard) are decoded
on the host and then uploaded. Without a GPU, all frames are decoded on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packhorse import _core
from packhorse.codecs.base import STATUS_WORDS, ByteArray, as_bytes
from packhorse.errors import CorruptionError, MissingBackendError
from packhorse.frame import Frame
from packhorse.frame.header import FrameHeader, header_of, label, open_frame
from packhorse.gpu.plans import ChunkPlan, plan_chunks, why_unsupported
from packhorse.layout import CHUNK_CRC, Split, Status

try:
    import torch

    from packhorse.kernels.launch import runs_on
    from packhorse.kernels.palette import decode_palettes
    from packhorse.kernels.planes import merge_planes
    from packhorse.kernels.rans import decode_rans, resolve_escapes
    from packhorse.torch_dtypes import TORCH_DTYPES
except ModuleNotFoundError as error:
    raise MissingBackendError(
        "packhorse.gpu needs PyTorch and Triton; install them with: pip install 'packhorse[gpu]'"
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "UNITS",
    "decode_frame",
    "empty_statuses",
    "fill_host_memory",
    "first_bad_chunk",
    "part_arrays",
    "run_plan",
    "why_on_host",
]

# The dtype that kernels write, for each size of a unit in bytes.
UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def decode_frame(
    frame: Buffer,
    device: torch.device | str = "cuda",
    *,
    name: str | None = None,
    check: bool = True,
) -> torch.Tensor:
    """The tensor of a frame, on a device.

    Args:
        frame: exactly the frame's bytes; only read.
        device: where to put the tensor.
        name: the tensor's name, for messages.
        check: compare each chunk's CRC32C before the upload, and wait for the kernels to report bad
            streams. Without it, the call does not wait, and a damaged payload may decode to wrong
            data, but never makes a kernel access memory outside of its buffers.

    Returns:
        The tensor, of the frame's dtype and shape.

    Raises:
        BaseMismatchError: the frame needs a base.
        CompatibilityError: a version, dtype, flag or mode is unknown to this release.
        CorruptionError: a rule of docs/format.md is broken; names tensor, chunk and byte offset.
        TypeError: the frame is not a C-contiguous buffer, or PyTorch lacks the dtype.
    """
    data = as_bytes(frame, "frame")
    header = header_of(open_frame(data, name, 0, None))
    if header.dtype.name not in TORCH_DTYPES:
        raise TypeError(f"{label(name)}PyTorch has no dtype for {header.dtype.name}")
    target = torch.device(device)
    if not header.nbytes or why_on_host(header, target) is not None:
        return _decode_on_host(data, name, target, check)
    payload = data[header.header_nbytes :]
    if check:
        _check_sums(payload, header, name)
    try:
        plan = plan_chunks(payload, header.table, header.geometry, header.header_nbytes)
    except CorruptionError as error:
        raise CorruptionError(f"{label(name)}{error}") from None
    scratch = torch.empty(max(plan.scratch_nbytes, 1), dtype=torch.uint8, device=target)
    unit = UNITS[header.dtype.unit_nbytes]
    units = torch.empty(plan.geometry.n_units, dtype=unit, device=target)
    source = fill_host_memory([payload], target).to(target, non_blocking=True)
    arrays = fill_host_memory([plan.memory], target).to(target, non_blocking=True)
    statuses = empty_statuses(plan, target)
    run_plan(source, plan, part_arrays(arrays, plan.arrays()), scratch, units, statuses)
    if check:
        _check_statuses(statuses, plan, header, name)
    return units.view(TORCH_DTYPES[header.dtype.name]).reshape(header.shape)


def run_plan(
    payload: torch.Tensor,
    plan: ChunkPlan,
    arrays: Sequence[torch.Tensor],
    scratch: torch.Tensor,
    out: torch.Tensor,
    statuses: Sequence[torch.Tensor],
) -> None:
    """Launches the kernels that a plan needs on the payload's device, and does not wait for them.

    Args:
        payload: u8, the bytes from which the plan was made; only read. Other bytes of the same
            length give wrong units, but never make a kernel access memory outside of its buffers.
        plan: the plan of the payload.
        arrays: those of the plan (`ChunkPlan.arrays`), on the device.
        scratch: u8, at least `plan.scratch_nbytes`, aligned to 4 bytes; overwritten.
        out: integers of a unit's size (units,); receives the units.
        statuses: those of `empty_statuses`; each number is a `Status`.
    """
    geometry = plan.geometry
    rotation = 0  # bits by which the first planes are rotated to become the top of a unit
    if geometry.split == Split.FLOAT:
        rotation = 4 if geometry.unit_nbytes == 8 else 1
    planes, palettes, entries, escaped, *of_groups = arrays
    longest = min(1 << geometry.chunk_log, geometry.n_units)
    decode_palettes(payload, palettes, entries, scratch, longest)
    for i, (group, status) in enumerate(zip(plan.rans, statuses[:-1], strict=True)):
        streams, states, tables = of_groups[3 * i : 3 * i + 3]
        decode_rans(payload, streams, states, tables, scratch, status, group.n_buckets)
    resolve_escapes(payload, escaped, scratch, statuses[-1])
    merge_planes(payload, planes, scratch, out, geometry.chunk_log, rotation)


def empty_statuses(plan: ChunkPlan, device: torch.device) -> list[torch.Tensor]:
    """Memory for the statuses that kernels write, i32: one tensor for each group of rANS streams,
    and one for planes with escapes."""
    lengths = (*(len(group.streams) for group in plan.rans), len(plan.escaped))
    return [torch.empty(n, dtype=torch.int32, device=device) for n in lengths]


def fill_host_memory(arrays: Sequence[NDArray[Any]], device: torch.device) -> torch.Tensor:
    """Copies arrays to host memory, one after the other, each aligned to 16 bytes.

    Args:
        arrays: C-contiguous; only read.
        device: where the copy will be uploaded. For a GPU, the copy is in pinned memory, which the
            GPU reads without the host's help.

    Returns:
        u8, one-dimensional.
    """
    starts, nbytes = _places(arrays)
    memory = _host_memory(nbytes, device)
    target = memory.numpy()
    for array, start in zip(arrays, starts, strict=True):
        target[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    return memory


def part_arrays(memory: torch.Tensor, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
    """The arrays in memory that `fill_host_memory` has filled, or in a copy of it, as views with
    their dtypes and shapes."""
    parts = []
    for array, start in zip(arrays, _places(arrays)[0], strict=True):
        dtype = getattr(torch, array.dtype.name)
        part = memory[start : start + array.nbytes].view(dtype)
        parts.append(part.reshape(array.shape))
    return parts


def _places(arrays: Sequence[NDArray[Any]]) -> tuple[list[int], int]:
    """Where the arrays begin, and where the last one ends."""
    *starts, end = accumulate((-(-array.nbytes // 16) * 16 for array in arrays), initial=0)
    return starts, end


def _host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        # The system may be unable to pin pages; PyTorch has no specific error for that.
        with suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def why_on_host(header: FrameHeader, device: torch.device) -> str | None:
    """The reason why a frame is decoded on the host; None if kernels decode it."""
    if not runs_on(device):
        return f"kernels do not run on {device}"
    if header.base is not None or header.n_row_dims:
        return "a base" if header.base is not None else "side data"
    return why_unsupported(header.table, header.geometry)


def _decode_on_host(
    data: ByteArray, name: str | None, device: torch.device, check: bool
) -> torch.Tensor:
    frame = Frame.from_buffer(data, name=name)
    memory = torch.empty(frame.logical_nbytes, dtype=torch.uint8)
    frame.decompress_into(memory.numpy(), check=check)
    return memory.to(device).view(TORCH_DTYPES[frame.dtype]).reshape(frame.shape)


def first_bad_chunk(payload: ByteArray, ends: Sequence[int], sums: Sequence[int]) -> int | None:
    """The first chunk whose CRC32C differs from the one in the chunk table; None if all are equal.

    Args:
        payload: the bytes of all these chunks.
        ends: where each chunk begins in the payload, and where the last one ends.
        sums: the CRC32C of each chunk by the table.
    """
    for chunk, crc in enumerate(sums):
        if _core.crc32c(payload[ends[chunk] : ends[chunk + 1]]) != crc:
            return chunk
    return None


def _check_sums(payload: ByteArray, header: FrameHeader, name: str | None) -> None:
    ends = (header.chunk_offsets() - header.header_nbytes).tolist()
    bad = first_bad_chunk(payload, ends, header.table[:, CHUNK_CRC].tolist())
    if bad is not None:
        raise _chunk_error(header, name, bad, STATUS_WORDS[Status.CHECKSUM])


def _chunk_error(header: FrameHeader, name: str | None, chunk: int, words: str) -> CorruptionError:
    where = f"byte {header.chunk_offset(chunk)}: chunk {chunk} of {len(header.table)}"
    return CorruptionError(f"{label(name)}{where}: {words}")


def _check_statuses(
    statuses: list[torch.Tensor], plan: ChunkPlan, header: FrameHeader, name: str | None
) -> None:
    """Waits for the kernels, and raises the first error that they report."""
    found = torch.cat(statuses).cpu().numpy()
    if not found.any():
        return
    places = np.concatenate([*(group.places for group in plan.rans), plan.escaped_places])
    first = min(np.flatnonzero(found), key=lambda i: (*places[i].tolist(), i))
    chunk, plane = places[first].tolist()
    words = f"plane {plane}: {STATUS_WORDS[int(found[first])]}"
    raise _chunk_error(header, name, chunk, words)
