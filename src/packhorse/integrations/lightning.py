"""Packhorse for Lightning: `Trainer(plugins=[PackhorseCheckpointIO()])`.

A checkpoint becomes one packed file. With `store=` it becomes a snapshot in a `SnapshotStore`,
which mostly holds differences from the previous checkpoint; the file that Lightning sees is then a
pointer, a line of JSON that names the snapshot. Neither file is a pickle, so reading one runs no
code.

Lightning's own `load_from_checkpoint` reads pickles, from a file or from an open file. So
`load_from_checkpoint` here gives it a pickle in memory, and everything else stays Lightning's.
"""

from __future__ import annotations

import io
import json
import os
import posixpath
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from packhorse.disk.snapshots import SnapshotStore
from packhorse.disk.state import find_tensors, path_below
from packhorse.errors import CompatibilityError, CorruptionError, MissingBackendError
from packhorse.framework import to_array
from packhorse.layout import Level
from packhorse.storage.atomic import atomic_file
from packhorse.storage.strict_json import parse_json, shown

__all__ = ["PackhorseCheckpointIO", "PackhorseLoading", "load_from_checkpoint"]

_PACKAGES = ("lightning.fabric", "lightning_fabric")  # the second belongs to pytorch_lightning


def _interface() -> Any:
    """Lightning's `CheckpointIO`, from the package that is in use, or else an installed one."""
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            import_module(name.partition(".")[0])
        except ModuleNotFoundError:
            continue
        return import_module(f"{name}.plugins").CheckpointIO
    raise MissingBackendError(
        "packhorse.lightning needs Lightning; install it with: pip install 'packhorse[lightning]'"
    )


if TYPE_CHECKING:
    CheckpointIO: Any = object
else:
    CheckpointIO = _interface()

import torch  # noqa: E402 - Lightning brings PyTorch, so its absence is reported first

from packhorse.torch import FRAMEWORK, load, save  # noqa: E402

_MARK = b'{"packhorse":'  # as the start of a safetensors file, this would be an invalid length
_VERSION = 1
_MAX_POINTER_NBYTES = 1 << 16
_SUFFIX = ".ckpt"
_Loaded = TypeVar("_Loaded")
# How files of torch.save start: a zip archive, or the older form. As the length of a safetensors
# header, with which our files start, both would be too large or absurd.
_PICKLES = (b"PK\x03\x04", b"\x80\x02\x8a\n")


class PackhorseCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Reads and writes Lightning's checkpoints.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from packhorse.lightning import PackhorseCheckpointIO
        >>> io = PackhorseCheckpointIO(store="runs/7")
        >>> quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        >>> trainer = Trainer(plugins=[io], max_steps=2, accelerator="cpu", **quiet)
        >>> trainer.fit(BoringModel())
        >>> trainer.save_checkpoint("step-2.ckpt")
        >>> io.load_checkpoint("step-2.ckpt")["global_step"]
        2
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | None = None,
        *,
        level: Level | str = "default",
        threads: int | None = None,
        **options: Any,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            store: where a `SnapshotStore` keeps the checkpoints; None to write each one as a packed
                file.
            level: "fast", "default" or "max".
            threads: None for the cores of this process, at most 8.
            **options: other options of `SnapshotStore`, such as `max_chain=`.

        Raises:
            ValueError, TypeError: an option is wrong.
        """
        if store is None and options:
            raise TypeError(f"{', '.join(options)}: only a store has such options; give store=")
        self._url = None if store is None else _lasting(os.fspath(store))
        self._options = {"level": level, "threads": threads, **options}
        self._opened: SnapshotStore | None = None
        if self._url is not None:
            SnapshotStore(self._url, **self._options)  # reports wrong options now
        for name in _PACKAGES:  # so that a trainer of either package accepts this object
            if name in sys.modules:
                import_module(f"{name}.plugins").CheckpointIO.register(type(self))

    def save_checkpoint(
        self, checkpoint: Mapping[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint. When this returns, it is on the disk. An older checkpoint at the path
        is replaced in one step.

        Args:
            checkpoint: the checkpoint that Lightning gives.
            path: of the file; any URL that fsspec knows.
            storage_options: not supported, as in Lightning's own plugin.

        Raises:
            TypeError: a value cannot be kept; the message gives its path in the checkpoint.
            BlockingIOError: another process writes to the store.
            OSError: an error of the file system.
        """
        if storage_options is not None:
            raise TypeError("storage_options are not supported; give them to the store")
        fs, place = _find(path)
        if not _is_local(fs):
            fs.makedirs(posixpath.dirname(place), exist_ok=True)
        else:
            os.makedirs(os.path.dirname(place), exist_ok=True)
        with _advising():
            if self._url is None:
                options = self._options
                data = save(checkpoint, place if _is_local(fs) else None, **options)
                if data is not None:
                    fs.pipe_file(place, data)
                return
            name, is_ours = self._name_for(fs, place)
            self._store().take(
                name, checkpoint, metadata=_describe(checkpoint, place), replace=is_ours
            )
        _write(fs, place, self._pointer(fs, place, name))

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: str | int | torch.device | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint, from a packed file or a pointer.

        Args:
            path: of the file.
            map_location: where tensors go; None for host memory.
            weights_only: ignored, because reading never runs code.

        Raises:
            FileNotFoundError: the file does not exist.
            CorruptionError: the file is damaged, or not a checkpoint.
            CompatibilityError: the file is too new, or torch.save has written it.
            ValueError: the snapshot is gone, or in a store that this object does not know.
        """
        fs, place = _find(path)
        if not fs.exists(place):  # in Lightning's words
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        if _is_pickle(fs, place):
            raise CompatibilityError(_how_to_convert(str(path)))
        pointer = _read_pointer(fs, place)
        if pointer is None:
            source = place if _is_local(fs) else fs.cat_file(place)
            state = load(source, map_location, threads=self._options["threads"])
        else:
            store, name = self._store_of(fs, place, pointer), pointer["snapshot"]
            state = store.restore(name, framework="pt")
            arrays = store.info(name).metadata.get("numpy", [])
            state = _placed(state, "", set(arrays), map_location)
        if not isinstance(state, dict):
            raise CorruptionError(f"{path}: holds a {type(state).__name__}, not a checkpoint")
        return state

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, and its snapshot if that is in this object's store.

        Args:
            path: of the file; nothing happens if it does not exist.
        """
        fs, place = _find(path)
        if not fs.lexists(place):
            return
        ours = self._owned(fs, place)
        fs.rm(place, recursive=True)
        if ours is not None:
            self._store().delete(ours)

    def teardown(self) -> None:
        """Release the store's memory. The store is opened again when it is next needed."""
        if self._opened is not None:
            self._opened.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}  # Lightning may start processes with it

    def _store(self) -> SnapshotStore:
        if self._opened is None:
            assert self._url is not None
            self._opened = SnapshotStore(self._url, **self._options)
        return self._opened

    def _pointer(self, fs: Any, place: str, name: str) -> dict[str, Any]:
        pointer = {"packhorse": "checkpoint", "version": _VERSION, "store": self._where(fs, place)}
        return pointer | {"snapshot": name, "file": posixpath.basename(place)}

    def _where(self, fs: Any, place: str) -> str | None:
        """The store's name in a pointer at a place: a relative path, so that both can be moved
        together, or its URL."""
        if self._url is None or "://" in self._url or not _is_local(fs):
            return self._url
        return os.path.relpath(os.path.realpath(self._url), _folder(place))

    def _store_of(self, fs: Any, place: str, pointer: dict[str, Any]) -> SnapshotStore:
        where = pointer["store"]
        if self._url is not None and where == self._where(fs, place):
            return self._store()
        if "://" in where or not _is_local(fs):
            raise ValueError(
                f"{place}: this checkpoint is in the store {shown(where)}; read it with a "
                "PackhorseCheckpointIO(store=...) of that store"
            )
        found = os.path.normpath(os.path.join(_folder(place), where))
        if not os.path.isdir(found):
            raise ValueError(
                f"{place}: this checkpoint is in the store {found}, which does not exist; the file "
                "only names a snapshot, and must be moved together with the store"
            )
        return SnapshotStore(found, threads=self._options["threads"])

    def _owned(self, fs: Any, place: str) -> str | None:
        """The snapshot that belongs to the file at a place; None if the file is a link or a
        copy."""
        if self._url is None or not fs.isfile(place) or (_is_local(fs) and os.path.islink(place)):
            return None
        try:
            pointer = _read_pointer(fs, place)
        except (CorruptionError, CompatibilityError):
            return None
        if pointer is None or pointer["file"] != posixpath.basename(place):
            return None
        is_ours = pointer["store"] == self._where(fs, place)
        name: str = pointer["snapshot"]
        return name if is_ours and name in self._store().names() else None

    def _name_for(self, fs: Any, place: str) -> tuple[str, bool]:
        """The name for a checkpoint's snapshot, and whether this snapshot replaces that of an older
        checkpoint at the same place."""
        owned = self._owned(fs, place)
        if owned is not None:
            return owned, True
        stem = posixpath.basename(place).removesuffix(_SUFFIX) or _SUFFIX
        names = set(self._store().names())
        name, n = stem, 1
        while name in names:
            n += 1
            name = f"{stem} ({n})"
        return name, False


def load_from_checkpoint(
    module_class: type[_Loaded], checkpoint_path: Any, *args: Any, **kwargs: Any
) -> _Loaded:
    """Make a module from a checkpoint, as `module_class.load_from_checkpoint` does.

    Args:
        module_class: a subclass of `LightningModule` or `LightningDataModule`.
        checkpoint_path: a checkpoint that `PackhorseCheckpointIO` has written, or anything that
            Lightning itself reads.
        *args: as for `module_class.load_from_checkpoint`.
        **kwargs: likewise, with hyperparameters in place of those in the checkpoint. Without
            `map_location=`, tensors of our checkpoints go to host memory.

    Returns:
        The module.

    Raises:
        FileNotFoundError, CorruptionError, CompatibilityError, ValueError: as
            `PackhorseCheckpointIO.load_checkpoint`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from packhorse.lightning import PackhorseCheckpointIO, load_from_checkpoint
        >>> quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        >>> io = PackhorseCheckpointIO()
        >>> trainer = Trainer(plugins=[io], max_steps=2, accelerator="cpu", **quiet)
        >>> trainer.fit(BoringModel())
        >>> trainer.save_checkpoint("step-2.ckpt")
        >>> model = load_from_checkpoint(BoringModel, "step-2.ckpt")
    """
    load = module_class.load_from_checkpoint  # type: ignore[attr-defined]
    found: _Loaded = _load(load, checkpoint_path, args, kwargs)
    return found


class PackhorseLoading:
    """A base class whose `load_from_checkpoint` also reads checkpoints of `PackhorseCheckpointIO`.

    Name it before Lightning's class.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from packhorse.lightning import PackhorseCheckpointIO, PackhorseLoading
        >>> class Model(PackhorseLoading, BoringModel):
        ...     pass

        >>> checkpoint = {"state_dict": Model().state_dict(), "pytorch-lightning_version": "2.6.0"}
        >>> PackhorseCheckpointIO().save_checkpoint(checkpoint, "best.ckpt")
        >>> model = Model.load_from_checkpoint("best.ckpt")
    """

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a module from a checkpoint, as the function `load_from_checkpoint` does.

        Args:
            checkpoint_path: as for the function.
            *args: as for the function.
            **kwargs: as for the function.

        Returns:
            The module.
        """
        load = super().load_from_checkpoint  # type: ignore[misc]
        return _load(load, checkpoint_path, args, kwargs)


def _load(load: Any, source: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call Lightning's `load_from_checkpoint`, with a pickle in memory if the source is ours."""
    if isinstance(source, str | os.PathLike) and not str(source).startswith("http"):
        fs, place = _find(os.fspath(source))
        if fs.isfile(place) and not _is_pickle(fs, place):
            checkpoint = PackhorseCheckpointIO().load_checkpoint(os.fspath(source))
            source = io.BytesIO()
            torch.save(checkpoint, source)
            source.seek(0)
            kwargs = kwargs | {"weights_only": False}  # True would refuse NumPy's arrays
    return load(source, *args, **kwargs)


def _is_pickle(fs: Any, place: str) -> bool:
    """Whether torch.save has written a file."""
    with fs.open(place, "rb") as file:
        return bool(file.read(4).startswith(_PICKLES))


def _how_to_convert(path: str) -> str:
    """A message with the line of code that turns a pickle into a checkpoint of ours."""
    new = path.removesuffix(_SUFFIX) + ".packhorse" + _SUFFIX
    return (
        f"{path}: torch.save has written this checkpoint; convert it once, and resume from the new "
        f"file: PackhorseCheckpointIO().save_checkpoint(torch.load({path!r}, map_location='cpu', "
        f"weights_only=True), {new!r})"
    )


def _lasting(url: str) -> str:
    """A store's URL, or a path that stays valid when the working directory changes."""
    return url if "://" in url else os.path.abspath(url)


def _find(path: str | Path) -> tuple[Any, str]:
    """The fsspec file system of a path, and the path within it."""
    fs, place = import_module("fsspec.core").url_to_fs(str(path))
    return fs, place


def _is_local(fs: Any) -> bool:
    return "file" in ([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)


def _folder(place: str) -> str:
    return os.path.dirname(os.path.realpath(place))


def _describe(checkpoint: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Metadata of a snapshot: step, epoch and file for people, and which tensors are NumPy
    arrays."""
    names = {"step": "global_step", "epoch": "epoch"}
    found = {key: checkpoint.get(name) for key, name in names.items()}
    described: dict[str, Any] = {k: v for k, v in found.items() if type(v) is int}
    described["file"] = posixpath.basename(place)
    leaves = find_tensors(checkpoint)
    arrays = [path for path, leaf in leaves.items() if leaf.framework.name == "np"]
    return described | ({"numpy": arrays} if arrays else {})


def _placed(value: Any, path: str, arrays: set[str], device: Any) -> Any:
    """A state with its tensors on a device; tensors that were NumPy arrays become arrays again."""
    if isinstance(value, dict):
        return {k: _placed(v, path_below(path, k), arrays, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        kind = type(value)
        return kind(_placed(v, path_below(path, i), arrays, device) for i, v in enumerate(value))
    if not isinstance(value, torch.Tensor):
        return value
    if path in arrays:
        return to_array(value, FRAMEWORK)
    return value if device is None else value.to(device)


def _write(fs: Any, place: str, pointer: dict[str, Any]) -> None:
    """Write a small file in one step."""
    data = json.dumps(pointer, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    if not _is_local(fs):
        fs.pipe_file(place, data)
        return
    with atomic_file(Path(place), force=True) as output:
        output.write(data)


def _read_pointer(fs: Any, place: str) -> dict[str, Any] | None:
    """The pointer at a place; None if the file there is something else.

    Raises:
        CorruptionError, CompatibilityError: the pointer is damaged or too new.
        FileNotFoundError: there is no file.
    """
    with fs.open(place, "rb") as file:
        text = file.read(_MAX_POINTER_NBYTES)
    if not text.startswith(_MARK):
        return None
    pointer = parse_json(text, label=place)
    version = pointer.get("version")
    if type(version) is int and version > _VERSION:
        raise CompatibilityError(
            f"{place}: a pointer of version {shown(version)}; this release reads versions up to "
            f"{_VERSION}: upgrade packhorse"
        )
    for key in ("store", "snapshot", "file"):
        if not isinstance(pointer.get(key), str):
            raise CorruptionError(f"{place}: {key!r} must be a string in the pointer to a snapshot")
    return pointer


@contextmanager
def _advising() -> Iterator[None]:
    """Adds advice to the error for a value that cannot be kept."""
    try:
        yield
    except TypeError as error:
        raise TypeError(
            f"{error}. Leave it out of the checkpoint, such as by "
            "save_hyperparameters(ignore=[...]), or convert it to one of these in "
            "on_save_checkpoint"
        ) from error
