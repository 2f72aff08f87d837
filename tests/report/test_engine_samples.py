"""Samples for other engines: groups, places, sizes, bases."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from cli_samples import flip_bytes, frame_offsets
from disk_samples import entry, file_bytes
from real_model import model_path, real_tensors
from safetensors.numpy import load_file, save_file

from packhorse.disk import pack_file
from packhorse.reports.engine_samples import EngineSample, take_engine_samples
from packhorse.reports.sources import Source, opened


def taken(path: Path, base: Path | None = None, **options: Any) -> list[EngineSample]:
    with opened(Source("new", str(path))) as new:
        if base is None:
            return take_engine_samples(new, **options)
        with opened(Source("step 100", str(base))) as old:
            return take_engine_samples(new, old, **options)


def test_a_sample_is_of_many_tensors() -> None:
    (sample,) = taken(model_path())
    assert (sample.title, sample.dtype, sample.base) == ("weights, F32", "F32", None)
    assert 7 << 20 < sample.data.size <= 8 << 20
    tensors = load_file(model_path())
    words = tensors["embeddings.word_embeddings.weight"]
    assert 0.05 < np.isin(words.reshape(-1)[::997], sample.data.view(np.float32)).mean() < 0.2
    text = sample.data.tobytes()
    last = tensors["encoder.layer.5.output.dense.weight"]
    assert any(row.tobytes() in text for row in last[::8])


def test_groups_and_bases(tmp_path: Path) -> None:
    weights = {n: t for n, t in real_tensors(1).items() if t.dtype == ml_dtypes.bfloat16}
    state: dict[str, np.ndarray] = {"step": np.array([7]), "gone.weight": np.ones(3)}
    for name, tensor in weights.items():
        if "word" not in name:
            state[name] = tensor
            state |= {f"{name}.{kind}": tensor.astype(np.float32) for kind in ("master", "exp_avg")}
    old = {name: tensor + tensor.dtype.type(1) for name, tensor in state.items()}
    del old["gone.weight"]
    old["encoder.layer.0.output.dense.bias.exp_avg"] = np.ones(5, np.float32)
    new, base = tmp_path / "new", tmp_path / "old"
    save_file(state, new)
    save_file(old, base)
    samples = taken(new, base, nbytes=1 << 20)
    assert {sample.title for sample in samples} == {
        "masters, F32, against step 100", "first moments, F32, against step 100",
        "weights, BF16, against step 100",
    }  # fmt: skip
    for sample in samples:
        assert sample.base is not None
        assert sample.base.size == sample.data.size
        kind = np.float32 if sample.dtype == "F32" else ml_dtypes.bfloat16
        np.testing.assert_array_equal(sample.data.view(kind) + kind(1), sample.base.view(kind))
        assert 0.7 * (1 << 20) < sample.data.size <= 1 << 20
    assert len(taken(new, base, most=1)) == 1
    assert all(sample.base is None for sample in taken(new))
    assert all(sample.base is None for sample in taken(new, model_path(), nbytes=1 << 18))
    whole = {sample.dtype: sample.data.size for sample in taken(new, nbytes=1 << 30)}
    assert whole["BF16"] == sum(t.nbytes for t in state.values() if t.dtype == ml_dtypes.bfloat16)


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.weight": np.full((100, 100), i + 1.0, np.float32) for i in range(3)}
    save_file(tensors, tmp_path / "m.safetensors")
    packed = tmp_path / "m.ph.safetensors"
    pack_file(tmp_path / "m.safetensors", packed)
    flip_bytes(packed, frame_offsets(packed)["layers.1.weight"][1] - 64)
    (sample,) = taken(packed)
    assert set(sample.data.view(np.float32)) == {1.0, 3.0}


def test_elements_of_six_bits_and_empty_models(tmp_path: Path) -> None:
    nbytes = 3 << 20
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).tobytes()
    six, none = tmp_path / "six", tmp_path / "none"
    six.write_bytes(file_bytes({"w": entry(0, nbytes, "F6_E3M2", [4 << 20])}, data))
    none.write_bytes(file_bytes({"w": entry(0, 0, "F32", [0])}))
    (sample,) = taken(six, nbytes=1 << 20)
    assert 0.9 * (1 << 20) < sample.data.size <= 1 << 20
    assert sample.data.size % 3 == 0
    assert taken(none) == []
