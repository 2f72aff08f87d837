"""fp32 masters of a model's weights, and the AdamW that moves them.

The model computes with bf16 copies of the masters under autocast, as mixed-precision training does;
its gradients move the masters. A stopped run goes on from `save` and `load` with the same bits.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = ["Masters", "Optimizer", "checkpoint_record"]


@dataclass(frozen=True)
class Optimizer:
    """The settings of AdamW.

    Attributes:
        betas: decay of the first and of the second moments, a step.
        weight_decay: of matrices; the scales of the norms do not decay.
        max_gradient_norm: longer gradients are shortened to this norm.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0


class Masters:
    """Weights and moments in fp32.

    Attributes:
        weights: the masters by name.
        step: the number of steps done.
    """

    def __init__(self, weights: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """Begin with moments of zero.

        Args:
            weights: the first masters by name, fp32; copied.
            optimizer: how they are moved.
        """
        # Clones have PyTorch's own alignment, on which the order of sums may depend.
        self.weights = {name: w.detach().clone() for name, w in weights.items()}
        self.step = 0
        self._settings = optimizer
        zeros = [{n: torch.zeros_like(w) for n, w in self.weights.items()} for _ in range(2)]
        self._set_moments(*zeros)

    def _set_moments(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
        matrices = [w for w in self.weights.values() if w.dim() > 1]
        scales = [w for w in self.weights.values() if w.dim() == 1]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices}, {"params": scales, "weight_decay": 0.0}],
            betas=self._settings.betas,
            weight_decay=self._settings.weight_decay,
            fused=True,
        )
        for name, weight in self.weights.items():
            self._adamw.state[weight] = {
                "step": torch.tensor(float(self.step)),
                "exp_avg": first[name].clone(),
                "exp_avg_sq": second[name].clone(),
            }

    def copies(self) -> dict[str, Tensor]:
        """The masters rounded to bf16: what is sent to the workers that sample."""
        return {name: weight.bfloat16() for name, weight in self.weights.items()}

    def fill(self, model: nn.Module) -> None:
        """Give a model the bf16 values of the masters, and no gradients.

        Args:
            model: its parameters have the names of the masters; fp32 or bf16.
        """
        model.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.weights[name].bfloat16())

    def move(self, model: nn.Module, rate: float) -> float:
        """Do one step of AdamW with the gradients that a model holds; shortens them first.

        Args:
            model: fp32; its parameters have gradients.
            rate: the learning rate.

        Returns:
            The norm of the gradient before it was shortened.
        """
        parameters = dict(model.named_parameters())
        limit = self._settings.max_gradient_norm
        norm = nn.utils.clip_grad_norm_(parameters.values(), limit)
        for name, weight in self.weights.items():
            weight.grad = parameters[name].grad
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.step += 1
        return float(norm)

    def save(self, path: Path, record: Mapping[str, Any]) -> None:
        """Write all that the next step depends on, so that the file is there whole or not at all.

        Args:
            path: a safetensors file.
            record: JSON values to keep beside it.
        """
        tensors = {f"w.{name}": weight for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            tensors[f"m.{name}"] = self._adamw.state[weight]["exp_avg"]
            tensors[f"v.{name}"] = self._adamw.state[weight]["exp_avg_sq"]
        names = list(self.weights)  # a safetensors file has an order of its own
        kept = {"step": self.step, "names": names, "record": record}
        part = path.with_suffix(".part")
        save_file({n: t.detach() for n, t in tensors.items()}, part, {"state": json.dumps(kept)})
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path, optimizer: Optimizer) -> tuple["Masters", dict[str, Any]]:
        """The masters that `save` wrote, and the record beside them.

        Args:
            path: the file.
            optimizer: how they are moved from now on; the moments are those of the file.
        """
        kept = _kept(path)
        tensors = load_file(path)
        weights, first, second = ({n: tensors[f"{p}.{n}"] for n in kept["names"]} for p in "wmv")
        masters = cls(weights, optimizer)
        masters.step = kept["step"]
        masters._set_moments(first, second)
        return masters, kept["record"]


def checkpoint_record(path: Path) -> dict[str, Any]:
    """The record in a file that `Masters.save` wrote.

    Args:
        path: the file.
    """
    record: dict[str, Any] = _kept(path)["record"]
    return record


def _kept(path: Path) -> dict[str, Any]:
    with safetensors.safe_open(path, "pt") as file:
        kept: dict[str, Any] = json.loads(file.metadata()["state"])
    return kept
