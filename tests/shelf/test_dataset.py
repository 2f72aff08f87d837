"""`ShelfDataset` in loaders of PyTorch: batches, workers of both kinds, transforms, a writer."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exchange_samples import DTYPES, random_array
from forked import fork_context
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, random_split

from packhorse.disk import Shelf, ShelfDataset
from packhorse.errors import CompatibilityError

N_ROWS = 1003
IMAGES = np.random.default_rng(0).standard_normal((N_ROWS, 12, 5)).astype(np.float32)
LABELS = np.arange(N_ROWS)


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    with Shelf(tmp_path / "data.shelf") as opened:
        opened.create("images", (0, 12, 5), "float32", chunk_nbytes=1 << 12).append(IMAGES)
        opened["labels"] = LABELS
        yield opened


@pytest.fixture
def data(shelf: Shelf) -> ShelfDataset:
    return ShelfDataset(shelf["images"], shelf["labels"])


def check(batches: list[list[torch.Tensor]], n_rows: int = N_ROWS, factor: int = 1) -> list[int]:
    """Every image has its label, and every sample comes once; the order in which they came."""
    labels = torch.cat([y for _, y in batches])
    images = torch.cat([x for x, _ in batches]).numpy()
    np.testing.assert_array_equal(images, factor * IMAGES[labels])
    assert sorted(labels.tolist()) == list(range(n_rows))
    return labels.tolist()


def test_samples(shelf: Shelf, data: ShelfDataset) -> None:
    assert len(data) == N_ROWS
    image, label = data[7]
    assert (image.dtype, label.dtype) == (torch.float32, torch.int64)
    assert torch.equal(image, torch.from_numpy(IMAGES[7]))
    assert int(label) == 7
    assert int(data[-1][1]) == int(data[torch.tensor(N_ROWS - 1)][1]) == N_ROWS - 1
    assert torch.equal(ShelfDataset(shelf["images"])[3], torch.from_numpy(IMAGES[3]))
    with pytest.raises(IndexError):
        data[N_ROWS]
    with pytest.raises(IndexError):
        data.__getitems__([0, N_ROWS])
    with pytest.raises(TypeError):
        data[1.5]


def test_batches_by_an_index(data: ShelfDataset) -> None:
    for index in ([5, 3, 3], np.array([5, 3, 3]), torch.tensor([5, 3, 3]), slice(9, 2, -3)):
        images, labels = data[index]
        wanted = LABELS[index if not isinstance(index, torch.Tensor) else index.numpy()]
        assert labels.tolist() == wanted.tolist()
        np.testing.assert_array_equal(images.numpy(), IMAGES[wanted])


def test_a_loader_without_workers(data: ShelfDataset) -> None:
    assert check(list(DataLoader(data, batch_size=64))) == list(range(N_ROWS))
    assert check(list(DataLoader(data, batch_size=64, shuffle=True))) != list(range(N_ROWS))
    batches = BatchSampler(RandomSampler(data), 100, drop_last=False)
    check(list(DataLoader(data, sampler=batches, batch_size=None)))
    train, test = random_split(data, [1000, 3])
    assert len(list(DataLoader(train, batch_size=500))) == 2
    assert sum(len(y) for _, y in DataLoader(test, batch_size=2)) == 3
    odd = Subset(data, range(1, N_ROWS, 2))
    assert torch.cat([y for _, y in DataLoader(odd, 50)]).tolist() == list(range(1, N_ROWS, 2))


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers(shelf: Shelf, context: str) -> None:
    """A process that inherits nothing gets the transform, too."""
    if context == "forkserver":
        fork_context()  # its server has imported PyTorch
    transform, factor = (double, 2) if context == "forkserver" else (None, 1)
    data = ShelfDataset(shelf["images"], shelf["labels"], transform=transform)
    loader = DataLoader(
        data, batch_size=64, shuffle=True, num_workers=2, multiprocessing_context=context,
        persistent_workers=True,
    )  # fmt: skip
    first, second = (check(list(loader), factor=factor) for _ in range(2))
    assert first != second


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_see_the_tag_and_what_is_committed_later(shelf: Shelf, context: str) -> None:
    if context == "forkserver":
        fork_context()  # its server has imported PyTorch
    shelf.tag("then")
    old = ShelfDataset(shelf.at("then")["labels"])
    new = ShelfDataset(shelf["labels"])
    options: dict[str, Any] = {"batch_size": 200, "num_workers": 1, "persistent_workers": True}
    loaders = [DataLoader(d, multiprocessing_context=context, **options) for d in (old, new)]
    for loader in loaders:
        assert torch.cat(list(loader)).tolist() == list(range(N_ROWS))
    shelf["labels"][...] = LABELS * 2
    assert torch.cat(list(loaders[0])).tolist() == list(range(N_ROWS))
    assert torch.cat(list(loaders[1])).tolist() == list(range(0, 2 * N_ROWS, 2))


def double(sample: Any) -> Any:
    image, label = sample
    image *= 2
    return image, label


def test_transforms_may_write_to_a_sample(shelf: Shelf) -> None:
    data = ShelfDataset(shelf["images"], shelf["labels"], transform=double)
    assert torch.equal(data[5][0], 2 * torch.from_numpy(IMAGES[5]))
    for images, labels in (data[[7, 7, 1]], next(iter(DataLoader(data, 3, sampler=[7, 7, 1])))):
        assert labels.tolist() == [7, 7, 1]
        np.testing.assert_array_equal(images.numpy(), 2 * IMAGES[[7, 7, 1]])


@pytest.mark.parametrize("name", [name for name in DTYPES if name[:2] not in ("F4", "F6")])
def test_every_dtype_of_torch(name: str, shelf: Shelf) -> None:
    wanted = shelf["x"] = random_array(DTYPES[name], (20, 3))
    (batch,) = DataLoader(ShelfDataset(shelf["x"]), batch_size=20)
    assert batch.shape == (20, 3)
    assert batch.view(torch.uint8).numpy().tobytes() == wanted.tobytes()


def test_a_shelf_of_torch_and_tensors_in_memory(shelf: Shelf, tmp_path: Path) -> None:
    with Shelf(tmp_path / "data.shelf", "r", framework="pt") as opened:
        weights = torch.rand(N_ROWS)
        data = ShelfDataset(opened["images"], opened["labels"], weights, LABELS)
        image, label, weight, again = data[11]
        assert torch.equal(image, torch.from_numpy(IMAGES[11]))
        assert (int(label), float(weight), int(again)) == (11, float(weights[11]), 11)
        assert sum(len(batch[0]) for batch in DataLoader(data, 100)) == N_ROWS


def test_the_dataset_grows_with_its_tensors(shelf: Shelf, data: ShelfDataset) -> None:
    with shelf.transaction():
        shelf["images"].append(IMAGES[:2])
        shelf["labels"].append([7, 8])
    assert len(data) == N_ROWS + 2
    assert int(data[-1][1]) == 8


def test_wrong_arguments(shelf: Shelf) -> None:
    shelf["one"], shelf["fours"] = np.float32(1), random_array(DTYPES["F6_E2M3"], (4, 4))
    with pytest.raises(TypeError, match="needs a tensor of a shelf"):
        ShelfDataset()
    with pytest.raises(TypeError, match="not list"):
        ShelfDataset([1, 2])
    with pytest.raises(TypeError, match="a tensor without axes has no rows"):
        ShelfDataset(shelf["one"])
    with pytest.raises(ValueError, match="must have the same number"):
        ShelfDataset(shelf["images"], LABELS[:-1])
    with pytest.raises(CompatibilityError):
        ShelfDataset(shelf["fours"])[0]


def test_a_sample_is_of_one_state(shelf: Shelf, data: ShelfDataset) -> None:
    """A writer changes both tensors in one transaction, again and again: no sample mixes two."""
    stop = threading.Event()

    def write() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            with shelf.transaction():
                shelf["images"][:50] = n
                shelf["labels"][:50] = n

    shelf["images"][:50], shelf["labels"][:50] = 0, 0
    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = set()
        for _ in range(200):
            images, labels = data[np.arange(50)]
            assert len(set(labels.tolist())) == 1
            assert bool((images == labels[0]).all())
            seen.add(int(labels[0]))
        assert len(seen) > 1
    finally:
        stop.set()
        writer.join()


def test_the_disk_hop_does_not_import_torch() -> None:
    code = (
        "import sys, packhorse.disk; assert 'torch' not in sys.modules\n"
        "sys.modules['torch'] = None\n"
        "try: packhorse.disk.ShelfDataset\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" in done.stdout
