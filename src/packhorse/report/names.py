"""What a tensor is for, guessed from its name: its role, its kind, its layer; and numbers in paths.

Frameworks name tensors differently, but the words in the names are few. A name that has none of
them is "other", which only makes a group in a picture less telling.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["kind_of", "layer_of", "role_of", "steps_of"]

# The first pattern that is found in a name decides. Norms have biases, and attention has norms.
_ROLES = (
    ("second moments", r"exp_avg_sq|second_moment|(^|[._])(nu|v)$"),
    ("first moments", r"exp_avg|momentum|first_moment|(^|[._])(mu|m)$"),
    ("masters", r"master|fp32_?param|fp32_from"),
)
_KINDS = (
    ("norm", r"norm|(^|[._])ln([._]|_?\d|_f)"),
    ("bias", r"bias$|(^|[._])b$"),
    ("embedding", r"embed|(^|[._])(wte|wpe|tok|token|position)([._]|$)"),
    ("output", r"lm_?head|(^|[._])(classifier|score|output\.weight$)"),
    ("attention", r"attn|attention|(^|[._])[qkvo]_?proj|qkv|query|key|value"),
    ("feed-forward", r"mlp|ffn|feed_?forward|expert|(gate|up|down)_proj|fc\d?|intermediate|dense"),
    ("convolution", r"conv"),
)
_LAYER = re.compile(r"(?:^|[._\[])(?:layers?|h|blocks?|stages?)[._\[](\d+)(?:[._\]]|$)")
_NUMBER = re.compile(r"\d+")


def role_of(name: str) -> str:
    """ "weights", "masters", "first moments" or "second moments", from the words of a name."""
    return _first(_ROLES, name, "weights")


def kind_of(name: str) -> str:
    """ "norm", "bias", "embedding", "output", "attention", "feed-forward", "convolution" or
    "other", from the words of a name."""
    return _first(_KINDS, name, "other")


def _first(patterns: tuple[tuple[str, str], ...], name: str, default: str) -> str:
    lower = name.lower()
    return next((word for word, pattern in patterns if re.search(pattern, lower)), default)


def layer_of(name: str) -> int | None:
    """The number after a word such as "layers" in a name; None if there is none."""
    found = _LAYER.search(name.lower())
    return int(found[1]) if found else None


def steps_of(paths: Sequence[str]) -> list[int] | None:
    """The number of each path in a series: the last number in which the paths differ.

    Args:
        paths: paths or URLs, such as "run/checkpoint-100/model.safetensors".

    Returns:
        The numbers; None if the paths differ in anything but numbers, or in no number.

    Example:
        >>> from packhorse.report.names import steps_of
        >>> steps_of(["run-2/step-100.safetensors", "run-2/step-50.safetensors"])
        [100, 50]
    """
    if len(paths) < 2 or len({_NUMBER.sub("0", path) for path in paths}) > 1:
        return None
    columns = zip(*(map(int, _NUMBER.findall(path)) for path in paths), strict=True)
    differing = [column for column in columns if len(set(column)) == len(paths)]
    return list(differing[-1]) if differing else None
