"""Checks an installed wheel that has nothing but its own dependencies: `python tests/smoke.py`.

`.ci/wheel` runs this in new environments, away from the checkout. It needs no pytest, no PyTorch
and none of the extras, and prints its result in one line.
"""

import json
import os
import subprocess
import sys
import sysconfig
from importlib import import_module, metadata, resources
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np

import packhorse
from packhorse import _core
from packhorse.disk import SnapshotStore, pack_file, unpack_file, verify_file
from packhorse.numpy import compress, decompress, load_file, save_file


def weights(seed: int) -> np.ndarray:
    """BF16 numbers such as layers have."""
    rng = np.random.default_rng(seed)
    return (0.02 * rng.standard_normal((300, 1000))).astype(ml_dtypes.bfloat16)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays are equal bit for bit."""
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


def check_arrays() -> None:
    """One array to a frame and back, plain and against a base."""
    old, new = weights(0), weights(0)
    new[::7, ::11] += ml_dtypes.bfloat16(0.5)
    frame = compress(new)
    assert frame.ratio > 1.3, frame
    assert same(decompress(frame.to_bytes()), new)
    delta = compress(new, base=old)
    assert delta.nbytes < frame.nbytes / 2
    assert same(decompress(delta, base=old), new)


def check_files(folder: Path) -> None:
    """A file from arrays, and one of another writer, byte for byte."""
    save_file({"w": weights(1), "step": np.array(7)}, folder / "packed")
    assert same(load_file(folder / "packed")["w"], weights(1))
    with packhorse.open_file(folder / "packed") as file:
        assert same(file.get_slice("w")[10:20], weights(1)[10:20])
    data = weights(2).tobytes()
    header = {"w": {"dtype": "BF16", "shape": [300, 1000], "data_offsets": [0, len(data)]}}
    text = json.dumps(header).encode()
    (folder / "plain").write_bytes(len(text).to_bytes(8, "little") + text + data)
    pack_file(folder / "plain", folder / "again")
    assert verify_file(folder / "again") == []
    unpack_file(folder / "again", folder / "back")
    assert (folder / "back").read_bytes() == (folder / "plain").read_bytes()


def check_store(folder: Path) -> None:
    """A snapshot, and the next one as its difference."""
    with SnapshotStore(folder / "store") as store:
        store.take("1", {"w": weights(3), "step": 1})
        store.take("2", {"w": weights(3), "step": 2})
        assert store.verify() == []
        state = store.restore("2")
    assert state["step"] == 2
    assert same(state["w"], weights(3))


def check_what_is_missing() -> None:
    """Errors name extras that are not installed."""
    words = ""
    try:
        import_module("packhorse.torch")
    except packhorse.MissingBackendError as error:
        words = str(error)
    assert "packhorse[torch]" in words, "PyTorch is there, and none is expected"
    command = Path(sysconfig.get_path("scripts")) / "packhorse"
    done = subprocess.run([command, "--version"], capture_output=True, text=True)
    assert done.returncode == 4, done
    assert "packhorse[cli]" in done.stderr


def check_package() -> None:
    """The wheel has its own files, and nothing else of a checkout."""
    assert metadata.version("packhorse") == packhorse.__version__
    assert resources.files("packhorse").joinpath("py.typed").is_file()
    place = Path(packhorse.__file__).resolve()
    assert place.is_relative_to(Path(sys.prefix).resolve()), place
    assert {path.suffix for path in place.parent.rglob("*") if path.is_file()} <= {
        ".py", ".pyi", ".pyc", ".so", ".typed",  # and of the kernels and the page of a report:
        ".cu", ".css", ".html", ".js", ".txt",
    }  # fmt: skip


def main() -> None:
    """Run all checks."""
    check_package()
    check_arrays()
    with TemporaryDirectory() as folder:
        check_files(Path(folder))
        check_store(Path(folder))
    check_what_is_missing()
    python = ".".join(map(str, sys.version_info[:3]))
    core = Path(_core.__file__).name
    print(f"ok: Python {python}, {core}, instruction set {_core.detect_isa()}, in {os.getcwd()}")


if __name__ == "__main__":
    main()
