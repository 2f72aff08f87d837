"""`RowOptimizer`: an optimizer of PyTorch for rows of packed tables.

A step takes the rows that have a gradient out of the table, together with the rows of the
optimizer's state. PyTorch's optimizer changes them as if they were a whole matrix, and they are
packed again, all in memory of the host. So losses are those of PyTorch's own optimizer on the plain
matrix, bit for bit.

This is right for optimizers that change each row by its own gradient and state, and leave rows
without a gradient alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from packhorse.host.packed_module import PackedModule

__all__ = ["RowOptimizer"]

_SPARSE: tuple[type[Optimizer], ...] = (SGD, Adagrad, SparseAdam)
_NEED_ALL_ROWS = ("momentum", "weight_decay")
_MAX_UNPACKED_SHARE = 0.1


class RowOptimizer(Optimizer):
    """Changes the rows of packed embeddings by an optimizer of PyTorch.

    It is an optimizer itself, so schedulers of learning rates and `state_dict` work as ever. It has
    no parameters that others could use, so gradients are not scaled or clipped by PyTorch's
    functions for parameters; `PackedEmbedding.gradient` is there to look at.

    Args:
        modules: packed embeddings, or one model that has some; frozen ones are left out.
        optimizer: `torch.optim.SGD`, `Adagrad` or `SparseAdam`, which get the sparse gradients that
            PyTorch's embeddings have with `sparse=True`; or another class of optimizers that gets
            the gradient of the rows concerned as a dense matrix, such as torchrec's
            `RowWiseAdagrad`.
        options: its options, such as `lr`.

    Raises:
        ValueError: there is no embedding that is trained, two of them share their rows, or the
            optimizer changes rows that have no gradient.

    Example:
        >>> import torch
        >>> from packhorse.host import PackedEmbeddingBag, RowOptimizer
        >>> bag = PackedEmbeddingBag(100, 32, mode="sum")
        >>> optimizer = RowOptimizer(bag, torch.optim.SGD, lr=0.1)
        >>> before = bag.table.gather([7])
        >>> bag(torch.tensor([[7, 8]])).sum().backward()
        >>> optimizer.step()
        >>> bool((bag.table.gather([7]) != before).all())
        True
    """

    def __init__(
        self,
        modules: nn.Module | Iterable[nn.Module],
        optimizer: Callable[..., Optimizer],
        **options: Any,
    ) -> None:
        self._modules = _trained(modules)
        self._make, self._options = optimizer, options
        # PyTorch keeps options and state by parameter; these have no elements.
        places = [Parameter(torch.empty(0, dtype=module.dtype)) for module in self._modules]
        self._module_of = dict(zip(places, self._modules, strict=True))
        super().__init__(places, _checked(optimizer, options))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of all modules."""
        for module in self._modules:
            module.gradient = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Changes the rows that have a gradient.

        Args:
            closure: as for PyTorch's optimizers.

        Returns:
            What the closure returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            for place in group["params"]:
                self._step_module(self._module_of[place], place, options)
        return loss

    def _step_module(self, module: PackedModule, place: Tensor, options: dict[str, Any]) -> None:
        if module.gradient is None:
            return
        gradient = module.gradient.cpu()  # rows and state are there, and go back there
        ids, places = torch.unique(gradient._indices()[0], return_inverse=True)
        rows = Parameter(module.table.gather(ids))
        small = torch.sparse_coo_tensor(
            places[None], gradient._values(), rows.shape, check_invariants=False
        )
        rows.grad = small if self._make in _SPARSE else small.to_dense()
        inner = self._make([rows], **self._options)
        inner.param_groups[0].update(options)
        state = self.state[place]
        for name, value in state.items():
            inner.state[rows][name] = value[ids] if _has_rows(value) else value
        inner.step()
        for name, value in inner.state[rows].items():
            if not _has_rows(value):
                state[name] = value
                continue
            if name not in state:
                state[name] = self._first_state(name, value, module.num_embeddings)
            state[name][ids] = value
        module.update_(ids, rows.detach())
        _warn_of_unpacked(module)

    def _first_state(self, name: str, value: Tensor, n_rows: int) -> Tensor:
        """The state of all rows before the first step, from that of a row of zeros."""
        row = Parameter(torch.zeros((1, *value.shape[1:]), dtype=value.dtype))
        first: Tensor | None = self._make([row], **self._options).state[row].get(name)
        shape = (n_rows, *value.shape[1:])
        if first is None:
            return torch.zeros(shape, dtype=value.dtype)
        return first.expand(shape).clone()


def _trained(modules: nn.Module | Iterable[nn.Module]) -> list[PackedModule]:
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    found: dict[int, PackedModule] = {}
    for root in roots:
        for module in root.modules():
            if isinstance(module, PackedModule) and module.trains:
                found[id(module)] = module
    if not found:
        raise ValueError(
            "there is no packed embedding that is trained: make them with freeze=False, or call"
            " requires_grad_() on them"
        )
    if len({id(module.table) for module in found.values()}) < len(found):
        raise ValueError(
            "two of the embeddings share their rows, and would change them one after the other;"
            " call one module at both places of the model instead"
        )
    return list(found.values())


def _checked(make: Callable[..., Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """All options of an optimizer.

    Raises:
        ValueError: it changes rows that have no gradient.
    """
    name = getattr(make, "__name__", str(make))
    defaults: dict[str, Any] = make([Parameter(torch.zeros(1, 1))], **options).defaults
    is_of_torch = getattr(make, "__module__", "").startswith("torch.optim")
    if is_of_torch and make not in _SPARSE:
        raise ValueError(
            f"{name} changes all rows of a matrix at each step; for packed rows take SGD, Adagrad"
            " or SparseAdam, which change those that have a gradient"
        )
    for option in _NEED_ALL_ROWS:
        if defaults.get(option):
            raise ValueError(
                f"{name} with {option}={defaults[option]} changes rows that have no gradient; leave"
                f" {option} out for packed rows"
            )
    return defaults


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _warn_of_unpacked(module: PackedModule) -> None:
    share = module.table.n_unpacked_rows / module.num_embeddings
    if share > module.unpacked_share_told + _MAX_UNPACKED_SHARE:
        module.unpacked_share_told = share
        warnings.warn(
            f"{share:.0%} of the rows of a packed embedding have changed so that they do not fit"
            " its format, and are kept plain: repack_() packs them again",
            RuntimeWarning,
            stacklevel=4,
        )
