"""Checksums: CRC32C, and the two kinds of content hash of a tensor (docs/format.md, section 7).

The usual hash is a tree of XXH3-128, so that it can be computed chunk by chunk, while a chunk is in
the cache, and in parallel. While the core encodes, it hashes leaves of more than 240 bytes. Only
the last leaf of a tensor can be shorter; it is hashed afterwards, as the root is.

A tensor may change while it is packed. So the encoder hashes the copy that it packs: the core fills
in the hashes while it reads, and puts the bytes of a short last leaf behind them.

The other kind is a sum, to which every word adds what follows from its value and its place. Where
few words change, the new sum follows from these words alone. Weight updates use it.
"""

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from packhorse import _core
from packhorse.codecs.base import ByteArray, as_bytes
from packhorse.layout import CONTENT_LEAF_NBYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "ContentHasher",
    "base_check",
    "changed_sum",
    "content_hash",
    "content_sum",
    "copy_with_hash",
    "crc32c",
    "empty_leaves",
    "finish_leaves",
    "hash_leaves",
    "hash_root",
    "leaves_from",
]

_SHORT_LEAF_NBYTES = 240
_SUM = struct.Struct("<QQ")
_SUM_MASK = (1 << 64) - 1


class ContentHasher:
    """Computes a content hash, or a content sum, piece by piece."""

    def __init__(self, *, has_sum: bool) -> None:
        self._has_sum = has_sum
        self._leaves = [np.empty(0, np.uint8)]
        self._sum = bytes(_SUM.size)
        self._nbytes = 0

    def add(self, piece: ByteArray, threads: int) -> None:
        """Adds the next bytes: whole leaves, if more follow."""
        if self._has_sum:
            self._sum = changed_sum(self._sum, *_core.content_sum(piece, self._nbytes, threads))
        else:
            self._leaves.append(hash_leaves(piece, threads))
        self._nbytes += piece.size

    def digest(self) -> bytes:
        """The 16 bytes for all pieces."""
        return self._sum if self._has_sum else hash_root(np.concatenate(self._leaves))


def crc32c(src: "Buffer | Any") -> int:
    """Computes the Castagnoli CRC of some bytes (docs/format.md, section 1).

    Raises:
        TypeError: `src` is not a C-contiguous buffer.
    """
    return _core.crc32c(as_bytes(src, "src"))


def content_hash(src: "Buffer | Any", *, threads: int = 1) -> bytes:
    """Computes the content hash of a tensor's bytes.

    Args:
        src: the bytes.
        threads: how many to use.

    Returns:
        The hash: 16 bytes.

    Raises:
        TypeError: `src` is not a C-contiguous buffer.

    Example:
        >>> from packhorse.frame import compress_buffer, content_hash
        >>> content_hash(bytes(4096)) == compress_buffer(bytes(4096), "F32", (1024,)).content_hash
        True
    """
    return hash_root(hash_leaves(as_bytes(src, "src"), threads))


def content_sum(src: "Buffer | Any", *, threads: int = 1) -> bytes:
    """Computes the content sum of a tensor's bytes (docs/format.md, section 7.2).

    Args:
        src: the bytes.
        threads: how many to use.

    Returns:
        The sum: 16 bytes.

    Raises:
        TypeError: `src` is not a C-contiguous buffer.

    Example:
        >>> from packhorse.codecs.content import content_sum
        >>> content_sum(bytes(4)).hex(), content_sum(b"\\1\\0\\0\\0").hex()
        ('00000000000000000000000000000000', 'afcd1d7b0000000039a820e200000000')
    """
    return _SUM.pack(*_core.content_sum(as_bytes(src, "src"), 0, threads))


def base_check(before: int) -> int:
    """The base check of a frame (docs/format.md, section 7.2).

    Args:
        before: what the first number of the base's content sum has of the units that are replaced.

    Returns:
        The check, of 32 bits.
    """
    return _core.content_key(before) >> 32


def changed_sum(digest: bytes, low: int, high: int) -> bytes:
    """The content sum after a change.

    Args:
        digest: the sum before.
        low: by how much its first number changes, modulo 2^64.
        high: by how much its second number changes.
    """
    before = _SUM.unpack(digest)
    return _SUM.pack(before[0] + low & _SUM_MASK, before[1] + high & _SUM_MASK)


def copy_with_hash(src: ByteArray, dst: ByteArray) -> bytes:
    """Copies bytes, and returns the content hash of the copy: another thread may write to `src`
    meanwhile."""
    leaves = empty_leaves(src.size)
    _core.copy_with_leaves(src, dst, leaves)
    return hash_root(finish_leaves(leaves, src.size))


def empty_leaves(nbytes: int) -> ByteArray:
    """Allocates room for the leaf hashes of `nbytes` bytes, 16 bytes each, followed by room for a
    last leaf that the core does not hash."""
    return np.zeros(_n_hashed(nbytes) + _SHORT_LEAF_NBYTES, np.uint8)


def _n_hashed(nbytes: int) -> int:
    return 16 * -(-nbytes // CONTENT_LEAF_NBYTES)


def leaves_from(leaves: ByteArray, start: int, nbytes: int) -> ByteArray:
    """Returns the part of `empty_leaves` for a piece that begins at byte `start`; a leaf must
    begin there."""
    first = _n_hashed(start)
    return leaves[first : first + _n_hashed(nbytes) + _SHORT_LEAF_NBYTES]


def hash_leaves(data: ByteArray, threads: int = 1) -> ByteArray:
    """Hashes all leaves of some bytes, to 16 bytes each."""
    leaves = empty_leaves(data.size)
    hashes = leaves[:-_SHORT_LEAF_NBYTES]
    _core.leaf_digests(data, hashes, threads)
    last = data.size % CONTENT_LEAF_NBYTES
    if 0 < last <= _SHORT_LEAF_NBYTES:
        leaves[hashes.size : hashes.size + last] = data[data.size - last :]
    return finish_leaves(leaves, data.size)


def finish_leaves(leaves: ByteArray, nbytes: int) -> ByteArray:
    """Completes the leaf hashes of `nbytes` bytes, once the core has filled in its part."""
    hashes = leaves[:-_SHORT_LEAF_NBYTES]
    last = nbytes % CONTENT_LEAF_NBYTES
    if 0 < last <= _SHORT_LEAF_NBYTES:
        digest = _core.xxh3_128(leaves[hashes.size : hashes.size + last])
        hashes[-16:] = np.frombuffer(digest, np.uint8)
    return hashes


def hash_root(leaves: ByteArray) -> bytes:
    """Computes the content hash from the hashes of all leaves."""
    if leaves.size == 16:
        return leaves.tobytes()
    return _core.xxh3_128(leaves)
