"""A language model as a policy: sampling, a toy reward, and the loss of GRPO.

Workers sample with a bf16 model, one id at a time. The reward is 1 for a completion that has a
wanted word, else 0. Rewards are normalised within the completions of one prompt, and the ratio of
new to old probabilities is clipped: Shao et al., DeepSeekMath (2024), section 4.1, with the mean
over all ids of a batch and no penalty for the distance from the first policy, as in Yu et al., DAPO
(2025).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.data.language_model import Cache, LanguageModel

__all__ = ["Rollouts", "advantages", "divergence", "log_probs", "loss", "rewards", "sample"]

SPREAD_FLOOR = 1e-6  # of the rewards of a group; keeps the division finite where all are equal


@dataclass(frozen=True)
class Rollouts:
    """Completions of some prompts, those of one prompt one after the other.

    Attributes:
        ids: prompts and completions, int64, shape (completions, prompt + new).
        log_probs: of the new ids, as the worker computed them, fp32, shape (completions, new).
    """

    ids: Tensor
    log_probs: Tensor

    @property
    def new(self) -> Tensor:
        """The new ids, shape (completions, new)."""
        return self.ids[:, -self.log_probs.shape[1] :]


@torch.no_grad()
def sample(model: LanguageModel, prompts: Tensor, *, group: int, n_new: int, seed: int) -> Rollouts:
    """Complete each prompt several times, at temperature 1.

    Args:
        model: the worker's, in bf16.
        prompts: int64, shape (prompts, ids of a prompt).
        group: completions a prompt.
        n_new: ids of a completion.
        seed: of the choices.
    """
    generator = torch.Generator().manual_seed(seed)
    cache = Cache()
    scores = model.logits(prompts, cache)[:, -1].repeat_interleave(group, 0)
    cache.repeat(group)
    ids, chosen = [prompts.repeat_interleave(group, 0)], []
    while True:
        log_p = scores.float().log_softmax(-1)
        ids.append(torch.multinomial(log_p.exp(), 1, generator=generator))
        chosen.append(log_p.gather(1, ids[-1]))
        if len(chosen) == n_new:
            return Rollouts(torch.cat(ids, 1), torch.cat(chosen, 1))
        scores = model.logits(ids[-1], cache)[:, -1]


def rewards(rollouts: Rollouts, wanted: Tensor) -> Tensor:
    """1 for a completion with at least one wanted id, else 0; fp32, shape (completions,).

    Args:
        rollouts: the completions.
        wanted: ids, shape (n,).
    """
    return torch.isin(rollouts.new, wanted).any(1).float()


def advantages(rewards: Tensor, group: int) -> Tensor:
    """How much better a completion is than the others of its prompt, in standard deviations.

    Args:
        rewards: shape (completions,).
        group: completions a prompt.

    Returns:
        The same shape; 0 in a group of equal rewards.
    """
    grouped = rewards.view(-1, group)
    spread = grouped.std(1, keepdim=True) + SPREAD_FLOOR
    return ((grouped - grouped.mean(1, keepdim=True)) / spread).flatten()


def log_probs(model: LanguageModel, rollouts: Rollouts) -> Tensor:
    """The log-probabilities that a model gives to the new ids, fp32, shape (completions, new).

    Args:
        model: any; computes under autocast.
        rollouts: the completions.
    """
    n_new = rollouts.log_probs.shape[1]
    with torch.autocast("cpu", torch.bfloat16):
        scores = model.logits(rollouts.ids[:, :-1])[:, -n_new:]
    return scores.float().log_softmax(-1).gather(2, rollouts.new[:, :, None])[:, :, 0]


def loss(new: Tensor, old: Tensor, advantages: Tensor, clip: float) -> tuple[Tensor, float]:
    """The clipped objective, with the sign of a loss.

    Args:
        new: log-probabilities of the policy that learns, shape (completions, ids).
        old: those of the policy that sampled.
        advantages: shape (completions,).
        clip: how far the ratio may leave 1 before it no longer counts.

    Returns:
        The loss, a scalar, and the share of ids whose ratio was outside.
    """
    ratio = (new - old).exp()
    gain = advantages[:, None]
    objective = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    outside = ((ratio - 1).abs() > clip).float().mean()
    return -objective.mean(), float(outside)


def divergence(sampled_by: Tensor, other: Tensor) -> float:
    """An estimate of KL(p, q) from ids that p sampled, in nats an id; never negative.

    Schulman, Approximating KL divergence (2020), k3.

    Args:
        sampled_by: log-probabilities by p.
        other: by q, of the same ids.
    """
    log_ratio = other - sampled_by
    return float((log_ratio.exp() - 1 - log_ratio).mean())
