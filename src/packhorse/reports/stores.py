"""What a snapshot store says of its snapshots: the figures of `packhorse snapshot list` and `show`.

A store may be written to meanwhile. What it says of a snapshot that is gone by then is unknown, and
snapshots that are new are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packhorse.disk import SnapshotStore, SnapshotSummary
from packhorse.reports.results import Problem, SourceRow
from packhorse.reports.sources import READ_ERRORS, Source

__all__ = ["StoreFacts", "summaries"]


def summaries(sources: Sequence[Source]) -> dict[str, SnapshotSummary]:
    """The summaries of the snapshots of a store, by name; empty if the sources are none, or if
    the store cannot be read."""
    first = next((source for source in sources if source.snapshot is not None), None)
    if first is None:
        return {}
    try:
        with SnapshotStore(first.path, storage_options=first.storage_options) as store:
            return {each.name: each for each in store.overview().snapshots}
    except READ_ERRORS:
        return {}


class StoreFacts:
    """The figures of the snapshots among some sources."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = list(sources)
        self._summaries = summaries(sources)

    def of(self, row: SourceRow) -> tuple[int | None, int | None, int | None]:
        """What the store grew by, the longest chain and the bytes that a restore reads; None where
        that is unknown."""
        summary = self._summaries.get(row.name)
        if summary is None:
            return None, None, None
        return summary.new_nbytes, summary.max_deltas, row.packed_nbytes

    def problems(self) -> Iterator[Problem]:
        """One problem if the store got new snapshots meanwhile."""
        new = [name for name in summaries(self._sources) if name not in self._summaries]
        if self._summaries and new:
            words = f"{len(new)} snapshots" if len(new) > 1 else "a snapshot"
            yield Problem(
                self._sources[0].path, None,
                f"{self._sources[0].path}: the store got {words} while the report was made (the "
                f"newest: {new[-1]}); make the report again to see all",
            )  # fmt: skip
