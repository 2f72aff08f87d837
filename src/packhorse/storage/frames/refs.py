"""References to frames: the tensor that a frame decodes to, and the place where it is stored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from packhorse.layout import DTYPE_BY_NAME

__all__ = ["Content", "FrameRef", "TensorSpec"]


class Content(NamedTuple):
    """Identifies the bytes of a tensor. Frames of the same content can replace each other.

    Attributes:
        digest: the content hash of the bytes.
        dtype: safetensors' name of the dtype.
        numel: number of elements.
        shape: the shape of the frame, in stores where only a frame of the same shape can replace
            another; None in all other stores.
    """

    digest: bytes
    dtype: str
    numel: int
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class FrameRef:
    """A frame in a store, and the frames that it needs.

    Attributes:
        pack: name of the pack (the file, or whatever the store has instead) that holds the frame.
        offset: the frame's first byte in the pack.
        nbytes: length of the frame.
        content: the tensor that the frame decodes to.
        base: the frame that this one is a delta against; None for a full frame.
        n_deltas: how many frames of the chain that begins here need a base.
        pack_nbytes: length of the pack, in stores whose manifests record it; 0 in all other stores.
    """

    pack: str
    offset: int
    nbytes: int
    content: Content
    base: FrameRef | None
    n_deltas: int
    pack_nbytes: int = 0

    def __hash__(self) -> int:
        """From the place alone: a hash of all fields would walk down the chain at each look-up."""
        return hash((self.pack, self.offset))

    @property
    def chain(self) -> tuple[FrameRef, ...]:
        """This frame, its base, the base of its base, and so on down to a full frame."""
        links = [self]
        while links[-1].base is not None:
            links.append(links[-1].base)
        return tuple(links)

    @property
    def name(self) -> str:
        """The name of the frame in its pack, unless the store gives it another one."""
        return f"{self.content.digest.hex()}.{self.content.dtype}"

    @property
    def logical_nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.content.numel * DTYPE_BY_NAME[self.content.dtype].bits // 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its bytes.

    Attributes:
        name: the path of the tensor in its state, or its name in a file.
        dtype: safetensors' name of the dtype.
        shape: the dimensions.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_BY_NAME[self.dtype].bits // 8
