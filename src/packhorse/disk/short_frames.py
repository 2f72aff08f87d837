"""Decodes short tensors together, because a call for each takes longer than its tensor.

Only what is right is done: tensors that need more than their frames, or that fail, are left to the
caller, who decodes them one by one and so finds out what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from packhorse import _core
from packhorse._core import OpenFrame, Views
from packhorse.errors import PackhorseError
from packhorse.layout import DTYPE_BY_NAME
from packhorse.storage.safetensors_header import TensorEntry
from packhorse.threads import batches

__all__ = ["ShortFrames", "decode_short", "frames_of"]

# Short tensors are decoded together: so many bytes that the hash still finds them in the cache.
_SHORT_NBYTES = 1 << 16
_TOGETHER_NBYTES = 1 << 19


class ShortFrames(NamedTuple):
    """Frames that are to be decoded.

    Attributes:
        numbers: the numbers of their tensors.
        opened: the frames.
        views: memory for each tensor.
    """

    numbers: Sequence[int]
    opened: Sequence[OpenFrame]
    views: Views


def decode_short(
    numbers: Sequence[int],
    sizes: Sequence[int],
    open_some: Callable[[Sequence[int]], ShortFrames],
    threads: int,
) -> Iterator[list[int]]:
    """Decodes the short ones of some tensors, and checks their content hashes.

    Args:
        numbers: the numbers of the tensors.
        sizes: the size in bytes of the tensor of each number.
        open_some: opens the frames of tensors of some numbers, or of those among them that it can.
            It may raise PackhorseError or OSError: then all of them are left.
        threads: how many threads to use.

    Yields:
        The numbers of the tensors that are decoded, and right, some at a time.
    """
    short = [i for i in numbers if sizes[i] <= _SHORT_NBYTES]
    for run in batches([sizes[i] for i in short], _TOGETHER_NBYTES):
        done: list[int] = []
        with suppress(PackhorseError, OSError):
            found = open_some(short[run.start : run.stop])
            status, _, _, left = _core.unpack_to_views(found.opened, found.views, threads)
            bad = {*left, *_core.content_faults(found.opened, found.views)}
            done = [] if status else [i for k, i in enumerate(found.numbers) if k not in bad]
        yield done


def frames_of(
    numbers: Sequence[int], entries: Sequence[TensorEntry], data: list[memoryview]
) -> dict[int, OpenFrame]:
    """The frames of tensors by their numbers, as far as they are those that a header describes.

    Args:
        numbers: the numbers of the tensors.
        entries: the tensors as the header describes them.
        data: the bytes of their frames.
    """
    return {
        i: frame
        for i, frame, entry in zip(numbers, _core.open_each(data), entries, strict=True)
        if frame is not None
        and frame.dtype_code == DTYPE_BY_NAME[entry.dtype].code
        and frame.shape == entry.shape
    }
