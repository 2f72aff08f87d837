"""A rank dies, lies, differs, or its bytes are damaged: all ranks raise the same error in time."""

import multiprocessing as mp
import re
from pathlib import Path

import pytest
import wire_fault_jobs as jobs
from wire_ranks import Outcome, run_ranks

PIECE = "CorruptionError: piece . that rank 1 sent to rank . in .* was damaged on its way: "


def errors(outcomes: list[Outcome], *, with_1: bool = True) -> set[str]:
    """The errors of all ranks; each has to raise the same twice."""
    found = set()
    for rank, one in enumerate(outcomes):
        if rank == 1 and not with_1:
            continue
        assert not one.error
        assert len(one.value) == 2
        found |= set(one.value)
    assert max(one.seconds for one in outcomes) < 12
    return found


@pytest.mark.parametrize(
    ("operation", "size"), [("all_gather", 2), ("broadcast", 3), ("all_reduce", 4)]
)
def test_a_damaged_piece_is_found_and_all_ranks_hear_of_it(
    operation: str, size: int, tmp_path: Path
) -> None:
    job = ("a flipped bit", operation, "packed", 20)
    found = errors(run_ranks(size, jobs.errors_of, *job, store=tmp_path / "store"))
    # The ranks that were through with the operation hear of it in the next one.
    assert len(found - {"none"}) == 1, found
    assert re.match(PIECE, next(iter(found - {"none"})))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("a flipped bit in a head", PIECE + "the checksum of the message does not match"),
        ("a flipped bit in a statement", "CorruptionError: what rank 1 stated to rank . is dama"),
        ("a lie", PIECE + "the message has 42"),
        ("another dtype", r"CompatibilityError: dtype differs among the ranks \(ranks? 0.*: "
         r"float32; rank 1: int32\)"),
        ("another operation", r"CompatibilityError: the operation differs among the ranks \(.*"
         r"rank 1: "),
        ("another option", r"CompatibilityError: level differs among the ranks \(rank.*: default; "
         r"rank 1: fast\)"),
        ("another version", r"CompatibilityError: wire version differs among the ranks \(rank.*: "
         r"2; rank 1: 7\)"),
        ("another size", "CompatibilityError: the size in bytes differs among the ranks"),
    ],
)  # fmt: skip
def test_ranks_that_disagree_are_named(fault: str, words: str, tmp_path: Path) -> None:
    # With "auto" the first call of a kind asks, and then runs as PyTorch's own.
    choice = "packed" if fault in ("a lie", "a flipped bit in a head") else "auto"
    job = (fault, "all_gather", choice, 20)
    outcomes = run_ranks(3, jobs.errors_of, *job, store=tmp_path / "store")
    found = errors(outcomes)
    if choice == "packed":
        found -= {"none"}
    assert len(found) == 1, found
    assert re.match(words, next(iter(found))), found


@pytest.mark.parametrize("choice", ["auto", "packed"])
@pytest.mark.parametrize(
    ("fault", "operation", "words"),
    [
        ("another root", "broadcast", r"the root differs among the ranks \(.*: 1; rank 1: 0\)"),
        ("another reduction", "all_reduce",
         r"the reduction differs among the ranks \(.*: SUM; rank 1: MAX\)"),
        ("another reduction", "reduce_scatter",
         r"the reduction differs among the ranks \(.*: SUM; rank 1: MAX\)"),
    ],
)  # fmt: skip
def test_arguments_that_differ_are_named(
    choice: str, fault: str, operation: str, words: str, tmp_path: Path
) -> None:
    # PyTorch's own way, which is the first with "auto", would not find any of them.
    job = (fault, operation, choice, 20)
    found = errors(run_ranks(3, jobs.errors_of, *job, store=tmp_path / "store"))
    assert len(found) == 1, found
    assert re.match(f"CompatibilityError: {words}", next(iter(found))), found


def test_labels_that_differ_are_named(tmp_path: Path) -> None:
    job = ("another label", "all_gather", "auto", 20)
    found = errors(run_ranks(3, jobs.errors_of, *job, store=tmp_path / "store"))
    assert len(found) == 1, found
    words = "CompatibilityError: label differs among the ranks (ranks 0, 2: none; rank 1: other)"
    assert next(iter(found)).startswith(words)


@pytest.mark.parametrize("choice", ["auto", "packed"])
def test_parts_that_do_not_fit_are_named(choice: str, tmp_path: Path) -> None:
    job = ("another size", "all_to_all_single", choice, 20)
    found = errors(run_ranks(3, jobs.errors_of, *job, store=tmp_path / "store"))
    assert len(found) == 1, found
    assert re.match(r"CompatibilityError: rank . sends \d+ bytes to rank ., which expects", *found)


@pytest.mark.parametrize("operation", ["all_gather", "broadcast", "all_to_all_single"])
def test_a_rank_that_is_killed_in_mid_collective_is_named(operation: str, tmp_path: Path) -> None:
    job = ("dies", operation, "packed", 20)
    outcomes = run_ranks(4, jobs.errors_of, *job, store=tmp_path / "store")
    assert outcomes[1].exit_code == -9
    found = errors(outcomes, with_1=False)
    words = f"PeerError: rank 1 closed the connection during {operation} (operation 1): "
    assert len(found) == 1, found
    assert next(iter(found)).startswith(words)


@pytest.mark.parametrize(
    ("choice", "culprit", "store"),
    [("raw", 1, "store"), ("raw", 0, "store.tcp"), ("packed", 0, "store.tcp")],
)
def test_a_dead_rank_is_named_even_if_it_served_the_store(
    choice: str, culprit: int, store: str, tmp_path: Path
) -> None:
    outcomes = run_ranks(3, jobs.die_between, choice, culprit, 20, store=tmp_path / store)
    words = f"PeerError: rank {culprit} closed the connection during all_reduce (operation 2): "
    for rank in {0, 1, 2} - {culprit}:
        assert outcomes[rank].value[0].startswith(words)
        assert outcomes[rank].seconds < 8
    assert len({str(outcomes[rank].value) for rank in {0, 1, 2} - {culprit}}) == 1


def test_a_rank_that_does_not_come_is_named_after_the_time_out(tmp_path: Path) -> None:
    job = ("sleeps", "all_gather", "packed", 2)
    outcomes = run_ranks(3, jobs.errors_of, *job, store=tmp_path / "store")
    found = errors(outcomes)
    assert len(found) == 1, found
    words = "PeerError: rank 1 did not appear within 2 s"
    assert next(iter(found)).startswith(words)


def test_an_error_of_one_rank_is_told_to_all(tmp_path: Path) -> None:
    outcomes = run_ranks(
        3, jobs.errors_of, "raises", "all_gather", "packed", 20, store=tmp_path / "store"
    )
    words = "PeerError: rank 1 failed in all_gather (operation 1): MemoryError: none is left"
    assert outcomes[0].value == outcomes[2].value == [words, words]
    assert outcomes[1].value == ["MemoryError: none is left", words]


@pytest.mark.slow
def test_processes_end_well_and_soon_after_a_failure(tmp_path: Path) -> None:
    context = mp.get_context("spawn")  # its processes end as programs do; forked ones do not
    processes = [
        context.Process(target=jobs.fail_and_end, args=(rank, 2, str(tmp_path / "store")))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(45)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0]
