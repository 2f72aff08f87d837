"""A real training run as benchmark data: `python benchmarks/training.py [--out DIR] [--resume]`.

A small LLaMA-like model learns the sources of Python's standard library on one thread: fp32 masters
and AdamW moments, and bf16 copies that the model computes with. Weights and moments are kept at
steps a factor of two apart, at the last step and at its neighbours. A few more steps use weights
and moments in pure bf16. Then the run goes on from its last step, at the rate that it ended with,
and keeps everything every few steps: a history of twelve checkpoints. All of it takes 17 to 22
minutes of one core and 6 GB of disk, in `$PACKHORSE_BENCH_DATA/training`, by default
`~/.cache/packhorse-bench/training`; `--resume` adds the history to a run that was made without one.

On one machine the files are the same each time, even if the run was stopped and resumed. Machines
round sums in different orders and Python versions have different sources, so no hash can be pinned:
`manifest.json` records the hashes, settings, versions, parameters and losses of the run, and
benchmark figures carry the hash of the data that they were measured on.
"""

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import machine
from benchmarks.common.reruns import check_same, one_thread
from benchmarks.data import sets
from benchmarks.data.language_model import LanguageModel, ModelShape
from benchmarks.data.vocabulary import Vocabulary

__all__ = ["Recipe", "main", "train"]

CHECKPOINT = "checkpoint.safetensors"
# Kinds of files, and whether they hold weights, first moments or second moments. The number is the
# width in bits; p says that the optimizer worked in bf16 too.
KINDS = {"w32": "w", "w16": "w", "m32": "m", "v32": "v", "p16": "w", "pm16": "m", "pv16": "v"}
WHOLE = ("w32", "w16", "m32", "v32")  # a whole state
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1  # of matrices; the scales of the norms do not decay
MAX_GRADIENT_NORM = 1.0
# Steps before the last whose weights are kept; of the first one the moments too.
NEIGHBOURS = (1, 4, 6, 7, 8)
TAIL = (4, 5, 6, 8)  # steps after the last, in pure bf16
HISTORY = tuple(range(0, 96, 8))  # steps after the last, with fp32 masters; the last is the first


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how.

    Attributes:
        shape: sizes of the model.
        batch: sequences a step.
        context: tokens a sequence.
        first_kept: first step that is kept; then each power of two times it, up to `full_steps`.
        full_steps: steps before the rate falls.
        cool_down: steps in which the rate falls to a tenth; the last one is the last full step.
        warm_up: steps in which the rate rises.
        peak_rate: the learning rate between.
        save_every: steps between two points from which a stopped run goes on.
        seed: of the first weights and of the batches.
    """

    shape: ModelShape = field(default_factory=ModelShape)
    batch: int = 2
    context: int = 256
    first_kept: int = 16
    full_steps: int = 1024
    cool_down: int = 128
    warm_up: int = 64
    peak_rate: float = 1.5e-3
    save_every: int = 64
    seed: int = sets.SEED

    @property
    def last(self) -> int:
        """The last step with fp32 masters."""
        return self.full_steps + self.cool_down

    def rate(self, step: int) -> float:
        """The learning rate of a step; steps count from 1."""
        cooled = min(max(step - self.full_steps, 0) / self.cool_down, 1.0)
        return self.peak_rate * min(step / self.warm_up, 1.0) * (1 - 0.9 * cooled)

    def kept(self, step: int) -> tuple[str, ...]:
        """The kinds of files that a step leaves, of `KINDS`."""
        doubling, rest = divmod(step, self.first_kept)
        geometric = rest == 0 and doubling.bit_count() == 1 and step <= self.full_steps
        if geometric or self.last - step in (0, NEIGHBOURS[0]):
            return WHOLE
        return ("w32", "w16") if self.last - step in NEIGHBOURS else ()

    def kept_of_tail(self, step: int) -> tuple[str, ...]:
        """The kinds that a step in pure bf16 leaves."""
        return ("p16", "pm16", "pv16") if step - self.last in TAIL else ()

    def kept_of_history(self, step: int) -> tuple[str, ...]:
        """The kinds that a step of the history leaves."""
        return WHOLE if step - self.last in HISTORY[1:] else ()

    def files(self) -> list[str]:
        """The names of all files that the run and its tail leave, except the manifest."""
        end = self.last + TAIL[-1]
        return _file_names(self.kept, end) + _file_names(self.kept_of_tail, end)

    def history_files(self) -> list[str]:
        """The names of those that the history adds."""
        return _file_names(self.kept_of_history, self.last + HISTORY[-1])


@dataclass
class _State:
    """Everything that the next step depends on, and a record of the steps before.

    Attributes:
        step: steps done.
        weights: the masters by name; fp32, or bf16 in the tail.
        first: first moments, of the same type.
        second: second moments.
        losses: the loss of each step.
        seconds: processor time spent.
    """

    step: int
    weights: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]
    losses: list[float]
    seconds: float

    def cast(self, dtype: torch.dtype) -> "_State":
        """The same with weights and moments of another type."""
        parts = ({n: t.to(dtype) for n, t in p.items()} for p in self._parts().values())
        return _State(self.step, *parts, self.losses, self.seconds)

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """The tensors of one file.

        Args:
            kind: of `KINDS`.
        """
        part = self._parts()[KINDS[kind]]
        return {n: t.bfloat16() for n, t in part.items()} if kind.endswith("16") else part

    def _parts(self) -> dict[str, dict[str, Tensor]]:
        return {"w": self.weights, "m": self.first, "v": self.second}

    def save(self, path: Path, identity: dict[str, Any]) -> None:
        """Write what `load` needs to go on."""
        tensors = {f"{p}.{n}": t for p, part in self._parts().items() for n, t in part.items()}
        record = {"step": self.step, "losses": self.losses, "seconds": self.seconds, **identity}
        _write(path, tensors, {"state": json.dumps(record)})

    @classmethod
    def load(cls, path: Path, identity: dict[str, Any]) -> "_State":
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
    def kept(cls, folder: Path, step: int) -> "_State":
        """The state in the files of a step, with an empty record."""
        parts = (_read(folder / _file_name(kind, step)) for kind in ("w32", "m32", "v32"))
        return cls(step, *parts, [], 0.0)


def train(
    recipe: Recipe,
    folder: Path,
    texts: Sequence[bytes],
    *,
    resume: bool = False,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Do the run, or the rest of it, and write its files and its manifest.

    Args:
        recipe: what is trained.
        folder: where the files go; made if it is missing.
        texts: what is learned.
        resume: go on from the checkpoint in the folder, if there is one.
        on_step: called after each step with its number and its loss.

    Raises:
        FileExistsError: there is a run in the folder and `resume` is false, or the run is complete.
        ValueError: the folder holds a run with other settings.
    """
    manifest, checkpoint = folder / sets.TRAINING_MANIFEST, folder / CHECKPOINT
    record = json.loads(manifest.read_text()) if manifest.exists() else None
    if record and "history" in record:
        raise FileExistsError(f"the run in {folder} is complete; remove the folder to repeat it")
    if (record or checkpoint.exists()) and not resume:
        raise FileExistsError(f"a run was begun in {folder}; --resume goes on with it")
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = Vocabulary.of(texts, recipe.shape.vocabulary)
    ids = vocabulary.encode(texts)
    identity = _identity(recipe, vocabulary, ids)
    trainer = _Trainer(recipe, folder, ids, on_step)
    with one_thread():
        if record is None:
            record = _do_run(trainer, checkpoint, identity) | {"n_tokens": len(ids)}
            _write_manifest(folder, record)
            checkpoint.unlink()
        check_same(manifest, record, identity)
        _write_manifest(folder, record | {"history": _do_history(trainer)})


def _do_run(trainer: "_Trainer", checkpoint: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Do the steps up to the last, and the tail; returns what the manifest says about them."""
    recipe, folder = trainer.recipe, trainer.folder
    begun = checkpoint.exists()
    state = _State.load(checkpoint, identity) if begun else _first(trainer.model)
    trainer.go(state, recipe.last, recipe.kept, lambda: state.save(checkpoint, identity))
    tail = state.cast(torch.bfloat16)
    trainer.go(tail, recipe.last + TAIL[-1], recipe.kept_of_tail)
    return {
        **identity,
        "machine": machine.describe(),
        "cpu_seconds": round(tail.seconds, 1),
        "parameters": {n: list(w.shape) for n, w in tail.weights.items()},
        "files": {name: _described(folder / name) for name in recipe.files()},
        "losses": tail.losses,
    }


def _do_history(trainer: "_Trainer") -> dict[str, Any]:
    """Do the steps of the history, starting from the files of the last step with fp32 masters."""
    recipe, folder = trainer.recipe, trainer.folder
    state = _State.kept(folder, recipe.last)
    trainer.go(state, recipe.last + HISTORY[-1], recipe.kept_of_history)
    return {
        "steps": [recipe.last + step for step in HISTORY],
        "cpu_seconds": round(state.seconds, 1),
        "files": {name: _described(folder / name) for name in recipe.history_files()},
        "losses": state.losses,
    }


def _first(model: LanguageModel) -> _State:
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    moments = [{n: torch.zeros_like(w) for n, w in weights.items()} for _ in range(2)]
    return _State(0, weights, *moments, [], 0.0)


class _Trainer:
    """Takes a state from step to step and writes the files of the steps that are kept."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        ids: NDArray[np.int32],
        on_step: Callable[[int, float], None],
    ) -> None:
        self.recipe = recipe
        self.folder = folder
        self.model = LanguageModel(recipe.shape, seed=recipe.seed)
        self._ids = ids
        self._on_step = on_step

    def go(
        self,
        state: _State,
        last: int,
        kept: Callable[[int], tuple[str, ...]],
        save: Callable[[], None] = lambda: None,
    ) -> None:
        """Do the steps up to `last`; the state is changed in place.

        Args:
            state: where it begins.
            last: the last step.
            kept: the kinds of files that a step leaves.
            save: called every `save_every` steps and at the end.
        """
        optimizer = _optimizer(state)
        spent, begun = state.seconds, time.process_time()
        while state.step < last:
            self._step(state, optimizer)
            state.seconds = spent + time.process_time() - begun
            for kind in kept(state.step):
                path = self.folder / _file_name(kind, state.step)
                _write(path, state.tensors(kind), {"format": "pt"})
            if state.step % self.recipe.save_every == 0 or state.step == last:
                save()
            self._on_step(state.step, state.losses[-1])

    def _step(self, state: _State, optimizer: torch.optim.AdamW) -> None:
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


def _optimizer(state: _State) -> torch.optim.AdamW:
    """AdamW that works on the tensors of the state."""
    matrices = [w for w in state.weights.values() if w.dim() > 1]
    scales = [w for w in state.weights.values() if w.dim() == 1]
    groups = [{"params": matrices}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    for name, weight in state.weights.items():
        optimizer.state[weight] = {
            "step": torch.tensor(float(state.step)),
            "exp_avg": state.first[name],
            "exp_avg_sq": state.second[name],
        }
    return optimizer


def _identity(recipe: Recipe, vocabulary: Vocabulary, ids: NDArray[np.int32]) -> dict[str, Any]:
    """What two runs must share to give the same files on the same machine."""
    return {
        "recipe": asdict(recipe),
        "optimizer": {
            "betas": list(BETAS),
            "weight_decay": WEIGHT_DECAY,
            "max_gradient_norm": MAX_GRADIENT_NORM,
        },
        "vocabulary_sha256": hashlib.sha256(b"\0".join(vocabulary.words)).hexdigest(),
        "tokens_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
        },
    }


def _file_name(kind: str, step: int) -> str:
    return f"{kind}_{step:06}.safetensors"


def _file_names(kept: Callable[[int], tuple[str, ...]], last: int) -> list[str]:
    return [_file_name(kind, step) for step in range(1, last + 1) for kind in kept(step)]


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file so that it is there whole or not at all."""
    part = path.with_suffix(".part")
    save_file({n: t.detach() for n, t in tensors.items()}, part, metadata)
    os.replace(part, path)


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. Clones have PyTorch's own alignment, on which the order of sums may
    depend."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    part = folder / f"{sets.TRAINING_MANIFEST}.part"
    part.write_text(json.dumps(manifest, indent=1) + "\n")
    os.replace(part, folder / sets.TRAINING_MANIFEST)


def _described(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"nbytes": path.stat().st_size, "sha256": digest}


def main(argv: list[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        description="Train a small model, and keep its states as benchmark data."
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the files go")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was stopped")
    args = parser.parse_args(argv)
    folder = args.out or sets.training_folder()
    try:
        train(
            Recipe(),
            folder,
            [text.encode() for text in sets.library_sources()],
            resume=args.resume,
            on_step=_Progress(),
        )
    except (FileExistsError, ValueError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    print(f"the files and their {sets.TRAINING_MANIFEST} are in {folder}")
    return 0


class _Progress:
    """One line every 8 steps."""

    def __init__(self) -> None:
        self._losses: list[float] = []

    def __call__(self, step: int, loss: float) -> None:
        self._losses.append(loss)
        if step % 8 == 0:
            mean = sum(self._losses) / len(self._losses)
            print(f"step {step:5}  loss {mean:.3f}  {time.process_time():.0f} s", flush=True)
            self._losses.clear()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
