"""Packhorse packs tensors without loss, so that fewer bytes travel on every hop.

Importing this package starts no thread, probes no device and does not import PyTorch. NumPy and the
C++ core are imported when a name that needs them is first used. Each framework has a module of its
own, `packhorse.numpy` and `packhorse.torch`, with the same verbs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from packhorse._version import __version__
from packhorse.errors import (
    BaseMismatchError,
    ChangedError,
    ClosedError,
    CompatibilityError,
    CorruptionError,
    MissingBackendError,
    PackhorseError,
    TruncationError,
)
from packhorse.framework import FrameDecoder as _FrameDecoder
from packhorse.framework import Framework as _Framework
from packhorse.framework import register_decoder as _register_decoder
from packhorse.framework import register_framework as _register
from packhorse.framework import resolve_framework as _resolve
from packhorse.gpu.host_embeddings import EmbeddingHost as _EmbeddingHost
from packhorse.gpu.host_embeddings import register_embedding_host as _register_embedding_host
from packhorse.late_import import import_late
from packhorse.layout import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from packhorse.disk.base_files import BaseLike
    from packhorse.disk.packed_file import PackedFile
    from packhorse.frame import Frame, Plan
    from packhorse.reports import Report

__all__ = [
    "BaseMismatchError",
    "ChangedError",
    "ClosedError",
    "CompatibilityError",
    "CorruptionError",
    "Frame",
    "Level",
    "MissingBackendError",
    "PackhorseError",
    "Plan",
    "TruncationError",
    "__version__",
    "open_file",
    "report",
]


def _numpy() -> _Framework:
    framework: _Framework = import_late("packhorse.numpy").FRAMEWORK
    return framework


def _torch() -> _Framework:
    framework: _Framework = import_late("packhorse.torch").FRAMEWORK
    return framework


def _decoder() -> _FrameDecoder:
    decode: _FrameDecoder = import_late("packhorse.gpu.uploads").decode_frames
    return decode


def _embedding_host() -> _EmbeddingHost:
    host: _EmbeddingHost = import_late("packhorse.host.embedding_host").EMBEDDING_HOST
    return host


_register("np", "numpy", load=_numpy)
_register("pt", "torch", "pytorch", load=_torch)
_register_decoder(_decoder)
_register_embedding_host(_embedding_host)


def __getattr__(name: str) -> Any:
    if name in ("Frame", "Plan"):
        return getattr(import_late("packhorse.frame"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def open_file(
    filename: str | os.PathLike[str],
    framework: str = "np",
    device: Any = None,
    *,
    threads: int | None = None,
    max_nbytes: int | None = None,
    base: BaseLike | None = None,
    backend: str = "mmap",
    storage_options: Mapping[str, Any] | None = None,
) -> PackedFile:
    """Opens a file lazily, in the manner of `safetensors.safe_open`.

    Args:
        filename: a `.ph.safetensors` file, or a plain safetensors file, which the safetensors
            library reads; or the URL of one, such as `s3://bucket/model.ph.safetensors`, for any
            file system of fsspec. From a URL, only the header and the chunks that a call needs are
            read.
        framework: "np" (or "numpy") or "pt" (or "torch", "pytorch").
        device: where tensors are placed; PyTorch only. A GPU with Triton decodes whole tensors
            itself (docs/device.md).
        threads: the number of threads of each read; None for one per core, at most 8.
        max_nbytes: refuse a tensor that takes more bytes once it is decoded.
        base: what the file was packed against, if it has a base: a safetensors file, packed or
            not, a folder of such files, or tensors by name.
        backend: how the safetensors library reads a plain file, "mmap" or "pread". A packed file is
            always mapped, and a file at a URL read in ranges.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        A `PackedFile`, with `keys()`, `metadata()`, `get_tensor(name)` and `get_slice(name)`; a
        context manager.

    Raises:
        CorruptionError, TruncationError, CompatibilityError: the file is bad or too new.
        MissingBackendError: the framework is not installed; or the file is plain, and the
            safetensors library is not installed.
        OSError: the file cannot be opened or read.
        ValueError: the framework or the device is unknown, the device is not in this machine,
            or `device` was given for NumPy.

    Example:
        >>> import packhorse
        >>> with packhorse.open_file("model.ph.safetensors", framework="np") as file:
        ...     rows = file.get_slice("weight")[128:256]
        >>> rows.shape
        (128, 64)
    """
    adapter = _resolve(framework)
    file: PackedFile = import_late("packhorse.disk.packed_file").PackedFile(
        filename,
        adapter,
        device=device,
        threads=threads,
        max_nbytes=max_nbytes,
        base=base,
        backend=backend,
        storage_options=storage_options,
    )
    return file


def report(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    base: str | os.PathLike[str] | None = None,
    full: bool = False,
    sample_nbytes: int = 1 << 28,
    checkpoints_per_day: float = 24.0,
    seconds_per_step: float | None = None,
    engines: bool = True,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    client: Any = None,
) -> Report:
    """Reports on what is compressible in models, in a series of checkpoints, or between two models.

    Args:
        sources: model files or folders, packed or not, at paths or URLs; checkpoints whose paths
            differ in a number, or a pattern of such paths, or a snapshot store, for a series; a
            base and its fine-tune, if there are two that are no series.
        base: the model that the only source was made from.
        full: whether everything is read and packed, instead of samples.
        sample_nbytes: bytes to look at of each source, about.
        checkpoints_per_day: how often such files are written, for what is saved in a year.
        seconds_per_step: how long a step of the training takes, for the policy of snapshots; None
            to take it from the times in the store.
        engines: whether other packers are measured on samples, too, for some seconds.
        threads: the number of threads; None for one per core, at most 8.
        progress: called with the bytes done since the last call.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.
        client: a `distributed.Client`, whose Dask cluster describes the tensors (docs/scale.md);
            None for this process. Models and checkpoints are compared here in any case.

    Returns:
        The report: `save(path)`, `to_html()`, `to_markdown()`, `to_json()`, `findings`; a notebook
        shows its page. What could not be read is in `findings.problems`.

    Raises:
        FileNotFoundError: nothing is there, or a store has no snapshot.
        ValueError: an argument is wrong, or there is a base and not one source.
        CorruptionError, CompatibilityError, OSError: no source can be read.

    Example:
        >>> import packhorse
        >>> found = packhorse.report("model.ph.safetensors", engines=False)
        >>> found.findings.shape
        'models'
    """
    make = import_late("packhorse.reports.build").make_report
    made: Report = make(
        [sources] if isinstance(sources, str | os.PathLike) else list(sources),
        base=base,
        full=full,
        sample_nbytes=sample_nbytes,
        checkpoints_per_day=checkpoints_per_day,
        seconds_per_step=seconds_per_step,
        engines=engines,
        threads=threads,
        progress=progress,
        storage_options=storage_options,
        client=client,
    )
    return made
