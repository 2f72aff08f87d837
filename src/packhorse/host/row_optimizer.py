"""`RowOptimizer`: an optimizer of PyTorch for rows of packed tables.

A step takes the rows that have a gradient out of the table, together with the rows of the
optimizer's state. PyTorch's optimizer changes them as if they were a whole matrix, and they are
packed again, all in memory of the host. So losses are those of PyTorch's own optimizer on the plain
matrix, bit for bit.

This is right for optimizers that change each row by its own gradient and state, and leave rows
without a gradient alone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
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
        modules: packed embeddings, or models that have some; frozen ones are left out. Or groups,
            as for PyTorch's optimizers: dicts with such modules as "params", and with options.
        optimizer: `torch.optim.SGD`, `Adagrad` or `SparseAdam`, or a class that derives from one,
            which get the sparse gradients that PyTorch's embeddings have with `sparse=True`; or
            another class of optimizers that gets the gradient of the rows concerned as a dense
            matrix, such as torchrec's `RowWiseAdagrad`. Or a function, such as a
            `functools.partial`, that makes one of given parameters.
        options: its options, such as `lr`.

    Raises:
        TypeError: the modules are parameters, or the optimizer is no class or function.
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
        modules: nn.Module | Iterable[nn.Module] | Iterable[dict[str, Any]],
        optimizer: Callable[..., Optimizer],
        **options: Any,
    ) -> None:
        self._make, self._options = optimizer, options
        self._kind, defaults = _checked(optimizer, options)
        self._module_of: dict[Parameter, PackedModule] = {}
        given: list[Any] = [modules] if isinstance(modules, nn.Module) else list(modules)
        are_groups = bool(given) and isinstance(given[0], Mapping)
        super().__init__(given if are_groups else [{"params": given}], defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As PyTorch's optimizers do.

        Args:
            param_group: packed embeddings, or models that have some, as "params"; and options.

        Raises:
            TypeError, ValueError: as the class.
        """
        modules = _trained(param_group["params"])
        _require_own_rows([*self._module_of.values(), *modules])
        _require_row_options(self._kind, {**self.defaults, **param_group})
        # PyTorch keeps options and state by parameter; these have no elements.
        places = [Parameter(torch.empty(0, dtype=each.dtype, device="cpu")) for each in modules]
        self._module_of |= zip(places, modules, strict=True)
        super().add_param_group({**param_group, "params": places})

    def __getstate__(self) -> dict[str, Any]:
        names = ("_make", "_options", "_kind", "_module_of")
        return super().__getstate__() | {name: vars(self)[name] for name in names}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of all modules."""
        for module in self._module_of.values():
            module.gradient = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Changes the rows that have a gradient.

        Args:
            closure: as for PyTorch's optimizers.

        Returns:
            What the closure returns.

        Raises:
            ValueError: an option has changed since, so that rows that have no gradient would
                change, too. All rows are as they were.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _require_row_options(self._kind, group)
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
            places[None], gradient._values(), rows.shape, device="cpu", check_invariants=False
        )
        rows.grad = small if issubclass(self._kind, _SPARSE) else small.to_dense()
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
        row = Parameter(torch.zeros((1, *value.shape[1:]), dtype=value.dtype, device="cpu"))
        first: Tensor | None = self._make([row], **self._options).state[row].get(name)
        shape = (n_rows, *value.shape[1:])
        if first is None:
            return torch.zeros(shape, dtype=value.dtype, device="cpu")
        return first.expand(shape).clone()


def _trained(modules: nn.Module | Iterable[nn.Module]) -> list[PackedModule]:
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    found: dict[int, PackedModule] = {}
    for root in roots:
        if not isinstance(root, nn.Module):
            raise TypeError(
                f"give RowOptimizer the model or packed embeddings, not {type(root).__name__}:"
                " packed rows are no parameters"
            )
        for module in root.modules():
            if isinstance(module, PackedModule) and module.trains:
                found[id(module)] = module
    if not found:
        raise ValueError(
            "there is no packed embedding that is trained: make them with freeze=False, or call"
            " requires_grad_() on them"
        )
    return list(found.values())


def _require_own_rows(modules: list[PackedModule]) -> None:
    if len({id(module) for module in modules}) < len(modules):
        raise ValueError("an embedding is in more than one group")
    if len({id(module.table) for module in modules}) < len(modules):
        raise ValueError(
            "two of the embeddings share their rows, and would change them one after the other;"
            " call one module at both places of the model instead"
        )


def _checked(
    make: Callable[..., Optimizer], options: dict[str, Any]
) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class of an optimizer, and all its options.

    Raises:
        TypeError: it is no class or function that makes one.
        ValueError: it changes rows that have no gradient.
    """
    if isinstance(make, Optimizer) or not callable(make):
        raise TypeError(
            f"the optimizer is an object of {type(make).__name__}; give its class, and its options"
            " by name"
        )
    made: Any = make([Parameter(torch.zeros(1, 1, device="cpu"))], **options)
    if not isinstance(made, Optimizer):
        raise TypeError(f"{make} makes {type(made).__name__}, which is no torch.optim.Optimizer")
    kind = type(made)
    bases = [base for base in kind.__mro__ if base.__module__.startswith("torch.optim.")]
    if bases != [Optimizer] and not issubclass(kind, _SPARSE):
        raise ValueError(
            f"{kind.__name__} changes all rows of a matrix at each step; for packed rows take SGD,"
            " Adagrad or SparseAdam, which change those that have a gradient"
        )
    return kind, made.defaults


def _require_row_options(kind: type[Optimizer], options: Mapping[str, Any]) -> None:
    for option in _NEED_ALL_ROWS:
        if options.get(option):
            raise ValueError(
                f"{kind.__name__} with {option}={options[option]} changes rows that have no"
                f" gradient; leave {option} out for packed rows, and give schedulers that set"
                " momentum cycle_momentum=False"
            )


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
            stacklevel=_caller_level(),
        )


def _caller_level() -> int:
    """The level, for a warning of the function that asks, of who called the optimizer: PyTorch and
    its schedulers wrap `step`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_inside(module: str) -> bool:
    return module == __name__ or module.startswith("torch.")
