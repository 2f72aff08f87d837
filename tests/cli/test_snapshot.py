"""`packhorse snapshot`: every verb on real files and real training states."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from cli_samples import (
    COMMAND,
    Ended,
    contents,
    default_signals,
    flip_bytes,
    result,
    run_command,
    run_on_terminal,
    write_large_model,
    write_model,
)
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from snapshot_samples import Run as Training

from packhorse.cli.snapshots import rows
from packhorse.disk import SnapshotStore, unpack_file

Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with four snapshots of a training run, and a second one of the last state."""
    folder = tmp_path_factory.mktemp("trained") / "runs"
    store, run = SnapshotStore(folder), Training(width=512)
    for _ in range(4):
        store.take(f"step-{run.step().n_steps}", run.state(), metadata={"loss": 1 / run.n_steps})
    store.take("last", run.state())
    return folder


@pytest.fixture
def store(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "runs"))


# Taking and restoring.


def test_take_and_restore_a_file(tmp_path: Path, model: Path, run: Run) -> None:
    store, back = tmp_path / "runs", tmp_path / "back.safetensors"
    assert run("snapshot", "take", store, "one", model) == Ended(0, "", "")
    assert run("snapshot", "restore", store, "one", "-o", back) == Ended(0, "", "")
    wanted, found = load_file(model), load_file(back)
    assert found.keys() == wanted.keys()
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)
    with safe_open(model, "np") as old, safe_open(back, "np") as new:
        assert new.metadata() == old.metadata()


def test_a_fine_tune_costs_its_difference(tmp_path: Path, model: Path, run: Run) -> None:
    tuned = load_file(model)
    tuned["layers.1.weight"][:2] += 1e-4
    save_file(tuned, tmp_path / "tuned.safetensors")
    store = tmp_path / "runs"
    first = result(run("snapshot", "take", store, "base", model, "--json"))
    options = ["--base", "base", "-m", "loss=2.5", "-m", "tag=a=b", "-m", "x=NaN", "--json"]
    second = result(
        run("snapshot", "take", store, "tuned", tmp_path / "tuned.safetensors", *options)
    )
    assert second["ratio"] == second["nbytes"] / second["stored_nbytes"] > 10 * first["ratio"]
    assert second["n_tensors"] == len(tuned)
    metadata = SnapshotStore(store).info("tuned").metadata
    assert metadata.items() >= {"loss": 2.5, "tag": "a=b", "x": "NaN"}.items()
    full = ["--base", "none", "--replace", "--level", "fast", "--threads", "1", "--json"]
    # Equal content is stored once even without a base.
    third = result(run("snapshot", "take", store, "tuned", tmp_path / "tuned.safetensors", *full))
    assert third["stored_nbytes"] == 0


def test_packed_files_and_shards_are_taken_too(
    tmp_path: Path, model: Path, packed: Path, folder: Path, run: Run
) -> None:
    store = tmp_path / "runs"
    assert run("snapshot", "take", store, "plain", model).code == 0
    assert result(run("snapshot", "take", store, "packed", packed, "--json"))["ratio"] is None
    row = result(run("snapshot", "take", store, "shards", folder, "--json"))
    assert row["n_tensors"] == 2 * len(load_file(model))


def test_restore_packed_and_in_part(tmp_path: Path, store: Path, run: Run) -> None:
    target = tmp_path / "model.ph.safetensors"
    options = ["-o", target, "--keys", "model", "--keys", "step", "--level", "max"]
    assert run("snapshot", "restore", store, "step-2", *options) == Ended(0, "", "")
    unpack_file(target, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        metadata = file.metadata()
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    wanted = SnapshotStore(store).restore("step-2", framework="pt")
    assert {name.removeprefix("model.") for name in found} == set(wanted["model"])
    assert all(bool((found[f"model.{name}"] == t).all()) for name, t in wanted["model"].items())
    assert json.loads(metadata["packhorse.values"]) == {"step": 2}
    assert metadata["loss"] == "0.5"


def test_a_store_at_a_url(tmp_path: Path, model: Path, run: Run) -> None:
    pytest.importorskip("fsspec")
    store, back = f"memory://{tmp_path.name}/runs", tmp_path / "back.safetensors"
    assert run("snapshot", "take", store, "one", model).code == 0
    row = result(run("snapshot", "list", store, "--json"))
    assert [item["name"] for item in row["snapshots"]] == ["one"]
    assert row["stored_nbytes"] > row["snapshots"][0]["stored_nbytes"]
    assert run("snapshot", "restore", store, "one", "-o", back).code == 0
    assert load_file(back).keys() == load_file(model).keys()
    assert run("snapshot", "delete", store, "one", "--yes").code == 0
    assert "0 snapshots" in run("snapshot", "list", store).out
    assert run("snapshot", "show", store).code == 0


def test_outputs_and_snapshots_are_not_replaced_unasked(
    tmp_path: Path, store: Path, model: Path, run: Run
) -> None:
    before = contents(tmp_path)
    refused = run("snapshot", "restore", store, "last", "-o", model)
    assert (refused.code, "--force" in refused.error) == (2, True)
    refused = run("snapshot", "take", store, "last", model)
    assert (refused.code, "--replace" in refused.error) == (2, True)
    assert contents(tmp_path) == before
    assert run("snapshot", "restore", store, "last", "-o", model, "--force").code == 0
    assert run("snapshot", "take", store, "last", model, "--replace").code == 0


@pytest.mark.parametrize("name", ["model.bin", "last.ckpt"])
def test_pickles_are_refused_with_a_recipe(tmp_path: Path, run: Run, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04" + bytes(100))
    done = run("snapshot", "take", tmp_path / "runs", "x", tmp_path / name)
    assert done.code == 2
    for word in (name, "pickle", "weights_only=True", "save_file"):
        assert word in done.error
    assert not (tmp_path / "runs").exists()


# Looking at a store.


def test_list_shows_every_snapshot_and_totals(store: Path, run: Run) -> None:
    done = run("snapshot", "list", store)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    for word in ("snapshot", "time", "tensors", "size", "stored", "ratio", "base"):
        assert word in lines[2]
    (second,) = [line for line in lines if line.startswith(" step-2 ")]
    assert second.split()[-1] == "step-1"
    assert "5 snapshots" in done.out
    row = result(run("snapshot", "list", store, "--json"))
    assert [item["name"] for item in row["snapshots"]] == SnapshotStore(store).names()
    assert [item["base"] for item in row["snapshots"]] == [
        None, "step-1", "step-2", "step-3", "step-4",
    ]  # fmt: skip
    assert row["snapshots"][-1]["ratio"] is None
    assert [item["max_deltas"] for item in row["snapshots"]][:4] == [0, 1, 2, 3]
    frames = sum(item["stored_nbytes"] for item in row["snapshots"])
    assert frames < row["stored_nbytes"] == SnapshotStore(store).stored_nbytes()
    assert row["ratio"] == row["nbytes"] / row["stored_nbytes"]


def test_show_plots_sizes_and_ratios(store: Path, run: Run) -> None:
    done = run("snapshot", "show", store)
    assert done.code == 0
    (first,) = [line for line in done.out.splitlines() if line.startswith(" step-1 ")]
    (second,) = [line for line in done.out.splitlines() if line.startswith(" step-2 ")]
    assert first.count("█") > second.split("kB")[0].count("█") > 0
    shown = result(run("snapshot", "show", store, "--json"))
    assert shown == result(run("snapshot", "list", store, "--json"))


def test_show_tells_what_each_kind_cost(store: Path, run: Run) -> None:
    done = run("snapshot", "show", store, "step-3")
    assert done.code == 0
    for kind in ("model.*.weight", "optimizer.*.exp_avg", "optimizer.*.exp_avg_sq", "rng"):
        assert any(line.startswith(f" {kind} ") for line in done.out.splitlines()), kind
    assert "base: step-2" in done.out
    assert "at most 2 deltas" in done.out
    assert "metadata: loss = 0.333" in done.out
    row = result(run("snapshot", "show", store, "step-3", "--json"))
    info = SnapshotStore(store).info("step-3")
    kinds = row["kinds"]
    assert sum(kind["n_tensors"] for kind in kinds) == len(info.tensors)
    assert sum(kind["nbytes"] for kind in kinds) == info.nbytes
    assert sum(kind["stored_nbytes"] for kind in kinds) == row["snapshot"]["stored_nbytes"]
    assert row["snapshot"]["stored_nbytes"] < info.stored_nbytes  # that counts the pack's header
    for kind in kinds:
        assert kind["n_full"] + kind["n_delta"] + kind["n_shared"] == kind["n_tensors"]
    last = result(run("snapshot", "show", store, "last", "--json"))
    assert all(kind["n_shared"] == kind["n_tensors"] for kind in last["kinds"])


def test_many_kinds_are_put_together(tmp_path: Path, run: Run) -> None:
    SnapshotStore(tmp_path / "runs").take(
        "x", {f"top{i}": {f"layer{i}": {"weight": np.arange(i + 1)}} for i in range(40)}
    )
    row = result(run("snapshot", "show", tmp_path / "runs", "x", "--json"))
    assert [(kind["kind"], kind["n_tensors"]) for kind in row["kinds"]] == [("weight", 40)]


def test_diff_tells_what_changed(store: Path, run: Run) -> None:
    done = run("snapshot", "diff", store, "step-1", "step-4", "--limit", 3)
    assert done.code == 0
    assert re.search(r"^ model\.0\.weight +BF16 +512x64 +changed +\d+\.\d+ % ", done.out, re.M)
    row = result(run("snapshot", "diff", store, "step-1", "step-4", "--json"))
    n_changed = row["counts"]["changed"]
    assert f"{n_changed - 3} more; show them with --limit {n_changed}" in done.out
    assert done.out.splitlines()[-1] == f"step-1 -> step-4: {n_changed} changed"
    assert len(row["tensors"]) == sum(row["counts"].values()) == n_changed
    same = run("snapshot", "diff", store, "step-4", "last")
    assert same.out == f"step-4 -> last: {n_changed} equal\n"


def test_names_cannot_steer_the_terminal(tmp_path: Path, run: Run) -> None:
    store, name = tmp_path / "runs", "\x1b[2J[red]"
    SnapshotStore(store).take(name, {"\x1b[0m": np.zeros(4)}, metadata={"\x1bk": "\x1bv"})
    for words in (["list"], ["show"], ["show", name], ["diff", name, name], ["verify"]):
        verb, *rest = words
        done = run("snapshot", verb, store, *rest)
        assert done.code == 0
        assert "\x1b" not in done.out + done.err
    assert "\\x1b[2J[red]" in run("snapshot", "list", store).out


# Verifying and removing.


def test_verify_names_what_is_bad(store: Path, run: Run) -> None:
    assert run("snapshot", "verify", store).out == f"{store}: ok, 5 snapshots\n"
    assert result(run("snapshot", "verify", store, "step-1", "--json"))["snapshots"] == ["step-1"]
    pack = max((store / "packs").iterdir(), key=lambda path: path.stat().st_size)
    flip_bytes(pack, pack.stat().st_size - 2000)
    done = run("snapshot", "verify", store)
    assert (done.code, done.err) == (1, "")
    assert all(line.startswith("bad: snapshot ") for line in done.out.splitlines())
    assert str(pack) in done.out
    row = json.loads(run("snapshot", "verify", store, "--json").out)["results"][0]
    assert not row["ok"]
    assert len(row["problems"]) == len(done.out.splitlines())


def test_a_damaged_manifest_does_not_hide_the_others(store: Path, run: Run) -> None:
    (manifest,) = (store / "snapshots" / "step-3").iterdir()
    flip_bytes(manifest, 300)
    for verb in ("list", "show"):
        done = run("snapshot", verb, store)
        assert done.code == 1
        assert "step-4" in done.out
        assert "bad: snapshot 'step-3'" in done.out
    assert run("snapshot", "show", store, "step-4").code == 0
    assert run("snapshot", "show", store, "step-3").code == 1
    assert run("snapshot", "delete", store, "step-3", "--yes").code == 0
    assert run("snapshot", "list", store).code == 0


def test_delete_removes_what_it_names(store: Path, run: Run) -> None:
    before = contents(store)
    done = run("snapshot", "delete", store, "step-1", "step-2", "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert "would remove 2 snapshots: step-1, step-2 (kept: 3 snapshots)" in done.out
    assert run("snapshot", "delete", store, "step-1", "nope", "--yes").code == 2
    assert contents(store) == before
    assert run("snapshot", "delete", store, "step-1", "step-2", "--yes") == Ended(0, "", "")
    assert SnapshotStore(store).names() == ["step-3", "step-4", "last"]
    assert SnapshotStore(store).verify() == []


@pytest.mark.parametrize(
    ("keep", "left"),
    [(["2"], ["step-4", "last"]), (["step-1", "last"], ["step-1", "last"]), (["9"], None)],
    ids=["number", "names", "more than there are"],
)
def test_prune_keeps_what_it_should(
    store: Path, run: Run, keep: list[str], left: list[str] | None
) -> None:
    options = [word for name in keep for word in ("--keep", name)]
    before, names = contents(store), SnapshotStore(store).names()
    planned = result(run("snapshot", "prune", store, *options, "--dry-run", "--json"))
    assert contents(store) == before
    assert planned["kept"] == (left or names)
    done = result(run("snapshot", "prune", store, *options, "--yes", "--json"))
    assert done["removed"] == planned["removed"]
    assert SnapshotStore(store).names() == (left or names)
    assert SnapshotStore(store).verify() == []
    listed = result(run("snapshot", "list", store, "--json"))
    assert sum(item["stored_nbytes"] for item in listed["snapshots"]) <= listed["stored_nbytes"]


@pytest.mark.parametrize(
    ("keep", "word"), [(["0"], "remove all"), (["nope"], "no such snapshot"), (["7"], "repeat it")]
)
def test_prune_refuses_what_is_not_clear(
    store: Path, model: Path, run: Run, keep: list[str], word: str
) -> None:
    assert run("snapshot", "take", store, "7", model).code == 0
    done = run("snapshot", "prune", store, "--keep", *keep, "--yes")
    assert (done.code, word in done.error) == (2, True)
    planned = run("snapshot", "prune", store, "--keep", "7", "--keep", "7", "-n", "--json")
    assert result(planned)["kept"] == ["7"]
    assert len(result(run("snapshot", "prune", store, "--keep", "07", "-n", "--json"))["kept"]) == 6


@pytest.mark.parametrize("words", [["delete", "last"], ["prune", "--keep", "1"]], ids=" ".join)
def test_nothing_is_removed_where_nobody_can_be_asked(store: Path, words: list[str]) -> None:
    before = contents(store)
    done = run_command("snapshot", words[0], store, *words[1:], stdin=subprocess.DEVNULL)
    assert (done.code, "--yes" in done.error) == (2, True)
    assert contents(store) == before


@pytest.mark.parametrize(("answer", "code"), [("n", 2), ("y", 0)])
def test_removing_is_asked_for_on_a_terminal(store: Path, answer: str, code: int) -> None:
    code_found, text = run_on_terminal("snapshot", "delete", store, "last", answer=answer)
    assert code_found == code
    assert "Remove 1 snapshot: last? [y/N]" in text
    assert ("last" in SnapshotStore(store).names()) == (code == 2)


def test_a_terminal_gets_progress_and_lines(tmp_path: Path, model: Path) -> None:
    store = tmp_path / "runs"
    code, text = run_on_terminal("snapshot", "take", store, "one", model)
    assert code == 0
    for part in ("take one", "━", "GB/s"):
        assert part in text
    assert re.search(r"one: \d+ kB -> \d+ kB, ratio \d\.\d{3}, .* GB/s", text.splitlines()[-1])
    code, text = run_on_terminal("snapshot", "show", store)
    assert code == 0
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in text.splitlines()) <= 100
    assert "\x1b[32m" in text
    _, text = run_on_terminal("snapshot", "delete", store, "one", answer="y")
    assert "removed 1 snapshot" in text


def test_a_plot_without_unicode(store: Path) -> None:
    done = run_command("snapshot", "show", store, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.code, done.err) == (0, "")
    assert done.out.isascii()
    assert "##########" in done.out


# How it ends.


@pytest.mark.parametrize(
    "words",
    [["list"], ["show"], ["show", "x"], ["diff", "a", "b"], ["verify"], ["delete", "x", "-y"],
     ["prune", "--keep", "1"], ["restore", "x", "-o", "out.safetensors"]],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_store_that_is_not_there(tmp_path: Path, run: Run, words: list[str]) -> None:
    verb, *rest = words
    done = run("snapshot", verb, tmp_path / "nowhere", *rest)
    assert (done.code, str(tmp_path / "nowhere") in done.error) == (3, True)
    assert list(tmp_path.iterdir()) == []
    done = run("snapshot", verb, tmp_path / "nowhere", *rest, "--json")
    assert json.loads(done.out)["errors"][0]["exit_code"] == 3


def test_a_snapshot_that_is_not_there(tmp_path: Path, store: Path, run: Run) -> None:
    for words in (["show", "x"], ["diff", "last", "x"], ["verify", "x"]):
        done = run("snapshot", words[0], store, *words[1:])
        assert (done.code, "'x'" in done.error) == (2, True)
    done = run("snapshot", "restore", store, "x", "-o", tmp_path / "out.safetensors")
    assert (done.code, (tmp_path / "out.safetensors").exists()) == (2, False)


def test_a_folder_that_is_no_store(tmp_path: Path, model: Path, run: Run) -> None:
    before = contents(tmp_path)
    for words in (["list"], ["take", "x", model]):
        done = run("snapshot", words[0], tmp_path, *words[1:])
        assert (done.code, "not a snapshot store" in done.error) == (2, True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "words", [["-m", "loss"], ["-m", "a=1", "-m", "a=2"], ["--base", "nope"]], ids=str
)
def test_wrong_options(tmp_path: Path, model: Path, run: Run, words: list[str]) -> None:
    done = run("snapshot", "take", tmp_path / "runs", "x", model, *words)
    assert done.code == 2
    assert len(done.error) > 10


def test_a_second_writer_is_told_who_writes(tmp_path: Path, store: Path, model: Path) -> None:
    from packhorse.disk.snapshots.lock import open_lock
    from packhorse.storage.locations import open_storage

    lock = open_lock(open_storage(store))
    lock.acquire()
    try:
        done = run_command("snapshot", "take", store, "x", model)
    finally:
        lock.release()
    assert (done.code, str(os.getpid()) in done.error) == (3, True)


def test_a_signal_in_mid_take_leaves_no_snapshot(tmp_path: Path) -> None:
    model = write_large_model(tmp_path / "model.safetensors", 1 << 26)
    store = tmp_path / "runs"
    SnapshotStore(store).take_files("a", [write_model(tmp_path / "small.safetensors")])
    before = contents(store)
    words = [COMMAND, "snapshot", "take", store, "b", model, "--threads", "1", "--level", "max"]
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, preexec_fn=default_signals
    ) as process:
        end = time.monotonic() + 60
        while not any((store / "packs").glob(".packhorse-*")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    words = "finished output was kept, unfinished output was removed"
    assert err == f"packhorse: error: stopped by SIGINT; {words}\n"
    after = contents(store)
    assert {name for name in after if name != "writer.lock"} == {
        name for name in before if name != "writer.lock"
    }


def test_the_page_lists_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for name in rows.__all__:
        for field in fields(getattr(rows, name)):
            assert f"`{field.name}`" in page, f"{name}.{field.name}"
