"""Huge pages for the memory of new tensors, so that one page fault brings 2 MiB instead of 4 KiB.

NumPy asks the system for them itself, PyTorch does not.
"""

from collections.abc import Callable

from packhorse import _core
from packhorse.codecs.base import ByteArray

__all__ = ["LEAST_NBYTES", "HugePages"]

LEAST_NBYTES = 4 << 20  # NumPy's limit, too


class HugePages:
    """Asks for huge pages, as long as the process has few mappings.

    Memory that the system was asked about may be a mapping of its own, and Linux allows a process
    65,530 of them.
    """

    def __init__(
        self,
        most_mappings: int = 1 << 14,
        asked_between: int = 256,
        count: Callable[[], int] = _core.count_mappings,
    ) -> None:
        """Args:
        most_mappings: from so many on, nothing is asked for.
        asked_between: how often is asked before mappings are counted again, which takes
            milliseconds.
        count: counts the mappings of this process.
        """
        self._most, self._between, self._count = most_mappings, asked_between, count
        self._left, self._may = 0, False

    def want(self, memory: ByteArray) -> None:
        """Ask for huge pages.

        Args:
            memory: all of it will be written; new, and of at least `LEAST_NBYTES` bytes.
        """
        if self._left <= 0:
            self._left, self._may = self._between, self._count() < self._most
        self._left -= 1
        if self._may:
            _core.want_huge_pages(memory)
