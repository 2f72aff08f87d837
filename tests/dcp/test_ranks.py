"""Checkpoints of several processes over gloo, of real models, and of processes that are killed."""

import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
from dcp_ranks import (
    Ranks,
    digest,
    expected_step,
    files_of,
    load_and_save,
    load_damaged,
    load_mixed,
    load_tensor,
    numbered_state,
    save_and_load_alone,
    save_async,
    save_badly,
    save_mixed,
    save_step,
    save_tensor,
    save_tensor_again,
    save_until_killed,
    train_and_save,
)
from dcp_samples import blank, load, patch, save, shards_of
from forked import fork_context, run_forked

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is ")

# Several processes.


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    processes = Ranks()
    yield processes
    processes.close()


def test_fsdp2_with_adamw_goes_from_4_ranks_to_2_to_1_and_back(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Every load gives the same bits, and training goes on with the same losses."""
    before, losses = ranks.run(4, train_and_save, str(tmp_path / "4"))[0]
    steps = [(2, "4", "2"), (1, "2", "1"), (2, "1", "2b"), (4, "2b", "4b"), (4, "1", None)]
    for world, source, target in steps:
        there = None if target is None else str(tmp_path / target)
        for found, later in ranks.run(world, load_and_save, str(tmp_path / source), there):
            assert found == before
            assert later == pytest.approx(losses, rel=1e-4)
    assert len(list((tmp_path / "4").glob("shards-*"))) == 4
    # All ranks have the plain values; one rank stores them.
    assert sum(index.fqn == "epoch" for index in shards_of(tmp_path / "4")) == 1


@pytest.mark.parametrize(
    ("shape", "saved", "loaded"),
    [
        ((5, 7), (4, (4,), "0"), (2, (2,), "1")),  # a rank with nothing
        ((64, 48), (4, (2, 2), "01"), (2, (2,), "0")),
        ((64, 48), (2, (2,), "1"), (4, (2, 2), "R1")),
        ((33, 9, 4), (1, (1,), "R"), (4, (2, 2), "10")),
    ],
    ids=str,
)
def test_dtensors_are_resharded(
    ranks: Ranks, tmp_path: Path, shape: Any, saved: Any, loaded: Any
) -> None:
    ranks.run(saved[0], save_tensor, str(tmp_path), shape, *saved[1:])
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for found, _ in ranks.run(loaded[0], load_tensor, str(tmp_path), shape, *loaded[1:]):
        assert found == digest(whole)


def test_a_program_without_a_process_group_loads_what_ranks_saved(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(4, save_tensor, str(tmp_path), (64, 48), (2, 2), "01")
    found = {"x": torch.zeros(64, 48), "plain": torch.zeros(9), "n": 0}
    load(found, tmp_path)
    whole = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    assert digest(found) == digest({"x": whole, "plain": torch.arange(9.0), "n": 5})


def test_each_rank_decodes_its_part_only(ranks: Ranks, tmp_path: Path) -> None:
    shape = (1024, 512)  # eight chunks
    ranks.run(1, save_tensor, str(tmp_path), shape, (1,), "R")
    for _, stats in ranks.run(4, load_tensor, str(tmp_path), shape, (4,), "0"):
        assert stats["n_chunks"] == 2 + 2  # and the two small values


def test_replicated_tensors_are_stored_once(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save_tensor, str(tmp_path), (100, 100), (2,), "R")
    assert sorted(index.fqn for index in shards_of(tmp_path)) == ["n", "plain", "x"]


def test_async_save_of_several_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save_async, str(tmp_path))
    whole = torch.randn(64, 32, generator=torch.Generator().manual_seed(7))
    for found, _ in ranks.run(2, load_tensor, str(tmp_path), (64, 32), (2,), "0"):
        assert found == digest(whole)


def test_async_save_in_another_process(ranks: Ranks, tmp_path: Path) -> None:
    assert run_forked(Path(dcp_ranks.__file__), tmp_path.with_suffix(".out"), tmp_path) == 0
    whole = torch.randn(64, 32, generator=torch.Generator().manual_seed(7))
    for found, _ in ranks.run(2, load_tensor, str(tmp_path), (64, 32), (2,), "0"):
        assert found == digest(whole)


def test_a_rank_that_fails_fails_all_and_the_older_checkpoint_stays(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(2, save_tensor, str(tmp_path), (64, 32), (2,), "0")
    for errors in ranks.run(2, save_badly, str(tmp_path)):
        assert errors == {1: "RuntimeError: the device is gone"}
    whole = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    for found, _ in ranks.run(2, load_tensor, str(tmp_path), (64, 32), (2,), "0"):
        assert found == digest(whole)
    # The next save removes the files that the other rank had written.
    assert len(files_of(tmp_path)) == 4
    ranks.run(2, save_tensor_again, str(tmp_path))
    assert len(files_of(tmp_path)) == 3


def test_damage_that_one_rank_sees_keeps_all_from_reading(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save_tensor, str(tmp_path), (64, 32), (2,), "0")
    frames = {
        index.offset: shard.frame
        for index, shard in shards_of(tmp_path).items()
        if index.fqn == "x"
    }
    second = frames[torch.Size([32, 0])]
    patch(tmp_path / second.pack, second.offset + 20, b"\xff")
    for errors, untouched in ranks.run(2, load_damaged, str(tmp_path)):
        assert list(errors) == [1]
        assert "CorruptionError" in errors[1]
        assert second.pack in errors[1]
        assert untouched


def test_ranks_may_save_without_talking_to_each_other(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, save_and_load_alone, str(tmp_path)) == [(0, [0.0]), (1, [1.0])]
    assert len(files_of(tmp_path)) == 4


def test_copies_build_upon_the_masters_of_their_rank(ranks: Ranks, tmp_path: Path) -> None:
    for number, base in enumerate((None, str(tmp_path / "0"))):
        ranks.run(2, save_mixed, str(tmp_path / str(number)), base, number)
        frames = {index: shard.frame for index, shard in shards_of(tmp_path / str(number)).items()}
        copies = [index for index in frames if index.fqn == "model.x"]
        assert len(copies) == 2
        for index in copies:
            master = frames[replace(index, fqn="master.x")]
            assert frames[index].base == master
            assert master.n_deltas == number
            assert frames[index].nbytes < master.nbytes / 50
    for world in (1, 2, 4):
        for number in range(2):
            assert all(ranks.run(world, load_mixed, str(tmp_path / str(number)), number))


def test_ranks_build_upon_their_shards_and_are_resharded(ranks: Ranks, tmp_path: Path) -> None:
    for number in range(3):
        base = str(tmp_path / str(number - 1)) if number else None
        ranks.run(2, save_step, str(tmp_path / str(number)), base, number)
    frames = [s.frame for index, s in shards_of(tmp_path / "2").items() if index.fqn == "x"]
    assert [frame.n_deltas for frame in frames] == [2, 2]
    expected = ranks.run(2, expected_step, 2)[0]
    for world in (1, 4):
        shape = (256, 300)
        for found, _ in ranks.run(world, load_tensor, str(tmp_path / "2"), shape, (world,), "0"):
            assert found == expected


# Killed in the middle.


def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """A process that saves again and again is killed at a random moment. The checkpoint that it
    reported last, or the next one, must be there. `PACKHORSE_KILLS=100` kills 100 of them."""
    context = fork_context()
    save(numbered_state(0), tmp_path)
    rng = random.Random(1)
    last = 0
    for _ in range(int(os.environ.get("PACKHORSE_KILLS", "8"))):
        reports, theirs = context.Pipe(duplex=False)
        args = (str(tmp_path), theirs, last + 1)
        process = context.Process(target=save_until_killed, args=args)
        process.start()
        theirs.close()
        assert reports.poll(60)
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        process.join()
        while reports.poll():
            try:
                last = reports.recv()
            except EOFError:
                break
        found = blank(numbered_state(0))
        load(found, tmp_path)
        assert found["number"] in (last, last + 1)
        assert digest(found) == digest(numbered_state(found["number"]))
        last = found["number"]
    save(numbered_state(0), tmp_path, overwrite=True)
    assert len(files_of(tmp_path)) == 2
