"""Describes a source: what each of its tensors is like, and what it would take in memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

from packhorse.arguments import resolve_threads
from packhorse.reports.bits import PlaneCounts, describe_tensor
from packhorse.reports.memory import describe_memory
from packhorse.reports.options import Options, Watch
from packhorse.reports.results import MemoryRow, Problem, SourceRow, TensorRow
from packhorse.reports.sampling import take_sample
from packhorse.reports.sources import READ_ERRORS, Source, opened
from packhorse.storage.tasks import check_wanted, holding
from packhorse.threads import map_tensors

__all__ = ["Described", "Part", "describe_part", "describe_source", "join_parts", "parts_of"]

_PART_NBYTES = 1 << 30


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


@dataclass(frozen=True)
class Part:
    """Some tensors of a source, as a task for any process.

    Attributes:
        source: the source.
        options: how the report is made.
        tensors: the number of the first tensor, and the one after the last.
        largest_nbytes: bytes of the largest tensor of the source, for the memory of the task.
    """

    source: Source
    options: Options
    tensors: tuple[int, int]
    largest_nbytes: int


def parts_of(source: Source, options: Options) -> list[Part]:
    """Cuts a source into parts of about a gigabyte to look at; only headers are read.

    Raises:
        Exception: as `opened` raises.
    """
    with opened(source) as file:
        sizes = [each.sampled_nbytes for each in options.places(file.entries)]
        largest = max((entry.nbytes for entry in file.entries), default=0)
    edges, held = [0], 0
    for i, nbytes in enumerate(sizes):
        if held and held + nbytes > _PART_NBYTES:
            edges.append(i)
            held = 0
        held += nbytes
    return [Part(source, options, edge, largest) for edge in pairwise([*edges, len(sizes)])]


def describe_part(part: Part) -> Described:
    """Describes some tensors of a source, on a worker of a cluster or in this process.

    Raises:
        Exception: as `opened` raises.
    """
    with holding(4 * part.largest_nbytes, part.options.threads) as threads:
        options = replace(part.options, threads=threads)
        return describe_source(
            part.source, options, lambda title, total: nullcontext(check_wanted), part.tensors
        )


def join_parts(parts: Sequence[Described]) -> Described:
    """The parts of one source, in their order, as one."""
    return Described(
        parts[0].row,
        [tensor for part in parts for tensor in part.tensors],
        [row for part in parts for row in part.memory],
        [problem for part in parts for problem in part.problems],
    )


def describe_source(
    source: Source, options: Options, watch: Watch, tensors: tuple[int, int] | None = None
) -> Described:
    """Describes the tensors of a source.

    Args:
        source: the source.
        options: how the report is made.
        watch: opens a display of progress.
        tensors: as in `Part`; None for all.

    Raises:
        Exception: as `opened` raises; what is wrong with single tensors becomes problems.
    """
    threads = resolve_threads(options.threads)
    with opened(source, threads) as file:
        places = options.places(file.entries)
        chosen = range(*(tensors or (0, len(places))))
        sizes = [places[i].sampled_nbytes for i in chosen]
        problems: list[Problem] = []
        with watch(f"look at {source.name}", sum(sizes)) as progress:

            def work(k: int, n_threads: int) -> _Tensor | None:
                entry = file.entries[chosen[k]]
                try:
                    sample = take_sample(file, entry, places[chosen[k]], n_threads)
                    row, counts = describe_tensor(file, sample)
                    return _Tensor(row, counts, describe_memory(file, sample, n_threads))
                except READ_ERRORS as error:
                    problems.append(Problem(source.name, entry.name, str(error)))
                    return None
                finally:
                    if progress is not None:
                        progress(sizes[k])

            found = [each for each in map_tensors(work, sizes, threads) if each is not None]
        described = [(each.row, each.counts) for each in found]
        return Described(file.row, described, [each.memory for each in found], problems)
