"""Tensors smaller than a frame's header grow when they are packed, and every packer reports it."""

import json
import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest
from disk_samples import write_sample
from safetensors.numpy import save_file

from packhorse.cli import main
from packhorse.disk import SnapshotStore, pack_file, pack_folder, plan_file
from packhorse.frame import compress_buffer, plan_buffer, planned_frame_nbytes


@pytest.fixture
def tiny(tmp_path):
    rng = np.random.default_rng(0)
    scales = {f"{i}.scale": rng.standard_normal(16).astype(np.float32) for i in range(1100)}
    (tmp_path / "model").mkdir()
    save_file(scales, tmp_path / "model" / "tiny.safetensors")
    return tmp_path / "model" / "tiny.safetensors"


WORDS = (
    "1,100 of 1,100 tensors grow when packed, because each frame has a header: 211,200 bytes "
    "instead of 70,400"
)


def test_results_say_what_tiny_tensors_cost(tiny, tmp_path):
    result = pack_file(tiny, tmp_path / "out")
    assert result.ratio < 0.6
    assert result.notice == WORDS
    assert pack_folder(tiny.parent, tmp_path / "packed").notice == WORDS


def test_the_command_warns_of_a_file_that_grows(tiny, tmp_path, capsys):
    out = tmp_path / "out.ph.safetensors"
    (tmp_path / "folder").mkdir()
    for source, output in ((tiny, out), (tiny.parent, tmp_path / "folder" / "packed")):
        assert main(["pack", str(source), "-o", str(output)]) == 0
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"packhorse: warning: {output}: ratio 0.")
        assert f", larger than the original: {WORDS}" in line
        assert line.endswith(f"; keep {source} as it is")


def test_the_dry_run_foretells_the_size_with_headers(tiny, tmp_path, capsys):
    assert main(["pack", "--dry-run", "--json", str(tiny)]) == 0
    printed = capsys.readouterr()
    (planned,) = json.loads(printed.out)["results"]
    result = pack_file(tiny, tmp_path / "out")
    assert planned["nbytes"] == result.original_nbytes
    assert planned["estimated_nbytes"] == pytest.approx(result.packed_nbytes, rel=0.03)
    assert planned["notice"] == WORDS
    assert "larger than the original" in printed.err
    assert sum(plan.packed_nbytes for plan in plan_file(tiny)) == 211_200


def test_a_file_whose_data_cannot_be_packed_is_told(tmp_path, capsys):
    noise = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint8)
    save_file({"noise": noise}, tmp_path / "noise.safetensors")
    assert main(["pack", str(tmp_path / "noise.safetensors")]) == 0
    assert "larger than the original: its data cannot be packed; keep" in capsys.readouterr().err


def test_a_few_tiny_tensors_of_a_model_are_not_worth_a_word(tmp_path, capsys):
    write_sample(tmp_path / "model.safetensors")
    assert pack_file(tmp_path / "model.safetensors", tmp_path / "out").notice is None
    assert main(["pack", str(tmp_path / "model.safetensors")]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("n", [1, 16, 64, 100, 500, 2000, 16_384, 1_000_000])
def test_planned_sizes_of_frames_count_header_and_padding(n):
    rng = np.random.default_rng(n)
    weights = rng.standard_normal(n).astype(np.float32) * 0.02
    for dtype, data in (
        ("BF16", weights.astype(ml_dtypes.bfloat16)),
        ("F32", weights),
        ("F32", np.ones(n, np.float32)),
        ("U8", rng.integers(0, 256, n).astype(np.uint8)),
    ):
        source = data.view(np.uint8)
        planned = planned_frame_nbytes(plan_buffer(source, dtype, (n,)), dtype, (n,))
        assert planned == pytest.approx(compress_buffer(source, dtype, (n,)).nbytes, rel=0.03)


def test_a_warning_that_nobody_can_be_told_does_not_make_the_packing_fail(tiny, tmp_path):
    out = tmp_path / "out.ph.safetensors"
    command = [sys.executable, "-m", "packhorse", "pack", str(tiny), "-o", str(out)]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stderr=full, timeout=60).returncode == 0
    assert out.exists()


def scales(n: int = 1100) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"{i}.scale": rng.standard_normal(16).astype(np.float32) for i in range(n)}


def taken(store, how, given):
    """Takes a snapshot, in each possible way."""
    found = getattr(store, how)("a", given)
    return found.result() if how == "take_async" else found


@pytest.mark.parametrize("how", ["take", "take_files", "take_async"])
def test_a_take_warns_once_of_tensors_that_grow(tiny, tmp_path, how):
    store = SnapshotStore(tmp_path / "store")
    given = [tiny] if how == "take_files" else scales()
    with pytest.warns(RuntimeWarning) as caught:
        info = taken(store, how, given)
    (warning,) = caught
    assert info.notice == pack_file(tiny, tmp_path / "out").notice
    assert str(warning.message) == f"snapshot 'a': {info.notice}"
    if how != "take_async":
        assert warning.filename == __file__
    assert store.take("b", scales()).notice is None  # nothing of it is new
    assert store.info("a").notice is None


def test_a_take_of_a_model_has_nothing_to_tell(tmp_path):
    state = {"w": np.ones((64, 64)), **scales(2)}
    state["w"] += np.random.default_rng(0).standard_normal((64, 64))
    assert SnapshotStore(tmp_path).take("a", state).notice is None


def test_a_step_that_counts_on_has_nothing_to_tell(tmp_path):
    """The store has all other tensors already, and the only new one is smaller than its frame."""
    state = {"w": np.random.default_rng(0).standard_normal((64, 64)), "step": np.array(0)}
    store = SnapshotStore(tmp_path)
    store.take("0", state)
    assert store.take("1", state | {"step": np.array(1)}).notice is None


@pytest.mark.parametrize("how", ["take", "take_async"])
def test_a_warning_that_is_an_error_leaves_nothing_taken(tmp_path, how):
    store = SnapshotStore(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="1,100 of 1,100 tensors"):
            taken(store, how, scales())
    assert store.names() == []
    assert not [path for path in tmp_path.glob("packs/*") if path.is_file()]
    store.take("a", scales())
    assert store.verify() == []


def test_the_command_tells_of_a_snapshot_that_grows(tiny, tmp_path, capsys):
    store, notice = tmp_path / "store", pack_file(tiny, tmp_path / "out").notice
    assert main(["snapshot", "take", str(store), "a", str(tiny)]) == 0
    assert capsys.readouterr().err == f"packhorse: warning: {store}: snapshot 'a': {notice}\n"
    for name, words in (("b", None), ("c", notice)):
        target = store if name == "b" else tmp_path / "other"
        assert main(["snapshot", "take", str(target), name, str(tiny), "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["results"]
        assert row["notice"] == words
