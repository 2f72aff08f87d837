"""Ways to send a weight update: what other projects do, made again, and ours.

A codec is built for one update and serves both ends. `encode` runs on the sender, which knows both
states; `decode` and `apply` run on a receiver, which has the base. Decoding may go on while the
model works, so it must not touch the weights; applying happens in the pause. Rivals are vectorised
and use `threads` wherever their formats let them; all of them get the whole model as one flat
range, which saves them the calls for each tensor. To add an arm, add a line to `ARMS`.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from benchmarks.wire.update_data import Units, Update

__all__ = ["ARMS", "PIECE", "Codec", "Share", "UpdateArm", "available", "prove"]

Bytes = NDArray[np.uint8]
Parts = list[Bytes]
Share = Callable[[Parts], Parts]
PIECE = 1 << 20
ZSTD_LEVEL = 1  # of all the projects
BLOCK = 1 << 22  # bytes that one thread works on


class Codec(Protocol):
    """One way to send one update."""

    def prepare(self, share: Share) -> None:
        """Return both ends to the state before the update; untimed.

        Args:
            share: gives all ranks the buffers of rank 0.
        """

    def encode(self) -> Parts:
        """On the sender: what to send, as buffers of bytes."""

    def decode(self, parts: Parts) -> Any:
        """On a receiver, beside a working model: what `apply` needs."""

    def apply(self, staged: Any, target: Units) -> None:
        """On a receiver, in the pause: turn the base in `target` into the new state."""


@dataclass(frozen=True)
class UpdateArm:
    """An entry of the comparison.

    Attributes:
        how: what it is, and who sends updates like this.
        make: builds the codec for an update, a number of threads and the weights to update.
        piece: bytes of one message; None for all in one.
        ours: whether it is Packhorse's.
    """

    how: str
    make: Callable[[Update, int, Units], Codec]
    piece: int | None = PIECE
    ours: bool = False


class _Stateless:
    """A codec whose ends keep nothing from one update to the next."""

    def __init__(self, update: Update, threads: int, target: Units) -> None:
        self._base, self._new = update.base, update.new
        self._target = target
        self._pool = ThreadPoolExecutor(threads)
        self._threads = threads

    def prepare(self, share: Share) -> None:
        pass

    def _map(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        return list(self._pool.map(work, *arguments))

    def _blocks(self, nbytes: int, itemsize: int = 1) -> list[slice]:
        size = BLOCK // itemsize
        n = nbytes // itemsize
        return [slice(first, min(first + size, n)) for first in range(0, n, size)]


class Raw(_Stateless):
    """The new weights as they are."""

    def encode(self) -> Parts:
        return [self._new.view(np.uint8)]

    def decode(self, parts: Parts) -> Any:
        return parts[0].view(self._new.dtype)

    def apply(self, staged: Any, target: Units) -> None:
        np.copyto(target, staged)


class Zstd(_Stateless):
    """Blocks of the new weights under zstd."""

    def encode(self) -> Parts:
        blocks = self._blocks(self._new.nbytes)
        return _joined(self._map(_compressed, [self._source(block) for block in blocks]))

    def _source(self, block: slice) -> Bytes:
        return self._new.view(np.uint8)[block]

    def decode(self, parts: Parts) -> Any:
        staged = np.empty(self._new.nbytes, np.uint8)
        places = [staged[block] for block in self._blocks(staged.nbytes)]
        self._map(_decompress_into, _split(parts), places)
        return staged.view(self._new.dtype)

    def apply(self, staged: Any, target: Units) -> None:
        np.copyto(target, staged)


class XorZstd(Zstd):
    """The XOR of both states under zstd, dense: blocks go through zstd as they are made."""

    def encode(self) -> Parts:
        return _joined(self._map(self._packed, self._blocks(self._new.nbytes, 2)))

    def _packed(self, block: slice) -> bytes:
        return _compressed((self._new[block] ^ self._base[block]).view(np.uint8))

    def apply(self, staged: Any, target: Units) -> None:
        def work(block: slice) -> None:
            np.bitwise_xor(target[block], staged[block], out=target[block])

        self._map(work, self._blocks(target.nbytes, 2))


class _Sparse(_Stateless):
    """Codecs of the changed elements."""

    def __init__(self, update: Update, threads: int, target: Units) -> None:
        super().__init__(update, threads, target)
        self._spans = list(update.spans())

    def _changed(self) -> NDArray[np.int64]:
        """Indices of the elements that differ, ascending."""

        def work(block: slice) -> NDArray[np.int64]:
            start: int = block.start
            return np.flatnonzero(self._new[block] != self._base[block]) + start

        changed: NDArray[np.int64] = np.concatenate(
            self._map(work, self._blocks(self._new.nbytes, 2))
        )
        return changed

    def _by_tensor(self, index: NDArray[np.int64]) -> list[slice]:
        """Which of the ascending indices belong to each tensor."""
        ends = np.searchsorted(index, [end for _, _, _, end in self._spans])
        return [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


class IndexValues(_Sparse):
    """Four bytes for the index and the new value of each change, nothing packed."""

    def encode(self) -> Parts:
        index = self._changed()
        values = self._new[index]
        return [index.astype(np.int32).view(np.uint8), values.view(np.uint8)]

    def decode(self, parts: Parts) -> Any:
        return parts[0].view(np.int32), parts[1].view(self._new.dtype)

    def apply(self, staged: Any, target: Units) -> None:
        index, values = staged
        target[index] = values


class GapsXorZstd(_Sparse):
    """Gaps between changes in the narrowest of u16, u32 and u64 that fits a tensor, a run of
    neighbours as its start alone, then the XOR of each change; all under one zstd.

    This is NeMo-RL's nemo_rl/utils/weight_transfer_sparse_codec.py (August 2026). It wraps the
    arrays in torch.save; a header of JSON takes less here.
    """

    WIDTHS = (np.uint16, np.uint32, np.uint64)

    def encode(self) -> Parts:
        index = self._changed()
        values = self._new[index] ^ self._base[index]
        tensors, gaps = [], []
        for (_, _, first, _), part in zip(self._spans, self._by_tensor(index), strict=True):
            kind, raw = self._gaps(index[part] - first)
            tensors.append([int(part.stop - part.start), kind])
            gaps.append(raw)
        header = json.dumps(tensors).encode()
        body = b"".join([_u32(len(header)), header, *gaps, values.tobytes()])
        return [_bytes(_compressed(body, self._threads))]

    def _gaps(self, index: NDArray[np.int64]) -> tuple[int, bytes]:
        """A tensor's indices: bytes a gap, or minus one and the start; and the gaps."""
        if not index.size:
            return 0, b""
        if index[-1] - index[0] + 1 == index.size:
            return -1 - int(index[0]), b""
        gaps = np.diff(index, prepend=-1) - 1
        width = next(width for width in self.WIDTHS if gaps.max() <= np.iinfo(width).max)
        return np.dtype(width).itemsize, gaps.astype(width).tobytes()

    def decode(self, parts: Parts) -> Any:
        body = memoryview(zstandard.ZstdDecompressor().decompress(memoryview(parts[0])))
        at = 4 + int.from_bytes(body[:4], "little")
        index = []
        for (count, kind), (_, _, first, _) in zip(
            json.loads(bytes(body[4:at])), self._spans, strict=True
        ):
            if kind < 0:
                index.append(np.arange(count) - kind - 1 + first)
            elif kind:
                gaps = np.frombuffer(body, f"u{kind}", count, at)
                at += count * kind
                steps = gaps.astype(np.int64)
                steps += 1
                np.cumsum(steps, out=steps)
                steps += first - 1
                index.append(steps)
        flat = np.concatenate(index) if index else np.empty(0, np.int64)
        return flat, np.frombuffer(body, self._new.dtype, flat.size, at)

    def apply(self, staged: Any, target: Units) -> None:
        index, values = staged
        target[index] ^= values


class CooZstd(_Sparse):
    """Rows as steps in u8, columns as steps within a row in u16, new values; all under one zstd.

    This is grail/infrastructure/sparse_codec.py, version 3.1, of one-covenant/grail (PULSE). Its
    header has more fields, and its decoder sums up each row in a loop of Python; here all rows are
    summed up at once.
    """

    def encode(self) -> Parts:
        index = self._changed()
        values = self._new[index]
        tensors, arrays = [], []
        for (_, shape, first, _), part in zip(self._spans, self._by_tensor(index), strict=True):
            rows, columns = np.divmod(index[part] - first, _columns(shape))
            steps = np.diff(rows, prepend=0)
            columns[1:] -= np.where(steps[1:] == 0, columns[:-1], 0)
            chosen = [_narrow(steps, np.uint8), _narrow(columns, np.uint16)]
            tensors.append([int(steps.size), *(a.dtype.str for a in chosen)])
            arrays += [*(a.tobytes() for a in chosen), values[part].tobytes()]
        header = json.dumps(tensors).encode()
        body = b"".join([_u32(len(header)), header, *arrays])
        return [_bytes(_compressed(body, self._threads))]

    def decode(self, parts: Parts) -> Any:
        body = memoryview(zstandard.ZstdDecompressor().decompress(memoryview(parts[0])))
        at = 4 + int.from_bytes(body[:4], "little")
        index, values = [], []
        for (count, *names), (_, shape, first, _) in zip(
            json.loads(bytes(body[4:at])), self._spans, strict=True
        ):
            found = []
            for dtype in (*names, self._new.dtype):
                found.append(np.frombuffer(body, dtype, count, at))
                at += found[-1].nbytes
            index.append(_flat(found[0], found[1], _columns(shape)) + first)
            values.append(found[2])
        return np.concatenate(index), np.concatenate(values)

    def apply(self, staged: Any, target: Units) -> None:
        index, values = staged
        target[index] = values


class Zipnn(_Stateless):
    """zipnn's own delta."""

    def __init__(self, update: Update, threads: int, target: Units) -> None:
        super().__init__(update, threads, target)
        zipnn = import_module("zipnn")
        options = {"input_format": "byte", "bytearray_dtype": "bfloat16", "threads": threads}
        ends = [zipnn.ZipNN(delta_compressed_type="byte", **options) for _ in range(2)]
        self._encoder, self._decoder = ends

    def encode(self) -> Parts:
        data, base = (memoryview(a.view(np.uint8)) for a in (self._new, self._base))
        return [_bytes(self._encoder.compress(data, delta_second_data=base))]

    def decode(self, parts: Parts) -> Any:
        base = memoryview(self._target.view(np.uint8))
        out = self._decoder.decompress(bytes(parts[0]), delta_second_data=base)
        return np.frombuffer(out, self._new.dtype)

    def apply(self, staged: Any, target: Units) -> None:
        np.copyto(target, staged)


class Frames(_Stateless):
    """A frame with the base, unpacked beside it, then copied."""

    def __init__(self, update: Update, threads: int, target: Units) -> None:
        super().__init__(update, threads, target)
        self._frame = import_module("packhorse.frame")
        self._dtype, self._shape = update.dtype, (update.new.size,)
        # Both ends know it from the update before.
        self._hash = self._frame.content_hash(update.base)

    def encode(self) -> Parts:
        frame = self._frame.compress_buffer(
            self._new.view(np.uint8),
            self._dtype,
            self._shape,
            base=self._base.view(np.uint8),
            base_hash=self._hash,
            base_is_fixed=True,
            threads=self._threads,
        )
        return [_bytes(frame.buffer())]

    def decode(self, parts: Parts) -> Any:
        out = np.empty_like(self._new)
        frame = self._frame.Frame.from_buffer(parts[0])
        base = {"base": self._target.view(np.uint8), "base_hash": self._hash}
        frame.decompress_into(out.view(np.uint8), threads=self._threads, **base)
        return out

    def apply(self, staged: Any, target: Units) -> None:
        np.copyto(target, staged)


class Updates(_Stateless):
    """`DeltaSender` and `DeltaReceiver`, which have an earlier update behind them."""

    def __init__(
        self, update: Update, threads: int, target: Units, *, in_place: bool = False
    ) -> None:
        super().__init__(update, threads, target)
        self._updates = import_module("packhorse.wire.updates")
        self._in_place = in_place
        self._states = [_state(update, flat) for flat in (update.base, update.new, target)]

    def prepare(self, share: Share) -> None:
        base, _, target = self._states
        options = {"threads": self._threads}
        self._sender = self._updates.DeltaSender(
            base, anchor_every=None, receivers_have_it=True, **options
        )
        self._receiver = self._updates.DeltaReceiver(
            into=target, in_place=self._in_place, **options
        )
        # The first update changes nothing, but both sides know each other and the hashes then.
        self._receiver.unpack(share([_bytes(bytes(self._sender.pack()))])[0])

    def encode(self) -> Parts:
        return [_bytes(self._sender.pack(self._states[1]).buffer())]

    def decode(self, parts: Parts) -> Any:
        return self._receiver.stage(parts[0])

    def apply(self, staged: Any, target: Units) -> None:
        self._receiver.commit(staged)


ARMS = {
    "raw": UpdateArm("the new weights in pieces of 1 MiB", Raw),
    "raw, one piece": UpdateArm("the new weights in one message", Raw, piece=None),
    "zstd-1": UpdateArm("zstd level 1 of the new weights, blocks of 4 MiB", Zstd),
    "XOR + zstd-1": UpdateArm(
        "zstd level 1 of the XOR, as slime, miles and SkyRL; blocks of 4 MiB", XorZstd
    ),
    "gaps + XOR + zstd-1": UpdateArm("as NeMo-RL: u16 gaps and XORs under zstd-1", GapsXorZstd),
    "rows, columns + zstd-1": UpdateArm(
        "as PULSE (grail 3.1): u8 rows, u16 columns and values under zstd-1", CooZstd
    ),
    "int32 + values": UpdateArm(
        "index and new value of each change, as verl and vLLM's sparse_nccl", IndexValues
    ),
    "zipnn delta": UpdateArm("zipnn's own delta", Zipnn),
    "packhorse frames": UpdateArm("one frame with a base, unpacked and copied", Frames, ours=True),
    "packhorse updates": UpdateArm(
        "`DeltaSender`, `DeltaReceiver`; decoded beside the weights", Updates, ours=True
    ),
    "packhorse updates, in place": UpdateArm(
        "the same with `in_place=True`: decoded in the pause, without memory for a second copy",
        partial(Updates, in_place=True),
        ours=True,
    ),
}


def available(names: Sequence[str] | None = None) -> tuple[dict[str, UpdateArm], dict[str, str]]:
    """The arms that can run here, and for each of the others the reason.

    Args:
        names: those that are wanted; None for all.
    """
    arms, absent = {}, {}
    nothing = Update("", "", np.zeros(2, np.uint16), np.zeros(2, np.uint16), (("w", (2,)),))
    for name, arm in ARMS.items():
        if names is not None and name not in names:
            continue
        try:
            arm.make(nothing, 1, nothing.base)
        except ImportError as reason:
            absent[name] = str(reason)
        else:
            arms[name] = arm
    return arms, absent


def prove(arm: UpdateArm, update: Update, threads: int = 1) -> int:
    """Send an update from one array to another without a wire.

    Returns:
        Bytes of the payload.

    Raises:
        RuntimeError: the receiver does not end with the new weights bit for bit, or the arm
            changed its input.
    """
    target, before = update.base.copy(), update.new.copy()
    codec = arm.make(update, threads, target)
    codec.prepare(lambda parts: parts)
    parts = codec.encode()
    staged = codec.decode([part.copy() for part in parts])
    if not np.array_equal(target, update.base):
        raise RuntimeError(f"{arm.how}: the weights changed before the update was applied")
    codec.apply(staged, target)
    if not np.array_equal(target, before) or not np.array_equal(update.new, before):
        raise RuntimeError(f"{arm.how}: {update.name} is not restored bit for bit")
    return sum(part.nbytes for part in parts)


def _state(update: Update, flat: Units) -> dict[str, torch.Tensor]:
    """Named tensors of PyTorch in the memory of a flat array."""
    values = torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
    return {name: values[first:end].view(shape) for name, shape, first, end in update.spans()}


def _compressed(source: Any, threads: int = 0) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, threads=threads).compress(source)


def _decompress_into(packed: Bytes, place: Bytes) -> None:
    place[:] = np.frombuffer(zstandard.ZstdDecompressor().decompress(memoryview(packed)), np.uint8)


def _joined(blocks: Sequence[bytes]) -> Parts:
    """Sizes of the blocks, and the blocks in one buffer."""
    sizes = np.array([len(block) for block in blocks], np.int64)
    return [sizes.view(np.uint8), _bytes(b"".join(blocks))]


def _split(parts: Parts) -> list[Bytes]:
    return np.split(parts[1], np.cumsum(parts[0].view(np.int64))[:-1])


def _bytes(data: Any) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _columns(shape: Sequence[int]) -> int:
    """Elements of a row of the two-dimensional view of a tensor."""
    return max(1, int(np.prod(shape[1:], dtype=np.int64)))


def _narrow(values: NDArray[np.int64], dtype: Any) -> NDArray[Any]:
    fits = not values.size or values.max() <= np.iinfo(dtype).max
    return values.astype(dtype if fits else np.int32)


def _flat(rows: NDArray[Any], columns: NDArray[Any], width: int) -> NDArray[np.int64]:
    """Indices in a tensor from the steps of rows and columns, all rows at once."""
    steps = rows.astype(np.int64)
    sums = np.cumsum(columns, dtype=np.int64)
    # In each row the sum begins again: what came before its first element is taken away.
    begins = np.flatnonzero(steps != 0)
    begins = begins if begins.size and begins[0] == 0 else np.concatenate([[0], begins])
    if steps.size:
        before = sums[begins] - columns[begins]
        sums -= np.repeat(before, np.diff(begins, append=steps.size))
    return np.cumsum(steps) * width + sums
