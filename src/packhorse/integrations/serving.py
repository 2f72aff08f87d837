"""What vLLM and SGLang share: options, packing the weight of a layer, products, and warming up.

A server makes a layer with a plain weight, fills it from the checkpoint, and then lets the
quantization method process it. There the plain weight is replaced by a buffer of bytes
(`packhorse.device.packed_buffer`) under the same name, `weight`. A layer that does not gain keeps
its plain weight. With tensor parallelism, each process packs its own shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from packhorse.device.formats import (
    StaysPlain,
    check_tokens,
    pack_if_smaller,
    resolve_format_or_auto,
)
from packhorse.device.model_config import METHOD
from packhorse.device.packed_arrays import pack_arrays
from packhorse.device.packed_buffer import BufferShape, arrays_of, to_buffer
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.layout import MAX_WEIGHT_COLUMNS, WEIGHT_FORMATS, WEIGHT_VERSION

__all__ = [
    "CommonConfig",
    "PackingTotals",
    "ServingOptions",
    "embed",
    "incomplete_weight",
    "is_packed_layer",
    "lacks",
    "multiply",
    "pack_layer",
    "refusing_config",
    "require_platform",
    "require_version",
    "unpack_layer",
    "warm_up",
]

_MIN_CAPABILITY = 80  # of a GPU that multiplies BF16
_KEYS = ("format", "modules_to_not_convert", "lm_head", "embeddings", "for_tokens")
_SHAPE = (
    "packhorse_shape"  # an attribute of packed layers: a tuple, which compilers take as constant
)


@dataclass(frozen=True)
class ServingOptions:
    """How a server packs a model: the options of `PackhorseConfig` (docs/device.md), by the same
    names.

    Attributes:
        format: "auto", "W12" or "W11".
        modules_to_not_convert: names of modules that stay plain, with all below them: whole names
            or their last parts; `*` and `?` stand for any characters.
        lm_head: whether to pack the output layer.
        embeddings: whether to pack embeddings; None for those that are the output layer, too.
        for_tokens: None, or the number of tokens for which a layer must be as fast as a plain one.
    """

    format: str = "auto"
    modules_to_not_convert: tuple[str, ...] = ()
    lm_head: bool = True
    embeddings: bool | None = None
    for_tokens: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ServingOptions:
        """The options in the `quantization_config` of a config.json.

        Args:
            config: options by name; `fmt` is another name of `format`.

        Raises:
            ValueError: an option is unknown or has a wrong value, or the method is another one.
            CompatibilityError: a later release has packed the model.
        """
        given = dict(config)
        method = given.pop("quant_method", METHOD)
        if method != METHOD:
            raise ValueError(
                f"quant_method is {method!r}, so the model is quantized in another way: serve it "
                "without --quantization packhorse"
            )
        version = given.pop("version", WEIGHT_VERSION)
        if version != WEIGHT_VERSION:
            raise CompatibilityError(
                f"the model is packed in version {version!r} of weights in memory; this release "
                f"reads version {WEIGHT_VERSION}: upgrade packhorse"
            )
        stored = given.pop("fmt", "auto")
        given.setdefault("format", stored)
        unknown = [repr(name) for name in given if name not in _KEYS]
        if unknown:
            raise ValueError(
                f"quantization_config has no option {', '.join(unknown)}; it may have "
                f"{', '.join(_KEYS)}"
            )
        given["modules_to_not_convert"] = _names(given.get("modules_to_not_convert"))
        options = cls(**given)
        resolve_format_or_auto(options.format)
        check_tokens(options.for_tokens)
        _require_flag("lm_head", options.lm_head, (True, False))
        _require_flag("embeddings", options.embeddings, (True, False, None))
        return options

    def skips(self, name: str, parts: Sequence[str] = ()) -> bool:
        """Whether a layer stays plain.

        Args:
            name: its full name in the server, such as "model.layers.0.self_attn.qkv_proj".
            parts: the last parts of the names of the matrices that were joined to it, such as
                "q_proj"; if any of them is to stay plain, all do.
        """
        stem, _, last = name.rpartition(".")
        names = [f"{stem}.{part}" if stem else part for part in parts or (last,)]
        return any(
            _is_below(each, pattern) for each in names for pattern in self.modules_to_not_convert
        )


def _names(names: object) -> tuple[str, ...]:
    if names is None:
        return ()
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ValueError(f"modules_to_not_convert is {names!r}; it must be a list of names")
    listed = tuple(names)
    for name in listed:
        if not isinstance(name, str):
            raise ValueError(f"modules_to_not_convert has {name!r}, which is not a name")
    return listed


def _require_flag(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(value is each for each in allowed):
        names = " or ".join(json.dumps(each) for each in allowed)
        raise ValueError(f"{name} is {value!r}; it must be {names}")


def _is_below(name: str, pattern: str) -> bool:
    """Whether a module, or one around it, has a name that fits: whole, or at its end."""
    parts = name.split(".")
    around = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return any(fnmatchcase(each, p) for each in around for p in (pattern, f"*.{pattern}"))


@dataclass
class PackingTotals:
    """What was packed so far, for one line in the server's log.

    Attributes:
        n_expected: layers that will be processed.
        n_packed: layers that are packed.
        plain_nbytes: bytes that their weights had.
        packed_nbytes: bytes that they have.
        left: reasons of layers that stayed plain, by the names of the layers.
    """

    n_expected: int = 0
    n_packed: int = 0
    plain_nbytes: int = 0
    packed_nbytes: int = 0
    left: dict[str, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether all layers were processed."""
        return self.n_packed + len(self.left) >= self.n_expected

    def __str__(self) -> str:
        before, after = self.plain_nbytes / 2**20, self.packed_nbytes / 2**20
        return (
            f"Packhorse: {self.n_packed} layers packed, {before:.0f} MiB as {after:.0f} MiB; "
            f"{len(self.left)} stay plain"
        )


def pack_layer(layer: nn.Module, options: ServingOptions, totals: PackingTotals, name: str) -> bool:
    """Replaces the plain weight of a layer by a buffer, if it gains.

    A layer that was packed before, and got new weights in the meantime, is packed in the same
    format with the same room, so that code that was compiled for the buffer's size fits.

    Args:
        layer: its parameter `weight` is a plain matrix, on any device.
        options: how to pack.
        totals: to add to.
        name: of the layer, for messages.

    Returns:
        Whether the layer is packed.

    Raises:
        MissingBackendError, ValueError: as `pack_model_`; or the new weights of a layer that was
            packed before have more exceptions than there is room for.
    """
    plain = layer.weight
    assert isinstance(plain, Tensor)
    before: tuple[Any, ...] | None = getattr(layer, _SHAPE, None)
    if before is None and hasattr(layer, _SHAPE):  # it stayed plain
        return False
    reason = _why_unfit(plain)
    if reason is None and before is None:
        format = resolve_format_or_auto(options.format)
        packed = pack_if_smaller(plain.detach(), format, options.for_tokens)
        if isinstance(packed, StaysPlain):
            reason = packed.reason
        else:
            buffer = to_buffer(packed.arrays, packed.format, plain.shape[1])
            shape = BufferShape(packed.format.name, *plain.shape)
    elif reason is None:
        buffer, shape = _pack_again(plain.detach(), before, name)
    if reason is not None:
        totals.left[name] = reason
        setattr(layer, _SHAPE, None)
        return False
    del layer.weight
    layer.register_parameter("weight", Parameter(buffer, requires_grad=False))
    setattr(layer, _SHAPE, (*shape, buffer.numel()))
    if before is None:
        totals.n_packed += 1
        totals.plain_nbytes += plain.nbytes
        totals.packed_nbytes += buffer.nbytes
    return True


def _why_unfit(plain: Tensor) -> str | None:
    if plain.dtype != torch.bfloat16:
        return f"is {plain.dtype}, not torch.bfloat16"
    if plain.dim() != 2 or not 1 <= plain.shape[1] <= MAX_WEIGHT_COLUMNS:
        return f"has shape {list(plain.shape)}"
    return None


def _pack_again(plain: Tensor, before: Any, name: str) -> tuple[Tensor, BufferShape]:
    *same, nbytes = before
    shape = BufferShape(*same)
    format = WEIGHT_FORMATS[shape.format]
    arrays = pack_arrays(plain, format)
    like = arrays_of(torch.empty(nbytes, dtype=torch.uint8, device="meta"), shape)
    try:
        return to_buffer(arrays, format, shape.n_columns, like.exceptions.numel()), shape
    except ValueError as error:
        raise ValueError(
            f"{name}: the new weights do not fit where the old ones were: {error}; restart the "
            "server with them"
        ) from error


def is_packed_layer(layer: nn.Module) -> bool:
    """Whether `pack_layer` has packed the layer."""
    return getattr(layer, _SHAPE, None) is not None


def multiply(layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product of a packed layer, as `torch.nn.functional.linear`; also in compiled graphs.

    Args:
        layer: a packed layer.
        x: BF16, any dimensions, the last of n_columns.
        bias: BF16, n_rows; None for none.

    Raises:
        TypeError, ValueError: an operand has another dtype, shape or device.
    """
    format, n_rows, n_columns, _ = getattr(layer, _SHAPE)
    product: Tensor = torch.ops.packhorse.multiply_buffer(
        x, layer.weight, bias, format, n_rows, n_columns
    )
    return product


def embed(layer: nn.Module, rows: Tensor) -> Tensor:
    """Rows of the weight of a packed layer, as `torch.nn.functional.embedding`.

    Args:
        layer: a packed layer.
        rows: integers, any dimensions; numbers of rows that exist.

    Returns:
        BF16, the dimensions of `rows`, and n_columns.
    """
    format, n_rows, n_columns, _ = getattr(layer, _SHAPE)
    found: Tensor = torch.ops.packhorse.embed_buffer(rows, layer.weight, format, n_rows, n_columns)
    return found


def unpack_layer(layer: nn.Module) -> Tensor:
    """The plain weight of a packed layer: BF16, n_rows x n_columns."""
    format, n_rows, n_columns, _ = getattr(layer, _SHAPE)
    found: Tensor = torch.ops.packhorse.unpack_buffer(layer.weight, format, n_rows, n_columns)
    return found


def warm_up(layer: nn.Module, sizes: Iterable[int], done: set[Any]) -> None:
    """Runs a product of a packed layer for each number of tokens, so that kernels are chosen and
    compiled before a CUDA graph is captured. On the host there is nothing to compile.

    Args:
        layer: a packed layer.
        sizes: numbers of tokens.
        done: what was run already, for any layer of the same size; it is added to.
    """
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if weight.device.type == "cpu":
        return
    shape = getattr(layer, _SHAPE)[:3]
    bias = getattr(layer, "bias", None)
    for size in sizes:
        key = (*shape, bias is not None, size, weight.device)
        if key in done:
            continue
        done.add(key)
        x = torch.zeros(size, shape[2], dtype=torch.bfloat16, device=weight.device)
        multiply(layer, x, bias)
        if bias is not None:
            multiply(layer, x)  # layers of several processes add the bias later


def incomplete_weight(name: str) -> CorruptionError:
    """The error for a layer whose weight the checkpoint does not have, or not all of it."""
    return CorruptionError(
        f"{name}.weight: the checkpoint does not have all of it: get the missing files, or the "
        "config.json that belongs to them"
    )


class CommonConfig:
    """Answers of the method that are the same for both servers. It stands before the server's own
    class `QuantizationConfig` among the bases."""

    def get_name(self) -> str:
        """The name of the method."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """BF16 alone; the server refuses others."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """8.0, as a number; the server refuses older GPUs."""
        return _MIN_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: options are in config.json, or not given."""
        return []

    def get_scaled_act_names(self) -> list[str]:
        """None, because activations stay as they are; SGLang asks."""
        return []


def require_platform(is_known: bool, name: str) -> None:
    """Refuses all but NVIDIA GPUs and the host.

    Args:
        is_known: whether the server runs on one of these.
        name: what it runs on.

    Raises:
        CompatibilityError: it runs on something else.
    """
    if not is_known:
        raise CompatibilityError(
            f"packed weights run on NVIDIA GPUs and on CPUs, not on {name}: serve the plain model "
            "without --quantization packhorse"
        )


def require_version(
    what: str, found: str, oldest: tuple[int, ...], newest: tuple[int, ...]
) -> None:
    """Refuses a server of another version than those that were tried.

    Args:
        what: name of the server.
        found: its version.
        oldest: the first version that is supported, in as many numbers as count.
        newest: the last one.

    Raises:
        CompatibilityError: it is older or newer.
    """
    digits = [part for part in found.split("+")[0].split(".") if part.isdecimal()]
    version = tuple(map(int, digits))
    if oldest <= version[: len(oldest)] and version[: len(newest)] <= newest:
        return
    first, last = (".".join(map(str, each)) for each in (oldest, newest))
    supported = first if first == last else f"{first} to {last}"
    raise CompatibilityError(
        f"this release of packhorse supports {what} {supported}, not {found}: install another "
        "release of one of them, or serve the plain model without --quantization packhorse"
    )


def lacks(what: str, version: str, error: Exception) -> str:
    """The message for a server that does not have something that is used.

    Args:
        what: name of the server.
        version: its version.
        error: of the import.
    """
    return (
        f"{what} {version} does not have what this release of packhorse needs ({error}): install "
        "another release of one of them, or serve the plain model without --quantization packhorse"
    )


def refusing_config(base: Any, reason: str) -> type:
    """A method that raises an error when a model asks for it; other models are not affected.

    Args:
        base: the server's class `QuantizationConfig`.
        reason: the message of the `CompatibilityError`.
    """

    class RefusedConfig(CommonConfig, base):  # type: ignore[misc]
        def __init__(self) -> None:
            raise CompatibilityError(reason)

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return cls()

        def get_supported_act_dtypes(self) -> list[Any]:
            return []

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        def get_quant_method(self, layer: Any, prefix: str) -> None:
            return None

    return RefusedConfig
