"""PyTorch's operators on a packed weight as a whole: `packhorse::linear` and
`packhorse::embedding`.

`PackedWeight` handles them; with a plain weight they are PyTorch's own. Gradients are defined here,
because autograd does not see the arrays.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.device.decoded_rows import require_frozen

__all__: list[str] = []


@torch.library.custom_op("packhorse::linear", mutates_args=())
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(input, weight, bias)


@_linear.register_fake
def _(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(input, weight, bias)


def _keep_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight = inputs[1]
    require_frozen(weight)
    # Not the parameter itself: libraries that offload give it other data before the backward pass.
    ctx.save_for_backward(weight.detach())


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    (weight,) = ctx.saved_tensors
    # Hooks on saved tensors, such as save_on_cpu, may return the plain matrix.
    plain = getattr(weight, "unpack", lambda: weight)
    to_input = grad @ plain() if ctx.needs_input_grad[0] else None
    # PyTorch leaves out arguments that have their default value.
    needs_bias = len(ctx.needs_input_grad) > 2 and ctx.needs_input_grad[2]
    return to_input, None, grad[None].flatten(0, -2).sum(0) if needs_bias else None


_linear.register_autograd(_linear_backward, setup_context=_keep_weight)


@torch.library.custom_op("packhorse::embedding", mutates_args=())
def _embedding(input: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(input, weight)


@_embedding.register_fake
def _(input: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(input, weight)
