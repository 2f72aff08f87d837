"""A small training run in plain PyTorch: dropout, shuffled data, Adam and a schedule, so that every
part of its state shows in the losses."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch with one thread: a model this small gains nothing from several threads that wait for
    a busy core."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


class Run:
    """The run; `state_dict` has everything that decides how it continues."""

    def __init__(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, total_steps=999)
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(40, 8, generator=generator)
        self.order = torch.empty(0, dtype=torch.int64)
        self.step = 0
        self.losses: list[float] = []

    def train(self, until: int) -> None:
        """Continue until a step."""
        while self.step < until:
            if not self.order.numel():
                self.order = torch.randperm(len(self.x))
            batch, self.order = self.x[self.order[:8]], self.order[8:]
            noise = random.random() + float(np.random.standard_normal())
            loss = nn.functional.mse_loss(self.model(batch), batch.sum(1, keepdim=True) + noise)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            self.losses.append(loss.item())

    def state_dict(self) -> dict[str, Any]:
        """The state to save."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": [random.getstate(), np.random.get_state(), torch.get_rng_state()],
            "order": self.order,
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        random.setstate(state["rng"][0])
        np.random.set_state(state["rng"][1])
        torch.set_rng_state(state["rng"][2])
        self.order, self.step = state["order"], state["step"]
