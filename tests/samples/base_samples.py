"""Models some real training steps apart, and model folders of them, for the tests of bases."""

import json
from functools import cache
from pathlib import Path

import safetensors.torch
import torch
from snapshot_samples import Run

__all__ = ["N_BASED", "checkpoints", "write_checkpoints", "write_folder"]

Tensors = dict[str, torch.Tensor]
# The tensors below that are packed against their base.
N_BASED = 12


@cache
def checkpoints() -> tuple[Tensors, Tensors]:
    """An older and a newer state of a model with its optimizer, and other tensors that a file may
    have."""
    run = Run(width=160).step(30)
    old = _tensors(run)
    new = _tensors(run.step())
    generator = torch.Generator().manual_seed(5)
    master = torch.randn(70, 64, generator=generator) * 0.02
    ids = torch.randint(0, 1 << 40, (3000,), generator=torch.Generator().manual_seed(6))
    old |= {
        "cast.weight": master,
        "ids": ids,
        "resized": torch.ones(30, 8),
        "retyped": torch.randn(600, generator=generator),
        "noise": torch.randint(0, 256, (3000,), generator=generator).to(torch.uint8),
        "dropped": torch.ones(9),
        "empty": torch.zeros(0, 3),
    }
    new |= {
        "cast.weight": master.to(torch.bfloat16),
        "ids": ids.reshape(30, 100) + 1,
        "resized": torch.ones(31, 8),
        "retyped": old["retyped"].double(),
        "noise": torch.randint(0, 256, (3000,), generator=generator).to(torch.uint8),
        "added": torch.randn(40, 8, generator=generator),
        "empty": torch.zeros(0, 3),
        "tied.0": new["model.0.weight"].clone(),
        "tied.1": new["model.0.weight"].clone(),
    }
    old["tied.0"] = old["model.0.weight"].clone()
    return old, new


def _tensors(run: Run) -> Tensors:
    tensors = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
    for i, moments in run.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{kind}": moments[kind] for kind in ("exp_avg", "exp_avg_sq")}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def write_checkpoints(folder: Path) -> tuple[Path, Path]:
    """Both states as files."""
    paths = folder / "old.safetensors", folder / "new.safetensors"
    for tensors, path in zip(checkpoints(), paths, strict=True):
        safetensors.torch.save_file(tensors, path, {"format": "pt"})
    return paths


def write_folder(folder: Path, tensors: Tensors, n_shards: int, **files: Tensors) -> Path:
    """A model folder of shards with their index, another file, and a file of a model below."""
    (folder / "vae").mkdir(parents=True)
    names = sorted(tensors)
    weight_map = {}
    for i in range(n_shards):
        name = f"model-{i + 1:05}-of-{n_shards:05}.safetensors"
        shard = {key: tensors[key] for key in names[i::n_shards]}
        safetensors.torch.save_file(shard, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text("{}")
    below = {"model.0.weight": tensors["model.0.weight"].float() + 1}
    safetensors.torch.save_file(below, folder / "vae" / "diffusion.safetensors")
    return folder
