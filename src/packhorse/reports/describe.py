"""Describes a source: what each of its tensors is like, and what it would take in memory."""

from __future__ import annotations

from dataclasses import dataclass

from packhorse.arguments import resolve_threads
from packhorse.reports.bits import PlaneCounts, describe_tensor
from packhorse.reports.memory import describe_memory
from packhorse.reports.options import Options, Watch
from packhorse.reports.results import MemoryRow, Problem, SourceRow, TensorRow
from packhorse.reports.sampling import take_sample
from packhorse.reports.sources import READ_ERRORS, Source, opened
from packhorse.threads import map_tensors

__all__ = ["Described", "describe_source"]


@dataclass(frozen=True)
class _Tensor:
    row: TensorRow
    counts: PlaneCounts
    memory: MemoryRow


@dataclass(frozen=True)
class Described:
    """What the tensors of one source are like.

    Attributes:
        row: the source.
        tensors: its tensors, each with the counts of its values.
        memory: what they would take in memory.
        problems: what could not be read.
    """

    row: SourceRow
    tensors: list[tuple[TensorRow, PlaneCounts]]
    memory: list[MemoryRow]
    problems: list[Problem]


def describe_source(source: Source, options: Options, watch: Watch) -> Described:
    """Describes all tensors of a source.

    Raises:
        Exception: as `opened` raises; what is wrong with single tensors becomes problems.
    """
    threads = resolve_threads(options.threads)
    with opened(source, threads) as file:
        places = options.places(file.entries)
        sizes = [each.sampled_nbytes for each in places]
        problems: list[Problem] = []
        with watch(f"look at {source.name}", sum(sizes)) as progress:

            def work(i: int, n_threads: int) -> _Tensor | None:
                entry = file.entries[i]
                try:
                    sample = take_sample(file, entry, places[i], n_threads)
                    row, counts = describe_tensor(file, sample)
                    return _Tensor(row, counts, describe_memory(file, sample, n_threads))
                except READ_ERRORS as error:
                    problems.append(Problem(source.name, entry.name, str(error)))
                    return None
                finally:
                    if progress is not None:
                        progress(sizes[i])

            found = [each for each in map_tensors(work, sizes, threads) if each is not None]
        tensors = [(each.row, each.counts) for each in found]
        return Described(file.row, tensors, [each.memory for each in found], problems)
