"""Snapshots instead of the checkpoint folders of the Trainer of Hugging Face transformers.

With `Trainer(callbacks=[PackhorseCallback("runs/7")])`, the callback takes a snapshot whenever the
Trainer would write a checkpoint folder: of the files of the model, and of optimizer, schedule,
random states and the Trainer's own state. To resume, a snapshot is written as such a folder again,
because the Trainer reads nothing else.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import warnings
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
from packhorse.integrations.transformers.checkpoint_folder import (
    checkpoint_names,
    newest,
    restore_checkpoint,
)
from packhorse.integrations.transformers.checkpoint_parts import model_parts

_trainer: Any = import_module("transformers.trainer_callback")
_accelerate: Any = import_module("accelerate.state")

if TYPE_CHECKING:
    TrainerCallback: Any = object
else:
    TrainerCallback = _trainer.TrainerCallback

__all__ = ["PackhorseCallback"]

_SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM")
_FOLDERS = (
    "allow the Trainer's own folders beside the snapshots: PackhorseCallback(..., folders=True)"
)


class PackhorseCallback(TrainerCallback):  # type: ignore[misc]
    """Takes a snapshot wherever the Trainer's `save_strategy` asks for a checkpoint.

    Snapshots are called `checkpoint-<step>`, as the folders would be, so give each run a store of
    its own. `save_total_limit` and `save_only_model` apply to them. All processes of a run need the
    callback; one of them writes.

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
        name = name or newest(self.store)
        if name is None:
            return None
        if self._output is not None:
            os.makedirs(self._output, exist_ok=True)
        self._drop_folder()
        folder = mkdtemp(prefix=".packhorse-resume-", dir=self._output)
        self._resuming = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        place = name if name in checkpoint_names(self.store) else "checkpoint"
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
                raise ValueError(f"{name}=True needs checkpoints that are folders; {_FOLDERS}")
        if not self._folders:
            _warn(args)
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
            self._prune(args, state)

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
        self._prune(args, state)
        take = self.store.take_async if self._background else self.store.take
        take(
            f"checkpoint-{state.global_step}", _state_of(args, state, rng, parts),
            metadata=_describe(state), replace=True,
        )  # fmt: skip

    def _prune(self, args: Any, state: Any) -> None:
        """Remove the oldest of the callback's snapshots that exceed `save_total_limit`, but neither
        the newest nor the best."""
        limit, names = args.save_total_limit, checkpoint_names(self.store)
        if not limit or limit < 0 or len(names) <= limit:
            return
        kept = {names[-1], f"checkpoint-{state.best_global_step}"} & set(names)
        n_gone = len(names) - max(limit, len(kept))
        gone = [name for name in names if name not in kept][:n_gone]
        if gone:
            self.store.prune(remove=gone)


def _warn(args: Any) -> None:
    """Warn about arguments that have no effect on snapshots."""
    if args.push_to_hub and args.hub_strategy != "end":
        warnings.warn(
            f"hub_strategy={args.hub_strategy.value!r} pushes folders, which snapshots are not: "
            f"only trainer.push_to_hub() pushes. To push checkpoints, {_FOLDERS}",
            stacklevel=2,
        )
    if args.save_on_each_node:
        warnings.warn(
            "save_on_each_node has no effect on snapshots, which one process writes", stacklevel=2
        )


def _state_of(
    args: Any, state: Any, rng: Sequence[dict[str, Any]], parts: dict[str, Any]
) -> dict[str, Any]:
    """What the Trainer would write: the model, and all that determines how training continues."""
    # The Trainer's state is kept as a tensor of text: it has a line for each log so far, which a
    # manifest would keep uncompressed.
    text = json.dumps(asdict(state), indent=2, sort_keys=True) + "\n"
    taken = model_parts(args, parts)
    taken["trainer_state"] = np.frombuffer(text.encode(), np.uint8)
    if args.save_only_model:
        return taken
    taken["optimizer"] = parts["optimizer"].state_dict()
    taken["scheduler"] = parts["lr_scheduler"].state_dict()
    taken["rng"] = list(rng)
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
