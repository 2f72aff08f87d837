"""Checkpoints of the real Lightning, as packed files and as snapshots."""

import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training_samples import one_thread

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    import lightning.pytorch as L
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

import packhorse.torch
from packhorse.disk import SnapshotStore
from packhorse.lightning import PackhorseCheckpointIO

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


class Model(L.LightningModule):
    """A regression with dropout. It keeps the random state itself, because Lightning does not."""

    def __init__(self, width: int = 32, tag: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1)
        )
        self.losses: list[float] = []
        self.rng: dict[str, Any] | None = None

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        noise = random.random() + float(np.random.standard_normal())
        loss = ((self.net(batch[0]) - batch[1] - noise) ** 2).mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("score", ((self.net(batch[0]) - batch[1]) ** 2).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rng"] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.rng = checkpoint["rng"]

    def on_train_start(self) -> None:
        if self.rng is not None:
            random.setstate(self.rng["python"])
            np.random.set_state(self.rng["numpy"])
            torch.set_rng_state(self.rng["torch"])


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training data, which Lightning shuffles by the epoch, and data for validation."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 8, generator=generator)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    order = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=5)
    return (
        DataLoader(data, 8, sampler=order, generator=torch.Generator()),
        DataLoader(data, 16, generator=torch.Generator()),
    )


def fit(folder: Path, io: Any, n_epochs: int, resume: str | None = None, **options: Any) -> Model:
    """Train; everything except the checkpoint is new."""
    L.seed_everything(1 if resume is None else 99, verbose=False)
    options = {"monitor": "score", "save_top_k": 2, "save_last": True} | options
    model = Model()
    trainer = L.Trainer(
        max_epochs=n_epochs,
        plugins=[] if io is None else [io],
        callbacks=[ModelCheckpoint(folder, **options), EarlyStopping("score", patience=50)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(model, *loaders(), ckpt_path=resume)
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of an uninterrupted run, with Lightning's own checkpoints."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(tmp_path_factory.mktemp("whole"), None, 5).losses


@pytest.mark.parametrize("kind", ["file", "store", "async"])
def test_training_resumes_to_the_identical_losses(
    kind: str, whole: list[float], tmp_path: Path
) -> None:
    def plugin() -> Any:
        io = PackhorseCheckpointIO(None if kind == "file" else tmp_path / "store")
        return AsyncCheckpointIO(io) if kind == "async" else io

    folder = tmp_path / "checkpoints"
    first = fit(folder, plugin(), 2)
    second = fit(folder, plugin(), 5, "last")
    assert len(first.losses) == 8
    assert first.losses + second.losses == whole
    assert len(list(folder.iterdir())) == 3


def test_a_checkpoint_is_a_packed_file(tmp_path: Path) -> None:
    fit(tmp_path / "c", PackhorseCheckpointIO(level="fast"), 1)
    path = tmp_path / "c" / "last.ckpt"
    with packhorse.open_file(path, "pt") as file:
        assert "state_dict.net.0.weight" in file.keys()  # noqa: SIM118 - not a dict
    found = packhorse.torch.load(path)
    assert found["hyper_parameters"] == {"width": 32, "tag": None}
    assert found.keys() == PackhorseCheckpointIO().load_checkpoint(path).keys()
    Model().load_state_dict(found["state_dict"])


def test_snapshots_come_and_go_with_the_checkpoints(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store")
    fit(tmp_path / "c", PackhorseCheckpointIO(tmp_path / "store"), 4)
    files = {path.name for path in (tmp_path / "c").iterdir()}
    assert len(files) == 3
    assert {f"{name}.ckpt" for name in store.names()} == files
    assert store.info("last").metadata["step"] == 16
    assert store.info("last").metadata["epoch"] == 3
    assert store.verify() == []
    assert all(path.stat().st_size < 200 for path in (tmp_path / "c").iterdir())


def test_a_link_to_the_last_checkpoint_keeps_its_snapshot(tmp_path: Path) -> None:
    io = PackhorseCheckpointIO(tmp_path / "store")
    fit(tmp_path / "c", io, 3, save_last="link")
    assert (tmp_path / "c" / "last.ckpt").is_symlink()
    assert len(SnapshotStore(tmp_path / "store").names()) == 2
    model = fit(tmp_path / "c", io, 4, "last", save_last="link")
    assert len(model.losses) == 4
    names = SnapshotStore(tmp_path / "store").names()
    io.remove_checkpoint(tmp_path / "c" / "last.ckpt")
    assert SnapshotStore(tmp_path / "store").names() == names


# The interface itself.

CHECKPOINT = {"state_dict": {"w": torch.arange(6.0)}, "global_step": 3, "a": [np.arange(4)]}


def test_both_kinds_are_read_by_either(tmp_path: Path) -> None:
    file, store = PackhorseCheckpointIO(), PackhorseCheckpointIO(tmp_path / "store", max_chain=2)
    file.save_checkpoint(CHECKPOINT, tmp_path / "new" / "a.ckpt")
    store.save_checkpoint(CHECKPOINT, tmp_path / "new" / "b.ckpt")
    for name in ("a.ckpt", "b.ckpt"):
        for io in (file, store):
            found = io.load_checkpoint(tmp_path / "new" / name, "cpu", weights_only=True)
            assert torch.equal(found["state_dict"]["w"], CHECKPOINT["state_dict"]["w"])
            assert type(found["a"][0]) is np.ndarray
            assert found["a"][0].dtype == np.arange(4).dtype
            assert found["global_step"] == 3
    store.teardown()
    store.save_checkpoint(CHECKPOINT, tmp_path / "new" / "c.ckpt")


def test_files_and_store_may_be_moved_together(tmp_path: Path) -> None:
    os.makedirs(tmp_path / "run")
    io = PackhorseCheckpointIO(tmp_path / "run" / "store")
    io.save_checkpoint(CHECKPOINT, tmp_path / "run" / "c" / "a.ckpt")
    os.rename(tmp_path / "run", tmp_path / "moved")
    assert PackhorseCheckpointIO().load_checkpoint(tmp_path / "moved" / "c" / "a.ckpt")["a"]
    os.rename(tmp_path / "moved" / "store", tmp_path / "lost")
    with pytest.raises(ValueError, match="must be moved together"):
        PackhorseCheckpointIO().load_checkpoint(tmp_path / "moved" / "c" / "a.ckpt")


def test_the_store_stays_where_it_is_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    io = PackhorseCheckpointIO(store="store")
    io.save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    monkeypatch.chdir(tmp_path / "elsewhere")
    io.save_checkpoint({"a": 2}, tmp_path / "b.ckpt")
    for name, value in (("a.ckpt", 1), ("b.ckpt", 2)):
        assert PackhorseCheckpointIO().load_checkpoint(tmp_path / name) == {"a": value}
        assert io.load_checkpoint(tmp_path / name) == {"a": value}


def test_a_checkpoint_without_a_stem(tmp_path: Path) -> None:
    io = PackhorseCheckpointIO(store=tmp_path / "store")
    io.save_checkpoint({"a": 1}, tmp_path / ".ckpt")
    assert io.load_checkpoint(tmp_path / ".ckpt") == {"a": 1}


def test_checkpoints_of_one_name_in_one_store_stay_apart(tmp_path: Path) -> None:
    io = PackhorseCheckpointIO(tmp_path / "store")
    for i in range(2):
        io.save_checkpoint({"state_dict": {}, "i": i}, tmp_path / f"run{i}" / "last.ckpt")
        io.save_checkpoint({"state_dict": {}, "i": i + 5}, tmp_path / f"run{i}" / "last.ckpt")
    store = SnapshotStore(tmp_path / "store")
    assert store.names() == ["last", "last (2)"]
    assert [io.load_checkpoint(tmp_path / f"run{i}" / "last.ckpt")["i"] for i in range(2)] == [5, 6]
    copy = tmp_path / "run0" / "copy.ckpt"
    copy.write_bytes((tmp_path / "run0" / "last.ckpt").read_bytes())
    io.remove_checkpoint(copy)
    assert store.names() == ["last", "last (2)"]
    io.remove_checkpoint(tmp_path / "run0" / "last.ckpt")
    io.remove_checkpoint(tmp_path / "run0" / "last.ckpt")
    assert store.names() == ["last (2)"]


def test_remote_paths(tmp_path: Path) -> None:
    file, store = PackhorseCheckpointIO(), PackhorseCheckpointIO("memory://lightning-store")
    for io in (file, store):
        io.save_checkpoint(CHECKPOINT, "memory://lightning/a/b.ckpt")
        assert io.load_checkpoint("memory://lightning/a/b.ckpt")["global_step"] == 3
    with pytest.raises(ValueError, match=r"read it with a PackhorseCheckpointIO\(store="):
        file.load_checkpoint("memory://lightning/a/b.ckpt")
    store.remove_checkpoint("memory://lightning/a/b.ckpt")
    assert SnapshotStore("memory://lightning-store").names() == []


def test_what_cannot_be_kept_is_named_with_advice(tmp_path: Path) -> None:
    for io in (PackhorseCheckpointIO(), PackhorseCheckpointIO(tmp_path / "store")):
        with pytest.raises(TypeError, match=r"hyper_parameters\.tag: PosixPath .*ignore=") as error:
            io.save_checkpoint({"hyper_parameters": {"tag": Path("x")}}, tmp_path / "a.ckpt")
        assert "on_save_checkpoint" in str(error.value)
        assert not (tmp_path / "a.ckpt").exists()


def test_bad_arguments_and_files(tmp_path: Path) -> None:
    io = PackhorseCheckpointIO()
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint(CHECKPOINT, tmp_path / "a.ckpt", {})
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        io.load_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(TypeError, match="max_chain: only a store has such options"):
        PackhorseCheckpointIO(max_chain=3)
    with pytest.raises(ValueError, match="max_chain is 99"):
        PackhorseCheckpointIO(tmp_path, max_chain=99)
    for zipped in (False, True):
        torch.save(CHECKPOINT, tmp_path / "t.ckpt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(packhorse.CompatibilityError, match=r"torch\.save has written"):
            io.load_checkpoint(tmp_path / "t.ckpt")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"version": 2}, packhorse.CompatibilityError, "pointer of version 2"),
        ({"snapshot": 3}, packhorse.CorruptionError, "'snapshot' must be a string"),
        ({"snapshot": "gone"}, ValueError, "no snapshot is named 'gone'"),
        ({"store": "../nowhere"}, ValueError, "nowhere, which does not exist"),
        ({"store": "s3://elsewhere"}, ValueError, "is in the store 's3://elsewhere'"),
        ({"file": "x" * 99999}, packhorse.CorruptionError, "is not JSON"),
    ],
)
def test_a_wrong_pointer_is_refused(
    change: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    io, path = PackhorseCheckpointIO(tmp_path / "store"), tmp_path / "a.ckpt"
    io.save_checkpoint(CHECKPOINT, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change, separators=(",", ":")))
    with pytest.raises(error, match=words):
        PackhorseCheckpointIO().load_checkpoint(path)
    io.remove_checkpoint(path)
    assert not path.exists()


def test_without_lightning_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['lightning'] = sys.modules['lightning_fabric'] = None\n"
        "import packhorse\n"
        "try: import packhorse.lightning\n"
        "except packhorse.MissingBackendError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install 'packhorse[lightning]'" in done.stdout, done.stderr
