"""What did not fit in a GPU's memory, so that not every product tries it again.

An attempt that fails is slow: PyTorch returns all its unused memory to the driver, asks once more,
and later gets that memory piece by piece. A product that decodes its weight is therefore only tried
if PyTorch would hold less memory with it than at the smallest attempt that failed. PyTorch does not
see what other programs free, so after a minute one attempt is made in any case.
"""

import time
from typing import NamedTuple

import torch

__all__ = ["SHORTAGES", "forget_shortages", "may_fit", "note_shortage"]

_LIFETIME = 60.0  # seconds


class _Shortage(NamedTuple):
    """A failed attempt: bytes that PyTorch would have held, and the time it counts until."""

    nbytes: int
    end: float


SHORTAGES: dict[torch.device, _Shortage] = {}  # the smallest on each device


def may_fit(nbytes: int, device: torch.device) -> bool:
    """Whether so much more memory is worth an attempt.

    Args:
        nbytes: bytes that are wanted.
        device: the GPU.
    """
    found = SHORTAGES.get(device)
    if found is None:
        return True
    if time.monotonic() >= found.end:
        SHORTAGES.pop(device, None)
        return True
    return _held_nbytes(device) + nbytes < found.nbytes


def note_shortage(nbytes: int, device: torch.device) -> None:
    """Remembers that an attempt has failed.

    Args:
        nbytes: bytes that were wanted.
        device: the GPU.
    """
    SHORTAGES[device] = _Shortage(_held_nbytes(device) + nbytes, time.monotonic() + _LIFETIME)


def forget_shortages() -> None:
    """Makes the next product try again."""
    SHORTAGES.clear()


def _held_nbytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
