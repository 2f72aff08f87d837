"""The command line: every verb on real model files, in this process if that is enough.

Tests that need a separate process (signals, terminals, limits, permissions) are in
`cli/test_process.py`, tests of bad input in `cli/test_bad_input.py`.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest
from cli_samples import (
    METADATA,
    Ended,
    contents,
    flip_bytes,
    frame_offsets,
    tensors,
    write_header,
    write_model,
)
from safetensors import safe_open
from safetensors.numpy import save_file

import packhorse
from packhorse.cli import rows
from packhorse.cli.failures import ExitCode

Run = Callable[..., Ended]


# Packing and unpacking


@pytest.mark.parametrize("level", ["fast", "default", "max"])
def test_pack_then_unpack_gives_the_same_bytes(tmp_path: Path, model: Path, run: Run, level: str):
    original = model.read_bytes()
    target = tmp_path / "small.ph.safetensors"
    assert run("pack", model, "-o", target, "--level", level, "--threads", 2) == Ended(0, "", "")
    assert model.read_bytes() == original
    assert target.stat().st_size < len(original)
    assert run("unpack", target, "-o", tmp_path / "back.safetensors") == Ended(0, "", "")
    assert (tmp_path / "back.safetensors").read_bytes() == original


def test_output_stands_beside_the_source(tmp_path: Path, model: Path, run: Run):
    original = model.read_bytes()
    assert run("pack", model).code == 0
    model.unlink()
    assert run("unpack", tmp_path / "model.ph.safetensors").code == 0
    assert model.read_bytes() == original


def test_packed_file_lists_its_tensors_in_safetensors(packed: Path):
    with safe_open(packed, "np") as file:
        assert set(file.keys()) == set(tensors())
        assert METADATA.items() <= file.metadata().items()


def test_packing_twice_gives_the_same_bytes(tmp_path: Path, model: Path, packed: Path, run: Run):
    assert run("pack", model, "-o", tmp_path / "again.ph.safetensors", "--threads", 1).code == 0
    assert (tmp_path / "again.ph.safetensors").read_bytes() == packed.read_bytes()


def test_several_sources_go_into_a_folder(tmp_path: Path, run: Run):
    sources = [write_model(tmp_path / f"{name}.safetensors", rows=i) for i, name in enumerate("ab")]
    target = tmp_path / "out"
    target.mkdir()
    assert run("pack", *sources, "-o", target).code == 0
    assert sorted(contents(target)) == ["a.ph.safetensors", "b.ph.safetensors"]
    back = tmp_path / "back"
    back.mkdir()
    assert run("unpack", *sorted(target.iterdir()), "-o", back).code == 0
    assert contents(back) == {path.name: path.read_bytes() for path in sources}


def test_one_file_goes_into_a_folder_that_exists(tmp_path: Path, model: Path, run: Run):
    (tmp_path / "out").mkdir()
    assert run("pack", model, "-o", tmp_path / "out").code == 0
    assert list(contents(tmp_path / "out")) == ["model.ph.safetensors"]


def test_one_bad_source_does_not_stop_the_others(tmp_path: Path, model: Path, run: Run):
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(model.read_bytes()[:-1])
    last = write_model(tmp_path / "last.safetensors", rows=3)
    done = run("pack", model, bad, last)
    assert done.code == 1
    assert str(bad) in done.error
    names = {path.name for path in tmp_path.glob("*.ph.safetensors")}
    assert names == {"model.ph.safetensors", "last.ph.safetensors"}


def test_existing_output_needs_force(model: Path, packed: Path, run: Run):
    before = packed.read_bytes()
    packed.write_bytes(b"mine")
    refused = run("pack", model)
    assert refused.code == 2
    assert str(packed) in refused.error
    assert "--force" in refused.error
    assert packed.read_bytes() == b"mine"
    assert run("pack", model, "--force").code == 0
    assert packed.read_bytes() == before


def test_names_with_spaces_and_other_scripts(tmp_path: Path, run: Run):
    model = write_model(tmp_path / "un modèle [β].safetensors")
    assert run("pack", model).code == 0
    assert run("verify", tmp_path / "un modèle [β].ph.safetensors").out.startswith(
        f"{tmp_path / 'un modèle [β].ph.safetensors'}: ok"
    )


def test_pack_json_tells_sizes_and_speed(model: Path, run: Run):
    done = run("pack", model, "--json")
    document = json.loads(done.out)
    (row,) = document["results"]
    packed = Path(row["dst"])
    assert document["errors"] == []
    assert row["src"] == str(model)
    assert row["n_files"] == 1
    assert row["n_tensors"] == len(tensors())
    assert row["nbytes"] == model.stat().st_size
    assert row["packed_nbytes"] == packed.stat().st_size
    assert row["ratio"] == pytest.approx(row["nbytes"] / row["packed_nbytes"])
    assert row["gb_per_s"] == pytest.approx(row["nbytes"] / row["seconds"] / 1e9)


def test_json_tells_errors_too(tmp_path: Path, model: Path, run: Run):
    bad = write_header(tmp_path / "bad.safetensors", "{]")
    done = run("pack", bad, model, "--json")
    document = json.loads(done.out)
    assert done.code == 1
    assert [row["src"] for row in document["results"]] == [str(model)]
    assert document["errors"] == [{"path": str(bad), "exit_code": 1, "message": done.error}]


# Dry run


def test_dry_run_writes_nothing(tmp_path: Path, model: Path, packed: Path, run: Run):
    before = contents(tmp_path)
    done = run("pack", model, "--dry-run")
    assert done.code == 0
    assert contents(tmp_path) == before
    for name, tensor in tensors().items():
        (line,) = [line for line in done.out.splitlines() if line.startswith(f" {name} ")]
        assert "x".join(map(str, tensor.shape)) in line


def test_dry_run_estimates_what_packing_gives(model: Path, packed: Path, run: Run):
    (row,) = json.loads(run("pack", model, "--dry-run", "--json").out)["results"]
    assert row["estimated_nbytes"] == pytest.approx(packed.stat().st_size, rel=0.05)
    reasons = {tensor["name"]: tensor["reason"] for tensor in row["tensors"]}
    assert reasons.keys() == tensors().keys()
    assert all(reasons.values())


def test_dry_run_of_a_folder(tmp_path: Path, folder: Path, run: Run):
    before = contents(tmp_path)
    planned = json.loads(run("pack", folder, "--dry-run", "--json").out)["results"]
    assert [Path(row["src"]).name for row in planned] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert contents(tmp_path) == before


# Folders


def test_folder_comes_back_exactly(tmp_path: Path, folder: Path, run: Run):
    before = contents(folder)
    assert run("pack", folder) == Ended(0, "", "")
    target = tmp_path / "llama.ph"
    assert contents(folder) == before
    assert "model-00001-of-00002.ph.safetensors" in contents(target)
    weight_map = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map.values()) == {
        "model-00001-of-00002.ph.safetensors",
        "model-00002-of-00002.ph.safetensors",
    }
    shutil.rmtree(folder)
    assert run("verify", target).code == 0
    assert run("unpack", target) == Ended(0, "", "")
    assert contents(folder) == before


def test_folder_in_the_place_where_one_stands(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder)
    assert run("pack", ".").code == 0
    assert (folder.parent / "llama.ph").is_dir()


def test_existing_folder_needs_force(tmp_path: Path, folder: Path, run: Run):
    assert run("pack", folder).code == 0
    before = contents(tmp_path)
    refused = run("pack", folder)
    assert refused.code == 2
    assert "llama.ph" in refused.error
    assert contents(tmp_path) == before
    assert run("pack", folder, "--force").code == 0
    assert contents(tmp_path) == before


def test_force_does_not_delete_other_peoples_files(tmp_path: Path, folder: Path, run: Run):
    (tmp_path / "llama.ph").mkdir()
    (tmp_path / "llama.ph" / "thesis.txt").write_text("years of work")
    before = contents(tmp_path)
    refused = run("pack", folder, "--force")
    assert refused.code == 2
    assert "thesis.txt" in refused.error
    assert contents(tmp_path) == before


def test_folder_json_counts_files(folder: Path, run: Run):
    (row,) = json.loads(run("pack", folder, "--json").out)["results"]
    assert (row["n_files"], row["n_copied"], row["n_tensors"]) == (2, 2, 2 * len(tensors()))


# Looking at packed files


def test_inspect_shows_every_tensor(packed: Path, run: Run):
    done = run("inspect", packed)
    assert done.code == 0
    for name, tensor in tensors().items():
        (line,) = [line for line in done.out.splitlines() if line.startswith(f" {name} ")]
        assert ("x".join(map(str, tensor.shape)) or "scalar") in line
    (line,) = [line for line in done.out.splitlines() if " layers.0.weight " in line]
    assert "exponent rans" in line
    assert "█" in line
    assert "·" in line


def test_inspect_json_adds_up(packed: Path, run: Run):
    (row,) = json.loads(run("inspect", packed, "--json").out)["results"]
    offsets = frame_offsets(packed)
    assert row["metadata"] == METADATA
    assert row["packed_nbytes"] == packed.stat().st_size
    for tensor in row["tensors"]:
        original = tensors()[tensor["name"]]
        start, stop = offsets[tensor["name"]]
        assert tensor["packed_nbytes"] == stop - start
        assert tensor["nbytes"] == original.nbytes
        assert tuple(tensor["shape"]) == original.shape
        assert sum(plane["nbytes"] for plane in tensor["planes"]) == original.nbytes
        assert all(sum(p["modes"].values()) == tensor["n_chunks"] for p in tensor["planes"])


def test_inspect_of_a_folder_shows_every_shard(folder: Path, run: Run):
    assert run("pack", folder).code == 0
    shards = json.loads(run("inspect", folder.with_name("llama.ph"), "--json").out)["results"]
    assert len(shards) == 2


def test_names_cannot_steer_the_terminal(tmp_path: Path, run: Run):
    model = tmp_path / "model.safetensors"
    save_file({"a\x1b[2Jb[bold]c": np.zeros(3, np.uint8)}, model)
    assert run("pack", model).code == 0
    done = run("inspect", tmp_path / "model.ph.safetensors")
    assert "\x1b" not in done.out
    assert r"a\x1b[2Jb[bold]c" in done.out


def test_verify_says_ok(packed: Path, run: Run):
    done = run("verify", packed)
    assert done.code == 0
    assert done.out.startswith(f"{packed}: ok")
    (row,) = json.loads(run("verify", packed, "--json").out)["results"]
    assert row["ok"]
    assert row["problems"] == []


def test_verify_lists_all_that_is_bad(packed: Path, run: Run):
    offsets = frame_offsets(packed)
    bad = ["layers.0.weight", "layers.1.weight"]
    flip_bytes(packed, *(offsets[name][1] - 100 for name in bad))
    done = run("verify", packed)
    assert done.code == 1
    lines = done.out.splitlines()
    assert len(lines) == len(bad)
    for name in bad:
        assert any(f"'{name}'" in line and str(packed) in line for line in lines)
    (row,) = json.loads(run("verify", packed, "--json").out)["results"]
    assert not row["ok"]
    assert {(p["tensor"], p["offset"]) for p in row["problems"]} == {
        (name, offsets[name][0]) for name in bad
    }


def test_verify_goes_on_to_the_next_source(tmp_path: Path, packed: Path, run: Run):
    good = tmp_path / "good.ph.safetensors"
    shutil.copy(packed, good)
    flip_bytes(packed, 20)
    done = run("verify", packed, good)
    assert done.code == 1
    assert f"{good}: ok" in done.out
    assert str(packed) in done.out


@pytest.mark.parametrize("level", ["fast", "default", "max"])
def test_bench_checks_and_counts(model: Path, run: Run, level: str):
    done = run("bench", model, "--level", level, "--repeat", 1, "--threads", 1, "--json")
    assert done.code == 0
    (row,) = json.loads(done.out)["results"]
    assert row["bit_exact"]
    assert row["threads"] == 1
    assert row["total"]["nbytes"] == sum(tensor.nbytes for tensor in tensors().values())
    assert {part["dtype"] for part in row["dtypes"]} == {"BF16", "F32", "F16", "I64", "U8"}
    assert row["total"]["encode_gb_per_s"] > 0
    assert row["total"]["decode_gb_per_s"] > 0


def test_bench_table_has_a_total_and_writes_nothing(tmp_path: Path, model: Path, run: Run):
    before = contents(tmp_path)
    lines = run("bench", model, "--repeat", 1).out.splitlines()
    (total,) = [line for line in lines if line.startswith(" all ")]
    assert total.endswith("yes")
    assert contents(tmp_path) == before


def test_bench_wants_the_original(packed: Path, run: Run):
    refused = run("bench", packed)
    assert refused.code == 2
    assert str(packed) in refused.error


# Help


def test_version(run: Run):
    assert run("--version").out.startswith(f"packhorse {packhorse.__version__} ")


@pytest.mark.parametrize("verb", ["pack", "unpack", "inspect", "verify", "bench"])
def test_help_has_examples(run: Run, verb: str):
    done = run(verb, "--help")
    assert done.code == 0
    assert f"packhorse {verb} model" in done.out


def test_help_tells_the_exit_codes(run: Run):
    assert "Exit codes" in run("--help").out


def test_document_names_every_field_and_exit_code():
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    classes = [value for value in vars(rows).values() if is_dataclass(value)]
    assert len(classes) > 8
    for field in {field.name for value in classes for field in fields(value)}:
        assert f"`{field}`" in text or f'"{field}"' in text, field
    for code in ExitCode:
        assert f"\n| {code.value} | " in text
