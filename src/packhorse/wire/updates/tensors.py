"""The tensors behind an update: found in a model or a state, read unit by unit, and written to.

Tensors are reached through `framework.py`, so NumPy and PyTorch work alike, on any device and with
any strides. Where a tensor lies in host memory in C order, its bytes are used in place: reading
copies nothing, and writing keeps the address. Two names of the same memory are one tensor with an
alias.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.errors import blaming
from packhorse.framework import Framework, framework_of
from packhorse.layout import DTYPE_BY_NAME
from packhorse.wire.updates.contents import Contents, Form, Part, Unit, make_contents

__all__ = ["Binding", "Shards", "Tensors", "contents_of", "framework_for", "named_tensors"]

# A model with `state_dict()`, a mapping from names to tensors, or pairs of both.
Tensors: TypeAlias = Any

_UNFIT = (TypeError, ValueError)


@dataclass(frozen=True)
class Shards:
    """Which part of a model one of several senders has.

    Attributes:
        index: the sender's number, from 0.
        count: how many senders there are.
        ranges: for each tensor of which the sender has a flat range only: the shape of the whole
            tensor, and the first element of the range. The tensor that is sent holds the range in C
            order; its own shape does not matter. Other tensors are whole.
    """

    index: int
    count: int
    ranges: Mapping[str, tuple[tuple[int, ...], int]]


def named_tensors(source: Tensors) -> dict[str, Any]:
    """The tensors of a model or a state, by name.

    Args:
        source: an object with `state_dict()`, a mapping, or an iterable of pairs.

    Raises:
        TypeError: it is none of these, or a value is no tensor of NumPy or PyTorch.
        ValueError: a name occurs twice, or tensors of both frameworks are mixed.
    """
    state = source.state_dict() if callable(getattr(source, "state_dict", None)) else source
    if isinstance(state, Mapping):
        pairs = list(state.items())
    elif isinstance(state, Iterable) and not isinstance(state, str | bytes):
        pairs = list(state)
    else:
        raise TypeError(
            f"a model, a mapping from names to tensors or pairs are needed, not "
            f"{type(source).__name__}"
        )
    tensors = dict(pairs)
    if len(tensors) != len(pairs):
        raise ValueError("a name occurs twice among the tensors")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"names of tensors must be strings, but {name!r} is not")
        if framework_of(tensor) is None:
            raise TypeError(f"{name}: a tensor is needed, not {type(tensor).__name__}")
    return tensors


def framework_for(tensors: Mapping[str, Any]) -> Framework:
    """The one framework of some tensors.

    Raises:
        ValueError: there is no tensor, or there are tensors of several frameworks.
    """
    kinds = {type(tensor): tensor for tensor in tensors.values()}
    found = {framework.name: framework for framework in map(framework_of, kinds.values())
             if framework is not None}  # fmt: skip
    if len(found) != 1:
        raise ValueError(f"tensors of one framework are needed, but there are {sorted(found)}")
    return next(iter(found.values()))


def contents_of(tensors: Mapping[str, Any], shards: Shards | None) -> Contents:
    """What a sender sends: each tensor once, under the first of its names.

    Raises:
        TypeError, ValueError: a tensor has no dtype of safetensors or no memory, or a range does
            not fit.
    """
    framework = framework_for(tensors)
    forms: dict[str, Form] = {}
    aliases: dict[str, str] = {}
    owners: dict[object, str] = {}
    for name in sorted(tensors):
        with blaming(name, _UNFIT):
            form = _form(framework, tensors[name], None if shards is None else
                         shards.ranges.get(name))  # fmt: skip
        owner = owners.setdefault((framework.identity(tensors[name]), form), name)
        if owner == name:
            forms[name] = form
        else:
            aliases[name] = owner
    if shards is not None and (unknown := set(shards.ranges) - set(tensors)):
        raise ValueError(f"a range is given for {min(unknown)!r}, which is not among the tensors")
    return make_contents(forms, aliases)


def _form(framework: Framework, tensor: Any, place: tuple[tuple[int, ...], int] | None) -> Form:
    dtype, shape = framework.describe(tensor)
    numel = math.prod(shape)
    if place is None:
        return Form(dtype, shape, 0, numel)
    whole, start = place
    if not 0 <= start <= start + numel <= math.prod(whole):
        raise ValueError(f"elements {start}:{start + numel} are not inside shape {tuple(whole)}")
    if numel < math.prod(whole) and DTYPE_BY_NAME[dtype].bits < 8:
        raise ValueError(f"{dtype} has several elements in a byte; send the whole tensor")
    return Form(dtype, tuple(whole), start, start + numel)


class _Target(NamedTuple):
    """Where a part lives.

    Attributes:
        part: the part.
        tensor: the tensor, or a view of the range.
        memory: its bytes, if they can be used in place.
    """

    part: Part
    tensor: Any
    memory: ByteArray | None


class Binding:
    """The contents of a stream, with the tensors that they stand for on this side."""

    def __init__(
        self, contents: Contents, tensors: Mapping[str, Any], *, holds_whole: bool = False
    ) -> None:
        """Finds the tensor of each part, without reading or writing.

        Args:
            contents: what updates are about.
            tensors: this side's tensors.
            holds_whole: whether the tensors are whole where parts are ranges, as a receiver has
                them; a sender's tensors have the range alone.

        Raises:
            TypeError: a tensor has no memory that can be read.
            ValueError: a tensor is missing, or has another dtype or shape.
        """
        self.contents = contents
        self.framework = framework_for(tensors)
        self.tensors = tensors
        self._holds_whole = holds_whole
        self._units = [
            [self._target(part) for part in unit.parts] for unit in contents.units
        ]  # fmt: skip
        by_name = {part.name: part for part in contents.parts}
        self._keys = self._identities(tensors)
        self._others: dict[str, list[_Target]] = {}
        for alias, name in contents.aliases.items():
            target = self._target(by_name[name]._replace(name=alias))
            if self._keys[alias] != self._keys[name]:
                self._others.setdefault(name, []).append(target)
        if holds_whole:
            self._check_shared()

    def _target(self, part: Part) -> _Target:
        if part.name not in self.tensors:
            raise ValueError(f"{part.name}: the update has this tensor, and it is not here")
        tensor, form = self.tensors[part.name], part.form
        with blaming(part.name, _UNFIT):
            dtype, shape = self.framework.describe(tensor)
            whole = part.is_whole or self._holds_whole
            numel = form.stop - form.start
            fits = shape == form.shape if whole else math.prod(shape) == numel
            if dtype != form.dtype or not fits:
                raise ValueError(
                    f"it is {dtype} {list(shape)} here, and {form.dtype} {list(form.shape)} in the "
                    "update"
                )
            if self._holds_whole:
                _check_writable(tensor)
            if self._holds_whole and not part.is_whole:
                tensor = _range_of(tensor, form)
            return _Target(part, tensor, self.framework.memory(tensor))

    def _check_shared(self) -> None:
        """Refuses tensors that share memory here but not at the sender: one would overwrite the
        other."""
        framework, spans = self.framework, []
        for name, (_, tensor, memory) in ((t.part.name, t) for row in self._units for t in row):
            span = framework.span(tensor) if memory is not None else None
            if span is not None:
                spans.append((*span, name))
        spans.sort()
        for (_, stop, name), (start, _, other) in pairwise(spans):
            if start < stop:
                raise ValueError(
                    f"{name} and {other} share memory here, and are sent as different tensors"
                )

    def _identities(self, tensors: Mapping[str, Any]) -> dict[str, object]:
        return {
            name: self.framework.identity(tensors[name]) if math.prod(tensors[name].shape) else None
            for name in (*(part.name for part in self.contents.parts), *self.contents.aliases)
            if name in tensors
        }

    def is_of(self, tensors: Mapping[str, Any]) -> bool:
        """Whether these are still the tensors that were found, at the same addresses."""
        names = self._keys.keys()
        return names <= tensors.keys() and self._identities(tensors) == self._keys

    def others(self) -> list[str]:
        """Names of tensors here that updates do not have."""
        return sorted(self.tensors.keys() - self._keys.keys())

    def read(self, i: int) -> ByteArray:
        """The bytes of a unit: in place if it is one tensor in host memory in C order, otherwise
        copied."""
        row, unit = self._units[i], self.contents.units[i]
        if len(row) == 1:
            return self._part_bytes(row[0])
        data = np.empty(unit.nbytes, np.uint8)
        for target in row:
            part = target.part
            data[part.offset : part.offset + part.nbytes] = self._part_bytes(target)
        return data

    def _part_bytes(self, target: _Target) -> ByteArray:
        if target.memory is not None:
            return target.memory
        return self.framework.readable(target.tensor)[0]

    def memory(self, i: int) -> ByteArray | None:
        """The bytes of a unit, for writing, if they are those of one tensor in host memory in C
        order, and nothing else is written with it."""
        row = self._units[i]
        if len(row) > 1 or row[0].part.name in self._others:
            return None
        return row[0].memory

    def differing_alias(self, i: int) -> str | None:
        """A name that the sender ties to a tensor of a unit, and that has other values here."""
        for target in self._units[i] if self._others else ():
            for other in self._others.get(target.part.name, ()):
                if not np.array_equal(self._part_bytes(other), self._part_bytes(target)):
                    return other.part.name
        return None

    def write(self, i: int, data: ByteArray) -> None:
        """Writes the bytes of a unit to its tensors, and to tensors that are tied to them at the
        sender only.

        Raises:
            ValueError: a tensor cannot be written to.
        """
        for target in self._units[i]:
            part = target.part
            piece = data[part.offset : part.offset + part.nbytes]
            for each in (target, *self._others.get(part.name, ())):
                self._write(each, piece)

    def _write(self, target: _Target, data: ByteArray) -> None:
        if target.memory is not None:
            target.memory[:] = data
            return
        form, framework = target.part.form, self.framework
        shape = form.shape if target.part.is_whole else (form.stop - form.start,)
        copy = framework.empty(form.dtype, shape)

        def fill(memory: ByteArray) -> None:
            memory[:] = data

        framework.fill(copy, fill)
        framework.assign(target.tensor, copy)

    def mark_written(self, units: Iterable[int]) -> None:
        """Tells the framework that tensors of units were written to, once all bytes are there."""
        for i in units:
            for target in self._units[i]:
                for each in (target, *self._others.get(target.part.name, ())):
                    if each.memory is not None:
                        self.framework.mark_written(each.tensor)

    def write_counts(self) -> dict[str, int]:
        """How often each tensor was written to, where the framework counts that."""
        counts = {name: self.framework.write_count(tensor) for name, tensor in self.tensors.items()}
        return {name: count for name, count in counts.items() if count is not None}

    def untied(self) -> str | None:
        """A name that the contents tie to another tensor, and that has memory of its own here."""
        return next((row[0].part.name for row in self._others.values()), None)

    def unit(self, i: int) -> Unit:
        """A unit of the contents."""
        return self.contents.units[i]


def _check_writable(tensor: Any) -> None:
    """Refuses a tensor that cannot be written to, so that a commit cannot fail for that.

    Raises:
        ValueError: it is read-only, or several of its elements are one.
    """
    flags = getattr(tensor, "flags", None)
    if flags is not None and not flags.writeable:
        raise ValueError("it is read-only; give a tensor that can be written to")
    strides = tensor.stride() if callable(getattr(tensor, "stride", None)) else tensor.strides
    pairs = zip(tensor.shape, strides, strict=True)
    if math.prod(tensor.shape) and any(n > 1 and not stride for n, stride in pairs):
        raise ValueError("it is expanded: several of its elements are one; give a copy")


def _range_of(tensor: Any, form: Form) -> Any:
    """A view of a flat range of a tensor.

    Raises:
        ValueError: the tensor is not in C order.
    """
    is_plain = (
        tensor.is_contiguous() if hasattr(tensor, "is_contiguous") else tensor.flags.c_contiguous
    )
    if not is_plain:
        raise ValueError("a range of it is sent, so it must be in C order here")
    return tensor.reshape(-1)[form.start : form.stop]
