"""What users of the real Lightning do with checkpoints besides training: modules made from them,
pickles of earlier runs, random states, and Fabric."""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_forked
from torch.utils.data import DataLoader, TensorDataset
from training_samples import one_thread

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    import lightning.pytorch as L
    from lightning.fabric import Fabric
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

import packhorse
from packhorse.lightning import PackhorseCheckpointIO, PackhorseLoading, load_from_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


class Plain(L.LightningModule):
    """A small regression with dropout, whose hyperparameters and extra state are in checkpoints."""

    def __init__(self, width: int = 8, tag: str = "none") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 1)
        )
        self.losses: list[float] = []
        self.extra: Any = None

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        noise = float(np.random.standard_normal())
        loss = ((self.net(batch[0]) - batch[1] - noise) ** 2).mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("score", ((self.net(batch[0]) - batch[1]) ** 2).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = (np.arange(3), np.random.get_state())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.extra = checkpoint["extra"]


class Loading(PackhorseLoading, Plain):
    pass


def data() -> TensorDataset:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def make_trainer(folder: Path, plugins: list[Any], n_epochs: int = 1, **options: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    callbacks = [ModelCheckpoint(folder, save_last=True), *options.pop("callbacks", [])]
    return L.Trainer(
        max_epochs=n_epochs, plugins=plugins, callbacks=callbacks, default_root_dir=folder,
        accelerator="cpu", **(quiet | options),
    )  # fmt: skip


def trained(folder: Path, io: Any, model: L.LightningModule) -> Path:
    make_trainer(folder, [io]).fit(model, DataLoader(data(), 8))
    return folder / "last.ckpt"


@pytest.mark.parametrize("kind", ["file", "store"])
@pytest.mark.parametrize("how", ["function", "class"])
def test_a_module_is_made_from_a_checkpoint(kind: str, how: str, tmp_path: Path) -> None:
    io = PackhorseCheckpointIO(tmp_path / "store" if kind == "store" else None)
    model = Loading(width=6)
    path = trained(tmp_path / "c", io, model)
    if how == "function":
        found = load_from_checkpoint(Plain, path, "cpu", tag="changed")
        assert type(found) is Plain
    else:
        found = Loading.load_from_checkpoint(str(path), map_location="cpu", tag="changed")
        assert type(found) is Loading
    assert found.hparams == {"width": 6, "tag": "changed"}
    assert type(found.extra[0]) is np.ndarray
    expected = model.state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in found.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing key"):
        load_from_checkpoint(Wider, path)
    assert load_from_checkpoint(Wider, path, strict=False)


class Wider(Plain):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.more = torch.nn.Linear(1, 1)


def test_a_data_module_is_made_from_a_checkpoint(tmp_path: Path) -> None:
    class Data(L.LightningDataModule):
        def __init__(self, size: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return DataLoader(data(), self.hparams["size"])

    make_trainer(tmp_path, [PackhorseCheckpointIO()]).fit(Plain(), datamodule=Data(size=5))
    assert load_from_checkpoint(Data, tmp_path / "last.ckpt").hparams == {"size": 5}


def test_pickles_and_open_files_go_to_lightning(tmp_path: Path) -> None:
    model = Plain(width=5)
    make_trainer(tmp_path, []).fit(model, DataLoader(data(), 8))
    path = tmp_path / "last.ckpt"
    for load in (
        Loading.load_from_checkpoint,
        lambda *a, **k: load_from_checkpoint(Plain, *a, **k),
    ):
        assert load(path, weights_only=False).hparams["width"] == 5
        with path.open("rb") as file:
            assert load(file, weights_only=False).hparams["width"] == 5
        with pytest.raises(Exception, match="weights_only"):  # it has arrays of NumPy
            load(path)
        with pytest.raises(FileNotFoundError):
            load(tmp_path / "none.ckpt")


class Simple(L.LightningModule):
    """A module whose pickled checkpoint holds nothing but tensors and plain values."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, 1)
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = ((self.net(batch[0]) - batch[1]) ** 2).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


@pytest.mark.parametrize("wrapped", [False, True])
def test_resuming_from_a_pickle_names_the_line_that_converts_it(
    wrapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(n_epochs: int, plugins: list[Any], resume: str | None = None) -> list[float]:
        L.seed_everything(1, verbose=False)
        model = Simple()
        trainer = make_trainer(tmp_path / str(n_epochs), plugins, n_epochs)
        trainer.fit(model, DataLoader(data(), 8), ckpt_path=resume)
        return model.losses

    whole = run(3, [])
    first = run(1, [])
    io = PackhorseCheckpointIO(store="store")
    plugins = [AsyncCheckpointIO(io) if wrapped else io]
    with pytest.raises(packhorse.CompatibilityError, match=r"torch\.save has written") as error:
        run(3, plugins, "1/last.ckpt")
    line = re.search(r"PackhorseCheckpointIO\(\)\.save_checkpoint\(.*\)$", str(error.value))
    assert line is not None
    eval(line[0], {"PackhorseCheckpointIO": PackhorseCheckpointIO, "torch": torch})
    assert first + run(3, plugins, "1/last.packhorse.ckpt") == whole


def recipe() -> str:
    """The code for random states on the page."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (block,) = [
        b for b in re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M) if "Random" in b
    ]
    return block


def test_the_recipe_for_random_states_resumes_to_identical_losses(tmp_path: Path) -> None:
    """Shuffled data, a last batch that is not full, dropout, NumPy, and validation."""

    def run(name: str, seed: int, n_epochs: int, resume: str | None = None) -> list[float]:
        L.seed_everything(seed, verbose=False)
        model = Plain()
        scope: dict[str, Any] = {
            "torch": torch, "dataset": data(), "model": model,
            "Trainer": lambda callbacks, plugins: make_trainer(
                tmp_path / name, plugins, n_epochs, callbacks=callbacks
            ),
        }  # fmt: skip
        code = recipe().replace("from lightning.pytorch import Callback, Trainer", "")
        scope["Callback"] = L.Callback
        exec(compile(code, "training.md", "exec"), scope)
        validation = DataLoader(data(), 16)
        scope["trainer"].fit(model, scope["loader"], validation, ckpt_path=resume)
        return model.losses

    whole = run("whole", 1, 4)
    first = run("parts", 1, 2)
    rest = run("parts", 99, 4, str(tmp_path / "parts" / "last.ckpt"))
    assert len(set(whole)) == len(whole) == 16
    assert first + rest == whole


@pytest.mark.parametrize("kind", ["file", "store", "async"])
def test_fabric_saves_and_loads(kind: str, tmp_path: Path) -> None:
    io: Any = PackhorseCheckpointIO(tmp_path / "store" if kind == "store" else None)
    if kind == "async":
        io = AsyncCheckpointIO(io)
    fabric = Fabric(accelerator="cpu", plugins=[io])

    def make(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 1)
        return fabric.setup(model, torch.optim.Adam(model.parameters()))

    def train(model: Any, optimizer: Any) -> Any:
        loss = (model(data().tensors[0]) ** 2).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model, optimizer = make(0)
    train(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 1, "rng": np.random.get_state()}
    path = tmp_path / "c" / "state.ckpt"
    fabric.save(path, state)
    expected = train(model, optimizer)
    if kind == "async":
        fabric.strategy.checkpoint_io.teardown()  # as the page says, before the file is read
    model, optimizer = make(1)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    rest = fabric.load(path, state, strict=False)
    assert state["step"] == 1
    assert list(rest) == ["rng"]
    assert train(model, optimizer) == expected
    assert fabric.load(path)["step"] == 1


def test_fabric_loads_a_raw_state_dict(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", plugins=[PackhorseCheckpointIO()])
    weights = torch.nn.Linear(4, 1).state_dict()
    packhorse.torch.save(weights, tmp_path / "raw.ckpt")
    model = torch.nn.Linear(4, 1)
    fabric.load_raw(tmp_path / "raw.ckpt", model)
    assert torch.equal(model.weight, weights["weight"])


def test_an_error_in_the_background_is_raised(tmp_path: Path) -> None:
    def save() -> None:
        io = AsyncCheckpointIO(PackhorseCheckpointIO())
        io.save_checkpoint({"path": Path("x")}, tmp_path / "a.ckpt")
        io.teardown()

    with pytest.raises(TypeError, match="path: PosixPath cannot be stored"):
        save()
    assert not (tmp_path / "a.ckpt").exists()


def test_pytorch_lightning_loads_it_too(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, sys, warnings; os.chdir(sys.argv[1]); warnings.simplefilter('ignore')\n"
        "import lightning.pytorch as other, pytorch_lightning as pl\n"
        "from pytorch_lightning.demos.boring_classes import BoringModel\n"
        "from packhorse.lightning import *\n"
        "quiet = dict(enable_progress_bar=False, enable_model_summary=False, logger=False)\n"
        "class Model(PackhorseLoading, BoringModel): pass\n"
        "io = PackhorseCheckpointIO()\n"
        "trainer = pl.Trainer(plugins=[io], max_steps=1, accelerator='cpu',"
        " enable_checkpointing=False, **quiet)\n"
        "assert trainer.strategy.checkpoint_io is io\n"
        "trainer.fit(Model())\n"
        "trainer.save_checkpoint('a.ckpt')\n"
        "Model.load_from_checkpoint('a.ckpt')\n"
        "load_from_checkpoint(BoringModel, 'a.ckpt')\n"
        "io = PackhorseCheckpointIO()\n"
        "other.Trainer(plugins=[io], accelerator='cpu', **quiet)\n"
        "import pickle; pickle.loads(pickle.dumps(io))\n"
    )
    assert run_forked(tmp_path / "program.py", tmp_path / "printed", tmp_path) == 0
