"""Tensors in memory that the host cannot read: they are copied to the host, and back in place."""

from pathlib import Path

import pytest
import torch
from forked import run_forked

backends = pytest.importorskip("torch.utils.backend_registration")

CHILD = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from faraway import Far
from packhorse import torch as ph
from packhorse.disk import PackhorseReader, PackhorseWriter, SnapshotStore

folder = sys.argv[1]
master = torch.randn(100, 200, generator=torch.Generator().manual_seed(0))
host = {"m": {"copy": master.bfloat16(), "master": master, "zero_dim": torch.tensor(2.5),
              "strided": master.T[::3], "empty": torch.empty(0, 3)}}
far = {"m": {name: Far(tensor) for name, tensor in host["m"].items()}}
assert all(tensor.device.type == "faraway" for tensor in far["m"].values())

def check(found):
    assert found["m"].keys() == host["m"].keys()
    for name, tensor in host["m"].items():
        data = found["m"][name]
        data = data.host if isinstance(data, Far) else data
        assert data.dtype == tensor.dtype and torch.equal(data, tensor), name

def blank():
    return {"m": {name: Far(torch.zeros_like(tensor)) for name, tensor in host["m"].items()}}

frame = ph.compress(far["m"]["strided"])
assert torch.equal(ph.decompress(frame), host["m"]["strided"])

with SnapshotStore(folder + "/s") as store:
    store.take("a", far)
    assert store.info("a").tensors[0].packed_nbytes < 1000  # seen to be a rounded copy
    master += 1e-5
    host["m"]["copy"].copy_(master)
    store.take_async("b", far)
    store.close()
    assert store.info("b").max_deltas
    check(store.restore("b", framework="pt"))
    target = blank()
    found = store.restore("b", framework="pt", into=target)
    assert found["m"]["master"] is target["m"]["master"]
    check(target)
    assert store.verify() == []

for i, base in (("0", None), ("1", folder + "/0")):
    dcp.save(far, storage_writer=PackhorseWriter(folder + "/" + i, base=base))
    target = blank()
    dcp.load(target, storage_reader=PackhorseReader(folder + "/" + i))
    check(target)
    master += 1e-5
    host["m"]["copy"].copy_(master)
print("ok")
"""


def test_tensors_of_a_device_are_copied_and_come_back(tmp_path: Path) -> None:
    if not hasattr(backends, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"PyTorch {torch.__version__} has no backends in Python")
    (tmp_path / "program.py").write_text(CHILD)
    assert run_forked(tmp_path / "program.py", tmp_path / "printed", tmp_path) == 0
    assert (tmp_path / "printed").read_text() == "ok\n"
