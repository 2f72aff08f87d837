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
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.reruns import check_same, one_thread
from benchmarks.data import sets
from benchmarks.data.language_model import ModelShape
from benchmarks.data.trainer import (
    BETAS,
    CHECKPOINT,
    State,
    Trainer,
    adamw,
    described,
    file_names,
    identity,
    summary,
    write_manifest,
)
from benchmarks.data.vocabulary import Vocabulary

__all__ = ["Recipe", "main", "train"]

WHOLE = ("w32", "w16", "m32", "v32")  # a whole state
WEIGHT_DECAY = 0.1  # of matrices; the scales of the norms do not decay
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
        """The kinds of files that a step leaves, of `trainer.KINDS`."""
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
        return file_names(self.kept, end) + file_names(self.kept_of_tail, end)

    def history_files(self) -> list[str]:
        """The names of those that the history adds."""
        return file_names(self.kept_of_history, self.last + HISTORY[-1])


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
    settings = {"betas": list(BETAS), "weight_decay": WEIGHT_DECAY}
    wanted = identity(asdict(recipe), settings, vocabulary, ids)
    trainer = Trainer(recipe, folder, ids, lambda state: [adamw(state, WEIGHT_DECAY)], on_step)
    with one_thread():
        if record is None:
            record = _do_run(trainer, recipe, checkpoint, wanted) | {"n_tokens": len(ids)}
            write_manifest(folder, record)
            checkpoint.unlink()
        check_same(manifest, record, wanted)
        write_manifest(folder, record | {"history": _do_history(trainer, recipe)})


def _do_run(
    trainer: Trainer, recipe: Recipe, checkpoint: Path, wanted: dict[str, Any]
) -> dict[str, Any]:
    """Do the steps up to the last, and the tail; returns what the manifest says about them."""
    folder = trainer.folder
    begun = checkpoint.exists()
    state = State.load(checkpoint, wanted) if begun else State.of(trainer.model)
    trainer.go(state, recipe.last, recipe.kept, lambda: state.save(checkpoint, wanted))
    tail = state.cast(torch.bfloat16)
    trainer.go(tail, recipe.last + TAIL[-1], recipe.kept_of_tail)
    return summary(wanted, tail, folder, recipe.files())


def _do_history(trainer: Trainer, recipe: Recipe) -> dict[str, Any]:
    """Do the steps of the history, starting from the files of the last step with fp32 masters."""
    folder = trainer.folder
    state = State.kept(folder, recipe.last)
    trainer.go(state, recipe.last + HISTORY[-1], recipe.kept_of_history)
    return {
        "steps": [recipe.last + step for step in HISTORY],
        "cpu_seconds": round(state.seconds, 1),
        "files": {name: described(folder / name) for name in recipe.history_files()},
        "losses": state.losses,
    }


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
