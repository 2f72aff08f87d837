"""Snapshots of the real Trainer of Hugging Face."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from training_samples import one_thread

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    from trainer_samples import Stop, history, make_trainer
    from transformers import EarlyStoppingCallback

import packhorse.torch
from packhorse.disk import SnapshotStore
from packhorse.transformers import PackhorseCallback, restore_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The log of an uninterrupted run, with the Trainer's own checkpoints."""
    trainer = make_trainer(tmp_path_factory.mktemp("whole"), [])
    trainer.train()
    assert len({entry.get("loss") for entry in history(trainer)}) > 15
    return history(trainer)


# 6 steps make an epoch: a stop within one, at its end, and after the second.
@pytest.mark.parametrize(
    ("stop", "save_steps", "background"), [(7, 4, True), (7, 6, False), (17, 5, True)]
)
def test_training_resumes_to_the_identical_losses(
    whole: list[dict[str, Any]], stop: int, save_steps: int, background: bool, tmp_path: Path
) -> None:
    callback = PackhorseCallback(tmp_path / "store", background=background)
    first = make_trainer(tmp_path / "out", [callback, Stop(stop)], save_steps=save_steps)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    callback.store.close()
    assert not list((tmp_path / "out").glob("checkpoint*"))

    callback = PackhorseCallback(tmp_path / "store", background=background)
    second = make_trainer(tmp_path / "out", [callback], seed=77, save_steps=save_steps)
    folder = callback.checkpoint()
    assert folder is not None
    step = stop // save_steps * save_steps
    assert os.path.basename(folder) == f"checkpoint-{step}"
    second.train(resume_from_checkpoint=folder)
    assert history(second) == whole
    assert not any((tmp_path / "out").iterdir())
    steps = [s for s in range(1, 19) if s % save_steps == 0 or s == 18]
    assert callback.store.names() == [f"checkpoint-{s}" for s in steps]
    assert callback.store.verify() == []


@pytest.mark.slow
def test_two_processes_resume_to_the_identical_losses(tmp_path: Path) -> None:
    ranks = Path(__file__).parents[1] / "samples" / "trainer_ranks.py"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launch, ranks, tmp_path],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole, resumed = (json.loads((tmp_path / name).read_text()) for name in ("whole", "resumed"))
    assert resumed == whole
    assert len(whole) == 13
    assert SnapshotStore(tmp_path / "store").verify() == []


def test_saves_by_epoch_with_evaluation(tmp_path: Path) -> None:
    options = {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_steps": 2}
    expected = make_trainer(tmp_path / "whole", [], **options)
    expected.train()
    callback = PackhorseCallback(tmp_path / "store")
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path / "out", [callback, Stop(14)], **options).train()
    resumed = make_trainer(tmp_path / "out", [callback], seed=77, **options)
    resumed.train(resume_from_checkpoint=callback.checkpoint())
    assert history(resumed) == history(expected)
    assert callback.store.names() == ["checkpoint-6", "checkpoint-12", "checkpoint-18"]
    state = callback.store.restore("checkpoint-12")
    callback.store.take("../best", state)
    folder = callback.checkpoint("../best")
    assert folder is not None
    assert Path(folder).parent.parent == tmp_path / "out"
    assert torch.load(Path(folder, "scheduler.pt"))["last_epoch"] == 12


def test_a_step_that_is_evaluated_too_keeps_what_the_evaluation_said(tmp_path: Path) -> None:
    options = {
        "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3,
        "metric_for_best_model": "loss",
    }  # fmt: skip
    callback = PackhorseCallback(tmp_path / "store")
    trainer = make_trainer(tmp_path / "out", [callback, EarlyStoppingCallback(99)], **options)
    trainer.train()
    folder = restore_checkpoint(tmp_path / "store", tmp_path / "folder", "checkpoint-9")
    state = json.loads((folder / "trainer_state.json").read_text())
    evaluated = [entry["step"] for entry in state["log_history"] if "eval_loss" in entry]
    assert evaluated == [3, 6, 9]
    assert state["best_metric"] == min(
        entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry
    )


def test_a_folder_is_what_the_trainer_writes(tmp_path: Path) -> None:
    callback = PackhorseCallback(tmp_path / "store", folders=True)
    make_trainer(tmp_path / "out", [callback], max_steps=4).train()
    theirs = tmp_path / "out" / "checkpoint-4"
    ours = restore_checkpoint(callback.store, tmp_path / "ours")
    for name in ("optimizer.pt", "scheduler.pt"):
        expected, found = (torch.load(folder / name) for folder in (theirs, ours))
        assert packhorse.torch.save({"x": [found]}) == packhorse.torch.save({"x": [expected]})
    expected, found = (
        json.loads((folder / "trainer_state.json").read_text()) for folder in (theirs, ours)
    )
    for state in (expected, found):  # the Trainer counts these when it writes a folder
        del state["total_flos"], state["stateful_callbacks"]
    assert found == expected
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}


def test_save_total_limit_holds_for_snapshots(tmp_path: Path) -> None:
    callback = PackhorseCallback(tmp_path / "store")
    callback.store.take("mine", {"a": 1})
    make_trainer(tmp_path / "out", [callback], save_steps=2, save_total_limit=2).train()
    assert callback.store.names() == ["mine", "checkpoint-16", "checkpoint-18"]
    assert callback.store.verify() == []
    metadata = callback.store.info("checkpoint-18").metadata
    assert metadata["step"] == 18
    assert metadata["epoch"] == 3.0
    assert metadata["loss"] > 0


def test_the_best_step_is_taken_when_the_trainer_says_so_late(tmp_path: Path) -> None:
    options = {
        "save_strategy": "best", "eval_strategy": "steps", "eval_steps": 9,
        "metric_for_best_model": "loss",
    }  # fmt: skip
    callback = PackhorseCallback(tmp_path / "store")
    trainer = make_trainer(tmp_path / "out", [callback], **options)
    trainer.train()
    scores = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    assert f"checkpoint-{min(scores, key=scores.__getitem__)}" in callback.store.names()


def test_an_empty_store_starts_from_the_beginning(tmp_path: Path) -> None:
    callback = PackhorseCallback(tmp_path / "store")
    assert callback.checkpoint() is None
    with pytest.raises(ValueError, match="no snapshot of a Trainer"):
        restore_checkpoint(callback.store, tmp_path / "folder")
    callback.store.take("checkpoint-1", {"a": 1})
    with pytest.raises(ValueError, match="'checkpoint-1' is not of a Trainer"):
        callback.checkpoint()
    callback.store.take("checkpoint-1", {"model": {}, "trainer_state": 1}, replace=True)
    with pytest.raises(packhorse.CorruptionError, match="'checkpoint-1' is not of a Trainer"):
        restore_checkpoint(callback.store, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        restore_checkpoint(callback.store, tmp_path / "full")
    assert (tmp_path / "full" / "a").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4},
            r"load_best_model_at_end=True needs .*folders=True",
        ),
        (
            {"restore_callback_states_from_checkpoint": True},
            r"restore_callback_states_from_checkpoint=True needs .*folders=True",
        ),
    ],
)
def test_what_needs_the_trainers_folders_is_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path / "out", [PackhorseCallback(tmp_path / "store")], **options)
    with pytest.raises(ValueError, match=words):
        trainer.train()


def test_a_sharded_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    trainer = make_trainer(tmp_path / "out", [callback := PackhorseCallback(tmp_path / "store")])
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType.FSDP)
    with pytest.raises(ValueError, match=r"FSDP has sharded.*docs/dcp\.md"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)


def test_a_failed_snapshot_ends_the_training(tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"not a folder")
    trainer = make_trainer(tmp_path / "out", [PackhorseCallback(tmp_path / "store")])
    with pytest.raises((OSError, ValueError), match="store"):
        trainer.train()


def test_without_transformers_the_error_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys; sys.modules['transformers'] = None\n"
        "import packhorse\n"
        "try: import packhorse.transformers\n"
        "except packhorse.MissingBackendError as error: print(error)\n"
    )
    assert run_forked(tmp_path / "program.py", tmp_path / "printed") == 0
    assert "pip install 'packhorse[transformers]'" in (tmp_path / "printed").read_text()


def test_the_store_may_be_given(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store", max_chain=2)
    assert PackhorseCallback(store).store is store
