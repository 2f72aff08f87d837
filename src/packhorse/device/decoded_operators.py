"""Runs operators that know nothing of packed weights on the decoded matrices, and packs again what
they have written to."""

from typing import Any, NoReturn

from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["run_decoded"]


def run_decoded(packed: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator on plain matrices.

    Args:
        packed: the class of packed weights.
        func: the operator.
        args: its arguments, some of which are packed weights.
        kwargs: its arguments by name.

    Returns:
        The operator's result; a packed weight that it has written to is itself returned.

    Raises:
        NotImplementedError: the operator returns a view, or writes to a list of packed weights.
    """
    schema = func._schema
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        _refuse_view(func)
    plain: dict[int, Tensor] = {}

    def decode(value: Any) -> Any:
        if isinstance(value, packed):
            return plain.setdefault(id(value), value.unpack())
        return value

    result = func(*tree_map(decode, args), **tree_map(decode, kwargs))
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    given |= kwargs
    for argument in schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        value = given.get(argument.name)
        if not written or value is None:
            continue
        if isinstance(value, packed):
            value.copy_(plain[id(value)])
            result = value if result is plain[id(value)] else result
        elif isinstance(value, (list, tuple)) and any(isinstance(v, packed) for v in value):
            raise NotImplementedError(f"{func} cannot write to a list of packed weights")
    return result


def _refuse_view(func: Any) -> NoReturn:
    raise NotImplementedError(
        f"{func} would return a view of a packed weight, which has no plain memory; use "
        "weight.unpack() for the plain matrix, weight.gather_rows(rows) for rows, or F.linear(x, "
        "weight) instead of x @ weight.T; or leave the layer plain: PackhorseConfig takes "
        "lm_head=False, embeddings=False and modules_to_not_convert, pack_model_ takes skip. For "
        "parallel training, give DistributedDataParallel init_sync=False, and give fully_shard "
        "packed weights as ignored_params"
    )
