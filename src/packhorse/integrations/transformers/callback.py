"""Snapshots instead of the checkpoint folders of the Trainer of Hugging Face transformers.

With `Trainer(callbacks=[PackhorseCallback("runs/7")])`, the callback takes a snapshot whenever the
Trainer would write a checkpoint folder: of model, optimizer, schedule, random states and the
Trainer's own state. To resume, a snapshot is written as such a folder again, because the Trainer
reads nothing else.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from packhorse.disk.snapshots import SnapshotStore
from packhorse.errors import CorruptionError
from packhorse.framework import to_array
from packhorse.torch_framework import FRAMEWORK

_trainer: Any = import_module("transformers.trainer_callback")
_accelerate: Any = import_module("accelerate.state")

if TYPE_CHECKING:
    TrainerCallback: Any = object
else:
    TrainerCallback = _trainer.TrainerCallback

__all__ = ["PackhorseCallback", "restore_checkpoint"]

_NAME = re.compile(r"checkpoint-[0-9]+")
_SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM")
# The Trainer's names for the files of a checkpoint.
_FILES = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}


class PackhorseCallback(TrainerCallback):  # type: ignore[misc]
    """Takes a snapshot wherever the Trainer's `save_strategy` asks for a checkpoint.

    Snapshots are called `checkpoint-<step>`, as the folders would be, so give each run a store of
    its own. `save_total_limit` applies to them. All processes of a run need the callback; one of
    them writes.

    Attributes:
        store: the store.

    Example:
        >>> from transformers import Trainer
        >>> from packhorse.transformers import PackhorseCallback
        >>> callback = PackhorseCallback("runs/7")
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        >>> outcome = trainer.train(resume_from_checkpoint=callback.checkpoint())
        {'train_runtime': ...}
        >>> callback.store.names()
        ['checkpoint-2']
    """

    def __init__(
        self,
        store: SnapshotStore | str | os.PathLike[str],
        *,
        background: bool = True,
        folders: bool = False,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            store: a store, or the place for one.
            background: whether training goes on while a copy of the state is written.
            folders: whether the Trainer writes its own folders, too.

        Raises:
            ValueError, TypeError: as `SnapshotStore`.
        """
        self.store = store if isinstance(store, SnapshotStore) else SnapshotStore(store)
        self._background = background
        self._folders = folders
        self._output: str | None = None
        self._resuming: weakref.finalize[..., Any] | None = None
        self._due: list[dict[str, Any]] | None = None  # random states of a snapshot that is due
        self._last_step = -1

    def checkpoint(self, name: str | None = None) -> str | None:
        """Write a snapshot as a folder for `trainer.train(resume_from_checkpoint=...)`. The
        callback removes the folder after the first step of training.

        Args:
            name: of the snapshot; None for the newest.

        Returns:
            The folder; None if the store has no snapshot of a Trainer yet, which makes training
            start from the beginning.

        Raises:
            ValueError, CorruptionError, CompatibilityError: as `restore_checkpoint`.
        """
        name = name or _newest(self.store)
        if name is None:
            return None
        if self._output is not None:
            os.makedirs(self._output, exist_ok=True)
        self._drop_folder()
        folder = mkdtemp(prefix=".packhorse-resume-", dir=self._output)
        self._resuming = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        place = name if _NAME.fullmatch(name) else "checkpoint"
        try:
            return str(restore_checkpoint(self.store, Path(folder) / place, name))
        except BaseException:
            self._drop_folder()
            raise

    # The Trainer calls these methods. A snapshot that is due is taken only after the step was
    # logged and evaluated, because both change the Trainer's state. So it is taken at once, at the
    # log, or at the next event.

    def on_init_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Remember the folder of the Trainer's output."""
        self._output = args.output_dir

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Refuse settings that snapshots do not support.

        Raises:
            ValueError: the model is sharded, or an argument needs the Trainer's own folders.
        """
        kind = _accelerate.AcceleratorState().distributed_type.name
        if kind in _SHARDED:
            raise ValueError(
                f"PackhorseCallback cannot take snapshots of a model that {kind} has sharded; use "
                "torch.distributed.checkpoint with PackhorseWriter (docs/dcp.md)"
            )
        for name in ("load_best_model_at_end", "restore_callback_states_from_checkpoint"):
            if getattr(args, name, False) and not self._folders:
                raise ValueError(
                    f"{name}=True needs the Trainer's own checkpoints; allow them beside the "
                    "snapshots: PackhorseCallback(..., folders=True)"
                )
        self._due, self._last_step = None, -1

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Take a snapshot that is due."""
        self._finish(args, state, parts)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Check whether the Trainer wants a checkpoint."""
        self._drop_folder()
        self._begin(args, state, control, parts)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Take a snapshot that is due."""
        self._finish(args, state, parts)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Take a snapshot that is due, and check whether the Trainer wants a checkpoint."""
        self._finish(args, state, parts)
        self._begin(args, state, control, parts)

    def on_log(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Take a snapshot that is due, unless an evaluation follows."""
        if not control.should_evaluate:
            self._finish(args, state, parts)

    def on_evaluate(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Update the random states, which the evaluation has changed."""
        if self._due is not None:
            self._due = _random_states(args)

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Take a snapshot of a step that the Trainer chooses only after it has called its
        callbacks, as with `save_strategy="best"`. The Trainer has then also written its own
        folder."""
        if self._due is None and self._last_step != state.global_step:
            self._due = _random_states(args)
            self._finish(args, state, parts)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Take a snapshot that is due, and wait until it is on the disk.

        Raises:
            Exception: the error of the last snapshot, if it failed.
        """
        self._finish(args, state, parts)
        if state.is_world_process_zero:
            self.store.close()
            self._prune(args)

    def _drop_folder(self) -> None:
        if self._resuming is not None:
            self._resuming()
            self._resuming = None

    def _begin(self, args: Any, state: Any, control: Any, parts: dict[str, Any]) -> None:
        if not control.should_save:
            return
        self._due = _random_states(args)
        control.should_save = self._folders
        if not (control.should_log or control.should_evaluate):
            self._finish(args, state, parts)

    def _finish(self, args: Any, state: Any, parts: dict[str, Any]) -> None:
        rng, self._due = self._due, None
        if rng is None:
            return
        self._last_step = state.global_step
        if not state.is_world_process_zero:
            return
        self._prune(args)
        take = self.store.take_async if self._background else self.store.take
        take(
            f"checkpoint-{state.global_step}", _state_of(state, rng, parts),
            metadata=_describe(state), replace=True,
        )  # fmt: skip

    def _prune(self, args: Any) -> None:
        """Remove the oldest of the callback's snapshots that exceed `save_total_limit`."""
        limit = args.save_total_limit
        gone = set() if not limit or limit < 0 else set(_checkpoints(self.store)[:-limit])
        if gone:
            self.store.prune(remove=gone)


def restore_checkpoint(
    store: SnapshotStore | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    name: str | None = None,
) -> Path:
    """Write a snapshot of `PackhorseCallback` as a folder from which `trainer.train` resumes.

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
        'model.safetensors'
    """
    opened = store if isinstance(store, SnapshotStore) else SnapshotStore(store)
    name = name or _newest(opened)
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


def _write_folder(store: SnapshotStore, name: str, target: Path) -> None:
    try:
        model = store.restore(name, framework="pt", keys="model")["model"]
        rest = store.restore(name, framework="pt", keys=lambda path: not path.startswith("model."))
        text = bytes(to_array(rest["trainer_state"], FRAMEWORK))
        states = [_numpy_state(rng) for rng in rest["rng"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(f"snapshot {name!r} is not of a Trainer: {error!r}") from error
    import_module("safetensors.torch").save_file(
        model, target / "model.safetensors", metadata={"format": "pt"}
    )
    for key, file in _FILES.items():
        if key in rest:
            torch.save(rest[key], target / file)
    for i, state in enumerate(states):
        torch.save(state, target / (f"rng_state_{i}.pth" if len(states) > 1 else "rng_state.pth"))
    (target / "trainer_state.json").write_bytes(text)


def _numpy_state(rng: dict[str, Any]) -> dict[str, Any]:
    """Random states, with NumPy's as an array again."""
    kind, keys, *more = rng["numpy"]
    return rng | {"numpy": (kind, to_array(keys, FRAMEWORK), *more)}


def _checkpoints(store: SnapshotStore) -> list[str]:
    """The snapshots of a Trainer, the oldest first."""
    return [name for name in store.names() if _NAME.fullmatch(name)]


def _newest(store: SnapshotStore) -> str | None:
    return next(reversed(_checkpoints(store)), None)


def _state_of(state: Any, rng: Sequence[dict[str, Any]], parts: dict[str, Any]) -> dict[str, Any]:
    """Everything that determines how training continues."""
    # The Trainer's state is kept as a tensor of text: it has a line for each log so far, which a
    # manifest would keep uncompressed.
    text = json.dumps(asdict(state), indent=2, sort_keys=True) + "\n"
    taken = {
        "model": parts["model"].state_dict(),
        "optimizer": parts["optimizer"].state_dict(),
        "scheduler": parts["lr_scheduler"].state_dict(),
        "rng": list(rng),
        "trainer_state": np.frombuffer(text.encode(), np.uint8),
    }
    scaler = getattr(parts["optimizer"], "scaler", None)
    return taken if scaler is None else taken | {"scaler": scaler.state_dict()}


def _describe(state: Any) -> dict[str, Any]:
    """Metadata of a snapshot for people: step, epoch and loss."""
    found = {"step": state.global_step, "epoch": state.epoch}
    for entry in reversed(state.log_history):
        if "loss" in entry:
            found["loss"] = entry["loss"]
            break
    return {k: v for k, v in found.items() if isinstance(v, int | float) and math.isfinite(v)}


def _random_states(args: Any) -> list[dict[str, Any]]:
    """The random states of all processes, in the Trainer's own layout."""
    own: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    is_distributed = args.parallel_mode.name == "DISTRIBUTED"
    if torch.cuda.is_available():
        cuda = torch.cuda.random
        own["cuda"] = cuda.get_rng_state_all() if is_distributed else cuda.get_rng_state()
    if args.world_size <= 1:
        return [own]
    everyone: list[Any] = [None] * args.world_size
    torch.distributed.all_gather_object(everyone, own)
    return everyone
