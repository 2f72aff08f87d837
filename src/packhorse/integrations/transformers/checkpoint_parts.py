"""What the Trainer puts into a checkpoint folder besides its own state: weights, configuration,
tokenizer, training arguments.

transformers and PEFT write these files themselves, to a folder that is then read and removed, so
that a restored folder has the files that the Trainer would have written. Only the weights of a
whole model do not take this way: they come from memory, because writing them would take as long as
a checkpoint of the Trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

_transformers: Any = import_module("transformers.modeling_utils")
_safetensors: Any = import_module("safetensors.torch")
_logging: Any = import_module("transformers.utils.logging")
_accelerate: Any = import_module("accelerate.utils")

__all__ = ["model_parts"]

_WEIGHTS = ".safetensors"
_TRAINING_ARGS = "training_args.bin"


def model_parts(args: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """The parts of a snapshot that make its folder a model.

    Args:
        args: the arguments of the Trainer.
        parts: what the Trainer gives its callbacks.

    Returns:
        `model`: the weights of a whole model, by name. `weights`: those in files that PEFT or a
        quantizer has written, by the files' names. `files`: all other files, as bytes.
    """
    model = _accelerate.extract_model_from_parallel(parts["model"], keep_torch_compile=False)
    with TemporaryDirectory(prefix="packhorse-") as name:
        folder = Path(name)
        taken = _save_model(model, folder)
        tokenizer = _tokenizer(parts)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(args, folder / _TRAINING_ARGS)
        return taken | _read(folder)


def _save_model(model: Any, folder: Path) -> dict[str, Any]:
    """Write the files of a model, and return the weights that need no file."""
    if not isinstance(model, _transformers.PreTrainedModel):
        if _is_adapted(model):
            model.save_pretrained(folder)
            return {}
        return {"model": model.state_dict()}
    if _is_adapted(model) or getattr(model, "hf_quantizer", None) is not None:
        model.save_pretrained(folder)
        return {}
    with _without_bars():  # one for no weights would be odd
        model.save_pretrained(folder, state_dict={})
    state = dict(model.state_dict())
    for key in model._keys_to_ignore_on_save or ():
        state.pop(key, None)
    return {"model": _transformers.remove_tied_weights_from_state_dict(state, model)}


@contextmanager
def _without_bars() -> Iterator[None]:
    shown = _logging.is_progress_bar_enabled()
    _logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            _logging.enable_progress_bar()


def _is_adapted(model: Any) -> bool:
    """Whether a model has adapters of PEFT, which are then all that the Trainer saves of it."""
    if getattr(model, "_hf_peft_config_loaded", False):
        return True
    return hasattr(model, "peft_config") and hasattr(model, "save_pretrained")


def _tokenizer(parts: dict[str, Any]) -> Any:
    """The tokenizer or processor that the Trainer saves; None if there is none."""
    if parts.get("processing_class") is not None:
        return parts["processing_class"]
    collator = getattr(parts.get("train_dataloader"), "collate_fn", None)
    inner = getattr(collator, "data_collator", collator)  # the Trainer may remove columns first
    return getattr(inner, "tokenizer", None)


def _read(folder: Path) -> dict[str, Any]:
    weights, files = {}, {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix == _WEIGHTS:
            weights[name] = _safetensors.load(path.read_bytes())
        else:
            files[name] = np.frombuffer(path.read_bytes(), np.uint8)
    return {"weights": weights, "files": files}
