"""Stores of a run's checkpoints, ours and the rivals', behind one interface.

All stores take the tensors that a run has in memory, and restore them to that memory. If a rival is
a codec and not a store, it gets the store that a user would write around it: each kind of tensor is
packed as one array, which suits the codec best, and a checkpoint is one safetensors file of the
packed bytes. As in Packhorse, a full checkpoint comes after every `MAX_DELTAS` differences. The
previous checkpoint is kept in memory, so that it need not be read for the next.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint._extension import ZStandard

from benchmarks.codecs.peers import Codec, PlanesCodec, Setup, ZipnnCodec, parts, zstandard_codec
from benchmarks.data import sets
from benchmarks.snapshots.delta_peers import XorCodec, ZipnnDeltaCodec
from benchmarks.snapshots.pairs import DTYPES, STATE_KINDS, Array, Pair
from packhorse.disk import PackhorseReader, PackhorseWriter, SnapshotStore

__all__ = ["MAX_DELTAS", "STORES", "Entry", "Live", "PackhorseStore", "Store"]

MAX_DELTAS = 8
Make = Callable[[Any, Setup], Codec]


class Live:
    """The tensors of a run in memory, which take the values of one checkpoint after the other.

    Attributes:
        parts: one flat array for each kind of tensor, with the shapes of the tensors in it.
        state: PyTorch's tensors in that memory, by kind and name.
    """

    def __init__(self, step: int) -> None:
        """Args:
        step: of the first checkpoint.
        """
        self.parts = [_part(kind, step) for kind in STATE_KINDS]
        self.state = {
            part.name: {name: _tensor(array) for name, array in part.tensors} for part in self.parts
        }

    @property
    def flat(self) -> dict[str, torch.Tensor]:
        """The same tensors in one dict."""
        return {f"{k}.{n}": t for k, tensors in self.state.items() for n, t in tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of one checkpoint."""
        return sum(part.array.nbytes for part in self.parts)

    def load(self, step: int) -> None:
        """Give the tensors the values of a checkpoint of the run."""
        for part in self.parts:
            tensors = sets.training_tensors(part.name, step, part.dtype, part.array.dtype.type)
            for name, array in part.tensors:
                np.copyto(array, tensors[name])

    def copy(self) -> list[Array]:
        """The bytes of all tensors as they are now."""
        return [part.array.view(np.uint8).copy() for part in self.parts]

    def check(self, wanted: list[Array], who: str) -> None:
        """Compare the tensors bit for bit with earlier values.

        Raises:
            RuntimeError: they differ; the message names `who`.
        """
        for part, known in zip(self.parts, wanted, strict=True):
            if not np.array_equal(part.array.view(np.uint8), known):
                raise RuntimeError(f"{who}: the tensors {part.name} are not as they were")

    def poison(self) -> None:
        """Overwrite all tensors."""
        for part in self.parts:
            part.array.view(np.uint8).fill(0xA5)


def _part(kind: str, step: int) -> Pair:
    """A kind of tensor at a step, in memory of its own, with room for an older one as base."""
    dtype, numpy_type = DTYPES[kind[-2:]]
    tensors = sets.training_tensors(kind, step, dtype, numpy_type)
    array = np.concatenate([tensor.reshape(-1) for tensor in tensors.values()])
    shapes = tuple((name, tensor.shape) for name, tensor in tensors.items())
    return Pair(kind, dtype, array, "", "", shapes)


def _tensor(array: Array) -> torch.Tensor:
    """A tensor on the array's memory. PyTorch cannot take bfloat16 from NumPy, so the tensor is a
    view of integers."""
    if array.itemsize == 2:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Store:
    """The interface that history.py measures; an object serves one history, in its own folder."""

    def look(self) -> None:
        """Called once, when the tensors have the values of the second checkpoint; not timed."""

    def take(self, i: int) -> None:
        """Write the values of the tensors as checkpoint `i`; they come in order."""
        raise NotImplementedError

    def restore(self, i: int) -> None:
        """Give the tensors the values of checkpoint `i`, after the last was taken."""
        raise NotImplementedError


class SafetensorsStore(Store):
    """A safetensors file for each checkpoint, nothing packed."""

    def __init__(self, folder: Path, live: Live) -> None:
        self._folder, self._tensors = folder, live.flat

    def take(self, i: int) -> None:
        save_file(self._tensors, self._folder / f"{i}.safetensors")

    def restore(self, i: int) -> None:
        for name, tensor in load_file(self._folder / f"{i}.safetensors").items():
            self._tensors[name].copy_(tensor)


class DcpStore(Store):
    """PyTorch's distributed checkpoints, of one process, with its own files."""

    def __init__(self, folder: Path, live: Live, *, zstd: bool = False) -> None:
        self._folder, self._state = folder, live.state
        self._options = {"_extensions": [ZStandard()]} if zstd else {}

    def take(self, i: int) -> None:
        writer = dcp.FileSystemWriter(self._folder / f"{i}", **self._options)
        dcp.save(self._state, storage_writer=writer, no_dist=True)

    def restore(self, i: int) -> None:
        reader = dcp.FileSystemReader(self._folder / f"{i}")
        dcp.load(self._state, storage_reader=reader, no_dist=True)


class CodecStore(Store):
    """A codec with a base, and a store that a user would write around it."""

    def __init__(self, folder: Path, live: Live, *, full: Make, delta: Make) -> None:
        self._folder = folder
        self._kinds = [_Kind(part, full, delta) for part in live.parts]

    def look(self) -> None:
        for kind in self._kinds:
            kind.look()

    def take(self, i: int) -> None:
        pieces = {}
        for kind in self._kinds:
            for k, piece in enumerate(kind.pack(i)):
                pieces[f"{kind.name}.{k}"] = np.frombuffer(piece, np.uint8)
        save_arrays(pieces, self._folder / f"{i}.safetensors")

    def restore(self, i: int) -> None:
        for kind in self._kinds:
            for link in kind.links(i):
                with safe_open(self._folder / f"{link}.safetensors", "np") as file:
                    names = sorted(file.keys())
                    mine = [name for name in names if name.startswith(f"{kind.name}.")]
                    kind.unpack([file.get_tensor(name) for name in mine], link, i)


class _Kind:
    """One kind of tensor in a `CodecStore`: packed in full, or as a difference if that pays."""

    def __init__(self, part: Pair, full: Make, delta: Make) -> None:
        self.name = part.name
        older = part.array.copy()
        self._pair = replace(part, shapes=(), base=older)
        self._older, self._live = older.view(np.uint8), part.array.view(np.uint8)
        self._full, self._delta = full(self._pair, Setup()), delta(self._pair, Setup())
        self._pays = True

    def look(self) -> None:
        """Find out whether the difference from the previous checkpoint pays."""
        full, delta = (
            sum(piece.nbytes for piece in parts(codec.encode(codec.prepare(self._pair))))
            for codec in (self._full, self._delta)
        )
        self._pays = delta < full

    def links(self, i: int) -> range:
        """The checkpoints that restore number `i`, a full one first."""
        return range(i - i % (MAX_DELTAS + 1) if self._pays else i, i + 1)

    def pack(self, i: int) -> list[memoryview]:
        """The packed bytes of checkpoint `i`, valid until the next call."""
        codec = self._codec(i)
        packed = codec.encode(codec.prepare(self._pair))
        if self._pays:
            np.copyto(self._older, self._live)
        return parts(packed)

    def unpack(self, pieces: list[Array], link: int, i: int) -> None:
        """Decode checkpoint `link` on the way to `i`; the one before was decoded last."""
        # A codec on planes has several pieces, other codecs have one.
        out = self._codec(link).decode(pieces if len(pieces) > 1 else pieces[0])
        (piece,) = parts(out)
        np.copyto(self._live if link == i else self._older, np.frombuffer(piece, np.uint8))

    def _codec(self, i: int) -> Codec:
        return self._full if self.links(i)[0] == i else self._delta


class PackhorseStore(Store):
    """A `SnapshotStore`."""

    def __init__(self, folder: Path, live: Live, *, keeps: bool = False) -> None:
        self._folder, self._state = folder, live.state
        kept = live.nbytes if keeps else 0
        self._store = SnapshotStore(folder, threads=1, max_chain=MAX_DELTAS, cache_nbytes=kept)

    def take(self, i: int) -> None:
        self._store.take(f"{i}", self._state)

    def ratios(self, i: int) -> dict[str, float]:
        """The ratio of each kind of tensor in checkpoint `i`."""
        sizes: dict[str, list[int]] = {}
        for tensor in self._store.info(f"{i}").tensors:
            of_kind = sizes.setdefault(tensor.path.partition(".")[0], [0, 0])
            of_kind[0] += tensor.nbytes
            of_kind[1] += tensor.packed_nbytes
        return {kind: nbytes / packed for kind, (nbytes, packed) in sizes.items()}

    def restore(self, i: int) -> None:
        # A new store object, as in a run that is restarted.
        SnapshotStore(self._folder, threads=1).restore(f"{i}", framework="pt", into=self._state)


class PackhorseDcpStore(Store):
    """Distributed checkpoints by Packhorse, each based on the one before."""

    def __init__(self, folder: Path, live: Live) -> None:
        self._folder, self._state = folder, live.state

    def take(self, i: int) -> None:
        base = self._folder / f"{i - 1}" if i else None
        writer = PackhorseWriter(self._folder / f"{i}", base=base, threads=1)
        dcp.save(self._state, storage_writer=writer, no_dist=True)

    def restore(self, i: int) -> None:
        reader = PackhorseReader(self._folder / f"{i}", threads=1)
        dcp.load(self._state, storage_reader=reader, no_dist=True)


@dataclass(frozen=True)
class Entry:
    """A store of the table.

    Attributes:
        make: the store, in a folder for the tensors of a run.
        how: how it is run, for the report.
    """

    make: Callable[[Path, Live], Store]
    how: str


_zstd_planes = partial(zstandard_codec, PlanesCodec, level=3)
_KEPT = "the checkpoint before is kept in memory"
_PAYS = f"of each kind of tensor the difference is packed only where that is shorter; {_KEPT}"

# In the order of the table.
STORES: dict[str, Entry] = {
    "safetensors": Entry(SafetensorsStore, "`save_file` and `load_file`, nothing packed"),
    "dcp": Entry(DcpStore, "`dcp.save` and `dcp.load` of PyTorch with its own writer and reader"),
    "dcp-zstd": Entry(
        partial(DcpStore, zstd=True), "the same with its ZStandard extension, at its only level"
    ),
    "zipnn-delta": Entry(
        partial(CodecStore, full=ZipnnCodec, delta=ZipnnDeltaCodec),
        f"zipnn with its own delta; {_PAYS}",
    ),
    "bitx-like": Entry(
        partial(CodecStore, full=_zstd_planes, delta=partial(XorCodec, make=_zstd_planes)),
        f"zstd level 3 on the byte planes of the XOR; {_PAYS}",
    ),
    "packhorse": Entry(
        PackhorseStore,
        "`SnapshotStore`; a take decodes the checkpoint before along its chain, and keeps nothing "
        "in memory",
    ),
    "packhorse-cache": Entry(
        partial(PackhorseStore, keeps=True),
        f"`SnapshotStore` with `cache_nbytes` of a whole state: {_KEPT}",
    ),
    "packhorse-dcp": Entry(
        PackhorseDcpStore,
        "`dcp.save` and `dcp.load` with `PackhorseWriter(base=...)` and `PackhorseReader`; a take "
        "decodes the checkpoint before along its chain",
    ),
}
