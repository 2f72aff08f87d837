"""`packhorse tune`: matrices of real model files, predictions, and the message without a GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_samples import Ended
from safetensors.torch import save_file

from packhorse.device import autotune, choices, matrix_tuning, pack_model_, product_timer
from packhorse.device.strategy import BUCKETS
from packhorse.device.tune_cache import TUNE_CACHE, Key
from packhorse.gpu import detect
from packhorse.gpu.figure_cache import Identity
from packhorse.gpu.models import PRESETS

Run = Callable[..., Ended]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
IDENTITY = Identity("NVIDIA H200", 132, "3.6.0", "0.1")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Shards with the names of a Llama, whose head is its embedding."""
    folder = tmp_path / "llama"
    folder.mkdir()
    for shard in range(2):
        prefix = f"model.layers.{shard}"
        tensors = {
            f"{prefix}.self_attn.q_proj.weight": torch.zeros(128, 64),
            f"{prefix}.mlp.down_proj.weight": torch.zeros(64, 96),
            f"{prefix}.mlp.down_proj.bias": torch.zeros(64),
            f"{prefix}.norm.weight": torch.ones(64),
            f"{prefix}.tiny.weight": torch.zeros(8, 64),
        }
        if shard == 0:
            tensors["model.embed_tokens.weight"] = torch.zeros(200, 64)
        tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        tensors[f"{prefix}.wide.weight"] = torch.zeros(77, 64)  # not BF16
        save_file(tensors, folder / f"model-{shard}.safetensors")
    return folder


def results(ended: Ended) -> list[dict[str, Any]]:
    assert ended.code == 0, ended.err
    rows: list[dict[str, Any]] = json.loads(ended.out)["results"]
    return rows


def found_shapes(rows: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(row["n_rows"], row["n_columns"], row["n_matrices"]) for row in rows]


def test_the_matrices_of_a_model_are_found(run: Run, llama: Path) -> None:
    rows = results(run("tune", llama, "--dry-run", "--gpu", "H200", "--json"))
    assert sorted(found_shapes(rows)) == [(64, 96, 2), (128, 64, 2), (200, 64, 1)]
    assert {(row["gpu"], row["format"], row["measured"]) for row in rows} == {
        ("H200", "W12", False)
    }


def test_a_packed_model_has_the_same_matrices(run: Run, llama: Path) -> None:
    plain = results(run("tune", llama, "--dry-run", "--json"))
    assert run("pack", llama).code == 0
    assert results(run("tune", llama.with_name("llama.ph"), "--dry-run", "--json")) == plain


def test_a_model_that_was_saved_packed_has_the_same_matrices(run: Run, tmp_path: Path) -> None:
    """A model as `save_pretrained` writes it; its columns include padding."""
    for name, n_columns in {"plain": 96, "padded": 90}.items():
        model = torch.nn.Sequential(torch.nn.Linear(n_columns, 128, dtype=torch.bfloat16))
        pack_model_(model, "W12")
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
        rows = results(run("tune", tmp_path / f"{name}.safetensors", "--dry-run", "--json"))
        assert found_shapes(rows) == [(128, 96, 1)]


def test_what_is_predicted(run: Run) -> None:
    options = ("--shape", "28672x4096", "--format", "W12", "--format", "W11", "--dry-run")
    rows = results(run("tune", *options, "--gpu", "h200", "--json"))
    assert [row["format"] for row in rows] == ["W12", "W11"]
    for row in rows:
        assert [bucket["n_tokens"] for bucket in row["buckets"]] == list(BUCKETS)
        first = row["buckets"][0]
        assert first["strategy"] == "fused"
        assert first["speedup"] == first["plain_seconds"] / first["seconds"]
        # W11's many exceptions cost more than its bytes save (docs/device.md).
        least, most = (1.2, 1.5) if row["format"] == "W12" else (0.3, 0.8)
        assert least < first["speedup"] < most
    ended = run("tune", *options)
    assert "predicted for H200" in ended.out
    assert "28672 x 4096 W12" in ended.out


@WITHOUT_GPU
def test_without_a_gpu_the_error_names_the_dry_run(run: Run) -> None:
    ended = run("tune", "--shape", "64x64", "--shape", "64x128")
    assert ended.code == 3
    assert ended.err.count("\n") == 1
    assert "this machine has no CUDA GPU" in ended.err
    assert "--dry-run" in ended.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--dry-run",), 2, "name a model"),
        (("--shape", "4096", "--dry-run"), 2, "not a shape"),
        (("--shape", "0x64", "--dry-run"), 2, "not a shape"),
        (("--shape", "64x65537", "--dry-run"), 2, "65536 columns"),
        (("--shape", "64x64", "--gpu", "H200"), 2, "--dry-run"),
        (("--shape", "64x64", "--dry-run", "--gpu", "B9000"), 2, "H100"),
        (("--shape", "64x64", "--dry-run", "--again"), 2, "exclude --dry-run"),
        (("--shape", "64x64", "--dry-run", "--cache", "here"), 2, "exclude --dry-run"),
        (("absent.safetensors", "--dry-run"), 3, "absent.safetensors"),
    ],
    ids=str,
)
def test_bad_words_are_named(run: Run, words: tuple[str, ...], code: int, message: str) -> None:
    ended = run("tune", *words)
    assert (ended.code, ended.out) == (code, "")
    assert message in ended.err


def test_a_model_without_matrices_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"norm.weight": torch.ones(9).bfloat16()}, path)
    ended = run("tune", path, "--dry-run")
    assert ended.code == 2
    assert "--shape" in ended.err


class HostTimer(product_timer.ProductTimer):
    """Times that depend only on the choice; the interpreter still computes the products."""

    def time(self, calls: Any) -> float:
        calls[0]()
        return 1e-5


def test_tuning_is_kept_and_goes_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tunes on the host as if it were a GPU, with Triton's interpreter."""
    for module in (choices, detect, matrix_tuning):
        monkeypatch.setattr(module, "identify", lambda _: IDENTITY)
    monkeypatch.setattr(matrix_tuning, "find_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(matrix_tuning, "describe_device", lambda _: PRESETS[0])
    monkeypatch.setattr(
        matrix_tuning, "ProductTimer", lambda *args: HostTimer(*args, chain_nbytes=1)
    )
    monkeypatch.setitem(matrix_tuning.tune_on_gpu.__kwdefaults__, "buckets", (1, 4096))
    monkeypatch.setattr(
        autotune, "_ORDER_FIELDS", {"block_steps": (32,), "n_warps": (2, 4), "n_splits": (1,)}
    )
    monkeypatch.setattr(autotune, "_FREE_FIELDS", {"block_rows": (16, 32), "n_stages": (2,)})
    (tmp_path / "file").touch()
    ended = run("tune", "--shape", "16x64", "--cache", tmp_path / "file", "--again")
    assert ended.code == 3
    assert f"{tmp_path}/file: measurements cannot be kept here" in ended.err
    options = ("tune", "--shape", "16x64", "--cache", tmp_path, "--json")
    (row,) = results(run(*options))
    path = TUNE_CACHE.path(IDENTITY.device, tmp_path)
    assert (row["gpu"], row["measured"], row["cache"]) == (IDENTITY.device, True, str(path))
    kept = TUNE_CACHE.read(path, IDENTITY)[Key(16, 64, "W12")]
    assert list(kept) == [1, 4096]
    assert kept[1].plain_seconds == 1e-5
    monkeypatch.setattr(matrix_tuning, "ProductTimer", None)  # nothing is measured again
    assert results(run(*options)) == [row]
