"""Writes a snapshot as the checkpoint folder that the Trainer would have written.

`trainer.train(resume_from_checkpoint=)` reads such a folder, and so does `from_pretrained`: besides
the Trainer's state it holds the model, its configuration and its tokenizer.
"""

from __future__ import annotations

import os
import re
import shutil
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from packhorse.disk.snapshots import SnapshotStore
from packhorse.errors import CorruptionError
from packhorse.framework import to_array
from packhorse.storage.strict_json import shown
from packhorse.torch_framework import FRAMEWORK

_safetensors: Any = import_module("safetensors.torch")

__all__ = ["checkpoint_names", "newest", "restore_checkpoint"]

_NAME = re.compile(r"checkpoint-[0-9]+")
# The Trainer's names for the files of a checkpoint.
_FILES = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
_MODEL = "model.safetensors"
_STATE = "trainer_state.json"


def restore_checkpoint(
    store: SnapshotStore | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    name: str | None = None,
) -> Path:
    """Write a snapshot of `PackhorseCallback` as a folder from which `trainer.train` resumes, and
    which `from_pretrained` loads.

    Args:
        store: the store, or its place.
        folder: where to write; it must be empty or not exist.
        name: of the snapshot; None for the newest.

    Returns:
        The folder.

    Raises:
        ValueError: there is no such snapshot, or it is not one of a Trainer.
        CorruptionError, CompatibilityError: as `SnapshotStore.restore`.
        OSError: the system refuses; FileExistsError if the folder is not empty.

    Example:
        >>> from transformers import Trainer
        >>> from packhorse.transformers import PackhorseCallback, restore_checkpoint
        >>> callbacks = [PackhorseCallback("runs/7")]
        >>> outcome = Trainer(model, args, train_dataset=data, callbacks=callbacks).train()
        {'train_runtime': ...}
        >>> sorted(path.name for path in restore_checkpoint("runs/7", "resumed").iterdir())[0]
        'config.json'
    """
    opened = store if isinstance(store, SnapshotStore) else SnapshotStore(store)
    name = name or newest(opened)
    if name is None:
        raise ValueError(f"{store}: the store has no snapshot of a Trainer")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise FileExistsError(f"{target}: is not empty; name another folder")
    try:
        _write_folder(opened, name, target)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return target


def checkpoint_names(store: SnapshotStore) -> list[str]:
    """The snapshots of a Trainer, the oldest first."""
    return [name for name in store.names() if _NAME.fullmatch(name)]


def newest(store: SnapshotStore) -> str | None:
    """The newest snapshot of a Trainer; None if there is none."""
    return next(reversed(checkpoint_names(store)), None)


def _write_folder(store: SnapshotStore, name: str, target: Path) -> None:
    state = store.restore(name, framework="pt")
    if not isinstance(state, dict) or "trainer_state" not in state:
        raise ValueError(f"snapshot {name!r} is not of a Trainer")
    try:
        text = bytes(to_array(state["trainer_state"], FRAMEWORK))
        states = [_numpy_state(rng) for rng in state.get("rng", [])]
        files = {_checked(path): data for path, data in state.get("files", {}).items()}
        weights = {_checked(path): data for path, data in state.get("weights", {}).items()}
        if "model" in state:
            weights[_MODEL] = state["model"]
        elif not weights:
            raise KeyError("model")
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(f"snapshot {name!r} is not of a Trainer: {error!r}") from error
    for path, data in files.items():
        _below(target, path).write_bytes(bytes(to_array(data, FRAMEWORK)))
    for path, tensors in weights.items():
        _safetensors.save_file(tensors, _below(target, path), metadata={"format": "pt"})
    for key, file in _FILES.items():
        if key in state:
            torch.save(state[key], target / file)
    for i, rng in enumerate(states):
        torch.save(rng, target / (f"rng_state_{i}.pth" if len(states) > 1 else "rng_state.pth"))
    (target / _STATE).write_bytes(text)


def _checked(path: Any) -> str:
    """A path of a file in a snapshot, which must not lead out of the folder."""
    parts = PurePosixPath(path).parts if isinstance(path, str) else ()
    if not parts or ".." in parts or "\\" in path or PurePosixPath(path).is_absolute():
        raise TypeError(f"{shown(path)} is not the path of a file in a checkpoint")
    return "/".join(parts)


def _below(target: Path, path: str) -> Path:
    """The place of a file; its folder is created."""
    place = target / path
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def _numpy_state(rng: dict[str, Any]) -> dict[str, Any]:
    """Random states, with NumPy's as an array again."""
    kind, keys, *more = rng["numpy"]
    return rng | {"numpy": (kind, to_array(keys, FRAMEWORK), *more)}
