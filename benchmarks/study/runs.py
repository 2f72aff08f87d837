"""The training runs of the study: one small model and one text, trained in six ways.

Each run differs from the first in one thing. A run keeps its state at dense early steps, then at
powers of two, each with the step before it; and, at three anchors, 1, 2, 4, 8, ... steps before
them, so that the difference between two states can be measured by the steps between. bf16 copies of
fp32 masters are not kept: they are the masters rounded.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.reruns import check_same, one_thread
from benchmarks.data import sets
from benchmarks.data.language_model import ModelShape
from benchmarks.data.trainer import (
    BETAS,
    CHECKPOINT,
    State,
    Trainer,
    adamw,
    file_name,
    identity,
    summary,
    write_manifest,
)
from benchmarks.data.vocabulary import Vocabulary

__all__ = [
    "ANCHORS",
    "LAST",
    "RUNS",
    "STEPS",
    "StudyRun",
    "expected_nbytes",
    "gaps",
    "train_run",
]

WARM_UP = 64  # steps in which the rate rises
COOL_DOWN = 128  # last steps, in which it falls to a tenth
LAST = 1024
ANCHORS = (64, 512, 1024)
SHAPE = ModelShape(4096, 256, 640, 4, 4)
MOMENTUM = {"muon": 0.95, "sgd": 0.9}


def gaps(anchor: int) -> list[int]:
    """The gaps of an anchor in steps: powers of two that are less than it."""
    return [1 << i for i in range(anchor.bit_length()) if 1 << i < anchor]


def _kept_steps() -> Iterator[int]:
    yield from range(5)
    for power in (1 << i for i in range(LAST.bit_length())):
        yield from (power - 1, power)
    for anchor in ANCHORS:
        yield from (anchor - gap for gap in gaps(anchor))


STEPS = sorted(set(_kept_steps()))  # 0 is the state before the first step
# Steps of which every run keeps the moments; the first run keeps all.
_STEPS_WITH_MOMENTS = {step for anchor in ANCHORS for step in (anchor - 1, anchor)}


@dataclass(frozen=True)
class StudyRun:
    """One run, and in what it differs from the first.

    Attributes:
        name: also of its folder.
        title: for tables.
        optimizer: `adamw`; `muon` for the matrices of the blocks and AdamW for the rest; or `sgd`,
            with momentum and without weight decay.
        masters: whether there are fp32 masters; otherwise weights and moments are bf16.
        peak_rate: the learning rate after the warm-up.
        weight_decay: of matrices.
        all_moments: keep the moments of every step that is kept.
        shape: sizes of the model.
        batch: sequences a step.
        context: tokens a sequence.
        save_every: steps between two points from which a stopped run goes on.
        seed: of the first weights and of the batches.
    """

    name: str
    title: str
    optimizer: str = "adamw"
    masters: bool = True
    peak_rate: float = 1.5e-3
    weight_decay: float = 0.1
    all_moments: bool = False
    shape: ModelShape = SHAPE
    batch: int = 2
    context: int = 256
    save_every: int = 64
    seed: int = sets.SEED

    def rate(self, step: int) -> float:
        """The learning rate of a step; steps count from 1."""
        cooled = max(step - (LAST - COOL_DOWN), 0) / COOL_DOWN
        return self.peak_rate * min(step / WARM_UP, 1.0) * (1 - 0.9 * cooled)

    @property
    def has_second_moments(self) -> bool:
        """Whether all weights have second moments."""
        return self.optimizer == "adamw"

    def kinds(self) -> dict[str, str]:
        """The kinds of files, of `trainer.KINDS`: of `weights`, `first` and, if any, `second`."""
        kinds = ("w32", "m32", "v32") if self.masters else ("p16", "pm16", "pv16")
        named = dict(zip(("weights", "first", "second"), kinds, strict=True))
        return named if self.has_second_moments else named | {"second": ""}

    def kept(self, step: int) -> tuple[str, ...]:
        """The kinds of files that a step leaves."""
        if step not in STEPS:
            return ()
        kinds = self.kinds()
        if step and (self.all_moments or step in _STEPS_WITH_MOMENTS):
            return tuple(kind for kind in kinds.values() if kind)
        return (kinds["weights"],)

    def files(self) -> list[str]:
        """The names of all files that the run leaves, except the manifest."""
        return [file_name(kind, step) for step in STEPS for kind in self.kept(step)]

    def optimizers(self, state: State) -> list[torch.optim.Optimizer]:
        """The optimizers that work on the tensors of a state."""
        if self.optimizer == "adamw":
            return [adamw(state, self.weight_decay)]
        if self.optimizer == "sgd":
            return [
                _with_momentum(
                    torch.optim.SGD(state.weights.values(), momentum=MOMENTUM["sgd"]), state
                )
            ]
        inner = [n for n, w in state.weights.items() if w.dim() > 1 and "embed" not in n]
        muon = torch.optim.Muon(
            [state.weights[n] for n in inner],
            weight_decay=self.weight_decay,
            momentum=MOMENTUM["muon"],
            adjust_lr_fn="match_rms_adamw",  # so that AdamW's rate fits
        )
        rest = [n for n in state.weights if n not in inner]
        return [_with_momentum(muon, state), adamw(state, self.weight_decay, rest)]

    def settings(self) -> dict[str, Any]:
        """The settings of the optimizer that are not attributes, for the manifest."""
        return {
            "betas": list(BETAS),
            "momentum": MOMENTUM.get(self.optimizer),
            "warm_up": WARM_UP,
            "cool_down": COOL_DOWN,
            "steps": LAST,
        }


RUNS = (
    StudyRun("base", "AdamW, fp32 masters", all_moments=True),
    StudyRun("bf16", "AdamW, pure bf16", masters=False),
    StudyRun("slow", "a tenth of the rate", peak_rate=1.5e-4),
    StudyRun("no_decay", "no weight decay", weight_decay=0.0),
    StudyRun("muon", "Muon", optimizer="muon"),
    StudyRun("sgd", "SGD with momentum", optimizer="sgd", peak_rate=0.1, weight_decay=0.0),
)


def _with_momentum(optimizer: torch.optim.Optimizer, state: State) -> torch.optim.Optimizer:
    """Make an optimizer use the first moments of the state as its momentum."""
    names = {id(weight): name for name, weight in state.weights.items()}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            optimizer.state[weight] = {"momentum_buffer": state.first[names[id(weight)]]}
    return optimizer


def expected_nbytes(run: StudyRun) -> int:
    """The bytes that the files of a run take, within a percent."""
    shape = run.shape
    block = 4 * shape.width**2 + 3 * shape.width * shape.hidden + 2 * shape.width
    numel = shape.vocabulary * shape.width + shape.n_layers * block + shape.width
    return len(run.files()) * numel * (4 if run.masters else 2)


def train_run(
    run: StudyRun,
    folder: Path,
    texts: Sequence[bytes],
    *,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> bool:
    """Do a run, or the rest of it, and write its files and its manifest.

    Args:
        run: what is trained.
        folder: where the files go; made if it is missing.
        texts: what is learned.
        on_step: called after each step with its number and its loss.

    Returns:
        Whether there was anything to do.

    Raises:
        ValueError: the folder holds a run with other settings.
    """
    manifest, checkpoint = folder / sets.TRAINING_MANIFEST, folder / CHECKPOINT
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = Vocabulary.of(texts, run.shape.vocabulary)
    ids = vocabulary.encode(texts)
    wanted = identity(asdict(run), run.settings(), vocabulary, ids)
    if manifest.exists():
        check_same(manifest, json.loads(manifest.read_text()), wanted)
        return False
    trainer = Trainer(run, folder, ids, run.optimizers, on_step)
    with one_thread():
        state = _train(trainer, run, checkpoint, wanted)
    record = summary(wanted, state, folder, run.files()) | {"n_tokens": len(ids)}
    write_manifest(folder, record)
    checkpoint.unlink()
    return True


def _train(trainer: Trainer, run: StudyRun, checkpoint: Path, wanted: dict[str, Any]) -> State:
    """Do the steps from the checkpoint, or from the first; returns the last state."""
    if checkpoint.exists():
        state = State.load(checkpoint, wanted)
    else:
        state = State.of(trainer.model)
        state = state if run.masters else state.cast(torch.bfloat16)
        state.keep(trainer.folder, run.kept(0))
    if not run.has_second_moments:
        state.second = {n: v for n, v in state.second.items() if _has_second(run, state, n)}
    trainer.go(state, LAST, run.kept, lambda: state.save(checkpoint, wanted))
    return state


def _has_second(run: StudyRun, state: State, name: str) -> bool:
    return run.optimizer == "muon" and (state.weights[name].dim() < 2 or "embed" in name)
