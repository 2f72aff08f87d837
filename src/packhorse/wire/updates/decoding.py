"""Decoding one unit of an update, and checking a payload without decoding it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import content_sum, crc32c
from packhorse.errors import BaseMismatchError, CorruptionError
from packhorse.frame import Frame
from packhorse.frame.patch import Patch
from packhorse.layout import CHUNK_CRC

__all__ = ["check_payload", "check_sum", "decode_unit", "patch_for_unit"]


def decode_unit(
    frame: Frame, base: ByteArray | None, base_hash: bytes | None, threads: int
) -> ByteArray:
    """Decodes a frame to new memory, and compares the content sum.

    Args:
        frame: the frame; its header was checked.
        base: the bytes of its base, if it has one.
        base_hash: the content sum that the base is known to have.
        threads: how many to use.

    Raises:
        CorruptionError: the frame is damaged, or the base is not what its hash says.
    """
    data = np.empty(frame.logical_nbytes, np.uint8)
    frame.decompress_into(data, base=base, base_hash=base_hash, threads=threads)
    check_sum(frame, data, threads)
    return data


def patch_for_unit(frame: Frame, base: ByteArray, base_hash: bytes, threads: int) -> Patch | None:
    """Decodes what a frame changes, and compares the content sum.

    Args:
        frame: the frame; its header was checked.
        base: the bytes of its base, which are only read.
        base_hash: the content sum that the base is known to have.
        threads: how many to use.

    Returns:
        The patch; None if the frame can only be decoded as a whole.

    Raises:
        CorruptionError: the frame is damaged.
        BaseMismatchError: the base is not what its hash says.
    """
    try:
        patch = frame.prepare_patch(base, base_hash=base_hash, threads=threads)
    except BaseMismatchError as error:
        raise BaseMismatchError(f"{error}; ask for an anchor") from None
    if patch is not None:
        _compare_sum(frame, patch.content_sum)
    return patch


def check_sum(frame: Frame, data: ByteArray, threads: int) -> None:
    """Compares the content sum of decoded bytes with their frame's.

    Raises:
        CorruptionError: it is another.
    """
    _compare_sum(frame, content_sum(data, threads=threads))


def _compare_sum(frame: Frame, digest: bytes) -> None:
    if digest != frame.content_hash:
        raise CorruptionError(
            f"the decoded bytes have content sum {digest.hex()}, and the frame says "
            f"{frame.content_hash.hex()}: something else wrote to the base since the last commit, "
            "or the frame is damaged; ask for an anchor"
        )


def check_payload(frame: Frame) -> None:
    """Compares the checksum of each chunk of a frame; nothing is decoded.

    Raises:
        CorruptionError: a checksum does not match.
    """
    payload = np.frombuffer(frame.buffer(), np.uint8)
    table, offsets = frame.header.table, frame.header.chunk_offsets().tolist()
    for chunk, (start, stop) in enumerate(pairwise(offsets)):
        if crc32c(payload[start:stop]) != table.item(chunk, CHUNK_CRC):
            raise CorruptionError(f"byte {start}: chunk {chunk}: its checksum does not match")
