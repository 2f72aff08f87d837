"""Memory of the caller that is written to: PyTorch learns about it, and no two calls share it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dcp_samples import load, save

from packhorse import numpy as ph_numpy
from packhorse import torch as ph_torch
from packhorse.disk import SnapshotStore
from packhorse.frame import max_frame_nbytes


def saved_for_backward(tensor: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient needs the tensor as it is now."""
    factor = torch.ones_like(tensor, requires_grad=True)
    return (tensor * factor).sum()


def decompress_over(tensor: torch.Tensor, folder: Path) -> None:
    ph_torch.decompress(ph_torch.compress(torch.ones_like(tensor)), out=tensor)


def decompress_all_over(tensor: torch.Tensor, folder: Path) -> None:
    ph_torch.decompress_all([ph_torch.compress(torch.ones_like(tensor))], outs=[tensor])


def restore_over(tensor: torch.Tensor, folder: Path) -> None:
    with SnapshotStore(folder) as store:
        store.take("a", {"x": torch.ones_like(tensor)})
        store.restore("a", into={"x": tensor})


def load_checkpoint_over(tensor: torch.Tensor, folder: Path) -> None:
    save({"x": torch.ones_like(tensor)}, folder)
    load({"x": tensor}, folder)


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OVERWRITING = [decompress_over, decompress_all_over, restore_over, load_checkpoint_over]


@pytest.mark.parametrize("shape", [(64, 48), (3,)])
@pytest.mark.parametrize("overwrite", OVERWRITING)
def test_a_backward_over_a_tensor_that_was_overwritten_is_refused(
    overwrite: Callable[[torch.Tensor, Path], None], shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = torch.full(shape, 2.0)
    loss, version = saved_for_backward(tensor), tensor._version
    overwrite(tensor, tmp_path)
    assert torch.equal(tensor, torch.ones(shape))
    assert tensor._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("overwrite", OVERWRITING[:3])
def test_tensors_without_a_version_and_leaves_are_overwritten_too(
    overwrite: Callable[[torch.Tensor, Path], None], tmp_path: Path
) -> None:
    with torch.inference_mode():
        plain = torch.zeros(100)
    parameter = torch.nn.Parameter(torch.zeros(100))
    overwrite(plain, tmp_path / "plain")
    overwrite(parameter, tmp_path / "parameter")
    assert plain.eq(1).all()
    assert parameter.eq(1).all()


def test_nothing_that_is_only_read_seems_to_be_written(tmp_path: Path) -> None:
    tensor, base = torch.randn(5000), torch.randn(5000)
    ph_torch.decompress(ph_torch.compress(tensor, base=base), base=base)
    ph_torch.save_file({"x": tensor}, tmp_path / "x.ph.safetensors")
    save({"x": tensor}, tmp_path / "checkpoint")
    with SnapshotStore(tmp_path / "store") as store:
        store.take("a", {"x": tensor})
    assert (tensor._version, base._version) == (0, 0)


def memory(module: Any, n: int) -> Any:
    return torch.zeros(n) if module is ph_torch else np.zeros(n, np.float32)


@pytest.mark.parametrize("module", [ph_numpy, ph_torch], ids=["numpy", "torch"])
def test_outs_that_share_memory_are_refused(module: Any) -> None:
    n = 30_000
    values = [memory(module, n) + i for i in range(4)]
    frames = module.compress_all(values)
    whole = memory(module, 3 * n)
    apart = [memory(module, n) for _ in values]
    overlapping = [apart[0], whole[n : 2 * n], apart[1], whole[2 * n - 1 : 3 * n - 1]]
    with pytest.raises(ValueError, match=r"outs\[1\] and outs\[3\] share memory"):
        module.decompress_all(frames, outs=overlapping)
    with pytest.raises(ValueError, match=r"outs\[0\] and outs\[2\] share memory"):
        module.decompress_all(frames, outs=[apart[0], apart[1], apart[0], apart[2]])
    room = bytearray(2 * max_frame_nbytes("F32", (n,)))
    rooms = [memoryview(room)[i : i + len(room) // 2] for i in (0, 64)]
    with pytest.raises(ValueError, match=r"outs\[0\] and outs\[1\] share memory"):
        module.compress_all(values[:2], outs=rooms)
    assert not any(room)
    assert not whole.any()
    touching = [whole[:n], whole[n : 2 * n], whole[2 * n :], apart[3]]
    for got, value in zip(module.decompress_all(frames, outs=touching), values, strict=True):
        assert (got == value).all()


@pytest.mark.parametrize("module", [ph_numpy, ph_torch], ids=["numpy", "torch"])
def test_an_out_over_what_another_call_reads_is_refused(module: Any) -> None:
    """For a base, a frame and a tensor; the message names both, ordered by their addresses."""
    n = 30_000
    values = [memory(module, n) + i for i in range(2)]
    bases = [value + 1e-3 for value in values]
    frames = module.compress_all(values, bases=bases)
    untouched = memory(module, n)
    with pytest.raises(ValueError, match=r"bases\[0\].* share memory"):
        module.decompress_all(frames, outs=[untouched, bases[0]], bases=bases)

    packed = frames[0].to_bytes()
    room = np.zeros(4 * n, np.uint8)
    room[: len(packed)] = np.frombuffer(packed, np.uint8)
    target = room.view(np.float32)
    target = target if module is ph_numpy else torch.from_numpy(target)
    some = [room[: len(packed)], frames[1]]
    with pytest.raises(ValueError, match=r"frame 0.* share memory"):
        module.decompress_all(some, outs=[untouched, target], bases=bases)
    assert room[: len(packed)].tobytes() == packed
    assert not untouched.any()

    rooms = [bytearray(max_frame_nbytes("F32", (n,))), np.asarray(values[0]).view(np.uint8)]
    with pytest.raises(ValueError, match=r"(array|tensor) 0.* share memory"):
        module.compress_all([values[0], values[1][: n // 2]], outs=rooms)
    assert not any(rooms[0])


def test_an_out_over_a_base_that_is_not_contiguous_is_refused() -> None:
    """What the core reads for it is a copy, but the caller's base is not to be written."""
    whole = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    base = whole[:, ::2]
    value, before = np.ascontiguousarray(base) + 1, whole.copy()
    room = whole.reshape(-1).view(np.uint8)
    with pytest.raises(ValueError, match=r"bases\[0\].* share memory"):
        ph_numpy.compress_all([value], bases=[base], outs=[room])
    frames = ph_numpy.compress_all([value], bases=[base])
    with pytest.raises(ValueError, match=r"bases\[0\].* share memory"):
        ph_numpy.decompress_all(frames, bases=[base], outs=[whole[:32].reshape(64, 32)])
    np.testing.assert_array_equal(whole, before)


def test_inputs_may_share_memory() -> None:
    array = np.arange(10_000, dtype=np.float32)
    frames = ph_numpy.compress_all([array, array, array[10:]], bases=[None, array, array[10:]])
    assert [frame.shape for frame in frames] == [(10_000,), (10_000,), (9990,)]


def test_overlaps_are_looked_for_in_reasonable_time() -> None:
    """Comparing all pairs of so many would take a minute."""
    n = 10_000
    whole = np.zeros(n, np.float32)
    frame = ph_numpy.compress(np.ones(1, np.float32))
    start = time.process_time()
    ph_numpy.decompress_all([frame] * n, outs=[whole[i : i + 1] for i in range(n)], threads=1)
    assert time.process_time() - start < 20
    assert whole.all()
