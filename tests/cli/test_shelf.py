"""`packhorse shelf`: every verb on real shelves."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import ml_dtypes
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
)
from safetensors.numpy import load_file, save_file

from packhorse.cli.shelf import rows
from packhorse.disk import Shelf

Run = Callable[..., Ended]
RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(0, 0.02, (300, 700)).astype(ml_dtypes.bfloat16)
ODD = np.array([[0.5, np.nan, -np.inf], [2, 0, -1]], np.float32)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shelf of several tensors, with a tag and a state."""
    path = tmp_path_factory.mktemp("filled") / "data.shelf"
    with Shelf(path) as shelf:
        shelf["weight"] = WEIGHT
        shelf["odd"] = ODD
        shelf["scalar"] = np.array(7, np.int64)
        run = shelf.create("run", (0, 400), "float32", base="previous", keyframe_every=4)
        walk = RNG.standard_normal(400, np.float32) + np.arange(9)[:, None] * 1e-5
        run.append(walk.astype(np.float32))
        shelf.save("model", {"layers": [{"w": ODD}, {"w": WEIGHT[:2]}], "step": 3, "lr": np.inf})
        shelf.tag("before")
        shelf["odd"][0, 0] = 100.0
        shelf["late"] = np.arange(5)
    return path


@pytest.fixture
def shelf(filled: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(filled, tmp_path / "data.shelf"))


# Looking at a shelf.


def test_list_shows_every_tensor_and_totals(shelf: Path, run: Run) -> None:
    done = run("shelf", "list", shelf)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[2].split() == [
        "tensor", "dtype", "shape", "chunks", "base", "size", "packed", "ratio",
    ]  # fmt: skip
    (weight,) = [line for line in lines if line.startswith(" weight ")]
    assert weight.split()[1:3] == ["BF16", "300x700"]
    assert float(weight.split()[-1]) > 1.3
    assert "5 tensors" in done.out
    assert "state: model" in lines
    assert re.search(r"^tag: before, \d{4}-\d\d-\d\d \d\d:\d\d UTC, commit \d+$", done.out, re.M)
    assert re.match(r"on the disk: \d", lines[-1])
    row = result(run("shelf", "list", shelf, "--json"))
    tensors = {tensor["name"]: tensor for tensor in row["tensors"]}
    assert list(tensors) == sorted(tensors)
    assert tensors["run"]["base"] == "previous"
    assert tensors["run"]["shape"] == [9, 400]
    with Shelf(shelf, "r") as opened:
        for name, tensor in tensors.items():
            assert tensor["nbytes"] == opened[name].nbytes
            assert tensor["packed_nbytes"] == opened[name].packed_nbytes
            assert tuple(tensor["chunks"]) == opened[name].chunks
    assert row["nbytes"] == sum(tensor["nbytes"] for tensor in tensors.values())
    assert row["ratio"] == row["nbytes"] / row["packed_nbytes"]
    assert row["file_nbytes"] >= row["packed_nbytes"]
    assert row["states"] == ["model"]
    assert [tag["name"] for tag in row["tags"]] == ["before"]


def test_list_at_a_tag_shows_what_was_there(shelf: Path, run: Run) -> None:
    now = result(run("shelf", "list", shelf, "--json"))
    then = result(run("shelf", "list", shelf, "--tag", "before", "--json"))
    names = [[tensor["name"] for tensor in row["tensors"]] for row in (now, then)]
    assert set(names[0]) - set(names[1]) == {"late"}
    assert (now["tag"], then["tag"]) == (None, "before")
    assert then["n_commits"] == now["n_commits"]
    assert f"{shelf} at before" in run("shelf", "list", shelf, "--tag", "before").out


def test_list_names_readers_that_are_behind(shelf: Path, run: Run) -> None:
    code = (
        "import sys; from packhorse.disk import Shelf\n"
        "with Shelf(sys.argv[1], 'r') as shelf, shelf.reading():\n"
        "    print(len(shelf), flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, shelf], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline()
        with Shelf(shelf) as writer:
            for i in range(3):
                writer["late"][i] = 9
        row = result(run("shelf", "list", shelf, "--json"))
        text = run("shelf", "list", shelf).out
        reader.communicate(timeout=60)
    (behind,) = [each for each in row["readers"] if each["pid"] == reader.pid]
    assert behind["n_commits_behind"] >= 3
    assert f"reader: process {reader.pid} is {behind['n_commits_behind']} commits behind" in text


def test_show_tells_a_tensor_and_its_values(shelf: Path, run: Run) -> None:
    done = run("shelf", "show", shelf, "odd", "--tag", "before")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == "odd at before: F32 2x3"
    assert "odd: 2x3 values" in done.out
    assert done.out.splitlines()[-2].split() == ["0.5", "nan", "-inf"]
    row = result(run("shelf", "show", shelf, "odd", "--json"))
    assert row["values"] == [[100.0, "nan", "-inf"], [2.0, 0.0, -1.0]]
    assert row["statistics"] is None
    row = result(run("shelf", "show", shelf, "scalar", "--stats", "--json"))
    assert (row["values"], row["selected"], row["statistics"]["mean"]) == (7, [], 7)
    assert run("shelf", "show", shelf, "scalar").out.splitlines()[-1].split() == ["7"]


def test_show_takes_an_index(shelf: Path, run: Run) -> None:
    row = result(run("shelf", "show", shelf, "weight", "10:200:3,5", "--json"))
    wanted = WEIGHT[10:200:3, 5].astype(np.float32)
    assert (row["index"], row["selected"]) == ("10:200:3,5", [len(wanted)])
    assert row["values"] == wanted[:8].tolist()
    row = result(run("shelf", "show", shelf, "weight", "--json", "--", "-1,::-1"))
    assert row["values"] == WEIGHT[-1, ::-1][:8].astype(np.float32).tolist()
    out = run("shelf", "show", shelf, "weight", "...,:3").out
    assert "weight[...,:3]: 300x3 values, the first 6x3" in out
    assert len(out.splitlines()) == 4 + 6


def test_show_reads_a_tensor_once_for_its_statistics(shelf: Path, run: Run) -> None:
    row = result(run("shelf", "show", shelf, "weight", "0,0", "--stats", "--json"))
    found, wanted = row["statistics"], WEIGHT.astype(np.float64)
    assert found["n_values"] == WEIGHT.size
    assert (found["min"], found["max"]) == (wanted.min(), wanted.max())
    assert found["mean"] == pytest.approx(wanted.mean(), rel=1e-12)
    out = run("shelf", "show", shelf, "odd", "--stats", "--tag", "before").out
    assert "values: 6, min -1, max 2, mean 0.375, 1 zero, 1 NaN, 1 infinite" in out


def test_show_tells_what_is_in_a_state(shelf: Path, run: Run) -> None:
    row = result(run("shelf", "show", shelf, "model", "--json"))
    assert [tensor["path"] for tensor in row["tensors"]] == ["layers[0].w", "layers[1].w"]
    assert row["tensors"][1]["dtype"] == "BF16"
    assert row["values"] == {"step": 3, "lr": "inf"}
    assert row["nbytes"] == sum(tensor["nbytes"] for tensor in row["tensors"])
    out = run("shelf", "show", shelf, "model").out
    assert any(line.startswith(" layers[0].w ") for line in out.splitlines())
    assert "value: step = 3" in out


def test_an_empty_shelf_is_shown_too(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "empty"
    with Shelf(path) as shelf:
        shelf.create("none", (0, 7), "uint8")
    row = result(run("shelf", "show", path, "none", "--stats", "--json"))
    assert (row["values"], row["selected"], row["tensor"]["ratio"]) == ([], [0, 7], 1)
    assert run("shelf", "show", path, "none", "--stats").code == 0
    assert "1 tensor" in run("shelf", "list", path).out
    assert run("shelf", "verify", path).out == f"{path}: ok, 1 tensor, 0 tags, 0 B\n"


def test_names_cannot_steer_the_terminal(tmp_path: Path, run: Run) -> None:
    path, name = tmp_path / "shelf", "\x1b[2J[red]"
    with Shelf(path) as shelf:
        shelf[name] = np.zeros(4)
        shelf.save("\x1bs", {"\x1b[0m": np.zeros(4), "v": "\x1bv"})
        shelf.tag("\x1bt")
    for words in (["list"], ["show", name], ["show", "\x1bs"], ["verify"],
                  ["export", tmp_path / "x.zarr", "-n"]):  # fmt: skip
        done = run("shelf", words[0], path, *words[1:])
        assert done.code == 0
        assert "\x1b" not in done.out + done.err
    assert "\\x1b[2J[red]" in run("shelf", "list", path).out


# Verifying and compacting.


def settled(folder: Path) -> dict[str, bytes | None]:
    """All that lies in a folder, without the table of readers, which readers change."""
    return {name: data for name, data in contents(folder).items() if "mdb-lock" not in name}


def data_file(shelf: Path) -> Path:
    (path,) = shelf.glob("shelf-*.mdb")
    return path


def damage(shelf: Path) -> None:
    """Change bytes within the first chunk of the weight, which has the longest frames."""
    data = data_file(shelf).read_bytes()
    gaps = [gap.span() for gap in re.finditer(rb"\0{64,}", data)]
    runs = [(end, start) for (_, end), (start, _) in pairwise([(0, 0), *gaps, (len(data),) * 2])]
    start, end = max(runs, key=lambda run: run[1] - run[0])
    flip_bytes(data_file(shelf), (start + end) // 2)


def test_verify_names_what_is_bad(shelf: Path, run: Run) -> None:
    done = run("shelf", "verify", shelf)
    assert re.fullmatch(rf"{re.escape(str(shelf))}: ok, 5 tensors, 1 tag, \d+ kB\n", done.out)
    assert result(run("shelf", "verify", shelf, "--json"))["n_tensors"] == 5
    damage(shelf)
    done = run("shelf", "verify", shelf)
    assert (done.code, done.err) == (1, "")
    assert all(line.startswith("bad: ") for line in done.out.splitlines())
    assert "weight" in done.out
    document = json.loads(run("shelf", "verify", shelf, "--json").out)
    (row,) = document["results"]
    assert not row["ok"]
    assert {problem["name"] for problem in row["problems"]} == {"weight"}
    assert len(row["problems"]) == len(done.out.splitlines())
    done = run("shelf", "show", shelf, "weight", "--stats")
    assert (done.code, "weight" in done.error) == (1, True)
    assert run("shelf", "show", shelf, "odd", "--stats").code == 0
    assert run("shelf", "list", shelf).code == 0


def test_compact_gives_space_back(shelf: Path, run: Run) -> None:
    with Shelf(shelf) as opened:
        opened["large"] = RNG.integers(0, 256, 1 << 22, np.uint8)
        del opened["large"]
        opened["after"] = ODD
    before = settled(shelf)
    size = data_file(shelf).stat().st_size
    planned = run("shelf", "compact", shelf, "--dry-run")
    assert re.search(r"would save about [34]\.\d+ MB of [45]\.\d+ MB", planned.out), planned.out
    estimate = result(run("shelf", "compact", shelf, "-n", "--json"))
    assert settled(shelf) == before
    row = result(run("shelf", "compact", shelf, "--json"))
    assert row["saved_nbytes"] >= 1 << 22
    assert abs(estimate["saved_nbytes"] - row["saved_nbytes"]) < 1 << 18
    assert size - data_file(shelf).stat().st_size >= 1 << 22
    assert run("shelf", "compact", shelf) == Ended(0, "", "")
    with Shelf(shelf, "r") as opened:
        np.testing.assert_array_equal(opened.at("before")["odd"][:], ODD)
        assert opened["weight"][:].tobytes() == WEIGHT.tobytes()


# Other formats.


@pytest.mark.parametrize("format", ["zarr", "npy", "safetensors"])
def test_export_and_import_bring_every_bit_back(
    tmp_path: Path, shelf: Path, run: Run, format: str
) -> None:
    if format == "zarr":
        pytest.importorskip("zarr")
    names = ["odd"] if format == "npy" else ["odd", "late", "scalar"]
    dest, other = tmp_path / f"out.{format}", tmp_path / "other.shelf"
    planned = result(run("shelf", "export", shelf, dest, *names, "--dry-run", "--json"))
    assert not dest.exists()
    assert [tensor["name"] for tensor in planned["tensors"]] == names
    assert (planned["format"], planned["dry_run"]) == (format, True)
    assert run("shelf", "export", shelf, dest, *names) == Ended(0, "", "")
    refused = run("shelf", "export", shelf, dest, *names)
    assert (refused.code, "--force" in refused.error) == (2, True)
    row = result(run("shelf", "export", shelf, dest, *names, "--tag", "before", "--force", "--json")
                 if "late" not in names else
                 run("shelf", "export", shelf, dest, *names, "--force", "--json"))  # fmt: skip
    assert row["tensors"] == planned["tensors"]

    options = ["--name", "odd" if format == "npy" else "p"]
    first = result(run("shelf", "import", other, dest, *options, "--dry-run", "--json"))
    assert not other.exists()
    done = result(run("shelf", "import", other, dest, *options, "--json"))
    assert first["tensors"] == done["tensors"]
    assert done["ratio"] == done["nbytes"] / done["packed_nbytes"]
    refused = run("shelf", "import", other, dest, *options)
    assert (refused.code, "--replace" in refused.error) == (2, True)
    again = result(run("shelf", "import", other, dest, *options, "--replace", "--json"))
    assert sorted(again["replaced"]) == sorted(tensor["name"] for tensor in done["tensors"])
    with Shelf(shelf, "r") as old, Shelf(other, "r") as new:
        view = old.at("before") if format == "npy" else old
        assert sorted(new) == sorted(name if format == "npy" else f"p/{name}" for name in names)
        for name in names:
            found = new[name if format == "npy" else f"p/{name}"]
            assert found.shape == view[name].shape
            assert found[...].tobytes() == view[name][...].tobytes()


def test_safetensors_of_every_kind_are_imported(
    tmp_path: Path, model: Path, packed: Path, run: Run
) -> None:
    shelf = tmp_path / "data.shelf"
    assert run("shelf", "import", shelf, packed).code == 0
    assert run("shelf", "import", shelf, model, "--name", "plain").code == 0
    wanted = load_file(model)
    with Shelf(shelf, "r") as opened:
        assert set(opened) == set(wanted) | {f"plain/{name}" for name in wanted}
        for name, array in wanted.items():
            for found in (opened[name], opened[f"plain/{name}"]):
                assert (found.shape, found.dtype) == (array.shape, array.dtype)
                assert found[...].tobytes() == array.tobytes()
    back = tmp_path / "back.safetensors"
    assert run("shelf", "export", shelf, back, *wanted).code == 0
    again = load_file(back)
    assert all(again[name].tobytes() == array.tobytes() for name, array in wanted.items())


def test_safetensors_come_from_urls_and_go_to_them(shelf: Path, run: Run) -> None:
    pytest.importorskip("fsspec")
    url = f"memory://{shelf.parent.name}/model.safetensors"
    assert run("shelf", "export", shelf, url, "odd", "late").code == 0
    row = result(run("shelf", "import", shelf, url, "--name", "back", "--json"))
    assert [tensor["name"] for tensor in row["tensors"]] == ["back/late", "back/odd"]
    done = run("shelf", "import", shelf, url.replace("model", "none"))
    assert (done.code, "none.safetensors" in done.error) == (3, True)


def test_folders_of_numpy_files_go_and_come(tmp_path: Path, shelf: Path, run: Run) -> None:
    with Shelf(shelf) as opened:
        opened["deep/er"] = WEIGHT[:3]
    out = tmp_path / "arrays"
    assert run("shelf", "export", shelf, out, "odd", "deep/er", "--format", "npy").code == 0
    np.testing.assert_array_equal(np.load(out / "odd.npy")[1], ODD[1])
    refused = run("shelf", "import", shelf, out, "--format", "npy", "--name", "new")
    assert (refused.code, "dtype" in refused.error) == (2, True)
    words = ["--format", "npy", "--name", "new", "--dtype", "bfloat16"]
    row = result(run("shelf", "import", shelf, out, *words, "--json"))
    assert {tensor["name"] for tensor in row["tensors"]} == {"new/odd", "new/deep/er"}
    with Shelf(shelf, "r") as opened:
        assert opened["new/deep/er"][:].tobytes() == WEIGHT[:3].tobytes()


def test_a_source_that_fails_does_not_stop_the_others(tmp_path: Path, run: Run) -> None:
    for name in ("a", "c"):
        np.save(tmp_path / f"{name}.npy", ODD)
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY" + bytes(50))
    sources = [tmp_path / f"{name}.npy" for name in "abc"]
    done = run("shelf", "import", tmp_path / "shelf", *sources)
    assert done.code in (1, 2)
    assert str(tmp_path / "b.npy") in done.error
    with Shelf(tmp_path / "shelf", "r") as opened:
        assert list(opened) == ["a", "c"]


def test_what_cannot_be_exchanged_is_refused(tmp_path: Path, shelf: Path, run: Run) -> None:
    np.save(tmp_path / "a.npy", ODD)
    before = settled(tmp_path)
    for words, said in (
        (["export", shelf, tmp_path / "out"], "--format"),
        (["export", shelf, tmp_path / "out.npy"], "one tensor"),
        (["export", shelf, tmp_path / "out.npy", "nope"], "'nope'"),
        (["export", shelf, tmp_path / "out.npy", "late", "--tag", "before"], "'late'"),
        (["export", shelf, tmp_path / "out.npy", "odd", "--tag", "nope"], "'nope'"),
        (["import", shelf, tmp_path / "a.bin"], "no such file"),
        (["import", shelf, shelf / "writer.lock"], "--format"),
        (["import", shelf, "memory://here/a.npy"], "on this machine"),
        (["export", shelf, "memory://here/a.npy", "odd"], "on this machine"),
        (["export", shelf, "memory://here/a.zarr", "odd"], "of this machine"),
        (["export", shelf, tmp_path / "a.ph.safetensors", "odd"], "packhorse pack"),
    ):
        done = run("shelf", *words)
        assert done.code == (3 if said == "no such file" else 2), (words, done)
        assert said in done.error
    assert settled(tmp_path) == before


# How it ends.


VERBS = [["list"], ["show", "x"], ["verify"], ["compact"], ["compact", "-n"], ["export", "x.npy"]]


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_a_shelf_that_is_not_there(tmp_path: Path, run: Run, words: list[str]) -> None:
    verb, *rest = words
    done = run("shelf", verb, tmp_path / "nowhere", *rest)
    assert (done.code, str(tmp_path / "nowhere") in done.error) == (3, True)
    assert list(tmp_path.iterdir()) == []
    done = run("shelf", verb, tmp_path / "nowhere", *rest, "--json")
    assert json.loads(done.out)["errors"][0]["exit_code"] == 3


@pytest.mark.parametrize("words", [*VERBS, ["import", "x.npy"]], ids=" ".join)
def test_a_folder_that_is_no_shelf(
    tmp_path: Path, run: Run, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "letter.txt").write_text("dear")
    (tmp_path / "void").mkdir()
    np.save(tmp_path / "x.npy", ODD)
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    wanted = 2 if words[0] == "import" else 3  # which would make a shelf
    for place in (folder, tmp_path / "x.npy", *([tmp_path / "void"] if wanted == 3 else [])):
        done = run("shelf", words[0], place, *words[1:])
        assert (done.code, str(place) in done.error) == (wanted, True)
        assert contents(tmp_path) == before


@pytest.mark.parametrize("words", [*VERBS, ["import", "x.npy"]], ids=" ".join)
def test_a_url_is_no_shelf(
    tmp_path: Path, run: Run, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", ODD)
    done = run("shelf", words[0], "s3://bucket/data.shelf", *words[1:])
    assert (done.code, "local disk" in done.error) == (2, True)


@pytest.mark.parametrize("kind", ["empty", "random", "zero", "cut", "later", "head"])
@pytest.mark.parametrize("words", VERBS[:5], ids=" ".join)
def test_a_file_that_is_bad(shelf: Path, run: Run, words: list[str], kind: str) -> None:
    path = data_file(shelf)
    data = bytearray(path.read_bytes())
    heads = [match.start() for match in re.finditer(rb"PHSHELF\0", data)]
    for at in heads if kind in ("later", "head") else []:
        data[at + (8 if kind == "later" else 20)] += 1  # the version, or the number of a tensor
    bad = {
        "empty": b"",
        "random": RNG.bytes(len(data)),
        "zero": bytes(len(data)),
        "cut": data[: len(data) // 3],
    }
    path.write_bytes(bad.get(kind, data))
    done = run("shelf", words[0], shelf, *words[1:])
    assert (done.code, str(shelf) in done.error) == (1, True)
    assert ("upgrade" in done.error) == (kind == "later")
    assert path.read_bytes()[: len(data) // 3] == bad.get(kind, data)[: len(data) // 3]


def test_names_and_tags_that_are_not_there(shelf: Path, run: Run) -> None:
    for words in (["show", "nope"], ["show", "late", "--tag", "before"], ["show", "odd", "0,0,0"],
                  ["show", "odd", "2"], ["show", "odd", "--tag", "nope"],
                  ["list", "--tag", "nope"]):  # fmt: skip
        done = run("shelf", words[0], shelf, *words[1:])
        assert (done.code, str(shelf) in done.error) == (2, True), words


def test_a_second_writer_is_told_who_writes(tmp_path: Path, shelf: Path) -> None:
    np.save(tmp_path / "x.npy", ODD)
    writer = (
        rf"by process {os.getpid()} on '{socket.gethostname()}' \(since '\d+-\d+-\d+T[\d:]+Z'\);"
    )
    with Shelf(shelf):
        for words in (["import", shelf, tmp_path / "x.npy"], ["compact", shelf]):
            start = time.monotonic()
            done = run_command("shelf", *words)
            assert done.code == 3
            assert re.search(writer, done.error), done.error
            assert time.monotonic() - start < 30
        for verb in ("list", "verify"):
            assert run_command("shelf", verb, shelf).code == 0
        assert "would save" in run_command("shelf", "compact", shelf, "-n").out


def test_a_signal_in_mid_import_leaves_nothing_of_it(tmp_path: Path, run: Run) -> None:
    model = write_large_model(tmp_path / "model.safetensors", 1 << 27)
    shelf = tmp_path / "data.shelf"
    with Shelf(shelf) as opened:
        opened["odd"] = ODD
    words = [COMMAND, "shelf", "import", shelf, model, "--threads", "1", "--level", "max"]
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, preexec_fn=default_signals
    ) as process:
        end = time.monotonic() + 60
        while data_file(shelf).stat().st_size < 1 << 24:  # chunks that wait for their commit
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    kept = "finished output was kept, unfinished output was removed"
    assert err == f"packhorse: error: stopped by SIGINT; {kept}\n"
    row = result(run("shelf", "list", shelf, "--json"))
    assert [tensor["name"] for tensor in row["tensors"]] == ["odd"]
    assert row["free_nbytes"] > 1 << 23
    assert result(run("shelf", "compact", shelf, "--json"))["saved_nbytes"] > 1 << 23
    assert run("shelf", "verify", shelf).code == 0


def test_without_lmdb_the_error_names_the_extra(shelf: Path) -> None:
    code = (
        "import sys; sys.modules['lmdb'] = None\n"
        "from packhorse.cli import main\n"
        "sys.exit(main(['shelf', 'list', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", code, shelf], capture_output=True, text=True)
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert "packhorse[shelf]" in done.stderr


def test_a_terminal_gets_progress_and_lines(tmp_path: Path, shelf: Path) -> None:
    save_file({"x": ODD}, tmp_path / "x.safetensors")
    text = screen("import", shelf, tmp_path / "x.safetensors")
    assert re.search(r"x\.safetensors: 1 tensor, 24 B -> \d+ B, ratio 0\.\d{3}, ", text)
    text = screen("show", shelf, "weight", "--stats")
    for part in ("read weight", "━", "GB/s"):
        assert part in text
    assert "verify" in screen("verify", shelf)
    assert re.search(r"saved \d", screen("compact", shelf))
    assert "1 tensor, 24 B" in screen("export", shelf, tmp_path / "y.npy", "x")


def screen(verb: str, *args: object) -> str:
    """What a run prints on a terminal."""
    code, text = run_on_terminal("shelf", verb, *args)
    assert code == 0, text
    return text


def test_the_page_lists_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for name in rows.__all__:
        for field in fields(getattr(rows, name)):
            assert f"`{field.name}`" in page, f"{name}.{field.name}"
