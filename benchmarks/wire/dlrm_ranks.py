"""The ranks of a training of a DLRM: over gloo, or all in one process.

In one process, the ranks take turns: each message is made by the code that makes it on real ranks,
and read by the code that reads it there, so all numbers are the same, bit by bit. Only sums of
the dense layers' gradients might differ on more than two ranks, where gloo has its own order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.wire.dlrm_model import Batch, Model
from packhorse.wire.embeddings import Bags, EmbeddingBags, EmbeddingExchange, Table

__all__ = ["InOneProcess", "OverGloo", "Ranks"]

_COUNTED = ("nbytes", "ids_nbytes", "rows_nbytes", "gradients_nbytes")


class Ranks(ABC):
    """The ranks that this process has.

    Args:
        world: how many ranks there are.
        own: which of them are here.
    """

    def __init__(self, world: int, own: Sequence[int]) -> None:
        self.world, self.own = world, own
        self.bags: list[EmbeddingBags] = []
        self._squares: list[list[Tensor]] = []

    def set_up(
        self, tables: Sequence[Table], seed: int, options: Callable[[], dict[str, Any]]
    ) -> None:
        """Makes the tables and exchanges of the ranks that are here.

        Args:
            tables: of all ranks.
            seed: of the first weights, which do not depend on the number of ranks.
            options: makes the options of a rank's exchange.
        """
        self.bags = [self._make(rank, tables, options()) for rank in self.own]
        self.plain = [self._exchange(rank, tables) for rank in self.own]
        for bags in self.bags:
            _fill(bags, seed)
        self._squares = [[torch.zeros_like(p) for p in bags.parameters()] for bags in self.bags]

    @abstractmethod
    def backward(self, model: Model, parts: Sequence[Batch]) -> float:
        """Forward and backward pass; gradients become those of the mean over the whole batch.

        Returns:
            The loss of the whole batch.
        """

    @abstractmethod
    def exact_bags(self, parts: Sequence[Batch]) -> list[list[Tensor]]:
        """The bags of each rank that is here, fetched without loss."""

    @abstractmethod
    def gathered(self, values: Tensor) -> Tensor:
        """The values of all ranks."""

    @torch.no_grad()
    def adagrad(self, lr: float) -> None:
        """A step of Adagrad for the rows that have a gradient, as `torch.optim.Adagrad` does it."""
        for bags, squares in zip(self.bags, self._squares, strict=True):
            for parameter, square in zip(bags.parameters(), squares, strict=True):
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.coalesce()
                ids, grads = gradient.indices()[0], gradient.values() / self.world
                sums = square[ids] + grads * grads
                square[ids] = sums
                parameter[ids] -= lr * grads / (sums.sqrt() + 1e-10)
                parameter.grad = None

    def sent(self) -> dict[str, int]:
        """Bytes that a rank sends, on average over the ranks that are here."""
        counted = [bags.exchange.traffic for bags in self.bags]
        return {
            name: round(sum(getattr(one, name) for one in counted) / len(counted))
            for name in _COUNTED
        }

    def _make(self, rank: int, tables: Sequence[Table], options: dict[str, Any]) -> EmbeddingBags:
        return EmbeddingBags(tables, **options)

    def _exchange(self, rank: int, tables: Sequence[Table]) -> EmbeddingExchange:
        return EmbeddingExchange(tables)


class OverGloo(Ranks):
    """This rank of a process group."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(world, [rank])

    def backward(self, model: Model, parts: Sequence[Batch]) -> float:
        """As `Ranks`."""
        loss = _loss(model, parts[0], self.bags[0](_bags(parts[0])))
        torch.autograd.backward(loss)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        flat /= self.world
        means = torch.split(flat, [grad.numel() for grad in grads])
        for grad, mean in zip(grads, means, strict=True):
            grad.copy_(mean.view_as(grad))
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / self.world

    def exact_bags(self, parts: Sequence[Batch]) -> list[list[Tensor]]:
        """As `Ranks`."""
        plain = self.plain[0]
        return [plain.fetch(plain.plan(_bags(parts[0])), self.bags[0].gather)]

    def gathered(self, values: Tensor) -> Tensor:
        """As `Ranks`."""
        parts = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(parts, values)
        return torch.cat(parts)


class InOneProcess(Ranks):
    """All ranks, one after the other."""

    def __init__(self, world: int) -> None:
        super().__init__(world, range(world))

    def backward(self, model: Model, parts: Sequence[Batch]) -> float:
        """As `Ranks`."""
        exchanges = [bags.exchange for bags in self.bags]
        plans, rows, got = self._fetch(exchanges, parts)
        slots = [[part.requires_grad_() for part in own] for own in got]
        losses = []
        for exchange, plan, own, part in zip(exchanges, plans, slots, parts, strict=True):
            losses.append(_loss(model, part, exchange.pool(plan, own)))
        for loss in losses:
            torch.autograd.backward(loss)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= self.world
        grads = [[part.grad for part in own] for own in slots]
        messages = [e.encode_gradients(*x) for e, *x in zip(exchanges, plans, grads, strict=True)]
        for rank, exchange in enumerate(exchanges):
            received = [of_rank[rank] for of_rank in messages]
            sums = exchange.decode_gradients(plans[rank], grads[rank], received)
            torch.autograd.backward(rows[rank], sums)
        return float(sum(loss.detach() for loss in losses)) / self.world

    def exact_bags(self, parts: Sequence[Batch]) -> list[list[Tensor]]:
        """As `Ranks`."""
        plans, _, got = self._fetch(self.plain, parts)
        return [e.pool(p, g) for e, p, g in zip(self.plain, plans, got, strict=True)]

    def gathered(self, values: Tensor) -> Tensor:
        """As `Ranks`."""
        return values

    def _fetch(self, exchanges: Sequence[EmbeddingExchange], parts: Sequence[Batch]) -> Any:
        """Plans, gathered rows, and the rows that each rank gets."""
        asked = [e.ask(_bags(part)) for e, part in zip(exchanges, parts, strict=True)]
        plans = [
            exchange.answer(asked[rank], [one.messages[rank] for one in asked])
            for rank, exchange in enumerate(exchanges)
        ]
        rows = [b.gather(p.requests) for b, p in zip(self.bags, plans, strict=True)]
        sent = [[part.detach() for part in own] for own in rows]
        messages = [e.encode_rows(p, s) for e, p, s in zip(exchanges, plans, sent, strict=True)]
        got = [
            exchange.decode_rows(plans[rank], sent[rank], [one[rank] for one in messages])
            for rank, exchange in enumerate(exchanges)
        ]
        return plans, rows, got

    def _make(self, rank: int, tables: Sequence[Table], options: dict[str, Any]) -> EmbeddingBags:
        bags = EmbeddingBags.__new__(EmbeddingBags)
        bags.set_up(_exchange_of(rank, self.world)(tables, **options))
        return bags

    def _exchange(self, rank: int, tables: Sequence[Table]) -> EmbeddingExchange:
        return _exchange_of(rank, self.world)(tables)


class _Here:
    """Stands where an exchange has its connection; nothing goes through it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def operation(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()


def _exchange_of(rank: int, world: int) -> type[EmbeddingExchange]:
    class Here(EmbeddingExchange):
        def _connect(self, group: Any, timeout: Any, options: Mapping[str, str]) -> Any:
            return _Here(rank, world)

    return Here


def _bags(part: Batch) -> list[Bags]:
    return [Bags(ids) for ids in part.ids]


def _loss(model: Model, part: Batch, bags: Sequence[Tensor]) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(part.dense, bags), part.labels)


@torch.no_grad()
def _fill(bags: EmbeddingBags, seed: int) -> None:
    """The same first weights for any number of ranks: U(-1/sqrt(rows), 1/sqrt(rows))."""
    for number, parameter in zip(bags.exchange.held, bags.parameters(), strict=True):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        values = torch.rand(parameter.shape, generator=generator) * 2 - 1
        parameter.copy_(values / parameter.shape[0] ** 0.5)
