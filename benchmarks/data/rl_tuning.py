"""Fine-tuning by a policy gradient, with the weights kept after every step.

Workers sample with bf16 copies of the weights; the trainer moves fp32 masters. As in asynchronous
training, the copies that sample are one step older than those that learn. One step is one batch of
completions and one step of AdamW, after which the new copies would be sent: they are taken into
the store. On one machine the same recipe gives the same bits, also when it is stopped and resumed.
"""

import fcntl
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.reruns import check_same, one_thread
from benchmarks.data import rl_policy, rl_trace
from benchmarks.data.language_model import LanguageModel, ModelShape
from benchmarks.data.rl_masters import Masters, Optimizer
from benchmarks.data.rl_pretraining import Corpus
from packhorse.disk import SnapshotStore

__all__ = ["Tuning", "changes", "tune"]

KL_EVERY = 10  # steps between two measurements of the distance from the first policy
LARGEST_COUNTED = 3  # ulp; larger changes are counted with those of three


@dataclass(frozen=True)
class Tuning:
    """What is rewarded, and how the policy learns.

    Attributes:
        word: a completion that has it gets the reward 1.
        prompts: a step.
        group: completions a prompt.
        n_prompt: ids of a prompt.
        n_new: ids of a completion.
        clip: how far the ratio of probabilities may leave 1.
        lag: how many steps the copies that sample are behind those that learn.
        warm_up: steps in which the rate rises; then it stays.
        save_every: steps between two points from which a stopped run goes on.
        seed: of prompts and completions.
        optimizer: the settings of AdamW.
    """

    word: str = "return"
    prompts: int = 4
    group: int = 8
    n_prompt: int = 8
    n_new: int = 24
    clip: float = 0.2
    lag: int = 1
    warm_up: int = 10
    save_every: int = 10
    seed: int = 20251126
    optimizer: Optimizer = field(default_factory=Optimizer)

    def wanted(self, corpus: Corpus) -> Tensor:
        """The ids that stand for the word, with or without a space in front.

        Raises:
            ValueError: there is none.
        """
        words = enumerate(corpus.vocabulary.words)
        ids = [i for i, word in words if word.strip() == self.word.encode()]
        if not ids:
            raise ValueError(f"no id of the vocabulary stands for the word {self.word!r}")
        return torch.tensor(ids)


def tune(
    recipe: Tuning,
    rate: float,
    n_steps: int,
    folder: Path,
    *,
    corpus: Corpus,
    shape: ModelShape,
    weights: Mapping[str, Tensor],
    on_step: Callable[[dict[str, Any]], None] = lambda record: None,
) -> None:
    """Do the run of one learning rate, or the rest of it.

    Args:
        recipe: how the policy learns.
        rate: the learning rate after the warm-up.
        n_steps: the last step; nothing is done if the trace has it.
        folder: of the trace.
        corpus: where prompts come from.
        shape: of the model.
        weights: the first masters by name, fp32.
        on_step: called with the record of each step, when the step is in the store.

    Raises:
        ValueError: the folder holds a run of another recipe, or one that began with other weights.
        BlockingIOError: another process is doing this run.
    """
    store = rl_trace.writable_store(folder, rate)
    with one_thread(), store, _alone(folder / f"{rate:g}.lock"):
        if len(store.names()) > n_steps:
            return
        run = _Run(recipe, rate, folder, store, corpus, shape, weights)
        while run.step < n_steps:
            on_step(run.do_step())
            if run.step % recipe.save_every == 0 or run.step == n_steps:
                run.save()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes out; a process that is killed keeps out nobody."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another process has locked {path} and does this run") from None
        yield


class _Run:
    """The state of a run between two steps."""

    def __init__(
        self,
        recipe: Tuning,
        rate: float,
        folder: Path,
        store: SnapshotStore,
        corpus: Corpus,
        shape: ModelShape,
        weights: Mapping[str, Tensor],
    ) -> None:
        self._recipe, self._rate, self._store, self._corpus = recipe, rate, store, corpus
        self._wanted = recipe.wanted(corpus)
        self._path = folder / f"checkpoint_{rate:g}.safetensors"
        self._learner = LanguageModel(shape, seed=0)
        self._worker = LanguageModel(shape, seed=0).bfloat16()
        self._first = LanguageModel(shape, seed=0)
        self._masters = Masters(weights, recipe.optimizer)
        self._masters.fill(self._first)
        self._record = {
            "recipe": asdict(recipe),
            "corpus_sha256": corpus.sha256,
            "first_sha256": _digest(self._masters.copies()),
        }
        # The copies of the last steps; the oldest is the one that samples.
        self._copies: deque[dict[str, Tensor]] = deque(maxlen=recipe.lag + 1)
        if self._path.exists():
            self._resume()
        else:
            self._begin()

    @property
    def step(self) -> int:
        return self._masters.step

    def _begin(self) -> None:
        n_there = len(self._store.names())
        if n_there > 1 + self._recipe.save_every:
            raise ValueError(
                f"{self._path} is missing, so {n_there} states cannot be continued; remove the "
                "folder beside it to begin anew"
            )
        self._forget_after(-1)
        self._copies.append(self._masters.copies())
        self._take({"step": 0, "sha256": self._record["first_sha256"]})

    def _resume(self) -> None:
        self._masters, kept = Masters.load(self._path, self._recipe.optimizer)
        wanted = {key: value for key, value in self._record.items() if key != "losses"}
        check_same(self._path, kept, wanted)
        self._forget_after(self.step)
        for step in range(max(self.step - self._recipe.lag, 0), self.step + 1):
            name = rl_trace.snapshot_name(step)
            self._copies.append(self._store.restore(name, framework="pt"))
        if _digest(self._copies[-1]) != _digest(self._masters.copies()):
            raise ValueError(f"{self._path} and step {self.step} of the trace differ")

    def _forget_after(self, step: int) -> None:
        """Remove the states that the run will make again."""
        for name in self._store.names()[step + 1 :]:
            self._store.delete(name)

    def save(self) -> None:
        self._masters.save(self._path, self._record)

    def _take(self, record: dict[str, Any]) -> None:
        name = rl_trace.snapshot_name(record["step"])
        self._store.take(name, self._copies[-1], metadata=record)

    def do_step(self) -> dict[str, Any]:
        begun = time.process_time()
        step = self.step + 1
        rate = self._rate * min(step / self._recipe.warm_up, 1.0)
        rollouts = self._sample(step)
        record = {"step": step, "rate": rate} | self._learn(rollouts, rate)
        if step % KL_EVERY == 0 or step == 1:
            record["kl_first"] = self._distance(rollouts)
        self._copies.append(self._masters.copies())
        record |= changes(self._copies[-2], self._copies[-1])
        record["sha256"] = _digest(self._copies[-1])
        record["cpu_seconds"] = round(time.process_time() - begun, 2)
        self._take(record)
        return record

    def _sample(self, step: int) -> rl_policy.Rollouts:
        recipe = self._recipe
        self._worker.load_state_dict(self._copies[0])
        prompts = self._corpus.rows(recipe.prompts, recipe.n_prompt, (recipe.seed, step))
        seed = recipe.seed + step
        return rl_policy.sample(
            self._worker, prompts, group=recipe.group, n_new=recipe.n_new, seed=seed
        )

    def _learn(self, rollouts: rl_policy.Rollouts, rate: float) -> dict[str, Any]:
        """One step of the masters; returns what is worth knowing about it."""
        rewards = rl_policy.rewards(rollouts, self._wanted)
        gains = rl_policy.advantages(rewards, self._recipe.group)
        self._masters.fill(self._learner)
        new = rl_policy.log_probs(self._learner, rollouts)
        loss, outside = rl_policy.loss(new, rollouts.log_probs, gains, self._recipe.clip)
        loss.backward()
        return {
            "reward": round(float(rewards.mean()), 4),
            "mixed_groups": int((gains.view(-1, self._recipe.group) != 0).any(1).sum()),
            "outside_clip": round(outside, 5),
            "kl_worker": rl_policy.divergence(rollouts.log_probs, new.detach()),
            "gradient_norm": self._masters.move(self._learner, rate),
        }

    @torch.no_grad()
    def _distance(self, rollouts: rl_policy.Rollouts) -> float:
        """How far the policy that sampled is from the first one."""
        first = rl_policy.log_probs(self._first, rollouts)
        return rl_policy.divergence(rollouts.log_probs, first)


def changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Any]:
    """How many elements differ, and by how many ulp.

    Args:
        before: bf16 tensors by name.
        after: tensors of the same names and shapes.

    Returns:
        `n_changed`; `ulps`, which counts the changes of 1 ulp, of 2, and of 3 or more; and
        `changed`, the share of all elements that changed.
    """
    counts = torch.zeros(LARGEST_COUNTED + 1, dtype=torch.int64)
    for name, tensor in before.items():
        old, new = (t.flatten().view(torch.int16) for t in (tensor, after[name]))
        places = (old != new).nonzero()[:, 0]
        apart = (_ordered(old[places]) - _ordered(new[places])).abs()
        # 0 and -0 are equal numbers and different bits: a change of the smallest kind.
        counts += torch.bincount(apart.clamp(1, LARGEST_COUNTED), minlength=len(counts))
    n_changed = int(counts.sum())
    n = sum(tensor.numel() for tensor in before.values())
    return {"changed": n_changed / n, "n_changed": n_changed, "ulps": counts[1:].tolist()}


def _ordered(bits: Tensor) -> Tensor:
    """Integers in the order of the numbers that have these bits, one for each ulp."""
    wide = bits.int()
    return torch.where(wide < 0, -(wide & 0x7FFF), wide)


def _digest(state: Mapping[str, Tensor]) -> str:
    return rl_trace.digest({n: t.view(torch.int16).numpy() for n, t in state.items()})
