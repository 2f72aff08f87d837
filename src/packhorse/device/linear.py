"""`PackedLinear`, and what modules with packed weights put into state dicts.

A module whose weight is packed has five plain tensors in a state dict: `weight`, which has the high
bits, `weight.low_bytes` and so on (`packing.array_names`). So safetensors, checkpoints and
`torch.load(weights_only=True)` handle these state dicts like any other. Loading a state dict checks
the arrays and uses them; if it has a plain `weight` instead, loading packs that. Embeddings need no
class of their own: any module that calls `torch.nn.functional.embedding` works with a packed
weight.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode

from packhorse.device import operators
from packhorse.device.offload import HOOK, join_offloaded, offloaded_weight
from packhorse.device.operators import is_transformed, obey_autocast
from packhorse.device.packed_weight import PackedWeight
from packhorse.device.packing import (
    array_names,
    drop_arrays,
    empty_weight,
    join_arrays,
    pack_weight,
    split_weight,
)
from packhorse.layout import WeightFormat

__all__ = ["PackedLinear", "change_class", "hold_packed", "hold_plain"]


class PackedLinear(nn.Linear):
    """A linear layer whose weight is packed and frozen; input and output are BF16.

    Example:
        >>> import torch
        >>> from packhorse.device import PackedLinear
        >>> plain = torch.nn.Linear(512, 256, dtype=torch.bfloat16)
        >>> packed = PackedLinear.from_linear(plain)
        >>> x = torch.ones(4, 512, dtype=torch.bfloat16)
        >>> torch.allclose(packed(x), plain(x), atol=0.02)
        True
    """

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None) -> None:
        """A layer around a weight that is already packed.

        Args:
            weight: n_rows outputs x n_columns inputs.
            bias: BF16, n_rows; shared, not copied.

        Raises:
            TypeError: the weight is not packed.
            ValueError: the bias has another shape.
        """
        if not isinstance(weight, PackedWeight):
            what = type(weight).__name__
            raise TypeError(f"the weight is a {what}, not packed; pack_weight packs it")
        n_rows, n_columns = weight.shape
        if bias is not None and tuple(bias.shape) != (n_rows,):
            raise ValueError(f"the bias has shape {list(bias.shape)}; it must be [{n_rows}]")
        nn.Module.__init__(self)
        self.in_features, self.out_features = n_columns, n_rows
        hold_packed(self, weight)
        if bias is not None and not isinstance(bias, Parameter):
            bias = Parameter(bias, requires_grad=False)
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear, format: WeightFormat | str = "W12") -> "PackedLinear":
        """A packed layer with the weight of a plain one. The plain layer is left as it is; both
        share the bias.

        Args:
            linear: its weight is BF16.
            format: "W12" or "W11".

        Returns:
            The packed layer, in the mode of the plain one (training or not).

        Raises:
            TypeError: its weight is not BF16.
            ValueError: it has too many columns.
        """
        packed = cls(pack_weight(linear.weight, format), linear.bias)
        return packed.train(linear.training)

    @classmethod
    def empty(
        cls,
        in_features: int,
        out_features: int,
        format: WeightFormat | str = "W12",
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
    ) -> "PackedLinear":
        """A layer to load a state dict into; the state dict may have any number of exceptions.

        Args:
            in_features: columns, 1 to 65536.
            out_features: rows.
            format: "W12" or "W11"; loading arrays of the other format changes it.
            bias: whether the layer has a bias.
            device: where the layer is made.

        Returns:
            The layer; its weights and its bias are zeros.

        Raises:
            ValueError: a size or the format is wrong.
        """
        weight = empty_weight(out_features, in_features, format, device=device)
        zeros = torch.zeros(out_features, dtype=torch.bfloat16, device=device) if bias else None
        return cls(weight, zeros)

    def to_linear(self) -> nn.Linear:
        """A plain layer with the same weight, bit for bit; they share the bias."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight = Parameter(_plain(self.weight), requires_grad=False)
        plain.bias = self.bias
        return plain.train(self.training)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == HOOK:
            join_offloaded(self)

    def forward(self, input: Tensor) -> Tensor:
        """As `torch.nn.Linear`.

        Args:
            input: BF16, any dimensions, the last of `in_features`.

        Raises:
            TypeError: the input has another dtype.
            ValueError: it has another last dimension, or is on another device.
        """
        weight = self.weight
        input, bias = obey_autocast(input, self.bias)
        if torch.compiler.is_compiling() or not self._runs_eagerly(input):
            return nn.functional.linear(input, weight, bias)
        # PyTorch's dispatcher would cost as much as the kernel of a small layer.
        assert isinstance(weight, PackedWeight)
        n_columns = weight.shape[1]
        with weight.lend(input.numel() // n_columns) as arrays:
            return operators.multiply(input, arrays, bias, weight.format, n_columns)

    def _runs_eagerly(self, x: Tensor) -> bool:
        """Whether nothing observes the operators that run: no gradients, tracing or modes."""
        bias = self.bias
        if type(x) is not Tensor or x.is_meta or not isinstance(self.weight, PackedWeight):
            return False
        if is_transformed():
            return False
        if torch.is_grad_enabled() and (
            x.requires_grad
            or self.weight.requires_grad
            or (bias is not None and bias.requires_grad)
        ):
            return False
        return _get_current_dispatch_mode() is None and torch._C._get_tracing_state() is None

    def extra_repr(self) -> str:
        """What `print` shows."""
        weight = self.weight
        format = weight.format.name if isinstance(weight, PackedWeight) else "plain"
        return f"{super().extra_repr()}, weight={format}"


def change_class(module: nn.Linear, new: type[nn.Linear]) -> None:
    """Turns a plain layer into a packed one, or a packed one into a plain one.

    Args:
        module: the layer; it keeps its attributes. Hooks of accelerate give a module its own
            `forward` and leave it there when they are removed. It is replaced too if it is the old
            class's method.
        new: the other class.
    """
    before = type(module).forward
    module.__class__ = new
    for name in ("forward", "_old_forward"):
        if getattr(module.__dict__.get(name), "__func__", None) is before:
            setattr(module, name, MethodType(new.forward, module))


def _plain(weight: Tensor) -> Tensor:
    return weight.unpack() if isinstance(weight, PackedWeight) else weight.detach()


def hold_packed(module: nn.Module, weight: PackedWeight | Parameter) -> None:
    """Makes a packed weight the parameter `weight` of a module, and writes plain arrays to the
    module's state dicts.

    Args:
        module: a module of any class.
        weight: if it is a parameter, that very object is used, so that several modules may share
            it.
    """
    if not isinstance(weight, Parameter):
        weight = Parameter(weight, requires_grad=False)
    module.weight = weight
    if isinstance(weight, PackedWeight):
        _prepared(module, _with_data(module, weight))
    if _write_arrays not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_write_arrays)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_read_arrays)  # type: ignore[no-untyped-call]
        # This hook runs before accelerate's, which is part of `forward`. Linear layers do not need
        # it.
        if not isinstance(module, PackedLinear):
            module.register_forward_pre_hook(_join_before)


def hold_plain(module: nn.Module, weight: Parameter) -> None:
    """Undoes `hold_packed`; the caller has unpacked the weight."""
    module.weight = weight
    hooks, pre_hooks = module._state_dict_hooks, module._load_state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _write_arrays]:
        del hooks[key]
    for key in [k for k, hook in pre_hooks.items() if getattr(hook, "hook", None) is _read_arrays]:
        del pre_hooks[key]
    forward_hooks = module._forward_pre_hooks
    for key in [key for key, hook in forward_hooks.items() if hook is _join_before]:
        del forward_hooks[key]


def _with_data(module: nn.Module, weight: PackedWeight) -> PackedWeight:
    """The weight itself, or the copy that accelerate keeps in host memory."""
    stored = offloaded_weight(module) if weight.is_meta else None
    return weight if stored is None else stored


def _join_before(module: nn.Module, args: Any) -> None:
    if hasattr(module, HOOK):
        join_offloaded(module)


def _write_arrays(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Writes the arrays instead of the weight."""
    weight = state.get(f"{prefix}weight")
    if isinstance(weight, PackedWeight):
        state |= split_weight(_with_data(module, weight), f"{prefix}weight")


def _read_arrays(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing_keys: list[str],
    *others: Any,
) -> None:
    """Loads a weight from its arrays, or packs a plain weight if the module's is packed."""
    name, current = f"{prefix}weight", module.weight
    assert isinstance(current, Tensor)
    joined = join_arrays(state, name, current.shape[1])
    if joined is not None:
        drop_arrays(state, name)
        state[name] = _prepared(module, joined)
    if not isinstance(current, PackedWeight):
        return
    given = state.get(name)
    if given is None:
        # Reported under the names that `state_dict` gives; the weight stays as it is.
        missing_keys.extend(array_names(name).values())
        state[name] = current
    elif type(given) is not PackedWeight and (given.dtype, given.shape) == (
        torch.bfloat16,
        current.shape,
    ):
        given = state[name] = _prepared(module, pack_weight(given, current.format))
    is_moved = current.host_nbytes and metadata.get("assign_to_params_buffers", False)
    if is_moved and isinstance(given, PackedWeight) and given.shape == current.shape:
        state[name] = current.copy_(given)  # it would leave the host memory that the GPU reads


def _prepared(module: nn.Module, weight: PackedWeight) -> PackedWeight:
    """The weight, prepared for look-ups if the module is an embedding."""
    if isinstance(module, nn.Embedding):
        weight.prepare_gather()
    return weight
