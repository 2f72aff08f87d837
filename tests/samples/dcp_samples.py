"""Helpers for the tests of checkpoints: small states, and saving and loading them in one
process."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from packhorse.disk import PackhorseReader, PackhorseWriter
from packhorse.disk.dcp.checkpoint_manifest import parse_manifest

MANIFEST = "packhorse.json"


def save(state: dict[str, Any], url: object, **options: Any) -> None:
    dcp.save(state, storage_writer=PackhorseWriter(str(url), **options))


def load(state: dict[str, Any], url: object, **options: Any) -> PackhorseReader:
    reader = PackhorseReader(str(url), **options)
    dcp.load(state, storage_reader=reader)
    return reader


def blank(value: Any) -> Any:
    """A state of the same form with nothing in it."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def shards_of(folder: Path) -> dict[Any, Any]:
    return parse_manifest((folder / MANIFEST).read_bytes(), "test").storage_data


def pack_file(folder: Path) -> Path:
    (path,) = folder.glob("shards-*")
    return path


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


class BoxPlanner(DefaultLoadPlanner):
    """Loads one box of each tensor."""

    def __init__(self, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
        super().__init__()
        self.box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))

    def create_local_plan(self) -> LoadPlan:
        items = [
            item
            for fqn in self.state_dict
            for item in create_read_items_for_chunk_list(
                fqn, self.metadata.state_dict_metadata[fqn], [self.box]
            )
        ]
        return LoadPlan(items)

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        return self.state_dict[index.fqn]


def load_box(
    folder: object, offsets: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[torch.Tensor, PackhorseReader]:
    found = {"w": torch.full(lengths, math.nan)}
    reader = PackhorseReader(str(folder))
    dcp.load(found, storage_reader=reader, planner=BoxPlanner(offsets, lengths))
    return found["w"], reader
