"""Frames decoded on a GPU: uploaded packed, with a plan of a few KiB that the host made of them.

The host reads and checks the header, the chunk table and the fields of every stream; kernels do the
rest. What no kernel decodes (classed rANS, differences from a base, Zstandard) is decoded on the
host and then uploaded; so is everything where there is no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packhorse import _core
from packhorse.codecs.base import STATUS_WORDS, ByteArray, as_bytes, choose_isa
from packhorse.errors import CorruptionError, MissingBackendError
from packhorse.frame import Frame
from packhorse.frame_header import FrameHeader, label, read_header

try:
    import torch

    from packhorse.kernels.launch import runs_on
    from packhorse.kernels.palette import decode_palettes
    from packhorse.kernels.planes import merge_planes
    from packhorse.kernels.rans import decode_rans, resolve_escapes
    from packhorse.kernels.streams import (
        ChunkPlan,
        Geometry,
        plan_chunks,
        why_unsupported,
    )
except ModuleNotFoundError as error:
    raise MissingBackendError(
        "packhorse.device needs PyTorch and Triton; install them with: pip install 'packhorse[gpu]'"
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["decode_frame", "run_plan", "why_on_host"]

_TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
}
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def decode_frame(
    frame: Buffer,
    device: torch.device | str = "cuda",
    *,
    name: str | None = None,
    check: bool = True,
) -> torch.Tensor:
    """The tensor of a frame, on a device.

    Args:
        frame: the frame's bytes, exactly; only read.
        device: where the tensor is to be.
        name: the tensor's name, for messages.
        check: compare each chunk's CRC32C before the upload, and wait for the kernels to see
            whether a stream was bad. Without it nothing waits, and a damaged payload may decode to
            wrong data, but never harms.

    Returns:
        The tensor, of the frame's dtype and shape.

    Raises:
        BaseMismatchError: the frame needs a base.
        CompatibilityError: a version, dtype, flag or mode that this release does not know.
        CorruptionError: a rule of docs/format.md is broken; names tensor, chunk and byte offset.
        TypeError: not a C-contiguous buffer, or a dtype that PyTorch does not have.
    """
    data = as_bytes(frame, "frame")
    header = read_header(data, name, 0, None, int(choose_isa()))
    if header.dtype.name not in _TORCH_DTYPES:
        raise TypeError(f"{label(name)}PyTorch has no dtype for {header.dtype.name}")
    target = torch.device(device)
    if not header.nbytes or why_on_host(header, target) is not None:
        return _decode_on_host(data, name, target, check)
    payload = data[header.header_nbytes :]
    if check:
        _check_sums(payload, header, name)
    try:
        plan = plan_chunks(payload, header.table, _geometry(header), header.header_nbytes)
    except CorruptionError as error:
        raise CorruptionError(f"{label(name)}{error}") from None
    scratch = torch.empty(max(plan.scratch_nbytes, 1), dtype=torch.uint8, device=target)
    unit = _UNITS[header.dtype.unit_nbytes]
    units = torch.empty(plan.geometry.n_units, dtype=unit, device=target)
    statuses = run_plan(_to_device(payload, target), plan, scratch, units)
    if check:
        _check_statuses(statuses, plan, header, name)
    return units.view(_TORCH_DTYPES[header.dtype.name]).reshape(header.shape)


def run_plan(
    payload: torch.Tensor, plan: ChunkPlan, scratch: torch.Tensor, out: torch.Tensor
) -> list[torch.Tensor]:
    """Launches the kernels that a plan needs, on the payload's device; waits for none.

    Args:
        payload: u8, the bytes that the plan was made of; only read. Other bytes of the same length
            make wrong units, but lead no kernel out of its memory.
        plan: what the host read in them.
        scratch: u8, at least `plan.scratch_nbytes`, aligned to 4 bytes; overwritten.
        out: integers of a unit's size (units,); receives the units.

    Returns:
        i32 status numbers: a tensor for each group of rANS streams, and one for planes with
        escapes; 0 is good, and other numbers are those of `packhorse.codecs.base.STATUS_WORDS`.
    """
    device, geometry = payload.device, plan.geometry
    statuses = [
        torch.empty(len(rows), dtype=torch.int32, device=device)
        for rows in (*(group.streams for group in plan.rans), plan.escaped)
    ]
    palettes, entries = _to_device(plan.palettes, device), _to_device(plan.entries, device)
    longest = min(1 << geometry.chunk_log, geometry.n_units)
    decode_palettes(payload, palettes, entries, scratch, longest)
    for group, status in zip(plan.rans, statuses[:-1], strict=True):
        arrays = (group.streams, group.states, group.tables)
        streams, states, tables = (_to_device(array, device) for array in arrays)
        decode_rans(payload, streams, states, tables, scratch, status, group.n_buckets)
    resolve_escapes(payload, _to_device(plan.escaped, device), scratch, statuses[-1])
    planes = _to_device(plan.planes, device)
    merge_planes(payload, planes, scratch, out, geometry.chunk_log, geometry.rotation)
    return statuses


def why_on_host(header: FrameHeader, device: torch.device) -> str | None:
    """Why a frame is decoded on the host, in words; None if kernels decode it."""
    if not runs_on(device):
        return f"kernels do not run on {device}"
    if header.base is not None or header.n_row_dims:
        return "a base" if header.base is not None else "side data"
    return why_unsupported(header.table, _geometry(header))


def _geometry(header: FrameHeader) -> Geometry:
    unit_nbytes = header.dtype.unit_nbytes
    return Geometry(header.nbytes // unit_nbytes, unit_nbytes, header.split, header.chunk_log)


def _decode_on_host(
    data: ByteArray, name: str | None, device: torch.device, check: bool
) -> torch.Tensor:
    frame = Frame.from_buffer(data, name=name)
    memory = torch.empty(frame.logical_nbytes, dtype=torch.uint8)
    frame.decompress_into(memory.numpy(), check=check)
    return memory.to(device).view(_TORCH_DTYPES[frame.dtype]).reshape(frame.shape)


def _check_sums(payload: ByteArray, header: FrameHeader, name: str | None) -> None:
    offsets, isa = header.chunk_offsets(), int(choose_isa())
    starts = (offsets - header.header_nbytes).tolist()
    for chunk, crc in enumerate(header.table[:, 0].tolist()):
        if _core.crc32c(payload[starts[chunk] : starts[chunk + 1]], isa) != crc:
            raise _chunk_error(header, name, chunk, STATUS_WORDS[1])


def _chunk_error(header: FrameHeader, name: str | None, chunk: int, words: str) -> CorruptionError:
    where = f"byte {header.chunk_offset(chunk)}: chunk {chunk} of {len(header.table)}"
    return CorruptionError(f"{label(name)}{where}: {words}")


def _to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy; also where the device is the host."""
    return torch.from_numpy(array.copy()).to(device)


def _check_statuses(
    statuses: list[torch.Tensor], plan: ChunkPlan, header: FrameHeader, name: str | None
) -> None:
    """Waits for the kernels."""
    found = torch.cat(statuses).cpu().numpy()
    if not found.any():
        return
    places = np.concatenate([*(group.places for group in plan.rans), plan.escaped_places])
    first = min(np.flatnonzero(found), key=lambda i: (*places[i].tolist(), i))
    chunk, plane = places[first].tolist()
    words = f"plane {plane}: {STATUS_WORDS[int(found[first])]}"
    raise _chunk_error(header, name, chunk, words)
