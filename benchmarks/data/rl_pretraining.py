"""The language model that the trace of a reinforcement learning run begins with.

It learns the sources of Python's standard library, so that its weights have the statistics of
trained weights. One thread and deterministic algorithms: a machine gives the same bits each time,
also when the run is stopped and goes on.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.common.reruns import check_same, one_thread
from benchmarks.data.language_model import LanguageModel, ModelShape
from benchmarks.data.rl_masters import Masters, Optimizer
from benchmarks.data.vocabulary import Vocabulary

__all__ = ["CHECKPOINT", "Corpus", "Pretraining", "pretrain"]

CHECKPOINT = "pretrained.safetensors"


@dataclass(frozen=True)
class Pretraining:
    """What is learned before the reinforcement, and how.

    Attributes:
        shape: sizes of the model.
        steps: their number.
        batch: sequences a step.
        context: tokens a sequence.
        warm_up: steps in which the rate rises.
        cool_down: the last steps, in which the rate falls to a hundredth.
        peak_rate: the learning rate between.
        save_every: steps between two points from which a stopped run goes on.
        seed: of the first weights and of the batches.
        optimizer: the settings of AdamW.
    """

    shape: ModelShape = field(default_factory=ModelShape)
    steps: int = 600
    batch: int = 8
    context: int = 128
    warm_up: int = 50
    cool_down: int = 200
    peak_rate: float = 1.5e-3
    save_every: int = 50
    seed: int = 20251125
    optimizer: Optimizer = field(default_factory=lambda: Optimizer((0.9, 0.95), weight_decay=0.1))

    def rate(self, step: int) -> float:
        """The learning rate of a step; steps count from 1."""
        cooled = max(step - self.steps + self.cool_down, 0) / self.cool_down
        return self.peak_rate * min(step / self.warm_up, 1.0) * (1 - 0.99 * cooled)


class Corpus:
    """The text that is learned, and from which prompts are cut.

    Attributes:
        vocabulary: words and their ids.
        ids: the whole text, shape (n,), int32.
    """

    def __init__(self, texts: Sequence[bytes], vocabulary: int) -> None:
        """Make the vocabulary of the texts and encode them.

        Args:
            texts: what is learned.
            vocabulary: number of ids.
        """
        self.vocabulary = Vocabulary.of(texts, vocabulary)
        self.ids: NDArray[np.int32] = self.vocabulary.encode(texts)

    @property
    def sha256(self) -> str:
        """The hash of all ids and of the words that they stand for."""
        digest = hashlib.sha256(self.ids.tobytes())
        digest.update(b"\0".join(self.vocabulary.words))
        return digest.hexdigest()

    def rows(self, n: int, length: int, seed: tuple[int, ...]) -> Tensor:
        """Runs of ids from anywhere in the text; the same for the same seed.

        Args:
            n: number of rows.
            length: ids a row.
            seed: numbers that choose the places.

        Returns:
            int64, shape (n, length).
        """
        rng = np.random.default_rng(seed)
        starts = rng.integers(0, len(self.ids) - length, n)
        rows = [self.ids[start : start + length] for start in starts]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def pretrain(
    recipe: Pretraining,
    corpus: Corpus,
    folder: Path,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> dict[str, Tensor]:
    """Train the model, or the rest of it, or only read it.

    Args:
        recipe: what is trained.
        corpus: what is learned.
        folder: where the checkpoint is kept.
        on_step: called after each step with its number and its loss.

    Returns:
        The fp32 weights by name.

    Raises:
        ValueError: the checkpoint in the folder was made by another recipe or from another text.
    """
    path = folder / CHECKPOINT
    identity = {"recipe": asdict(recipe), "corpus_sha256": corpus.sha256}
    record: dict[str, Any] = {**identity, "losses": []}
    model = LanguageModel(recipe.shape, seed=recipe.seed)
    masters = Masters(dict(model.named_parameters()), recipe.optimizer)
    if path.exists():
        masters, kept = Masters.load(path, recipe.optimizer)
        check_same(path, kept, identity)
        record = kept
    with one_thread():
        while masters.step < recipe.steps:
            record["losses"].append(_step(recipe, corpus, model, masters))
            if masters.step % recipe.save_every == 0 or masters.step == recipe.steps:
                masters.save(path, record)
            on_step(masters.step, record["losses"][-1])
    return masters.weights


def _step(recipe: Pretraining, corpus: Corpus, model: LanguageModel, masters: Masters) -> float:
    step = masters.step + 1
    masters.fill(model)
    ids = corpus.rows(recipe.batch, recipe.context + 1, (recipe.seed, step))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids)
    loss.backward()
    masters.move(model, recipe.rate(step))
    return round(loss.item(), 4)
