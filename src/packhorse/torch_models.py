"""Whole modules of PyTorch in one packed file, and tensors that share memory.

A file of tensors by name cannot say that two tensors are one. So `save_file` refuses tensors that
share memory, and `save_model` stores them once, under the name that safetensors would keep: the
first in alphabetical order of those that cover the whole storage. The metadata of the file maps
each dropped name to the kept one. `load_model` needs no such record, because the module itself
says which of its tensors are one.

As in safetensors, tensors share memory if they have the same storage and their ranges of addresses
overlap.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch

from packhorse import _core
from packhorse._core import Views
from packhorse.disk.base_files import BaseLike
from packhorse.disk.container import check_tensors, lay_out, write_packed
from packhorse.disk.packed_file import PackedFile
from packhorse.layout import Level
from packhorse.torch_framework import FRAMEWORK, extent_of

__all__ = ["load_model", "refuse_shared", "save_model"]


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    level: Level | str = "default",
    threads: int | None = None,
    base: BaseLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Writes the state of a module to a packed file, in the manner of
    `safetensors.torch.save_model`. Tensors that share memory, such as tied weights, are stored
    once.

    Args:
        model: the module; only read.
        filename: the file to write, at a path or a URL; its name usually ends in
            ".ph.safetensors". An existing file is replaced in one step, when the new one is
            complete.
        metadata: strings to keep in the file. Each name that is not stored is added, with the name
            that is stored for it, unless `metadata` has such a key already.
        force_contiguous: whether a tensor that is not contiguous is stored in C order; if False,
            such a tensor is refused.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        base: as for `save_file`.
        storage_options: as for `save_file`.

    Raises:
        RuntimeError: tensors share memory, and none of them covers it all.
        TypeError: a value of the state is not a dense tensor, or safetensors does not have its
            dtype.
        ValueError: a tensor is not contiguous, and `force_contiguous` is False; or `level` or
            `threads` is wrong, or `filename` is the base.
        BaseMismatchError, CorruptionError, TruncationError, CompatibilityError: as for `save_file`.
        OSError: the file cannot be written, or the base cannot be read.

    Example:
        >>> import torch
        >>> from packhorse.torch import load_model, save_model
        >>> layer = torch.nn.Linear(4, 2)
        >>> save_model(layer, "layer.ph.safetensors")
        >>> load_model(torch.nn.Linear(4, 2), "layer.ph.safetensors")
        ([], [])
    """
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    check_tensors(state, FRAMEWORK)
    dropped = dict(_dropped_names(state))
    tensors = {name: tensor for name, tensor in state.items() if name not in dropped}
    if not force_contiguous:
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise ValueError(
                    f"tensor {name!r} is not contiguous: make it so, or "
                    "use save_model(..., force_contiguous=True)"
                )
    pairs = {**dropped, **(metadata or {})} if dropped else metadata
    header, buffers = lay_out(tensors, FRAMEWORK, pairs)
    write_packed(
        filename,
        header,
        buffers,
        level=level,
        threads=threads,
        force=True,
        base=base,
        storage_options=storage_options,
    )


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int | torch.device = "cpu",
    *,
    threads: int | None = None,
    max_nbytes: int | None = None,
    base: BaseLike | None = None,
    backend: str = "mmap",
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[list[str], list[str]]:
    """Reads a packed or plain file into a module, in the manner of `safetensors.torch.load_model`.

    Args:
        model: the module; its tensors are overwritten.
        filename: the file, at a path or a URL.
        strict: whether missing and unexpected names are an error.
        device: where tensors are decoded before they are copied to the module.
        threads: the number of threads; None for one per core, at most 8.
        max_nbytes: refuse a file whose tensors take more bytes in total, before any is decoded.
        base: as for `load_file`.
        backend: as for `load_file`.
        storage_options: as for `load_file`.

    Returns:
        The names of the module's tensors that the file did not set, and the names of the file that
        the module did not take. A name whose memory another name has set is not missing.

    Raises:
        RuntimeError: names are missing or unexpected, and `strict` is True; or a shape differs.
        BaseMismatchError, CorruptionError, TruncationError, CompatibilityError: as for `load_file`.
        MissingBackendError, MemoryError, OSError, ValueError: likewise.

    Example:
        >>> import torch
        >>> from packhorse.torch import load_model, save_model
        >>> save_model(torch.nn.Linear(4, 2), "layer.ph.safetensors")
        >>> load_model(torch.nn.Linear(4, 2, bias=False), "layer.ph.safetensors", strict=False)
        ([], ['bias'])
    """
    with PackedFile(
        filename,
        FRAMEWORK,
        device=device,
        threads=threads,
        max_nbytes=max_nbytes,
        base=base,
        backend=backend,
        storage_options=storage_options,
    ) as file:
        tensors = file.get_tensors()
    state = model.state_dict().items()
    own = {name: value for name, value in state if FRAMEWORK.why_unreadable(value) is None}
    dropped = _dropped_names(own, preferred=tensors, is_loading=True)
    found = model.load_state_dict(tensors, strict=False)
    missing, unexpected = list(found.missing_keys), list(found.unexpected_keys)
    for name, _ in dropped:
        if name in missing:
            missing.remove(name)
        else:
            unexpected.append(name)
    if strict and (missing or unexpected):
        raise RuntimeError(_mismatch(type(model).__name__, missing, unexpected))
    return missing, unexpected


def _mismatch(model: str, missing: list[str], unexpected: list[str]) -> str:
    """The message of PyTorch for such a state."""
    lines = [f"Error(s) in loading state_dict for {model}:"]
    for kind, names in (("Missing", missing), ("Unexpected", unexpected)):
        if names:
            listed = ", ".join(f'"{name}"' for name in sorted(names))
            lines.append(f"\t{kind} key(s) in state_dict: {listed}. ")
    return "\n".join(lines)


def refuse_shared(tensors: Mapping[str, torch.Tensor], views: Views) -> None:
    """Refuse tensors that share memory.

    Args:
        tensors: dense tensors by name.
        views: where they lie.

    Raises:
        RuntimeError: some share memory; the message names them.
    """
    if not views.unknown() and _core.are_apart([views], []):
        return
    groups = [sorted(group) for group in _groups(tensors) if len(group) > 1]
    if groups:
        raise RuntimeError(
            f"tensors share memory, and would be stored several times and loaded apart: {groups}; "
            "save the module with save_model, which stores them once, or clone all but one"
        )


def _dropped_names(
    tensors: Mapping[str, torch.Tensor],
    preferred: Collection[str] = (),
    *,
    is_loading: bool = False,
) -> Iterator[tuple[str, str]]:
    """Pairs of a name that is not stored, and the name that is stored for it.

    Args:
        tensors: dense tensors by name.
        preferred: names that are rather stored than others.
        is_loading: whether tensors of which none covers all are left as they are; otherwise
            they are refused.
    """
    for group in _groups(tensors):
        whole = sorted(name for name in group if _covers_storage(tensors[name]))
        if not whole and len(group) > 1 and not is_loading:
            raise RuntimeError(
                f"tensors share memory, and none of them covers it all: {sorted(group)}; clone "
                "them, so that each has memory of its own"
            )
        if whole:
            kept = next((name for name in whole if name in preferred), whole[0])
            yield from ((name, kept) for name in sorted(group) if name != kept)


def _groups(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """The names of tensors by the memory that they share."""
    spans = sorted(
        (_storage_of(tensor), extent_of(tensor), name)
        for name, tensor in tensors.items()
        if tensor.numel() and not tensor.is_meta
    )
    for _, members in groupby(spans, key=lambda span: span[0]):
        group: list[str] = []
        end = 0
        for _, (start, stop), name in members:
            if start >= end and group:
                yield group
                group = []
            group.append(name)
            end = max(end, stop)
        yield group


def _storage_of(tensor: torch.Tensor) -> tuple[str, int, int]:
    storage = tensor.untyped_storage()
    return str(tensor.device), storage.data_ptr(), storage.nbytes()


def _covers_storage(tensor: torch.Tensor) -> bool:
    _, start, nbytes = _storage_of(tensor)
    return tensor.data_ptr() == start and tensor.numel() * tensor.element_size() == nbytes
