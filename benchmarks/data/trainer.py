"""Trains the language model step by step, and keeps states of it as safetensors files.

The commands `benchmarks/training.py` and `benchmarks/study.py` decide what is trained and which
steps leave files; here is what a step is. The model computes with bf16 copies of the weights,
whatever type the optimizer works in. A run that was stopped goes on from its checkpoint to the same
bytes as one that was not.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.common import machine
from benchmarks.common.reruns import check_same
from benchmarks.data import sets
from benchmarks.data.language_model import LanguageModel, ModelShape
from benchmarks.data.vocabulary import Vocabulary

__all__ = [
    "BETAS",
    "CHECKPOINT",
    "KINDS",
    "MAX_GRADIENT_NORM",
    "State",
    "Trainer",
    "TrainingRecipe",
    "adamw",
    "described",
    "file_name",
    "file_names",
    "identity",
    "summary",
    "write_manifest",
]

CHECKPOINT = "checkpoint.safetensors"
# Kinds of files, and whether they hold weights, first moments or second moments. The number is the
# width in bits; p says that the optimizer worked in bf16 too.
KINDS = {"w32": "w", "w16": "w", "m32": "m", "v32": "v", "p16": "w", "pm16": "m", "pv16": "v"}
BETAS = (0.9, 0.95)
MAX_GRADIENT_NORM = 1.0


class TrainingRecipe(Protocol):
    """What `Trainer` must know about a run."""

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""

    @property
    def batch(self) -> int:
        """Sequences a step."""

    @property
    def context(self) -> int:
        """Tokens a sequence."""

    @property
    def save_every(self) -> int:
        """Steps between two points from which a stopped run goes on."""

    @property
    def seed(self) -> int:
        """The seed of the first weights and of the batches."""

    def rate(self, step: int) -> float:
        """The learning rate of a step; steps count from 1."""


@dataclass
class State:
    """Everything that the next step depends on, and a record of the steps before.

    Attributes:
        step: steps done.
        weights: the masters by name; fp32, or bf16 where the optimizer works in bf16.
        first: first moments, of the same type.
        second: second moments; only of the weights whose optimizer has them.
        losses: the loss of each step.
        seconds: processor time spent.
    """

    step: int
    weights: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]
    losses: list[float]
    seconds: float

    @classmethod
    def of(cls, model: LanguageModel) -> "State":
        """The state before the first step.

        Args:
            model: with its first weights, which are copied.
        """
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        moments = [{n: torch.zeros_like(w) for n, w in weights.items()} for _ in range(2)]
        return cls(0, weights, *moments, [], 0.0)

    def cast(self, dtype: torch.dtype) -> "State":
        """The same with weights and moments of another type."""
        parts = ({n: t.to(dtype) for n, t in p.items()} for p in self._parts().values())
        return State(self.step, *parts, self.losses, self.seconds)

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """The tensors of one file.

        Args:
            kind: of `KINDS`.
        """
        part = self._parts()[KINDS[kind]]
        return {n: t.bfloat16() for n, t in part.items()} if kind.endswith("16") else part

    def keep(self, folder: Path, kinds: Sequence[str]) -> None:
        """Write the files of this step.

        Args:
            folder: where they go.
            kinds: of `KINDS`; a file for each.
        """
        for kind in kinds:
            _write(folder / file_name(kind, self.step), self.tensors(kind), {"format": "pt"})

    def _parts(self) -> dict[str, dict[str, Tensor]]:
        return {"w": self.weights, "m": self.first, "v": self.second}

    def save(self, path: Path, identity: dict[str, Any]) -> None:
        """Write what `load` needs to go on."""
        tensors = {f"{p}.{n}": t for p, part in self._parts().items() for n, t in part.items()}
        record = {"step": self.step, "losses": self.losses, "seconds": self.seconds, **identity}
        _write(path, tensors, {"state": json.dumps(record)})

    @classmethod
    def load(cls, path: Path, identity: dict[str, Any]) -> "State":
        """The state in a checkpoint.

        Raises:
            ValueError: it belongs to a run with other settings, sources or versions.
        """
        with safetensors.safe_open(path, "pt") as file:
            record = json.loads(file.metadata()["state"])
        parts: dict[str, dict[str, Tensor]] = {"w": {}, "m": {}, "v": {}}
        for key, tensor in _read(path).items():
            part, name = key.split(".", 1)
            parts[part][name] = tensor
        check_same(path, record, identity)
        return cls(record["step"], *parts.values(), record["losses"], record["seconds"])

    @classmethod
    def kept(cls, folder: Path, step: int) -> "State":
        """The state in the files of a step with fp32 masters, with an empty record."""
        parts = (_read(folder / file_name(kind, step)) for kind in ("w32", "m32", "v32"))
        return cls(step, *parts, [], 0.0)


class Trainer:
    """Takes a state from step to step and writes the files of the steps that are kept.

    Attributes:
        recipe: what is trained.
        folder: where the files go.
        model: has the weights of the recipe's seed until the first step.
    """

    def __init__(
        self,
        recipe: TrainingRecipe,
        folder: Path,
        ids: NDArray[np.int32],
        optimizers: Callable[[State], list[torch.optim.Optimizer]],
        on_step: Callable[[int, float], None],
    ) -> None:
        """Make the model.

        Args:
            recipe: what is trained.
            folder: where the files go.
            ids: the text, as ids of tokens.
            optimizers: makes the optimizers that work on the tensors of a state.
            on_step: called after each step with its number and its loss.
        """
        self.recipe = recipe
        self.folder = folder
        self.model = LanguageModel(recipe.shape, seed=recipe.seed)
        self._ids = ids
        self._optimizers = optimizers
        self._on_step = on_step

    def go(
        self,
        state: State,
        last: int,
        kept: Callable[[int], Sequence[str]],
        save: Callable[[], None] = lambda: None,
    ) -> None:
        """Do the steps up to `last`; the state is changed in place.

        Args:
            state: where it begins.
            last: the last step.
            kept: the kinds of files that a step leaves.
            save: called every `save_every` steps and at the end.
        """
        optimizers = self._optimizers(state)
        spent, begun = state.seconds, time.process_time()
        while state.step < last:
            self._step(state, optimizers)
            state.seconds = spent + time.process_time() - begun
            state.keep(self.folder, kept(state.step))
            if state.step % self.recipe.save_every == 0 or state.step == last:
                save()
            self._on_step(state.step, state.losses[-1])

    def _step(self, state: State, optimizers: list[torch.optim.Optimizer]) -> None:
        state.step += 1
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state.weights[name].bfloat16())
        self.model.zero_grad()
        loss = self.model(self._batch(state.step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_GRADIENT_NORM)
        for name, parameter in parameters.items():
            weight = state.weights[name]
            weight.grad = parameter.grad.to(weight.dtype)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.rate(state.step)
            optimizer.step()
        state.losses.append(round(loss.item(), 4))

    def _batch(self, step: int) -> Tensor:
        """Sequences from anywhere in the text; the same for the same step."""
        length = self.recipe.context + 1
        rng = np.random.default_rng((self.recipe.seed, step))
        starts = rng.integers(0, len(self._ids) - length, self.recipe.batch)
        rows = [self._ids[start : start + length] for start in starts]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def adamw(
    state: State, weight_decay: float, names: Sequence[str] | None = None
) -> torch.optim.Optimizer:
    """AdamW that works on the tensors of the state.

    Args:
        state: its weights and moments are changed in place.
        weight_decay: of matrices; the scales of the norms do not decay.
        names: the weights that it changes; None means all.
    """
    weights = {n: state.weights[n] for n in (state.weights if names is None else names)}
    matrices = [w for w in weights.values() if w.dim() > 1]
    scales = [w for w in weights.values() if w.dim() == 1]
    groups = [{"params": matrices}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=weight_decay, fused=True)
    for name, weight in weights.items():
        optimizer.state[weight] = {
            "step": torch.tensor(float(state.step)),
            "exp_avg": state.first[name],
            "exp_avg_sq": state.second[name],
        }
    return optimizer


def identity(
    recipe: dict[str, Any],
    optimizer: dict[str, Any],
    vocabulary: Vocabulary,
    ids: NDArray[np.int32],
) -> dict[str, Any]:
    """What two runs must share to give the same files on the same machine.

    Args:
        recipe: what is trained.
        optimizer: its settings, without those in the recipe.
        vocabulary: the words.
        ids: the text.
    """
    return {
        "recipe": recipe,
        "optimizer": {**optimizer, "max_gradient_norm": MAX_GRADIENT_NORM},
        "vocabulary_sha256": hashlib.sha256(b"\0".join(vocabulary.words)).hexdigest(),
        "tokens_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
        },
    }


def summary(
    wanted: dict[str, Any], state: State, folder: Path, names: Sequence[str]
) -> dict[str, Any]:
    """What a manifest says about a run that is complete.

    Args:
        wanted: its identity.
        state: its last state.
        folder: where its files are.
        names: of its files.
    """
    return {
        **wanted,
        "machine": machine.describe(),
        "cpu_seconds": round(state.seconds, 1),
        "parameters": {n: list(w.shape) for n, w in state.weights.items()},
        "files": {name: described(folder / name) for name in names},
        "losses": state.losses,
    }


def file_name(kind: str, step: int) -> str:
    """The name of a file.

    Args:
        kind: of `KINDS`.
        step: its step.
    """
    return f"{kind}_{step:06}.safetensors"


def file_names(kept: Callable[[int], Sequence[str]], last: int) -> list[str]:
    """The names of all files that a run leaves.

    Args:
        kept: the kinds of files that a step leaves.
        last: the last step.
    """
    return [file_name(kind, step) for step in range(1, last + 1) for kind in kept(step)]


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file so that it is there whole or not at all."""
    part = path.with_suffix(".part")
    save_file({n: t.detach() for n, t in tensors.items()}, part, metadata)
    os.replace(part, path)


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. Clones have PyTorch's own alignment, on which the order of sums may
    depend."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a run so that it is there whole or not at all.

    Args:
        folder: of the run.
        manifest: what it says.
    """
    part = folder / f"{sets.TRAINING_MANIFEST}.part"
    part.write_text(json.dumps(manifest, indent=1) + "\n")
    os.replace(part, folder / sets.TRAINING_MANIFEST)


def described(path: Path) -> dict[str, Any]:
    """What a manifest says about a file: its size and its hash."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"nbytes": path.stat().st_size, "sha256": digest}
