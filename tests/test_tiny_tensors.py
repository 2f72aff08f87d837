"""Tensors smaller than a frame's header grow when they are packed, and all who pack them say so."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from disk_samples import write_sample
from safetensors.numpy import save_file

from packhorse.cli import main
from packhorse.disk import pack_file, pack_folder, plan_file
from packhorse.frame import compress_buffer, plan_buffer, planned_frame_nbytes


@pytest.fixture
def tiny(tmp_path):
    rng = np.random.default_rng(0)
    scales = {f"{i}.scale": rng.standard_normal(16).astype(np.float32) for i in range(1100)}
    (tmp_path / "model").mkdir()
    save_file(scales, tmp_path / "model" / "tiny.safetensors")
    return tmp_path / "model" / "tiny.safetensors"


WORDS = (
    "1,100 of 1,100 tensors are smaller than their frames, which have a header each: packed they "
    "take 211,200 bytes instead of 70,400"
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
