"""Packhorse for PyTorch: the same verbs as `safetensors.torch`.

`compress` and `decompress` take one tensor, `compress_all` and `decompress_all` many; `save_file`
and `load_file` take tensors by name; `save` and `load` replace `torch.save` and `torch.load` for
nested states. Tensors on a device are copied to the host and packed there. `device=` says where
loaded tensors are placed; a GPU with Triton receives them packed and decodes them. The input is
only read. The tensors that come back are equal bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, overload

from packhorse.arguments import resolve_threads
from packhorse.disk.base_files import BaseLike
from packhorse.disk.container import lay_out, pack_tensors, write_packed
from packhorse.disk.packed_file import PackedFile, load_with_metadata
from packhorse.disk.state_file import base_by_name, lay_out_state, rebuild_state
from packhorse.errors import MissingBackendError
from packhorse.frame import Frame
from packhorse.frame.verbs import (
    check_limit,
    compress_tensor,
    compress_tensors,
    decompress_tensor,
    decompress_tensors,
    read_frames,
)
from packhorse.layout import Level

try:
    import torch

    from packhorse.torch_framework import FRAMEWORK, TorchFramework
    from packhorse.torch_models import load_model, refuse_shared, save_model
except ModuleNotFoundError as error:
    raise MissingBackendError(
        "packhorse.torch needs PyTorch; install it with: pip install 'packhorse[torch]'"
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "FRAMEWORK",
    "SupportsRead",
    "SupportsWrite",
    "TorchFramework",
    "compress",
    "compress_all",
    "decompress",
    "decompress_all",
    "load",
    "load_file",
    "load_model",
    "save",
    "save_file",
    "save_model",
]


class SupportsWrite(Protocol):
    """A binary file to write to."""

    def write(self, data: Any, /) -> object:
        """Write bytes, and return how many were written."""


class SupportsRead(Protocol):
    """A binary file to read from."""

    def read(self) -> bytes:
        """All bytes from the current position to the end."""


def compress(
    tensor: torch.Tensor,
    *,
    level: Level | str = "default",
    threads: int | None = None,
    out: Buffer | None = None,
    base: torch.Tensor | None = None,
) -> Frame:
    """Packs one tensor, without loss.

    Args:
        tensor: a tensor of any shape, strides and device; only read.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        out: memory to build the frame in, at least `packhorse.frame.max_frame_nbytes` bytes.
        base: another tensor with the same number of elements, for example the same parameter some
            training steps earlier. It has the same dtype, or it is the float32 tensor that a
            bfloat16 or float16 one was rounded from. If differences from the base are shorter, the
            frame holds these; then `frame.base_hash` names the base, and `decompress` needs it.

    Returns:
        The frame; `frame.to_bytes()` are its bytes.

    Raises:
        TypeError: `tensor` is not a dense tensor, or safetensors does not have its dtype.
        ValueError: `level`, `threads`, `out` or `base` is wrong.
        ChangedError: the base was written to in the meantime. (If the tensor itself is written to,
            no error is raised: the frame holds the bytes that were read, old or new.)

    Example:
        >>> import torch
        >>> from packhorse.torch import compress, decompress
        >>> frame = compress(torch.zeros(256, 256))
        >>> decompress(frame).shape
        torch.Size([256, 256])
        >>> frame.ratio > 100
        True
    """
    return compress_tensor(FRAMEWORK, tensor, level=level, threads=threads, out=out, base=base)


def decompress(
    frame: Frame | Buffer,
    *,
    out: torch.Tensor | None = None,
    threads: int | None = None,
    max_nbytes: int | None = None,
    base: torch.Tensor | None = None,
    device: str | int | torch.device | None = None,
) -> torch.Tensor:
    """Unpacks one tensor, in host memory or on a device.

    Args:
        frame: a frame, or the bytes of one.
        out: a contiguous host tensor of the same dtype and shape to decode into; it is returned.
            Its version counter increases, as with PyTorch's own writes.
        threads: the number of threads; None for one per core, at most 8.
        max_nbytes: refuse a tensor of more bytes, before memory is allocated.
        base: the tensor that the frame was packed against, if it has a base (`Frame.base_hash`).
        device: where the tensor is placed; None for host memory. A GPU with Triton receives the
            frame packed and decodes it (docs/device.md).

    Returns:
        The tensor, in host memory or on the device; `out`, if that is given.

    Raises:
        BaseMismatchError: the frame has a base, and no base or another one was given.
        CorruptionError, TruncationError, CompatibilityError: the bytes are bad or too new.
        TypeError: `out` is not a contiguous host tensor.
        ValueError: `out` has another dtype or shape, or `device` is given too.
        MemoryError: there is not enough memory for the tensor.

    Example:
        >>> import torch
        >>> from packhorse.torch import compress, decompress
        >>> old, new = torch.zeros(4096), torch.ones(4096)
        >>> data = compress(new, base=old).to_bytes()
        >>> torch.equal(decompress(data, base=old), new)
        True
    """
    if out is not None and device is not None:
        raise ValueError("out is in host memory, so it cannot be combined with device; give one")
    frame = check_limit(frame, max_nbytes)
    if device is not None:
        tensor = FRAMEWORK.decode_on([frame], device, resolve_threads(threads))[0]
        if tensor is not None:
            return tensor
    found: torch.Tensor = decompress_tensor(FRAMEWORK, frame, out=out, threads=threads, base=base)
    return found if device is None else found.to(device)


def compress_all(
    tensors: Sequence[torch.Tensor],
    *,
    level: Level | str = "default",
    threads: int | None = None,
    outs: Sequence[Buffer] | None = None,
    bases: Sequence[torch.Tensor | None] | None = None,
) -> list[Frame]:
    """Packs many tensors, each as `compress` does. Small tensors are packed side by side, one per
    thread.

    Args:
        tensors: tensors of any shapes and memory orders; only read.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        outs: memory to build each frame in, as `out` of `compress`.
        bases: a tensor or None for each tensor, as `base` of `compress`.

    Returns:
        A frame for each tensor, in the same order.

    Raises:
        TypeError, ValueError, ChangedError: as for `compress`; the message says which tensor.
        ValueError: one of `outs` shares memory with another one or with a tensor that is read;
            then nothing is written.

    Example:
        >>> import torch
        >>> from packhorse.torch import compress_all
        >>> frames = compress_all([torch.zeros(4096), torch.arange(100)])
        >>> [frame.shape for frame in frames]
        [(4096,), (100,)]
    """
    return compress_tensors(
        FRAMEWORK, tensors, level=level, threads=threads, outs=outs, bases=bases, what="tensor"
    )


def decompress_all(
    frames: Sequence[Frame | Buffer],
    *,
    outs: Sequence[torch.Tensor] | None = None,
    threads: int | None = None,
    max_nbytes: int | None = None,
    bases: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """Unpacks many tensors, each as `decompress` does. Small tensors are unpacked side by side, one
    per thread.

    Args:
        frames: frames, or the bytes of frames.
        outs: a tensor for each frame to decode into, as `out` of `decompress`.
        threads: the number of threads; None for one per core, at most 8.
        max_nbytes: refuse tensors of more bytes in total, before memory is allocated.
        bases: a tensor or None for each frame, as `base` of `decompress`.

    Returns:
        The tensors, in the order of the frames.

    Raises:
        BaseMismatchError, CorruptionError, TruncationError: as for `decompress`; the message says
            which frame.
        CompatibilityError, TypeError, MemoryError: likewise.
        ValueError: as for `decompress`; or one of `outs` shares memory with another one or with a
            frame or base that is read; then nothing is written.

    Example:
        >>> import torch
        >>> from packhorse.torch import compress_all, decompress_all
        >>> frames = compress_all([torch.zeros(4096), torch.arange(100)])
        >>> [len(tensor) for tensor in decompress_all(frames)]
        [4096, 100]
    """
    return decompress_tensors(
        FRAMEWORK, read_frames(frames, max_nbytes), outs=outs, threads=threads, bases=bases
    )


@overload
def save(
    state: object,
    f: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    *,
    level: Level | str = "default",
    threads: int | None = None,
    base: BaseLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> bytes: ...


@overload
def save(
    state: object,
    f: str | os.PathLike[str] | SupportsWrite,
    metadata: Mapping[str, str] | None = None,
    *,
    level: Level | str = "default",
    threads: int | None = None,
    base: BaseLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None: ...


def save(
    state: object,
    f: str | os.PathLike[str] | SupportsWrite | Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    *,
    level: Level | str = "default",
    threads: int | None = None,
    base: BaseLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> bytes | None:
    """Packs a state dict, in the manner of `torch.save`, without pickle.

    A flat dict of tensors by name becomes the file that `save_file` writes. For any other state,
    the file also records the structure, so that `load` can restore it. It does so too if tensors
    share memory, which is stored once.

    Args:
        state: nested dicts, lists and tuples of tensors, NumPy arrays, strings, numbers, booleans
            and None, as `state_dict()` of modules, optimizers and schedulers returns.
        f: a path or a URL, where an existing file is replaced in one step, or a binary file that is
            open for writing; None to get bytes. (A dict in this position is the metadata, as in
            `safetensors.torch.save`.)
        metadata: strings to keep in the file.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        base: as for `save_file`; or an older state, nested in the same way.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        The bytes of the packed file, if `f` is None.

    Raises:
        TypeError: an object in the state cannot be stored; the message gives its path.
        ValueError: `level` or `threads` is wrong, or the state is nested too deeply.
        OSError: the file cannot be written, or the base cannot be read.

    Example:
        >>> import torch
        >>> from packhorse.torch import load, save
        >>> save({"step": 7, "moments": [torch.zeros(3)]}, "state.ph.safetensors")
        >>> load("state.ph.safetensors")
        {'step': 7, 'moments': [tensor([0., 0., 0.])]}
    """
    if isinstance(f, Mapping):
        f, metadata = None, f
    plain = dict(state) if isinstance(state, Mapping) else state
    header, buffers = lay_out_state(plain, metadata, FRAMEWORK)
    base = base_by_name(base)
    if isinstance(f, str | os.PathLike):
        write_packed(
            f,
            header,
            buffers,
            level=level,
            threads=threads,
            force=True,
            base=base,
            storage_options=storage_options,
        )
        return None
    data = pack_tensors(header, buffers, level=level, threads=threads, base=base)
    if f is None:
        return data
    _write_all(f, data)
    return None


def _write_all(file: SupportsWrite, data: bytes) -> None:
    view = memoryview(data)
    while view.nbytes:  # an unbuffered file may write only a part
        written = file.write(view)
        if written == 0:
            raise OSError(f"{file!r} accepts no more bytes")
        view = view[written if isinstance(written, int) else view.nbytes :]


def load(
    f: Buffer | str | os.PathLike[str] | SupportsRead,
    map_location: str | int | torch.device | None = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    threads: int | None = None,
    max_nbytes: int | None = None,
    base: BaseLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Unpacks the state that `save` packed, in the manner of `torch.load`; or all tensors of any
    packed or plain safetensors file, by name.

    Args:
        f: a path, a URL of fsspec, a binary file that is open for reading, or the bytes of a file.
        map_location: where tensors are placed, as `device` of `load_file`; None for host memory.
            (The file does not record devices, so functions and dicts would have nothing to map.)
        weights_only: exists for callers of `torch.load`; it has no effect, because loading never
            runs code.
        mmap: has no effect either; a file at a path is always mapped.
        threads: the number of threads; None for one per core, at most 8.
        max_nbytes: refuse a file whose tensors take more bytes in total, before any is decoded.
        base: what the file was packed against, if it has a base: a file, a folder, tensors by name,
            or a nested state.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        The state. Subclasses of containers come back as plain containers, parameters as tensors.

    Raises:
        BaseMismatchError: the file needs a base, and no base or another one was given.
        CorruptionError, TruncationError, CompatibilityError: the file is bad or too new, or exceeds
            the limit.
        MissingBackendError: `f` is a path of a plain file, and the safetensors library is not
            installed.
        TypeError: `map_location` is not a device.
        ValueError: there is no such device.
        MemoryError: there is not enough memory for a tensor.
        OSError: the file cannot be opened or read.

    Example:
        >>> import torch
        >>> from packhorse.torch import load, save
        >>> layer = torch.nn.Linear(4, 2)
        >>> data = save({"model": layer.state_dict(), "step": 7})
        >>> layer.load_state_dict(load(data, map_location="cpu")["model"])
        <All keys matched successfully>
    """
    if not (map_location is None or isinstance(map_location, str | int | torch.device)):
        raise TypeError(f"map_location is {map_location!r}; it must be a device or the name of one")
    base = base_by_name(base)
    if isinstance(f, str | os.PathLike):
        with PackedFile(
            f,
            FRAMEWORK,
            device=map_location,
            threads=threads,
            max_nbytes=max_nbytes,
            base=base,
            storage_options=storage_options,
        ) as file:
            return rebuild_state(file.get_tensors(), file.metadata(), FRAMEWORK, os.fspath(f))
    data = f.read() if hasattr(f, "read") else f
    tensors, metadata = load_with_metadata(
        data, FRAMEWORK, device=map_location, threads=threads, max_nbytes=max_nbytes, base=base
    )
    return rebuild_state(tensors, metadata, FRAMEWORK, "the bytes given")


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    level: Level | str = "default",
    threads: int | None = None,
    base: BaseLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Writes a packed file. An existing file is replaced in one step, when the new one is complete.

    Args:
        tensors: tensors by name, such as a state dict. A tensor that is not contiguous is stored in
            C order.
        filename: the file to write, whose name usually ends in ".ph.safetensors"; a path, or a URL
            of fsspec. A file at a URL is written to a temporary file first, and uploaded as a
            whole.
        metadata: strings to keep in the file.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        base: older tensors: a safetensors file, packed or not, a folder of such files, or tensors
            by name. A tensor is packed as differences from the older one of the same name, if these
            are shorter; then `load_file` needs the base.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Raises:
        RuntimeError: tensors share memory, which a file of tensors cannot say; use `save_model` for
            a module with tied weights.
        TypeError: one of `tensors` is not a dense tensor, or safetensors does not have its dtype;
            the message names it. Or `metadata` has a value that is not a string.
        ValueError: `level` or `threads` is wrong, or `filename` is the base.
        BaseMismatchError: the base was itself packed against a base.
        CorruptionError, TruncationError, CompatibilityError: the base is bad or too new.
        OSError: the file cannot be written, or the base cannot be read.

    Example:
        >>> import torch
        >>> from packhorse.torch import load_file, save_file
        >>> old, new = torch.zeros(4096), torch.ones(4096)
        >>> save_file({"weight": old}, "old.ph.safetensors")
        >>> save_file({"weight": new}, "new.ph.safetensors", base="old.ph.safetensors")
        >>> len(load_file("new.ph.safetensors", base="old.ph.safetensors")["weight"])
        4096
    """
    header, buffers = lay_out(tensors, FRAMEWORK, metadata, refuse_shared)
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


def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    threads: int | None = None,
    max_nbytes: int | None = None,
    base: BaseLike | None = None,
    backend: str = "mmap",
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Unpacks all tensors of a packed or plain safetensors file, to `device`.

    Args:
        filename: the file, packed or plain; a path, or a URL of fsspec, such as `s3://bucket/model`.
        device: where the tensors are placed. A GPU with Triton receives them packed and decodes
            them (docs/device.md).
        threads: the number of threads; None for one per core, at most 8.
        max_nbytes: refuse a file whose tensors take more bytes in total, before any is decoded.
        base: what the file was packed against, if it has a base: a file, a folder, or tensors by
            name.
        backend: how the safetensors library reads a plain file, "mmap" or "pread". A packed file is
            always mapped.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        The tensors by name, in the order of their names.

    Raises:
        BaseMismatchError: the file needs a base, and no base or another one was given.
        CorruptionError, TruncationError, CompatibilityError: the file is bad or too new, or exceeds
            the limit.
        MissingBackendError: the file is plain, and the safetensors library is not installed.
        MemoryError: there is not enough memory for a tensor.
        OSError: the file cannot be opened or read.
        ValueError: there is no such device.

    Example:
        >>> from packhorse.torch import load_file
        >>> tensors = load_file("model.ph.safetensors")
        >>> tensors["weight"].shape
        torch.Size([512, 64])
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
        return {name: tensors[name] for name in file.keys()}  # noqa: SIM118 - not a dict
