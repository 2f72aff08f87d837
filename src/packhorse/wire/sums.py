"""Reductions of the values of all ranks, in the order of the ranks.

Floats of less than 32 bits are computed in 32 bits, and rounded once at the end. F64 is computed in
64 bits, integers wrap around, and a sum of truth values says whether any is true. With two ranks,
the results have the bits that PyTorch's own have. With more, PyTorch leaves the order of sums to
its backends; here it is always that of the ranks, so every run gives the same bits. A NaN stays
one, in minima and maxima, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from packhorse.wire.backend import dist, torch

__all__ = ["OPERATIONS", "REDUCTION_WORDS", "check_operation", "reduce_into"]

# The order gives each its number in statements.
OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
REDUCTION_WORDS = ("the reduction", *OPERATIONS)
_NAMES = {getattr(dist.ReduceOp, name): name for name in OPERATIONS}
_Operator = Callable[[torch.Tensor, torch.Tensor], object]
_OPERATORS: dict[str, _Operator] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "MIN": lambda a, b: torch.minimum(a, b, out=a),
    "MAX": lambda a, b: torch.maximum(a, b, out=a),
    "PRODUCT": torch.Tensor.mul_,
}
_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_operation(op: object, dtype: torch.dtype) -> str:
    """The name of a reduction.

    Args:
        op: one of `torch.distributed.ReduceOp`: SUM, AVG, MIN, MAX or PRODUCT.
        dtype: of the tensors.

    Raises:
        ValueError: there is no such reduction for this dtype.
    """
    name = _NAMES.get(op) if isinstance(op, dist.ReduceOp.RedOpType) else None
    if name is None:
        name = next((name for kind, name in _NAMES.items() if op == kind), None)
    if name is None:
        raise ValueError(f"op is {op}; it must be one of {', '.join(OPERATIONS)}")
    if dtype.is_complex and name not in ("SUM", "AVG"):
        raise ValueError(f"{dtype} has no {name} in PyTorch's collectives; use SUM or AVG")
    if name == "AVG" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"{dtype} has no AVG; sum, and divide as you want it rounded")
    return name


def reduce_into(target: torch.Tensor, values: Sequence[torch.Tensor], name: str) -> None:
    """Reduces the values of all ranks.

    Args:
        target: where the result goes; may be none of the values.
        values: a tensor of each rank, in their order, of one dtype and shape. They may change.
        name: one of `OPERATIONS`.
    """
    dtype = target.dtype
    if dtype in _SIGNED:
        _reduce_unsigned(target, values, name)
        return
    is_narrow = (dtype.is_floating_point or dtype.is_complex) and dtype not in _WIDE
    wide = (torch.complex64 if dtype.is_complex else torch.float32) if is_narrow else dtype
    total = values[0].to(wide)
    for value in values[1:]:
        _OPERATORS[name](total, value.to(wide))
    if name != "AVG":
        target.copy_(total)
    elif dtype.itemsize > 1:  # rounded before the division, as PyTorch does it
        target.copy_(total).div_(len(values))
    else:
        target.copy_(total / len(values))


def _reduce_unsigned(target: torch.Tensor, values: Sequence[torch.Tensor], name: str) -> None:
    """As `reduce_into`, for integers that PyTorch computes little with: sums and products have the
    same bits as those of signed ones, and with the highest bit flipped the order is the same."""
    signed = _SIGNED[target.dtype]
    flip = torch.iinfo(signed).min if name in ("MIN", "MAX") else 0
    found = target.view(signed)
    reduce_into(found, [value.view(signed).bitwise_xor_(flip) for value in values], name)
    found.bitwise_xor_(flip)
