"""`--base` with every verb, on real files that are a few training steps apart."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from base_samples import N_BASED, checkpoints, write_checkpoints, write_folder
from cli_samples import Ended, contents
from safetensors.torch import save_file

from packhorse.cli import main
from packhorse.cli.render import _STYLES
from packhorse.layout import Mode

Run = Callable[..., Ended]
Pair = tuple[Path, Path]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_checkpoints(tmp_path)


@pytest.fixture
def packed(pair: Pair, run: Run) -> Path:
    old, new = pair
    assert run("pack", new, "--base", old) == Ended(0, "", "")
    return new.with_name("new.ph.safetensors")


def results(ended: Ended) -> list[dict]:
    document = json.loads(ended.out)
    assert document["errors"] == []
    return document["results"]


def test_pack_and_unpack_give_the_same_bytes(pair: Pair, packed: Path, run: Run):
    old, new = pair
    original = new.read_bytes()
    new.unlink()
    assert run("unpack", packed, "--base", old) == Ended(0, "", "")
    assert new.read_bytes() == original
    done = run("verify", packed, "--base", old)
    assert (done.code, done.out.startswith(f"{packed}: ok")) == (0, True)


def test_a_packed_base_will_do(tmp_path: Path, pair: Pair, packed: Path, run: Run):
    old, new = pair
    assert run("pack", old).code == 0
    base = tmp_path / "old.ph.safetensors"
    for args in (("pack", new, "-o", tmp_path / "x"), ("unpack", packed, "-o", tmp_path / "y")):
        assert run(*args, "--base", base) == Ended(0, "", "")
    assert (tmp_path / "y").read_bytes() == new.read_bytes()


def test_folders_of_other_shards(tmp_path: Path, run: Run):
    old, new = checkpoints()
    base, model = write_folder(tmp_path / "base", old, 3), write_folder(tmp_path / "model", new, 2)
    before = contents(model)
    (row,) = results(run("pack", model, "--base", base, "--json"))
    assert row["n_delta"] == N_BASED + 1
    for command in ("unpack", "verify"):
        args = ["-o", tmp_path / "back"] if command == "unpack" else []
        refused = run(command, tmp_path / "model.ph", *args)
        assert refused.code == 1
        assert "--base PATH" in refused.out + refused.err
        assert run(command, tmp_path / "model.ph", *args, "--base", base).code == 0
    assert contents(tmp_path / "back") == before


def test_a_missing_base_is_one_line_with_the_remedy(tmp_path: Path, packed: Path, run: Run):
    before = contents(tmp_path)
    refused = run("unpack", packed, "-o", tmp_path / "x")
    assert refused.code == 1
    for words in (str(packed), "'old.safetensors'", "content hash", "--base PATH"):
        assert words in refused.error
    done = run("verify", packed)
    assert done.code == 1
    (line,) = done.out.splitlines()
    assert line.startswith(f"bad: {packed}: tensor ")
    assert "--base PATH" in line
    assert contents(tmp_path) == before


def test_inspect_draws_a_few_differences(tmp_path: Path, run: Run):
    old = {"w": torch.randn(500, 400, generator=torch.Generator().manual_seed(0)).bfloat16()}
    new = {"w": old["w"].clone()}
    new["w"][::50, ::50] *= 2
    for name, tensors in (("old", old), ("new", new)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    packed = tmp_path / "x.ph.safetensors"
    base = ["--base", tmp_path / "old.safetensors"]
    assert run("pack", tmp_path / "new.safetensors", "-o", packed, *base).code == 0
    shown = run("inspect", packed)
    assert shown.code == 0
    assert "sparse delta" in shown.out.replace("_", " ")


def test_every_mode_has_a_glyph():
    assert {mode.name.lower() for mode in Mode} <= _STYLES.keys()


def test_another_base_is_one_line(tmp_path: Path, packed: Path, run: Run):
    other = tmp_path / "other.safetensors"
    save_file({name: t for name, t in checkpoints()[0].items() if name != "ids"}, other)
    refused = run("unpack", packed, "-o", tmp_path / "x", "--base", other)
    assert refused.code == 1
    for words in (str(packed), "'ids'", str(other), "no tensor of that name"):
        assert words in refused.error
    (row,) = results(run("verify", packed, "--base", other, "--json"))
    assert not row["ok"]
    assert [problem["tensor"] for problem in row["problems"]] == ["ids"]


@pytest.mark.parametrize("verb", ["pack", "unpack", "verify", "bench"])
def test_a_base_that_is_not_there_is_told_once(tmp_path: Path, pair: Pair, run: Run, verb: str):
    args = [verb, pair[1], *([pair[1]] if verb == "verify" else []), "--base", tmp_path / "no"]
    if verb == "unpack":
        args += ["-o", tmp_path / "x"]
    refused = run(*args)
    assert refused.code == 3
    assert refused.error == f"{tmp_path / 'no'}: no such file or folder; check the path"


def test_the_base_and_the_source_are_not_the_output(pair: Pair, packed: Path, run: Run):
    old, new = pair
    refused = run("unpack", packed, "-o", old, "--force", "--base", old)
    assert refused.code == 2
    assert "the base itself" in refused.error
    refused = run("pack", new, "--force", "--base", new)
    assert refused.code == 2
    assert "the base is the file itself" in refused.error


def test_json_tells_what_has_a_base(pair: Pair, packed: Path, run: Run):
    old, new = pair
    (row,) = results(run("pack", new, "--base", old, "--force", "--json"))
    assert row["n_delta"] == N_BASED
    (row,) = results(run("unpack", packed, "--base", old, "--force", "--json"))
    assert row["n_delta"] == N_BASED
    (row,) = results(run("inspect", packed, "--json"))
    assert row["base_name"] == "old.safetensors"
    assert row["n_delta"] == N_BASED
    tensors = {tensor["name"]: tensor for tensor in row["tensors"]}
    assert tensors["cast.weight"]["base_dtype"] == "F32"
    assert len(bytes.fromhex(tensors["ids"]["base_hash"])) == 16
    assert tensors["noise"]["base_hash"] is None
    assert tensors["ids"]["planes"][0]["modes"] == {"delta": tensors["ids"]["n_chunks"]}
    assert not any(plane["modes"] for plane in tensors["ids"]["planes"][1:])


def test_inspect_shows_what_needs_a_base(tmp_path: Path, packed: Path, run: Run):
    lines = run("inspect", packed).out.splitlines()
    assert lines[-1].startswith(f"base: {N_BASED} of 27 tensors need one to be unpacked")
    assert "'old.safetensors'" in lines[-1]
    (ids,) = [line for line in lines if line.startswith(" ids ")]
    assert "delta " in ids
    assert "stored" not in ids
    (cast,) = [line for line in lines if line.startswith(" cast.weight ")]
    assert cast.endswith("equal to its base")
    assert "▚" in lines[-2]


def test_inspect_counts_few_changes_against_the_whole_tensor(tmp_path: Path, run: Run):
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    weights = 0.02 * torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))
    save_file({"w": weights}, old)
    weights[::500] += 1e-5
    save_file({"w": weights}, new)
    assert run("pack", new, "--base", old) == Ended(0, "", "")
    lines = run("inspect", new.with_name("new.ph.safetensors")).out.splitlines()
    (line,) = [line for line in lines if line.startswith(" w ")]
    fields = line.split()
    assert fields[-2] == "sparse_delta"
    assert float(fields[-1].removesuffix("x")) >= float(fields[7]) > 100  # the ratio


@pytest.mark.parametrize("level", ["fast", "default", "max"])
def test_inspect_shows_every_mode(tmp_path: Path, pair: Pair, run: Run, level: str):
    assert run("pack", pair[1], "-o", tmp_path / "x", "--level", level).code == 0
    assert run("inspect", tmp_path / "x").code == 0
    assert "base:" not in run("inspect", tmp_path / "x").out


def test_a_dry_run_says_what_the_base_gives(tmp_path: Path, pair: Pair, packed: Path, run: Run):
    old, new = pair
    before = contents(tmp_path)
    (row,) = results(run("pack", new, "--base", old, "--dry-run", "--json"))
    reasons = [tensor["reason"] for tensor in row["tensors"]]
    assert sum("differences from the base" in reason for reason in reasons) == N_BASED
    assert row["estimated_nbytes"] == pytest.approx(packed.stat().st_size, rel=0.25)
    assert "differences from the base" in run("pack", new, "--base", old, "-n").out
    assert contents(tmp_path) == before


def test_bench_takes_a_base(pair: Pair, run: Run):
    old, new = pair
    (alone,) = results(run("bench", new, "--repeat", 1, "--json"))
    (row,) = results(run("bench", new, "--repeat", 1, "--base", old, "--json"))
    assert row["bit_exact"]
    assert row["total"]["nbytes"] == alone["total"]["nbytes"]
    assert row["total"]["packed_nbytes"] < alone["total"]["packed_nbytes"] / 1.7


def test_progress_counts_up_to_the_end(
    pair: Pair, packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if on a terminal
    old, new = pair
    args = ["pack", new, "--base", old, "--force"]
    assert main([str(arg) for arg in args]) == 0
    assert "pack new.safetensors" in capsys.readouterr().err


def test_names_of_bases_cannot_steer_the_terminal(tmp_path: Path, pair: Pair, run: Run):
    odd = tmp_path / "a\x1b[2Jb[bold]"
    pair[0].rename(odd)
    assert run("pack", pair[1], "--base", odd).code == 0
    for command in ("inspect", "verify", "unpack"):
        args = ["-o", tmp_path / "x"] if command == "unpack" else []
        done = run(command, tmp_path / "new.ph.safetensors", *args)
        assert "\x1b" not in done.out + done.err
        assert "[bold]" in done.out + done.err
    assert safetensors.torch.load_file(odd).keys() == checkpoints()[0].keys()


@pytest.mark.parametrize("verb", ["pack", "unpack", "verify", "bench"])
def test_help_has_an_example(run: Run, verb: str):
    assert "--base original.safetensors" in " ".join(run(verb, "--help").out.split())
