"""Runs every reader of files on a file of many small tensors, in a process that may open few
files."""

import resource
import sys
import warnings
from pathlib import Path

import numpy as np
import safetensors.numpy

import packhorse
import packhorse.numpy
from packhorse.cli.actions import inspect
from packhorse.cli.measure import Settings, bench_file
from packhorse.disk import (
    SnapshotStore,
    pack_file,
    pack_folder,
    plan_file,
    unpack_file,
    unpack_folder,
    verify_file,
    verify_folder,
)

N_TENSORS, MAX_OPEN = 300, 64


def check(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert got.keys() == wanted.keys()
    assert all(np.array_equal(got[name], wanted[name]) for name in wanted)


def main(folder: Path) -> None:
    """Run all readers in an existing folder."""
    rng = np.random.default_rng(0)
    tensors = {f"{i}.scale": rng.standard_normal(64).astype(np.float32) for i in range(N_TENSORS)}
    copies = {f"{name}.copy": tensor.astype(np.float16) for name, tensor in tensors.items()}
    tensors |= copies
    source, older, packed, back = (folder / name for name in ("model", "old", "packed", "back"))
    for path in (source, older):
        safetensors.numpy.save_file(tensors, path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN, MAX_OPEN))

    pack_file(source, packed)
    unpack_file(packed, back)
    assert back.read_bytes() == source.read_bytes()
    assert verify_file(packed) == []
    assert len(plan_file(source)) == len(inspect(packed)[0].tensors) == len(tensors)
    check(packhorse.numpy.load_file(packed), tensors)
    with packhorse.open_file(packed) as file:
        check({name: file.get_tensor(name) for name in file}, tensors)
    bench_file(source, Settings("fast", 1, 1))

    for base in (older, packed):
        pack_file(source, folder / "based", force=True, base=base)
        unpack_file(folder / "based", back, force=True, base=base)
        check(packhorse.numpy.load_file(folder / "based", base=base), tensors)
        assert verify_file(folder / "based", base=base) == []

    warnings.filterwarnings("ignore", "snapshot .* tensors grow when packed")
    with SnapshotStore(folder / "store") as store:
        for name, file in (("plain", source), ("packed", packed)):
            store.take_files(name, [file])
            check(store.restore(name), tensors)
            store.restore_file(name, folder / f"{name}.safetensors")

    shards = folder / "shards"
    shards.mkdir()
    for i in range(80):
        safetensors.numpy.save_file(
            {f"{i}.{j}": np.arange(j) for j in range(3)}, shards / f"{i}.safetensors"
        )
    pack_folder(shards, folder / "packed shards")
    assert verify_folder(folder / "packed shards") == []
    unpack_folder(folder / "packed shards", folder / "unpacked")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
