"""What a tensor is for, guessed from its name: its role, its kind, its layer; and numbers in paths.

Frameworks name tensors differently, but the words in the names are few. A name that has none of
them is "other", which only makes a group in a picture less telling.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["are_shards", "is_input_embedding", "kind_of", "layer_of", "role_of", "steps_of"]

# The first pattern that is found in a name decides. `^`, `$` and these separate words.
_START, _END = r"(?:^|[._/\[])", r"(?:[._/\]]|$)"
_OPTAX = r"opt\w*[./\[].*[./](?:{})(?:[./]|$)|(?:^|weight\.|bias\.|kernel\.|\d\.)(?:{})$"
_ROLES = (
    ("second moments", r"exp_avg_sq|second_moment|" + _OPTAX.format("nu", "nu|v")),
    ("first moments", r"exp_avg|momentum|first_moment|" + _OPTAX.format("mu", "mu|m")),
    ("masters", rf"master|{_START}(?:\w+_)?fp32{_END}"),
)
# Norms have biases, attention has norms, and some embeddings of numbers are layers of a network.
_KINDS = (
    ("norm", rf"norm|{_START}(?:ln|bn)(?:{_END}|\d|_\d)"),
    ("bias", rf"bias$|{_START}b$"),
    (
        "output",
        rf"lm_?head|embed_?out|{_START}(?:classifier|score){_END}|(^|\.)(?:head|cls)\.|"
        r"(^|[._])output\.weight$",
    ),
    ("feed-forward", r"emb\w*\.(?:linear|mlp)|time\w*_emb"),
    ("embedding", rf"embed|{_START}(?:wte|wpe|tok|token|position){_END}|{_START}shared\.weight$"),
    ("feed-forward", rf"mlp|ffn|feed_?forward|expert|{_START}(?:moe|ff){_END}|_moe\."),
    ("attention", rf"attn|attention|{_START}[qkvo]_?proj|qkv|query|{_START}(?:key|value){_END}"),
    ("convolution", r"conv"),
    ("feed-forward", r"(?:gate|up|down)_proj|fc\d?|intermediate|dense"),
)
_OTHER_EMBEDDING = re.compile(rf"position|{_START}pos{_END}|wpe|type|segment|patch|class|cls|label")
_LAYER = re.compile(r"(?:^|[._/\[])(?:layers?|h|\w*?blocks?|blk|stages?)[._/\[](\d+)(?:[._/\]]|$)")
_NUMBER = re.compile(r"\d+")
_SHARD = re.compile(r"\d+-of-\d+")
_STEP = re.compile(r"(?:step|iter|iteration|checkpoint|ckpt)s?[^0-9a-z]*$")


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


def is_input_embedding(name: str) -> bool:
    """Whether a name is that of an embedding of tokens, not of positions, types or patches."""
    return kind_of(name) == "embedding" and not _OTHER_EMBEDDING.search(name.lower())


def layer_of(name: str) -> int | None:
    """The number after a word such as "layers" in a name; None if there is none."""
    found = _LAYER.search(name.lower())
    return int(found[1]) if found else None


def are_shards(paths: Sequence[str]) -> bool:
    """Whether paths are shards of one model, such as "model-00001-of-00003.safetensors"."""
    return len(set(paths)) > 1 and len({_SHARD.sub("", path) for path in paths}) == 1


def steps_of(paths: Sequence[str]) -> list[int] | None:
    """The number of each path in a series: of the numbers in which the paths differ, the last one
    that follows a word such as "step", or else the last one.

    Args:
        paths: paths or URLs, such as "run/checkpoint-100/model.safetensors".

    Returns:
        The numbers; None if the paths differ in anything but numbers, or in no number, or if they
        are the shards of one model.

    Example:
        >>> from packhorse.reports.names import steps_of
        >>> steps_of(["run-2/step-100.safetensors", "run-2/step-50.safetensors"])
        [100, 50]
    """
    if len(paths) < 2 or len({_NUMBER.sub("0", path) for path in paths}) > 1:
        return None
    if are_shards(paths):
        return None
    columns = list(zip(*(map(int, _NUMBER.findall(path)) for path in paths), strict=True))
    differing = [i for i, column in enumerate(columns) if len(set(column)) == len(paths)]
    if not differing:
        return None
    words = _NUMBER.split(paths[0].lower())
    named = [i for i in differing if _STEP.search(words[i])]
    return list(columns[(named or differing)[-1]])
