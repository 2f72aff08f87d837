"""Imports from URLs and exports to them, with a real server of S3 in this process."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr
from exchange_samples import DTYPES, random_array, same
from s3_server import Server

from packhorse.disk import Shelf, pack_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries of AWS are warned of

WANTED = {
    "a/b": random_array(DTYPES["BF16"], (300, 5)),
    "c": np.arange(7),
    "none": np.zeros((0, 3), np.float32),
}


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    with Shelf(tmp_path / "data.shelf") as opened:
        yield opened


def test_safetensors_at_a_url(s3: Server, shelf: Shelf) -> None:
    for name, array in WANTED.items():
        shelf[name] = array
    place = "s3://bucket/out.safetensors"
    shelf.export_safetensors(place, storage_options=s3.options)
    with pytest.raises(FileExistsError):
        shelf.export_safetensors(place, storage_options=s3.options)
    shelf.import_safetensors(place, "again", storage_options=s3.options)
    assert same({name: shelf[f"again/{name}"] for name in WANTED}, WANTED)


def test_a_sharded_model_at_a_url(s3: Server, shelf: Shelf, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    places = {name: f"model-{i}.safetensors" for i, name in enumerate(WANTED)}
    for name, file in places.items():
        shelf[name] = WANTED[name]
        shelf.export_safetensors(folder / file, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    pack_folder(folder, "s3://bucket/packed", storage_options=s3.options)
    s3.fs.put(str(folder), "bucket/plain", recursive=True)
    for prefix in ("packed", "plain"):
        names = shelf.import_safetensors(
            f"s3://bucket/{prefix}", prefix, storage_options=s3.options
        )
        assert same({name.removeprefix(f"{prefix}/"): shelf[name] for name in names}, WANTED)


def test_zarr_at_a_url(s3: Server, shelf: Shelf, tmp_path: Path) -> None:
    group = zarr.create_group("s3://bucket/z.zarr", storage_options=s3.options)
    group.create_array("c", data=WANTED["c"])
    assert shelf.import_zarr("s3://bucket/z.zarr", "z", storage_options=s3.options) == ["z/c"]
    assert same({"c": shelf["z/c"]}, {"c": WANTED["c"]})
    with pytest.raises(ValueError, match="neither a group nor an array of zarr"):
        shelf.import_zarr("s3://bucket/none", storage_options=s3.options)
