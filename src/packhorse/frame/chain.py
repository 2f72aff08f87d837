"""Decodes a chain of frames: a tensor's own, that of its base, and so on down to a full frame.

The core takes a range of the tensor through all frames before it begins the next range. So each
range stays in the cache, and no base is ever whole in memory, nor hashed: if the content hash of
the tensor is right, all bases were. The caller compares it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from packhorse import _core
from packhorse._core import EncodedTensor
from packhorse.codecs.base import STATUS_WORDS, ByteArray
from packhorse.errors import CorruptionError
from packhorse.frame.base import kind_of_base
from packhorse.frame.frame import Frame

__all__ = ["ChainFault", "can_decode_chain", "decode_chain"]


class ChainFault(NamedTuple):
    """What is wrong with a chain.

    Attributes:
        number: of the damaged frame in the chain; 0 is the tensor's own frame.
        error: what is wrong with it.
    """

    number: int
    error: CorruptionError


def can_decode_chain(frames: Sequence[Frame]) -> bool:
    """Tells whether `decode_chain` can decode some frames.

    Args:
        frames: the tensor's own frame first.

    Returns:
        Whether each has the next one's tensor as its base, the last has none, and only the last has
        chunks of Zstandard.
    """
    if frames[-1].header.base is not None:
        return False
    for frame, before in pairwise(frames):
        base, of_base = frame.header.base, before.header
        if (
            base is None
            or (base.content_hash, base.dtype) != (of_base.content_hash, of_base.dtype)
            or frame.header.geometry.n_units != of_base.geometry.n_units
            or frame.has_zstd
        ):
            return False
    return True


def decode_chain(frames: Sequence[Frame], dst: ByteArray, threads: int) -> ChainFault | None:
    """Decodes a chain.

    Args:
        frames: those of a chain that can be decoded, the tensor's own frame first.
        dst: memory for the tensor. After an error, its content is undefined.
        threads: how many to use.

    Returns:
        What is wrong, if a checksum does not match or a stream breaks a rule.

    Raises:
        CorruptionError: the last frame has chunks of Zstandard, and one of them is damaged.
    """
    links = list(reversed(frames))
    tensors: list[EncodedTensor] = []
    for link in links:
        tensor = link._encoded(None)
        tensors.append(
            tensor if isinstance(tensor, EncodedTensor) else tensor.stored(threads, None)
        )
    kinds = [kind_of_base(link.header.dtype, link.header.base) for link in links]
    status, number, chunk = _core.decode_links(tensors, kinds, dst, True, threads)
    if not status:
        return None
    error = links[number]._chunk_error(chunk, STATUS_WORDS[status])
    return ChainFault(len(links) - 1 - number, error)
