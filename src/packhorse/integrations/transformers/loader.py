"""Loads language models from folders that `packhorse pack` has written, on this machine or on
a hub, as plain models or with weights that stay packed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from packhorse.disk.folder_index import INDEX_SUFFIX, unpack_index, weight_map
from packhorse.disk.index_file import tensors_beside
from packhorse.disk.packed_file import PackedFile
from packhorse.errors import CorruptionError
from packhorse.layout import FILE_SUFFIX
from packhorse.storage.opening import open_regular
from packhorse.storage.strict_json import parse_json
from packhorse.torch_framework import FRAMEWORK

__all__ = ["load_packed_model"]

_hf: Any = import_module("transformers")
# Options of `from_pretrained` that say how a folder is fetched from a hub.
_HUB_OPTIONS = ("revision", "token", "cache_dir", "force_download", "local_files_only")
_REPO = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def load_packed_model(
    folder: str | os.PathLike[str], model_class: Any = None, **options: Any
) -> Any:
    """Load a model from a folder that `packhorse pack` has written.

    Tensors are decoded one by one. If a plain model goes to one GPU, the GPU decodes them
    (docs/device.md).

    Args:
        folder: a folder with config.json and packed files, and their index if there are several;
            or the name of such a folder on a hub, "user/model".
        model_class: a model class of transformers, but not an `Auto` class; None for the class that
            config.json names.
        options: for its `from_pretrained`, such as `dtype`, `quantization_config`, and for a folder
            on a hub `revision`.

    Returns:
        The model.

    Raises:
        FileNotFoundError: there is no packed model in the folder.
        ValueError: config.json does not name a model class of transformers.
        CorruptionError, CompatibilityError: as for reading the packed files or their index.
        OSError: as `from_pretrained`.

    Example:
        >>> from packhorse.transformers import PackhorseConfig, load_packed_model
        >>> model = load_packed_model("llama.ph")  # decoded
        >>> model = load_packed_model("llama.ph", quantization_config=PackhorseConfig())
        >>> len(model.hf_quantizer.report.packed)  # and these stay packed
        16
    """
    place = _fetched(folder, options)
    files, promised = _packed_shards(place)
    config = options.pop("config", None) or _hf.AutoConfig.from_pretrained(place)
    model_class = model_class or _named_class(config)
    device = _single_gpu(config, options)
    with ExitStack() as stack:
        opened = [stack.enter_context(PackedFile(file, FRAMEWORK, device=device)) for file in files]
        slices = {name: file.get_slice(name) for file in opened for name in file}
        # transformers would fill missing tensors with random numbers.
        for name in promised:
            if name not in slices:
                raise CorruptionError(f"{place}: no file has {name!r}, which the index names")
        model = model_class.from_pretrained(None, config=config, state_dict=slices, **options)
    if model.can_generate() and (place / "generation_config.json").exists():
        model.generation_config = _hf.GenerationConfig.from_pretrained(place)
    model.config.name_or_path = model.name_or_path = str(folder)
    return model


def _fetched(folder: str | os.PathLike[str], options: dict[str, Any]) -> Path:
    """The folder, downloaded if it is on a hub. Its options are taken out of `options`."""
    how = {name: options.pop(name) for name in _HUB_OPTIONS if name in options}
    if os.path.isdir(folder) or not _REPO.fullmatch(os.fspath(folder)):
        return Path(folder)
    hub = import_module("huggingface_hub")  # transformers needs it
    patterns = ["*.json", f"*{FILE_SUFFIX}"]
    return Path(hub.snapshot_download(os.fspath(folder), allow_patterns=patterns, **how))


def _single_gpu(config: Any, options: Mapping[str, Any]) -> torch.device | None:
    """The GPU that all tensors of a plain model go to; None if there is no single one, or if
    weights stay packed, because these are made from rows in host memory."""
    place = options.get("device_map")
    if isinstance(place, dict) and set(place) == {""}:
        place = place[""]
    is_packed = options.get("quantization_config") or getattr(config, "quantization_config", None)
    if is_packed or not isinstance(place, str | int | torch.device):
        return None
    try:
        device = torch.device(place)
    except RuntimeError:  # "auto" and such
        return None
    return device if FRAMEWORK.decodes_on(device) else None


def _named_class(config: Any) -> Any:
    for name in config.architectures or ():
        found = getattr(_hf, str(name), None)
        if isinstance(found, type) and issubclass(found, _hf.PreTrainedModel):
            return found
    raise ValueError(
        f"config.json names {config.architectures}, which is not a model class of transformers; "
        "give load_packed_model a model_class"
    )


def _packed_shards(folder: Path) -> tuple[list[Path], list[str]]:
    """The packed files of a model, and the names of the tensors that its index lists."""
    index = folder / f"model{INDEX_SUFFIX}"
    names, promised = {f"model{FILE_SUFFIX}"}, []
    if index.exists():
        with open_regular(index) as file:
            text = file.read()
        files = weight_map(parse_json(text, label=str(index)), str(index))
        if any(name.endswith(FILE_SUFFIX) for name in files.values()):
            unpack_index(text, label=str(index), tensors=tensors_beside(index))
        names, promised = set(files.values()), list(files)
        if not names:
            raise CorruptionError(f"{index}: names no tensors; pack the model again")
    for name in sorted(names):
        is_name = name.endswith(FILE_SUFFIX) and name == os.path.basename(name)
        if not is_name or not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder}: has no packed model: {name} is not a packed file there; give the "
                "folder that `packhorse pack` has written, or use from_pretrained for a plain one"
            )
    return sorted(folder / name for name in names), promised
