"""Fashion-MNIST, from Debian's package dataset-fashion-mnist: `make data`.

    python benchmarks/data/fashion_mnist.py              # apt-get downloads the package
    python benchmarks/data/fashion_mnist.py FILE.deb     # or it is here already

The package is not installed, so this needs no root: its files go to `build/data/fashion-mnist`. The
set (Xiao, Rasul and Vollgraf 2017; MIT licence) has MNIST's shape: 60,000 images for training and
10,000 for tests, of 28 x 28 bytes, in 10 classes.
"""

import gzip
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.data import debian_package

PACKAGE = "dataset-fashion-mnist"
FOLDER = Path(__file__).resolve().parents[2] / "build" / "data" / "fashion-mnist"
SIDE = 28
_INSIDE = "usr/share/datasets/fashion-mnist"
HOW = "run: make data"
_SHAPES = {"train": 60_000, "t10k": 10_000}
_MAGIC = {"images": 0x803, "labels": 0x801}  # of files of bytes with three axes, and with one


class Images(NamedTuple):
    """Images and their classes.

    Attributes:
        images: a row of 784 bytes for each.
        labels: 0 to 9.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]


def is_there() -> bool:
    """Whether `make data` was run."""
    return FOLDER.is_dir()


def load(part: str = "all") -> Images:
    """Read the set.

    Args:
        part: "train", "t10k" (for tests), or "all", which is both in this order.

    Returns:
        The images.

    Raises:
        FileNotFoundError: the set is not here.
        ValueError: there is no such part, or a file is not as it should be.
    """
    if part == "all":
        halves = [load(name) for name in _SHAPES]
        return Images(*(np.concatenate(arrays) for arrays in zip(*halves, strict=True)))
    if part not in _SHAPES:
        raise ValueError(f"part is {part!r}; it must be one of 'all', 'train', 't10k'")
    if not is_there():
        raise FileNotFoundError(f"{FOLDER} is missing; {HOW}")
    images = _read(part, "images", 3)
    return Images(images.reshape(len(images), -1), _read(part, "labels", 1))


def _read(part: str, what: str, n_axes: int) -> NDArray[np.uint8]:
    """One file of the format IDX: magic number, shape, then bytes."""
    path = FOLDER / f"{part}-{what}-idx{n_axes}-ubyte.gz"
    data = gzip.decompress(path.read_bytes())
    magic, *shape = np.frombuffer(data, ">u4", 1 + n_axes).tolist()
    wanted = [_SHAPES[part], SIDE, SIDE][:n_axes]
    if magic != _MAGIC[what] or shape != wanted or len(data) != 4 + 4 * n_axes + np.prod(shape):
        raise ValueError(f"{path} is not the file of {what} that it should be; {HOW}")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * n_axes).reshape(shape)


def main(argv: list[str]) -> int:
    """Fetch the set, unless it is there.

    Args:
        argv: the package, if it is here already.

    Returns:
        The exit status.
    """
    script = "benchmarks/data/fashion_mnist.py"
    status = debian_package.main(PACKAGE, _INSIDE, FOLDER, script, argv)
    if status == 0:
        print(f"{FOLDER}: {len(load().images):,} images")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
