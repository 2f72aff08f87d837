"""Packs the linear layers of a model in place, and unpacks them.

Weights are packed one after the other. Each packed weight is put into all modules that share it,
and the plain weight is released before the next one is packed. So at its peak, memory holds the
model and one layer. Modules stay the same objects, with their hooks and their places in the model;
a linear layer becomes a `PackedLinear` only by a change of its class.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from packhorse.device.formats import (
    StaysPlain,
    check_tokens,
    pack_if_smaller,
    plan_if_smaller,
    require_speeds,
    resolve_format_or_auto,
)
from packhorse.device.linear import PackedLinear, change_class, hold_packed, hold_plain
from packhorse.device.model_config import IN_HOST, forget_method, name_method
from packhorse.device.offload import require_weights
from packhorse.device.packed_weight import PackedWeight
from packhorse.device.report import LeftWeight, PackReport, WeightReport
from packhorse.device.weight_groups import WeightGroup, weight_groups
from packhorse.gpu.host_embeddings import MIN_HOST_NBYTES, HostedRows, embedding_host
from packhorse.layout import MAX_WEIGHT_COLUMNS, WeightFormat
from packhorse.torch_dtypes import short_name

__all__ = [
    "Embeddings",
    "Progress",
    "Skip",
    "WeightChoice",
    "check_embeddings",
    "hold_packed_weights",
    "host_embeddings_",
    "pack_model_",
    "report_model",
    "unpack_model_",
]

_TRAINED_APART = "is trained, and others are frozen"
Embeddings = bool | str | None
Skip = str | Iterable[str] | Callable[[str, nn.Module], bool]
Progress = Callable[[int], object]


def pack_model_(
    model: nn.Module,
    format: WeightFormat | str = "auto",
    *,
    skip: Skip = (),
    embeddings: Embeddings = None,
    lm_head: bool = True,
    for_tokens: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> PackReport:
    """Packs the BF16 weights of linear layers in place, where that saves memory.

    Layers whose class is exactly `torch.nn.Linear` are packed. Subclasses may compute in other
    ways, and stay plain. Packed weights are frozen; in a model that is partly frozen, trained
    weights stay plain. Modules that share a weight share the packed one. The config of a
    transformers model then names the method "packhorse", so that a folder that `save_pretrained`
    writes loads as a packed model.

    Args:
        model: the model, on any device; it may be a single layer if that is a `torch.nn.Linear`.
        format: "W12", "W11", or "auto": W11 for weights with at most one exception of W11 in 2000
            elements, otherwise W12.
        skip: names of modules to leave plain, with all modules below them; `*` and `?` stand for
            any characters. Or a function that gets a name and a module, and returns whether to skip
            it.
        embeddings: whether to pack embeddings; None for only the input embedding, which
            `get_input_embeddings` of a transformers model gives. An embedding that shares its
            weight with a packed output layer is packed with it. "host" puts the rows of all
            embeddings and bags that take 64 KiB or more, of any dtype, into memory of the host as
            packed tables, from where they are looked up (docs/host.md); one that shares its weight
            with a linear layer is packed with that layer.
        lm_head: whether to pack the output layer: the one that `get_output_embeddings` gives, or
            that is called `lm_head`.
        for_tokens: give this to aim for speed: the usual number of tokens that are multiplied at
            once, which is the batch size when text is generated, not the length of a prompt. Each
            layer gets the fastest format for this number on its GPU, as `packhorse tune` has
            measured or else as predicted, and stays plain if it would be slower when packed.
        dry_run: only count what packing would give, and leave the model as it is. What rows would
            take in memory of the host is estimated from a sample.
        progress: called with the bytes of plain weights done since the last call.

    Returns:
        The weights that were (or would be) packed, and those that were not, with reasons; `print`
        shows a table.

    Raises:
        TypeError: the model is not a module, or `skip` is neither names nor a function.
        ValueError: the format does not exist, `embeddings` is another word than "host", `skip`
            names a module that the model lacks, or `for_tokens` is not positive or is given for a
            model that is not on a GPU.
        MissingBackendError: `for_tokens` is given, and Triton is not installed.

    Example:
        >>> import torch
        >>> from packhorse.device import pack_model_, unpack_model_
        >>> layers = [torch.nn.Linear(512, 256), torch.nn.Linear(256, 512)]
        >>> model = torch.nn.Sequential(*layers).to(torch.bfloat16).eval()
        >>> pack_model_(model, dry_run=True).ratio > 1.3
        True
        >>> report = pack_model_(model, skip=["1"])
        >>> [weight.name for weight in report.packed], [left.name for left in report.left]
        (['0'], ['1'])
    """
    wanted = resolve_format_or_auto(format)
    check_tokens(for_tokens)
    check_embeddings(embeddings)
    _require_module(model)
    choice = WeightChoice(model, skip=skip, embeddings=embeddings, lm_head=lm_head)
    groups = weight_groups(model)
    reasons = [choice.why_left(group) for group in groups]
    if for_tokens is not None:
        for group, reason in zip(groups, reasons, strict=True):
            if reason is None and group.is_multiplied:
                require_speeds(group.weight.device)
    hosted = embedding_host().hosted(model)
    total = sum(map(_held_nbytes, _tensors_of(model))) + sum(h.nbytes for h in hosted.values())
    others = _report_others(model, {id(group.weight) for group in groups})
    packed, left = [], []
    for group, reason in zip(groups, reasons, strict=True):
        nbytes = group.weight.nbytes
        n_tokens = for_tokens if group.is_multiplied else None
        if reason is not None:
            outcome: WeightReport | LeftWeight = _report_left(group.name, group.weight, reason)
        elif choice.is_for_host(group):
            outcome = _host_group(group, dry_run)
        else:
            outcome = (_plan_group if dry_run else _pack_group)(group, wanted, n_tokens)
        if isinstance(outcome, WeightReport):
            packed.append(outcome)
        else:
            left.append(outcome)
        if progress is not None:
            progress(nbytes)
    if not dry_run:
        name_method(model, _left_out_of_host)
    left += [_report_hosted_before(name, rows) for name, rows in hosted.items()]
    return PackReport(tuple(packed), (*left, *others), total)


def check_embeddings(embeddings: object) -> None:
    """Refuses a choice of embeddings that there is not.

    Raises:
        ValueError: it is not True, False, None or "host".
    """
    if embeddings is not None and not isinstance(embeddings, bool) and embeddings != IN_HOST:
        raise ValueError(f'embeddings is {embeddings!r}; it must be True, False, None or "host"')


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {type(model).__name__}; it must be a torch.nn.Module")


def _pack_group(
    group: WeightGroup, format: WeightFormat | None, for_tokens: int | None
) -> WeightReport | LeftWeight:
    packed = pack_if_smaller(group.weight, format, for_tokens)
    if isinstance(packed, StaysPlain):
        return _report_left(group.name, group.weight, packed.reason)
    _replace(group, Parameter(packed, requires_grad=False))
    return _report_packed(group.name, packed.shape, packed.format, packed.packed_nbytes)


def _plan_group(
    group: WeightGroup, format: WeightFormat | None, for_tokens: int | None
) -> WeightReport | LeftWeight:
    planned = plan_if_smaller(group.weight, format, for_tokens)
    if isinstance(planned, StaysPlain):
        return _report_left(group.name, group.weight, planned.reason)
    return _report_packed(group.name, group.weight.shape, planned.format, planned.nbytes)


def _left_out_of_host(model: nn.Module) -> list[str]:
    """Embeddings that a loaded model would have in memory of the host, and this one has not."""
    choice = WeightChoice(model, skip=(), embeddings=IN_HOST, lm_head=True)
    found: list[str] = []
    for group in weight_groups(model):
        # Nothing is frozen in a model that is loaded.
        if choice.is_for_host(group) and choice.why_left(group) in (None, _TRAINED_APART):
            found += group.modules
    return found


def _host_group(group: WeightGroup, dry_run: bool) -> WeightReport:
    host = embedding_host()
    rows = host.plan(group.weight) if dry_run else host.pack_(group.modules)
    return _report_hosted(group.name, rows)


def host_embeddings_(model: nn.Module, choice: "WeightChoice") -> None:
    """Puts embeddings of a model that was loaded into memory of the host, if the caller wants that.

    Args:
        model: with packed weights or without.
        choice: which weights were to be packed.
    """
    for group in weight_groups(model):
        if choice.is_for_host(group) and choice.why_left(group) is None:
            _host_group(group, False)
    embedding_host().save_plain_(model)


def hold_packed_weights(model: nn.Module) -> None:
    """Does the rest of the work of `pack_model_` for modules that were given packed weights
    directly."""
    for group in weight_groups(model):
        if isinstance(group.weight, PackedWeight):
            _replace(group, group.weight)


def report_model(
    model: nn.Module, choice: "WeightChoice", noted: Mapping[str, str], otherwise: str
) -> PackReport:
    """A report on a model that was loaded.

    Args:
        model: with packed weights or without.
        choice: which weights were to be packed.
        noted: why weights are plain, by the names of their parameters.
        otherwise: the reason for all other plain weights.
    """
    packed, left, seen = [], [], set()
    for group in weight_groups(model):
        weight = group.weight
        seen.add(id(weight))
        if isinstance(weight, PackedWeight):
            size = weight.shape, weight.format, weight.packed_nbytes
            packed.append(_report_packed(group.name, *size))
            continue
        known = [noted[name] for name in group.parameter_names if name in noted]
        reason = choice.why_left(group) or (known[0] if known else otherwise)
        left.append(_report_left(group.name, weight, reason))
    hosted = [_report_hosted(*each) for each in embedding_host().hosted(model).items()]
    # A packed weight's `nbytes` is that of the plain matrix.
    total = sum(tensor.nbytes for tensor in _tensors_of(model))
    total += sum(each.plain_nbytes for each in hosted)
    packed += hosted
    return PackReport(tuple(packed), (*left, *_report_others(model, seen)), total)


def _report_others(model: nn.Module, seen: Container[int]) -> list[LeftWeight]:
    """Parameters of two or more dimensions whose `id` is not in `seen`."""
    left = []
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen and parameter.dim() > 1:
            is_matrix = parameter.dim() == 2
            what = "not the weight of a layer" if is_matrix else f"{parameter.dim()} dimensions"
            reason = f"{what}; only matrices of layers are packed"
            left.append(_report_left(name, parameter, reason))
    return left


def _report_packed(name: str, shape: torch.Size, format: WeightFormat, nbytes: int) -> WeightReport:
    return WeightReport(name, (shape[0], shape[1]), format.name, nbytes)


def _report_hosted(name: str, rows: HostedRows) -> WeightReport:
    return WeightReport(
        *(name, rows.shape, f"host, {rows.words}", rows.nbytes, rows.element_nbytes),
        is_in_host=True,
    )


def _report_hosted_before(name: str, rows: HostedRows) -> LeftWeight:
    reason = "is packed already, in memory of the host"
    return LeftWeight(name, rows.shape, rows.dtype, rows.nbytes, reason)


def _report_left(name: str, weight: Tensor, reason: str) -> LeftWeight:
    dtype = short_name(weight.dtype)
    return LeftWeight(name, tuple(weight.shape), dtype, _held_nbytes(weight), reason)


def _replace(group: WeightGroup, parameter: Any) -> None:
    for module in group.modules.values():
        if type(module) is nn.Linear:
            change_class(module, PackedLinear)
        hold_packed(module, parameter)


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """All parameters and buffers, shared ones once."""
    yield from model.parameters()
    yield from model.buffers()


def _held_nbytes(tensor: Tensor) -> int:
    return tensor.packed_nbytes if isinstance(tensor, PackedWeight) else tensor.nbytes


class WeightChoice:
    """Which weights of a model a caller wants to pack, and which of these can be packed.

    Args:
        model: the model, on any device, including the meta device.
        skip: as for `pack_model_`.
        embeddings: as for `pack_model_`.
        lm_head: as for `pack_model_`.

    Raises:
        ValueError: no module has a name that is to be skipped.
    """

    def __init__(
        self, model: nn.Module, *, skip: Skip, embeddings: Embeddings, lm_head: bool
    ) -> None:
        self._model = model
        self._skips = skip if callable(skip) else _matcher(model, skip)
        self._names: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._names.setdefault(id(module), []).append(name)
        self._embeddings = embeddings
        # Bags cannot look up rows of weights that are packed for products.
        bags = (nn.EmbeddingBag,) if embeddings == IN_HOST else ()
        self._looks_up = (nn.Embedding, *bags)
        self._lm_head = lm_head
        self._outputs = _output_layers(model)
        self._inputs = _called(model, "get_input_embeddings")
        self._holders = _count_holders(model)
        plain = (each for each in model.parameters() if not isinstance(each, PackedWeight))
        trains = [parameter.requires_grad for parameter in plain]
        self._partly_frozen = any(trains) and not all(trains)

    def wanted_names(self, tied: Mapping[str, str]) -> dict[str, bool]:
        """The weights to pack when they come from a checkpoint.

        Args:
            tied: pairs of parameters, by name, that will share the weight of the second.

        Returns:
            For the name of each such parameter: whether a linear layer multiplies with it.
        """
        groups: dict[str, WeightGroup] = {}
        for group in weight_groups(self._model):
            for own in group.parameter_names:
                groups.setdefault(tied.get(own, own), WeightGroup()).modules |= group.modules
        wanted = [
            group
            for group in groups.values()
            if self._why_excluded(group) is None and not self.is_for_host(group)
        ]
        return {n: group.is_multiplied for group in wanted for n in group.parameter_names}

    def why_left(self, group: WeightGroup) -> str | None:
        """Why a weight stays as it is; None if it is to be packed."""
        reason = self._why_excluded(group)
        if reason is None and self.is_for_host(group):
            return self._why_not_hosted(group.weight)
        return reason or self._why_weight_left(group.weight)

    def is_for_host(self, group: WeightGroup) -> bool:
        """Whether the rows of a weight, if it is packed, go to memory of the host."""
        modules = group.modules.values()
        return self._embeddings == IN_HOST and all(isinstance(m, self._looks_up) for m in modules)

    def _why_excluded(self, group: WeightGroup) -> str | None:
        for module in group.modules.values():
            reason = self._why_module_left(module)
            if reason is not None:
                return reason
        if self._holders[id(group.weight)] > len(group.modules):
            return "shared with a parameter of another kind"
        return self._why_unwanted(group)

    def _why_module_left(self, module: nn.Module) -> str | None:
        if isinstance(module.weight, PackedWeight):
            return "is packed already"
        if isinstance(module, self._looks_up):
            if module.max_norm is not None:
                return "max_norm changes it"
            if self._embeddings == IN_HOST and module.scale_grad_by_freq:
                return "scale_grad_by_freq is not for rows in memory of the host"
        elif type(module) is not nn.Linear:
            is_linear = isinstance(module, nn.Linear)
            what = "a subclass of" if is_linear else "not a"
            return f"{type(module).__name__} is {what} torch.nn.Linear"
        names = self._names[id(module)]
        return "skipped" if any(self._skips(name, module) for name in names) else None

    def _why_unwanted(self, group: WeightGroup) -> str | None:
        modules = group.modules.values()
        linears = [module for module in modules if isinstance(module, nn.Linear)]
        if linears and any(isinstance(module, nn.EmbeddingBag) for module in modules):
            return "an EmbeddingBag would decode all of it at each call"
        if any(self._lm_head or id(module) not in self._outputs for module in linears):
            return None
        if linears:
            if self._embeddings is True and len(linears) < len(modules):
                return None
            shares = self._embeddings == IN_HOST and len(linears) < len(modules)
            return "lm_head=False" + ("; the embedding shares its weight" if shares else "")
        if self._embeddings is None:
            is_input = any(id(module) in self._inputs for module in modules)
            return None if is_input else "embeddings=None packs the input embedding only"
        return None if self._embeddings else "embeddings=False"

    def _why_not_hosted(self, weight: Tensor) -> str | None:
        if type(weight) is not Parameter or weight.layout != torch.strided or weight.is_meta:
            return self._why_weight_left(weight) or "is not a plain tensor"
        if weight.nbytes < MIN_HOST_NBYTES:
            return f"takes {weight.nbytes} bytes; less than 64 KiB stays where it is"
        if not 1 <= weight.shape[1] <= MAX_WEIGHT_COLUMNS:
            return f"{weight.shape[1]} columns; at most {MAX_WEIGHT_COLUMNS} can be packed"
        return _TRAINED_APART if self._is_trained_apart(weight) else None

    def _is_trained_apart(self, weight: Tensor) -> bool:
        return self._partly_frozen and weight.requires_grad

    def _why_weight_left(self, weight: Tensor) -> str | None:
        if weight.dtype != torch.bfloat16:
            return f"packed weights are BF16, not {short_name(weight.dtype)}"
        if type(weight) is not Parameter or weight.layout != torch.strided:
            return f"{type(weight).__name__} is not a plain tensor"
        if weight.is_meta:
            return "has no data: it is on the meta device"
        if not 1 <= weight.shape[1] <= MAX_WEIGHT_COLUMNS:
            return f"{weight.shape[1]} columns; at most {MAX_WEIGHT_COLUMNS} can be packed"
        return _TRAINED_APART if self._is_trained_apart(weight) else None


def _matcher(model: nn.Module, skip: str | Iterable[str]) -> Callable[[str, nn.Module], bool]:
    patterns = [skip] if isinstance(skip, str) else skip
    if not isinstance(patterns, Iterable):
        raise TypeError(f"skip is {skip!r}; it must be names of modules, or a function")
    patterns = list(patterns)
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"skip has {pattern!r}, which is not the name of a module")
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"skip names {pattern!r}, but the model has no such module")

    def skips(name: str, module: nn.Module) -> bool:
        parts = name.split(".")
        above = [".".join(parts[: n + 1]) for n in range(len(parts))]
        return any(fnmatchcase(each, pattern) for each in above for pattern in patterns)

    return skips


def _output_layers(model: nn.Module) -> set[int]:
    found = {id(m) for name, m in model.named_modules() if name.split(".")[-1] == "lm_head"}
    return found | _called(model, "get_output_embeddings")


def _called(model: nn.Module, getter_name: str) -> set[int]:
    """The `id` of the module that a method of transformers returns, if the model has the method."""
    getter = getattr(model, getter_name, None)
    try:
        module = getter() if callable(getter) else None
    except NotImplementedError:  # raised by models with several such modules, or with none
        module = None
    return set() if module is None else {id(module)}


def _count_holders(model: nn.Module) -> dict[int, int]:
    """How many modules hold each parameter."""
    counts: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


def unpack_model_(model: nn.Module) -> None:
    """Unpacks the weights of a model in place, bit for bit, one after the other; they stay frozen.
    Embeddings in memory of the host come back to where their rows came out.
    The config of a transformers model no longer names the method "packhorse".

    Args:
        model: a model with or without packed weights, on any device.

    Raises:
        TypeError: the model is not a module.
        ValueError: accelerate keeps weights in host memory; nothing is unpacked then.

    Example:
        >>> import torch
        >>> from packhorse.device import pack_model_, unpack_model_
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 256, dtype=torch.bfloat16))
        >>> plain = model[0].weight.clone()
        >>> report = pack_model_(model)
        >>> unpack_model_(model)
        >>> torch.equal(model[0].weight, plain)
        True
    """
    _require_module(model)
    groups = [group for group in weight_groups(model) if _was_packed(group)]
    for group in groups:
        require_weights(group.modules)
    for group in groups:
        plain: Any = group.weight
        if isinstance(plain, PackedWeight):
            plain = Parameter(plain.unpack(), requires_grad=False)
        for module in group.modules.values():
            if type(module) is PackedLinear:
                change_class(module, nn.Linear)
            hold_plain(module, plain)
    embedding_host().unpack_(model)
    forget_method(model)


def _was_packed(group: WeightGroup) -> bool:
    """Whether the weight is packed, or was packed until it was to be trained."""
    is_layer = any(type(module) is PackedLinear for module in group.modules.values())
    return is_layer or isinstance(group.weight, PackedWeight)
