"""What tensors take in memory, packed: equal to what packing really takes, bit for bit."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from cases import each
from real_model import model_path, real_tensors
from safetensors.numpy import load_file, save_file
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from packhorse.codecs import weight_plan, weights
from packhorse.device import pack_model_
from packhorse.host import pack_table
from packhorse.layout import W11, W12
from packhorse.reports.memory import describe_memory
from packhorse.reports.results import MemoryRow, total
from packhorse.reports.sampling import choose_places, take_sample
from packhorse.reports.sources import Source, opened


def rows_of(path: Path, share: float = 1.0) -> dict[str, MemoryRow]:
    with opened(Source("it", str(path))) as file:
        return {
            entry.name: describe_memory(file, take_sample(file, entry, choose_places(entry, share)))
            for entry in file.entries
        }


def saved(path: Path, tensors: dict[str, Any]) -> Path:
    save_file(tensors, path)
    return path


def bf16(*shape: int, scale: float = 0.02) -> np.ndarray:
    values = np.random.default_rng(sum(shape)).standard_normal(shape, np.float32) * scale
    return values.astype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model with its first two layers, BF16."""
    return saved(tmp_path_factory.mktemp("model") / "m.safetensors", real_tensors(2))


def module_of(path: Path) -> BertModel:
    config = BertConfig.from_pretrained(model_path().parent, num_hidden_layers=2)
    bert = BertModel(config).to(torch.bfloat16)
    state = {
        name: torch.from_numpy(tensor.view(np.uint16).copy()).view(torch.bfloat16)
        for name, tensor in load_file(path).items()
        if tensor.dtype == ml_dtypes.bfloat16
    }
    bert.load_state_dict(state, strict=False)
    return bert.eval()


def test_a_model_takes_in_memory_what_the_report_says(model: Path) -> None:
    found = rows_of(model)
    report = pack_model_(module_of(model))
    assert len(report.packed) == 14
    for weight in report.packed:
        row = found.pop(f"{weight.name}.weight")
        assert row.device_nbytes is not None
        assert (row.device_nbytes.nbytes, row.device_nbytes.error) == (weight.nbytes, 0)
        assert row.device_note.startswith(weight.format)
        assert row.formats[weight.format].nbytes == row.device_nbytes
        assert row.formats["W11"].exceptions > row.formats["W12"].exceptions
        assert row.exceptions is not None
        assert 0 < row.exceptions < 0.01
        assert row.layer == (int(weight.name.split(".")[2]) if "layer" in weight.name else None)
    left = {f"{each.name}.weight": each.reason for each in report.left}
    assert {name: found[name].device_note for name in left} == left
    assert all(row.device_nbytes is None and row.device_note for row in found.values())


def test_embeddings_take_in_memory_of_the_host_what_the_report_says(model: Path) -> None:
    found = rows_of(model)
    report = pack_model_(module_of(model), embeddings="host")
    hosted = {f"{each.name}.weight": each for each in report.packed if each.is_in_host}
    assert len(hosted) == 2
    for name, row in found.items():
        assert (row.host_nbytes is not None) == (name in hosted)
        if row.host_nbytes is None:
            assert row.host_note
            continue
        assert (row.host_nbytes.nbytes, row.host_nbytes.error) == (hosted[name].nbytes, 0)
        assert f"host, {row.host_note}" == hosted[name].format
        assert row.pulled == pytest.approx(0.73, abs=0.03)


def test_a_table_of_which_only_a_sample_decides_and_rows_with_exceptions(tmp_path: Path) -> None:
    """More rows than the sample that chooses how they are packed; F32, F8, sparse and raw ones."""
    rng = np.random.default_rng(0)
    words = real_tensors(1)["embeddings.word_embeddings.weight"]
    sparse = np.where(rng.random((9000, 300)) < 0.02, rng.standard_normal((9000, 300)), 0)
    tables = {
        "bf16.embedding": words,
        "f32.embedding": words[:9000].astype(np.float32),
        "f8.embedding": words[:5000].astype(ml_dtypes.float8_e4m3fn),
        "sparse.embedding": sparse.astype(np.float32),
        "raw.embedding": rng.integers(0, 1 << 60, (999, 33), np.int64),
    }
    found = rows_of(saved(tmp_path / "tables.safetensors", tables))
    n_with_exceptions = 0
    for name, rows in tables.items():
        table, row = pack_table(rows), found[name]
        assert row.host_nbytes is not None
        assert (row.host_nbytes.nbytes, row.host_note) == (table.nbytes, table.way.words), name
        assert row.pulled == table.way.pulled[32] / table.way.format.row_nbytes
        n_with_exceptions += table.arrays.exception_columns.size > 0
    assert n_with_exceptions >= 2


def with_outliers(elements: np.ndarray, share: float) -> np.ndarray:
    places = np.random.default_rng(1).random(elements.shape) < share
    return np.where(places, elements * ml_dtypes.bfloat16(2.0**30), elements)


def test_formats_are_chosen_as_there(tmp_path: Path) -> None:
    """W11 for rows of few exponents; W12 if the rows that were looked at first mislead; none."""
    narrow = np.sign(bf16(640, 512)) * (np.abs(bf16(640, 512, scale=1)) * 0 + 1)
    misled = narrow.copy()
    misled[5::10] = bf16(64, 512)  # which a sample of every tenth row misses
    matrices = {
        "narrow.weight": narrow,
        "misled.weight": misled,
        "usual.weight": with_outliers(bf16(300, 512), 0.001),
        "noise.weight": np.random.default_rng(3).integers(0, 1 << 16, (99, 512), np.uint16)
        .view(ml_dtypes.bfloat16),
        "thin.weight": bf16(5000, 3),
    }  # fmt: skip
    found = rows_of(saved(tmp_path / "matrices.safetensors", matrices))
    formats = {}
    for name, matrix in matrices.items():
        layer = torch.nn.Linear(matrix.shape[1], len(matrix), bias=False, dtype=torch.bfloat16)
        tensor = torch.from_numpy(matrix.view(np.uint16).copy()).view(torch.bfloat16)
        layer.weight = torch.nn.Parameter(tensor)
        report, row = pack_model_(torch.nn.Sequential(layer), dry_run=True), found[name]
        if report.left:
            assert (row.device_nbytes, row.device_note) == (None, report.left[0].reason)
            continue
        assert row.device_nbytes is not None
        assert row.device_nbytes.nbytes == report.packed[0].nbytes
        formats[name] = row.device_note[:3]
        kind = W11 if formats[name] == "W11" else W12
        share = weights.count_exceptions(matrix.view(np.uint16), kind) / matrix.size
        assert row.exceptions == share
    assert formats == {"narrow.weight": "W11", "misled.weight": "W12", "usual.weight": "W12"}
    assert weight_plan.SAMPLED_ROWS == 64


def test_samples_tell_the_size_within_their_error(model: Path) -> None:
    exact, sampled = rows_of(model), rows_of(model, 0.2)
    n_sampled = 0
    for name, row in exact.items():
        for whole, part in (
            (row.device_nbytes, sampled[name].device_nbytes),
            (row.host_nbytes, sampled[name].host_nbytes),
        ):
            assert (whole is None) == (part is None), name
            if whole is not None and part is not None:
                assert abs(part.nbytes - whole.nbytes) <= 2 * part.error + 0.001 * row.nbytes
                n_sampled += part.error > 0
    assert n_sampled == 6
    found = [total([r.device_nbytes for r in rows.values() if r.device_nbytes])
             for rows in (exact, sampled)]  # fmt: skip
    assert found[1].nbytes == pytest.approx(found[0].nbytes, rel=1e-3)


SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 300,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


@each("make", [
    lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    lambda: MixtralForCausalLM(MixtralConfig(num_local_experts=2, **SIZES)),
    lambda: T5ForConditionalGeneration(
        T5Config(d_model=128, d_ff=256, num_layers=1, d_kv=64, num_heads=2, vocab_size=300)
    ),
])  # fmt: skip
def test_names_in_files_of_transformers_tell_what_is_packed(tmp_path: Path, make: Any) -> None:
    model = make().to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / type(model).__name__)
    found = rows_of(tmp_path / type(model).__name__)
    report = pack_model_(model, dry_run=True)
    packed = {f"{n}.weight": w.nbytes for w in report.packed for n in w.name.split(" = ")}
    sizes = {name: row.device_nbytes.nbytes for name, row in found.items() if row.device_nbytes}
    assert sizes == {name: nbytes for name, nbytes in packed.items() if name in found}
    assert len(sizes) >= 6


@each("name, tensor, device, host", [
    ("a.weight.exp_avg", bf16(64, 64), "optimizer", "no embedding"),
    ("conv.weight", bf16(64, 8, 3, 3), "4 dimensions", "no embedding"),
    ("norm.weight", bf16(64), "1 dimension;", "no embedding"),
    ("mlp.experts.1.w1.weight", bf16(64, 64), "one of several experts", "no embedding"),
    ("model.layers.0.mlp.gate.weight", bf16(64, 64), "a router", "no embedding"),
    ("rnn.weight_ih_l0", bf16(64, 64), "not the weight of a layer", "no embedding"),
    ("a.weight", bf16(64, 64).astype(np.float16), "BF16, not F16", "no embedding"),
    ("wide.weight", bf16(1, 65537), "65537 columns; at most 65536", "no embedding"),
    ("position_embedding.weight", bf16(512, 64), "input embedding only", "exponents"),
    ("embedding.weight", bf16(1, 65537), "65537 columns", "65537 columns"),
    ("small.embedding.weight", bf16(64, 64), "W12", "takes 8192 bytes; less than 64 KiB"),
    ("patch_embed.weight", bf16(64, 3, 16, 16), "4 dimensions", "rows and columns, not shape"),
    ("mask.embedding", np.ones((300, 300), np.bool_), "not the weight of a layer", "of columns"),
    ("empty.weight", bf16(0, 64), "no gain", "no embedding"),
    ("none.weight", bf16(64, 0), "0 columns", "no embedding"),
    ("h.0.mlp.c_fc.weight", bf16(64, 256), "Conv1D stays", "no embedding"),
])  # fmt: skip
def test_reasons(tmp_path: Path, name: str, tensor: np.ndarray, device: str, host: str) -> None:
    (row,) = rows_of(saved(tmp_path / "one.safetensors", {name: tensor})).values()
    assert device in row.device_note, row
    assert host in row.host_note, row
    assert (row.exceptions is None) == (row.device_nbytes is None)
    assert (row.pulled is None) == (row.host_nbytes is None)


def test_rows_that_are_too_long_for_a_sample_and_data_at_an_odd_byte(tmp_path: Path) -> None:
    long = np.ones((20, 40_000))
    path = saved(tmp_path / "m.safetensors", {"long.embedding": long})
    row = rows_of(path, 0.1)["long.embedding"]
    assert row.host_nbytes is None
    assert "no row of it was sampled" in row.host_note
    assert rows_of(path)["long.embedding"].host_nbytes is not None
    text = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"w.weight":{"dtype":"BF16","shape":[64,64],"data_offsets":[1,8193]}}'
    )
    odd = tmp_path / "odd.safetensors"
    odd.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" + bf16(64, 64).tobytes())
    even = saved(tmp_path / "even.safetensors", {"w.weight": bf16(64, 64)})
    assert rows_of(odd)["w.weight"].device_nbytes == rows_of(even)["w.weight"].device_nbytes
