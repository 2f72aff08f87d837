"""Every iterate of a training run: the rows that a posterior is made of.

The network, the batches and the optimiser are those of the paper "Non-Volatile Memory Accelerated
Posterior Estimation": four fully connected layers with 2,797,010 parameters, batches of 100, plain
SGD with a learning rate of 1e-4. The images are Fashion-MNIST's, which have MNIST's shape.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import nn

from benchmarks.data import fashion_mnist
from benchmarks.shelf.store import Array

__all__ = ["WIDTH", "Training"]

LAYERS = (784, 1000, 1000, 1000, 10)
WIDTH = sum(a * b + b for a, b in pairwise(LAYERS))
BATCH, RATE = 100, 1e-4


def network(seed: int = 0) -> nn.Sequential:
    """The paper's network of four layers, as PyTorch initialises it."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in pairwise(LAYERS):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Training:
    """A training run that makes one step at a time.

    Attributes:
        model: the network.
    """

    def __init__(self, seed: int = 0) -> None:
        images, labels = fashion_mnist.load("train")
        self._images = torch.from_numpy(images.reshape(-1, LAYERS[0]).copy())
        self._targets = torch.from_numpy(labels.astype(np.int64))
        self.model = network(seed)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self._order = torch.Generator().manual_seed(seed)
        self._batches: list[torch.Tensor] = []

    def step(self) -> None:
        """Train on the next batch; each epoch has all images in a new order."""
        if not self._batches:
            order = torch.randperm(len(self._images), generator=self._order)
            self._batches = list(order.split(BATCH))
        batch = self._batches.pop()
        self._optimizer.zero_grad()
        found = self.model(self._images[batch].float() / 255)
        loss = nn.functional.cross_entropy(found, self._targets[batch])
        loss.backward()
        self._optimizer.step()

    def row(self) -> Array:
        """A copy of all parameters."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().numpy()
