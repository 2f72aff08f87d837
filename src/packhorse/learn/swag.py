"""SWAG: sample neural networks from the iterates of their training (PyTorch).

Maddox et al., "A Simple Baseline for Bayesian Uncertainty in Deep Learning" (arXiv 1902.02476).
Training goes on at a rate that does not fall; the iterates then wander around a solution, and a
normal distribution with their mean and covariance stands for the posterior of the weights:

    sample = mean + sqrt(variance / 2) * z1 + D z2 / sqrt(2 (K - 1))

The columns of D are the K iterates that are kept, less the mean of all iterates. D is not stored:
its rows are iterates on a shelf, so D z2 is a weighted sum of rows, for all samples in one pass.

A row holds the parameters that require gradients, each once even if it is tied, in the order of
`model.named_parameters()`, as fp32. Frozen parameters and buffers are not sampled: a sample has
those that the model has now.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from packhorse.errors import ClosedError, MissingBackendError

try:
    import torch
except ModuleNotFoundError as error:
    raise MissingBackendError(
        "packhorse.learn.SWAG needs PyTorch; install it with: pip install 'packhorse[torch]'"
    ) from error

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, RandomSampler

from packhorse.learn.background import BackgroundQueue
from packhorse.learn.iterates import Iterates, Layout, difference
from packhorse.learn.moments import Row
from packhorse.learn.tensors import check_shelf
from packhorse.torch_framework import FRAMEWORK

if TYPE_CHECKING:
    from packhorse.disk import Shelf, ShelfView

__all__ = ["SWAG"]

# Rows that are summed at once: the samples are read and written once for each such block.
_BLOCK_NBYTES = 256 << 20
# Samples that `predict` draws in one pass.
_SAMPLES_NBYTES = 1 << 30


class SWAG:
    """A posterior of a model's weights, from iterates of its training that lie on a shelf.

    `collect` copies the weights and returns; a thread packs and writes them. Mean, variance and
    rows change in one transaction, so whenever the process dies, the posterior is that of the
    iterates that were written. A program that ends waits for the iterates that are left.

    The same posterior goes on when a SWAG is made again on the same shelf. A shelf that is open for
    reading can be sampled from.

    Only one thread may use a SWAG. A process that was forked cannot collect.

    Example:
        >>> import torch
        >>> from packhorse.disk import Shelf
        >>> from packhorse.learn import SWAG
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> x, y = torch.randn(64, 4), torch.randint(3, (64,))
        >>> with Shelf("run.shelf") as shelf, SWAG(model, shelf) as swag:
        ...     for step in range(50):
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.cross_entropy(model(x), y).backward()
        ...         optimizer.step()
        ...         _ = swag.collect(step)
        ...     probabilities = swag.predict([x], n_samples=30)
        >>> probabilities.shape
        torch.Size([64, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        shelf: Shelf | ShelfView,
        *,
        name: str = "swag",
        every: int = 1,
        max_rank: int | None = None,
        max_pending: int = 4,
    ) -> None:
        """Begin a posterior, or go on with the one of this name on the shelf.

        Args:
            model: the network. One that `torch.compile` or a wrapper for several processes has made
                counts as the network inside.
            shelf: where the posterior is kept. It stays open when this is closed; close it later.
                From `shelf.at(tag)` the posterior of that time can be sampled.
            name: the prefix of the names of what is on the shelf.
            every: only every k-th iterate counts: those whose step is a multiple of k, or if
                `collect` is given no steps, every k-th call.
            max_rank: how many of the last iterates are kept as rows; None for all. Mean and
                variance are those of all iterates in either case.
            max_pending: how many iterates may wait in memory to be written. If more come,
                `collect` waits.

        Raises:
            TypeError: the model is no module, or has parameters that cannot be read; or another
                argument is something else than it must be.
            ValueError: the posterior on the shelf is of a model with other parameters, or was begun
                with another `max_rank`; or the model has nothing to train.
            CompatibilityError: the posterior was written by a later release.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
        self._model = _inner(model)
        self._every = _at_least(1, every=every)
        if max_rank is not None:
            max_rank = _at_least(2, max_rank=max_rank)
        max_pending = _at_least(1, max_pending=max_pending)
        self._layout = _layout(self._model)
        check_shelf(shelf, name, writes=False)
        self._shelf = cast("Shelf", shelf)  # nothing is written to the view of a tag
        self._name = name
        self._iterates = Iterates(self._shelf, name, self._layout, max_rank)
        self._queue = BackgroundQueue[tuple[Row, int | None]](
            self._write, lambda: self._shelf.transaction(), max_pending, "iterates"
        )
        self._free: deque[Row] = deque(maxlen=max_pending)  # buffers to use again
        self._n_calls = 0
        self._is_closed = False

    def __enter__(self) -> SWAG:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def n_collected(self) -> int:
        """How many iterates were written to the shelf."""
        return self._iterates.count

    @property
    def rank(self) -> int:
        """How many of them are kept as rows."""
        return self._iterates.rank

    def collect(self, step: int | None = None) -> bool:
        """Take the model's weights as an iterate; call it after a step of the optimizer.

        The weights are copied, and written in the background.

        Args:
            step: the number of the step. A step that is not after the last one collected is
                skipped, so a run that goes on from an older checkpoint collects no iterate twice.

        Returns:
            Whether the iterate was taken.

        Raises:
            ValueError: a weight is NaN or infinite, or the model's parameters have changed since
                the posterior was begun. The iterate is not taken.
            ClosedError: this was closed.
            PermissionError: the shelf is open for reading only, or this is the posterior of a tag.
            RuntimeError: this process was forked from the one that made this.
            Exception: the thread could not write an earlier iterate, for example an OSError because
                the disk is full. This iterate is not taken; the earlier ones wait, and
                the next call tries again.
        """
        self._check_usable()
        if getattr(self._shelf, "mode", "r") == "r":
            raise PermissionError(
                f"the posterior {self._name!r} can only be read; open the shelf with mode 'r+', or "
                "roll it back to the tag, and collect there"
            )
        if not self._is_due(step):
            return False
        row = self._free.pop() if self._free else np.empty(self._iterates.numel, np.float32)
        self._copy_weights(row)
        self._queue.put((row, step))
        return True

    def flush(self) -> None:
        """Write all iterates that wait; they are on the disk afterwards. Call it before a
        checkpoint is saved, so that the posterior is never behind the checkpoint.

        Inside a transaction of the caller the iterates become part of that transaction.

        Raises:
            ClosedError: this was closed.
            RuntimeError: this process was forked from the one that made this.
            Exception: as for `collect`.
        """
        self._check_usable()
        self._queue.flush()

    def close(self) -> None:
        """Write all iterates that wait, and their mean and variance. The shelf stays open, and
        samples can still be drawn.

        Raises:
            Exception: an iterate could not be written; those that wait are lost.
        """
        if self._is_closed or not self._queue.is_of_this_process():
            return
        try:
            self.flush()
            self._iterates.settle()
        finally:
            self._queue.drop()
            self._is_closed = True

    def mean(self) -> dict[str, Any]:
        """The mean of all iterates, which is the solution of SWA.

        Returns:
            A state dict on the CPU, like those of `sample`.

        Raises:
            ValueError: no iterate was collected, or the model's parameters have changed.
        """
        self._finish_writing(1)
        return self._state(torch.from_numpy(self._iterates.moments().mean), {})

    def variance(self) -> dict[str, Tensor]:
        """The variance of each weight, over all iterates.

        Returns:
            For each parameter that is sampled, a float64 tensor on the CPU.

        Raises:
            ValueError: no iterate was collected.
        """
        self._finish_writing(1)
        variance = torch.from_numpy(self._iterates.moments().variance())
        parts = _split(variance, self._layout)
        return {name: part for (name, _), part in zip(self._layout, parts, strict=True)}

    def sample(
        self, n: int = 1, *, scale: float = 1.0, seed: int | torch.Generator | None = None
    ) -> list[dict[str, Any]]:
        """Draw networks from the posterior, all in one pass over the rows.

        This takes as much memory as `n` copies of the weights in fp32, and up to 1 GB for rows.

        Args:
            n: how many networks.
            scale: what the covariance is multiplied by; 1 as in the paper's formula. The paper's
                programs use 0.5, and 0 gives the mean.
            seed: a number, or a generator on the CPU; None for PyTorch's own generator.

        Returns:
            State dicts on the CPU, for `model.load_state_dict`. Tied weights are tied. Weights have
            the dtype of the model's, so those of a bf16 model are rounded. Frozen parameters and
            buffers are copies of the model's, so the statistics of batch normalisation do not fit:
            update them, as `predict` does.

        Raises:
            ValueError: fewer than two iterates were collected, the model's parameters have changed,
                or `n` or `scale` makes no sense.
        """
        n = _at_least(1, n=n)
        rows = self._draw(n, scale, _generator(seed))
        others: dict[int, Tensor] = {}
        return [self._state(row, others) for row in rows]

    def predict(
        self,
        loader: Iterable[Any],
        n_samples: int = 30,
        *,
        bn_loader: Iterable[Any] | None = None,
        scale: float = 1.0,
        seed: int | torch.Generator | None = None,
    ) -> Tensor:
        """Average the predictions of networks from the posterior.

        The model takes each sample in turn, in evaluation mode. Afterwards it is as it was before.

        Args:
            loader: batches of inputs, or tuples of which the first item is the input. It is
                read once for each sample, and must give the same each time.
            n_samples: how many networks. The rows are read once for as many as fit in 1 GiB.
            bn_loader: batches to compute the statistics of batch normalisation from, for each
                sample; the training data, or a part of it. Needed if the model has such layers.
            scale: as for `sample`. `predict(loader, 1, scale=0)` predicts with the mean.
            seed: as for `sample`.

        Returns:
            Probabilities on the CPU, fp32: the softmax of the model's outputs over the last
            dimension, averaged over the samples.

        Raises:
            ValueError: as for `sample`; or a loader is needed, is empty or gives something else
                each time.
        """
        n_samples = _at_least(1, n_samples=n_samples)
        if bn_loader is None and _has_statistics(self._model):
            raise ValueError(
                "the model has batch normalisation, whose statistics differ for each sample; give "
                "bn_loader=, the training data or a part of it"
            )
        if isinstance(loader, DataLoader) and isinstance(loader.sampler, RandomSampler):
            raise ValueError("loader gives another order each time; use shuffle=False")
        generator = _generator(seed)
        group = max(1, _SAMPLES_NBYTES // (4 * self._iterates.numel))
        total: Tensor | None = None
        with _kept(self._model):
            for start in range(0, n_samples, group):
                for row in self._draw(min(group, n_samples - start), scale, generator):
                    self._load(row)
                    if bn_loader is not None:
                        update_bn(bn_loader, self._model, device=_device(self._model))
                    total = _sum(total, _probabilities(self._model, loader))
        assert total is not None
        return (total / n_samples).float()

    def _write(self, items: Sequence[tuple[Row, int | None]]) -> None:
        self._iterates.add(items)
        self._free.extend(row for row, _ in items)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClosedError("this SWAG is closed; make one again on the same shelf")
        if not self._queue.is_of_this_process():
            raise RuntimeError(
                "this SWAG belongs to the process that forked this one; collect there"
            )

    def _is_due(self, step: int | None) -> bool:
        self._n_calls += 1
        if step is None:
            return self._n_calls % self._every == 0
        if _integer(step=step) % self._every:
            return False
        newest = self._queue.last()
        last = self._iterates.last_step if newest is None or newest[1] is None else newest[1]
        return step > last

    def _parameters(self) -> list[nn.Parameter]:
        """Those that are sampled."""
        now = _layout(self._model)
        if now != self._layout:
            raise ValueError(
                f"the model has changed since the posterior {self._name!r} was begun: "
                f"{difference(self._layout, now)}; undo that, or begin another with another name="
            )
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def _copy_weights(self, row: Row) -> None:
        """Copy the weights to a row, and refuse those that are not finite."""
        flat = torch.from_numpy(row)
        parts = _split(flat, self._layout)
        for part, parameter in zip(parts, self._parameters(), strict=True):
            part.copy_(parameter.detach())
        if math.isfinite(flat.sum()):
            return
        for (name, _), part in zip(self._layout, parts, strict=True):
            if not part.isfinite().all():  # otherwise only the sum was too large
                self._free.append(row)
                raise ValueError(
                    f"parameter {name!r} is NaN or infinite; the iterate was not taken, and the "
                    "posterior is as before"
                )

    def _finish_writing(self, needed: int) -> None:
        """Write what waits, and check that enough was collected."""
        if self._queue.is_of_this_process() and not self._is_closed:
            self._queue.flush()
        if self.n_collected < needed:
            raise ValueError(
                f"the posterior {self._name!r} has {self.n_collected} iterates; this needs {needed}"
            )

    def _draw(self, n: int, scale: float, generator: torch.Generator | None) -> Tensor:
        """Samples as rows."""
        if not isinstance(scale, Real) or not 0 <= scale < math.inf:
            raise ValueError(f"scale is {scale!r}; it must be 0 or more, and finite")
        self._finish_writing(2 if scale else 1)
        with self._shelf.reading():
            moments, rank = self._iterates.moments(), self._iterates.rank
            draws = torch.zeros(n, self._iterates.numel)
            if scale:
                weights = torch.empty(n, rank)
                deviation = torch.from_numpy(np.sqrt(scale / 2 * moments.variance())).float()
                for draw, z2 in zip(draws, weights, strict=True):
                    draw.normal_(generator=generator).mul_(deviation)
                    z2.normal_(generator=generator)
                weights *= math.sqrt(scale / (2 * max(1, rank - 1)))
                self._add_rows(draws, weights)
        mean = torch.from_numpy(moments.mean)
        for draw in draws:
            draw.copy_(mean + draw)
        return draws

    def _add_rows(self, draws: Tensor, weights: Tensor) -> None:
        """Add weighted sums of the rows, less the mean.

        The rows are close to the mean, so it is taken from them first, in fp32: that difference is
        almost exact, and the sum keeps its digits. Half a unit in the last place of the mean, which
        fp32 does not hold, would not change the samples, which are fp32 too.
        """
        mean = self._iterates.moments().mean.astype(np.float32)
        for columns, rows in self._iterates.blocks(weights.numpy(), _BLOCK_NBYTES):
            draws.addmm_(torch.from_numpy(columns), torch.from_numpy(rows - mean))

    def _load(self, row: Tensor) -> None:
        with torch.no_grad():
            for part, parameter in zip(_split(row, self._layout), self._parameters(), strict=True):
                parameter.copy_(part)

    def _state(self, row: Tensor, others: dict[int, Tensor]) -> dict[str, Any]:
        """The model's state dict with weights from a row. Copies of other tensors are taken from
        `others`, and put there."""
        parts = zip(_split(row, self._layout), self._parameters(), strict=True)
        taken = {id(parameter): part.to(parameter.dtype) for part, parameter in parts}
        state = dict(self._model.state_dict(keep_vars=True))
        for key, value in state.items():
            if id(value) in taken:
                state[key] = taken[id(value)]
            elif isinstance(value, Tensor):
                if id(value) not in others:
                    others[id(value)] = value.detach().cpu().clone()
                state[key] = others[id(value)]
        return state


def _integer(**arguments: Any) -> int:
    ((name, value),) = arguments.items()
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be an integer") from None


def _at_least(least: int, **arguments: Any) -> int:
    ((name, value),) = arguments.items()
    if _integer(**arguments) < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
    return operator.index(value)


def _inner(model: nn.Module) -> nn.Module:
    """The network inside of what `torch.compile` and wrappers for several processes make."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return _inner(model.module)
    return model


def _layout(model: nn.Module) -> Layout:
    """Names and shapes of the parameters that are sampled."""
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not found:
        raise ValueError("the model has no parameter that requires gradients")
    for name, parameter in found:
        words = FRAMEWORK.why_unreadable(parameter)
        if words is None and not parameter.is_floating_point():
            words = f"a real number is needed, not {parameter.dtype}"
        if words is not None:
            raise TypeError(f"parameter {name!r}: {words}")
    return tuple((name, tuple(parameter.shape)) for name, parameter in found)


def _split(row: Tensor, layout: Layout) -> list[Tensor]:
    """The parts of a row in their shapes."""
    sizes = [math.prod(shape) for _, shape in layout]
    parts = zip(torch.split(row, sizes), layout, strict=True)
    return [part.view(shape) for part, (_, shape) in parts]


def _generator(seed: int | torch.Generator | None) -> torch.Generator | None:
    if seed is None or isinstance(seed, torch.Generator):
        return seed
    return torch.Generator().manual_seed(_integer(seed=seed))


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _has_statistics(model: nn.Module) -> bool:
    return any(
        isinstance(module, _BatchNorm) and module.track_running_stats for module in model.modules()
    )


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Restores parameters, buffers and modes after the block."""
    tensors = [*model.parameters(), *model.buffers()]
    copies = [tensor.detach().clone() for tensor in tensors]
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        for module, training in modes:
            module.training = training


@torch.no_grad()
def _probabilities(model: nn.Module, loader: Iterable[Any]) -> Tensor:
    """The model's predictions for all batches."""
    model.eval()
    device = _device(model)
    found = []
    for batch in loader:
        inputs = batch[0] if isinstance(batch, list | tuple) else batch
        if not hasattr(inputs, "to"):
            raise TypeError(
                f"the loader gives a {type(inputs).__name__}; it must give tensors, or tuples of "
                "which the first item is one"
            )
        found.append(model(inputs.to(device)).float().softmax(dim=-1).cpu().double())
    if not found:
        raise ValueError("the loader gives nothing, or gives something only once; use a DataLoader")
    return torch.cat(found)


def _sum(total: Tensor | None, added: Tensor) -> Tensor:
    if total is None:
        return added
    if total.shape != added.shape:
        raise ValueError(
            f"the loader gave {len(total)} rows at first and {len(added)} later; it must give the "
            "same each time"
        )
    return total.add_(added)
