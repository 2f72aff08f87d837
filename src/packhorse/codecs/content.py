"""Checksums: CRC32C, and the content hash of a tensor (docs/format.md, section 7).

The hash is a tree of XXH3-128, so that it can be computed chunk by chunk while the chunk is in the
cache, and in parallel. The core hashes leaves of more than 240 bytes; the short forms of XXH3,
which at most the last leaf of a tensor needs, and the root come from the xxhash package.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from packhorse import _core
from packhorse.codecs.base import ByteArray, as_bytes, choose_isa
from packhorse.layout import CONTENT_LEAF_NBYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["content_hash", "crc32c", "empty_leaves", "finish_leaves", "hash_leaves", "hash_root"]

_SHORT_LEAF_NBYTES = 240


def crc32c(src: "Buffer | Any") -> int:
    """The Castagnoli CRC of some bytes (docs/format.md, section 1).

    Raises:
        TypeError: `src` is not a C-contiguous buffer.
    """
    return _core.crc32c(as_bytes(src, "src"), int(choose_isa()))


def content_hash(src: "Buffer | Any", *, threads: int = 1) -> bytes:
    """The content hash of a tensor's bytes: 16 bytes.

    Raises:
        TypeError: `src` is not a C-contiguous buffer.
    """
    return hash_root(hash_leaves(as_bytes(src, "src"), threads))


def empty_leaves(nbytes: int) -> ByteArray:
    """Room for the hashes of the leaves of so many bytes, 16 bytes each."""
    return np.zeros(16 * -(-nbytes // CONTENT_LEAF_NBYTES), np.uint8)


def hash_leaves(data: ByteArray, threads: int = 1) -> ByteArray:
    """The hashes of all leaves of the bytes, 16 bytes each."""
    leaves = empty_leaves(data.size)
    _core.leaf_digests(data, leaves, threads, int(choose_isa()))
    finish_leaves(data, leaves)
    return leaves


def finish_leaves(data: ByteArray, leaves: ByteArray) -> None:
    """Hashes the last leaf if it is one that the core leaves out."""
    last = data.size % CONTENT_LEAF_NBYTES
    if 0 < last <= _SHORT_LEAF_NBYTES:
        digest = xxhash.xxh3_128_digest(data[data.size - last :].tobytes())
        leaves[-16:] = np.frombuffer(digest, np.uint8)


def hash_root(leaves: ByteArray) -> bytes:
    """The content hash, given the hashes of all leaves."""
    if leaves.size == 16:
        return leaves.tobytes()
    return xxhash.xxh3_128_digest(leaves.tobytes())
