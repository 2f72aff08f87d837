"""Sources of reports: the same bytes wherever they lie, and no more of them than are needed."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from disk_samples import file_bytes
from s3_server import Server
from safetensors.numpy import save_file

from packhorse.disk import SnapshotStore, pack_file
from packhorse.errors import CorruptionError
from packhorse.reports.sampling import choose_places, take_sample
from packhorse.reports.sources import Source, find_sources, opened

NAME = "layers.0.weight"


def weight() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(0, 0.02, (8192, 1024)).astype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def places_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tensor of 16 MiB: plain, packed and in a store."""
    folder = tmp_path_factory.mktemp("sources")
    tensors = {NAME: weight(), "none": np.zeros((0, 3)), "scalar": np.ones((), np.int64)}
    save_file(tensors, folder / "m.safetensors")
    pack_file(folder / "m.safetensors", folder / "m.ph.safetensors")
    with SnapshotStore(folder / "store") as store:
        store.take("1", {NAME: weight() + weight().dtype.type(1)})
        store.take("2", tensors)
    return {path.name: path for path in folder.iterdir()}


def test_runs_blocks_and_hashes_are_the_same_everywhere(places_of: dict[str, Path]) -> None:
    data, runs = weight().view(np.uint8).reshape(-1), [(0, 6), (1 << 20, 3 << 20), (5, 5)]
    hashes = set()
    for name in ("m.safetensors", "m.ph.safetensors", "store"):
        source = find_sources([places_of[name]])[-1]
        with opened(source) as file:
            found = file.runs(NAME, runs)
            assert [run.tolist() for run in found] == [data[a:b].tolist() for a, b in runs], name
            assert np.array_equal(np.concatenate(list(file.blocks(NAME, 2))), data)
            assert np.array_equal(file.read(NAME), data)
            assert list(file.blocks("none")) == []
            assert [block.tolist() for block in file.blocks("scalar")] == [[1] + [0] * 7]
            hashes.add(file.content_hash(NAME))
    assert len(hashes - {None}) == 1


@pytest.mark.filterwarnings("ignore")  # what the libraries of AWS are warned of
def test_a_sample_of_a_file_at_a_url_reads_little_more_than_the_sample(
    s3: Server, places_of: dict[str, Path]
) -> None:
    data = weight().view(np.uint8).reshape(-1)
    for name in ("m.safetensors", "m.ph.safetensors"):
        s3.fs.put(str(places_of[name]), f"bucket/{name}")
        s3.forget()
        with opened(Source(name, f"s3://bucket/{name}")) as file:
            entry = file.entry(NAME)
            assert entry is not None
            sample = take_sample(file, entry, choose_places(entry, 0.05))
            n_read = sum(request.nbytes for request in s3.requests)
            for (start, stop), run in zip(sample.places.runs, sample.runs, strict=True):
                assert np.array_equal(run, data[start:stop])
            assert (file.frame(NAME) is None) == (name == "m.safetensors")
            assert n_read < (2 << 20 if name == "m.safetensors" else 5 << 20)  # of 16 and 10 MiB
            s3.forget()
            assert (file.content_hash(NAME) is None) == (name == "m.safetensors")
            assert sum(request.nbytes for request in s3.requests) < 1 << 17
            assert np.array_equal(np.concatenate(list(file.blocks(NAME))), data)


def test_a_file_that_was_cut_short_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    header = {NAME: {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}
    path.write_bytes(file_bytes(header, bytes(8)))
    with pytest.raises(CorruptionError, match=r"m\.safetensors"), opened(Source("m", str(path))):
        pass


def test_a_store_beside_other_sources_is_refused(places_of: dict[str, Path]) -> None:
    store, _ = find_sources([places_of["store"], places_of["m.safetensors"]])
    with pytest.raises(ValueError, match="a snapshot store makes a report of its own"), \
        opened(store):  # fmt: skip
        pass


@pytest.mark.filterwarnings("ignore")  # what the libraries of AWS are warned of
def test_patterns_of_urls_find_files_and_folders(s3: Server, places_of: dict[str, Path]) -> None:
    for name in ("run/step-5/m.safetensors", "run/step-10/m.safetensors", "run/notes.txt"):
        s3.fs.put(str(places_of["m.safetensors"]), f"bucket/{name}")
    options = s3.options
    found = find_sources(["s3://bucket/run/step-*"], storage_options=options)
    assert [(source.path, source.step) for source in found] == [
        ("s3://bucket/run/step-5", 5), ("s3://bucket/run/step-10", 10)
    ]  # fmt: skip
    found = find_sources(["s3://bucket/run/*/m.saf*"], storage_options=options)
    assert [source.step for source in found] == [5, 10]
    with pytest.raises(FileNotFoundError, match="no file or folder matches this pattern"):
        find_sources(["s3://bucket/run/none-*"], storage_options=options)
