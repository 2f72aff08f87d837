"""The command line with URLs: every verb for files, snapshots of files, errors and exit codes."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_samples import Ended, contents, run_command
from s3_server import Server

from packhorse.disk import SnapshotStore
from packhorse.numpy import load_file

Run = Callable[..., Ended]

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries of AWS are warned of


def test_files(s3: Server, model: Path, tmp_path: Path, run: Run):
    assert run("pack", model, "-o", "s3://bucket/sub/").code == 0
    assert s3.names() == ["sub/model.ph.safetensors"]
    packed = "s3://bucket/sub/model.ph.safetensors"
    s3.forget()
    (shown,) = json.loads(run("inspect", packed, "--json").out)["results"]
    assert sum(request.nbytes for request in s3.requests) < s3.fs.size(packed)
    local = model.with_name("model.ph.safetensors")
    assert run("pack", model).code == 0
    (expected,) = json.loads(run("inspect", local, "--json").out)["results"]
    assert shown == {**expected, "path": packed}
    verified = run("verify", packed)
    assert (verified.code, verified.out[: len(packed) + 4]) == (0, f"{packed}: ok")
    assert run("unpack", packed).code == 0
    assert s3.fs.cat_file("bucket/sub/model.safetensors") == model.read_bytes()
    assert run("unpack", packed, "-o", tmp_path / "back").code == 0
    assert (tmp_path / "back").read_bytes() == model.read_bytes()
    assert run("bench", "s3://bucket/sub/model.safetensors", "--repeat", 1).code == 0
    again = run("pack", "s3://bucket/sub/model.safetensors", "--dry-run", "--json")
    (planned,) = json.loads(again.out)["results"]
    assert planned["dst"] == packed
    done = run("pack", "s3://bucket/sub/model.safetensors")
    assert (done.code, done.error) == (
        2, f"{packed}: already exists; allow replacing it (force, --force) or name another",
    )  # fmt: skip
    assert run("pack", "s3://bucket/sub/model.safetensors", "--force").code == 0


def test_folders(s3: Server, folder: Path, tmp_path: Path, run: Run):
    done = run("pack", folder, "-o", "s3://bucket/llama.ph", "--json")
    (row,) = json.loads(done.out)["results"]
    assert (row["dst"], row["n_files"], row["n_copied"]) == ("s3://bucket/llama.ph", 2, 2)
    assert run("verify", "s3://bucket/llama.ph/").out.startswith("s3://bucket/llama.ph: ok, 2 pa")
    assert run("inspect", "s3://bucket/llama.ph").code == 0
    assert run("unpack", "s3://bucket/llama.ph").code == 0
    assert run("unpack", "s3://bucket/llama.ph", "-o", tmp_path / "back").code == 0
    assert contents(tmp_path / "back") == contents(folder)
    dry = run("pack", "s3://bucket/llama", "--dry-run", "--json")
    assert [row["dst"] for row in json.loads(dry.out)["results"]] == [
        f"s3://bucket/llama.ph/model-0000{i}-of-00002.safetensors" for i in (1, 2)
    ]
    s3.fs.pipe_file("bucket/llama.ph/.packhorse-unfinished.json", b"{}")
    for verb in ("verify", "inspect", "unpack"):
        refused = run(verb, "s3://bucket/llama.ph", *(["-o", tmp_path / "x"] * (verb == "unpack")))
        assert refused.code == 1
        assert refused.error.startswith("s3://bucket/llama.ph: this folder is not complete: ")


def test_several_sources_and_a_base(s3: Server, model: Path, folder: Path, run: Run):
    refused = run("pack", model, folder, "-o", "s3://bucket/all")
    assert refused.code == 2
    assert refused.error.endswith("must be an existing folder; end the URL with a slash")
    assert run("pack", model, folder, "-o", "s3://bucket/all/").code == 0
    assert "all/model.ph.safetensors" in s3.names()
    assert "all/llama.ph/config.json" in s3.names()
    base = "s3://bucket/all/model.ph.safetensors"
    tuned = "s3://bucket/tuned.ph.safetensors"
    assert run("pack", model, "-o", tuned, "--base", base).code == 0
    assert run("verify", tuned, "--base", base).code == 0
    assert "base: 2 of 6 tensors need one" in run("inspect", tuned).out
    missing = run("unpack", tuned, "-o", "s3://bucket/no.safetensors")
    assert missing.code == 1
    assert missing.error.startswith(f"{tuned}: tensor ")
    assert "no.safetensors" not in s3.names()
    assert run("unpack", tuned, "--base", base).code == 0
    assert s3.fs.cat_file("bucket/tuned.safetensors") == model.read_bytes()


def test_snapshots_of_files_at_urls(s3: Server, folder: Path, tmp_path: Path, run: Run):
    s3.fs.put(f"{folder}/", "bucket/llama/", recursive=True)
    store = tmp_path / "store"
    assert run("snapshot", "take", store, "a", "s3://bucket/llama").code == 0
    out = "s3://bucket/out.ph.safetensors"
    assert run("snapshot", "restore", store, "a", "-o", out).code == 0
    found = load_file(out)
    assert sorted(found) == sorted(tensor.path for tensor in SnapshotStore(store).info("a").tensors)
    plain = "s3://bucket/out.safetensors"
    done = run("snapshot", "restore", store, "a", "-o", plain, "--json")
    assert json.loads(done.out)["results"][0]["dst"] == plain
    assert run("snapshot", "restore", store, "a", "-o", plain).code == 2
    remote = SnapshotStore("s3://bucket/store", storage_options=s3.options)
    remote.take_files("b", [plain, folder / "model-00001-of-00002.safetensors"][:1])
    remote.restore_file("b", "s3://bucket/b.safetensors")
    assert s3.fs.size("bucket/b.safetensors") == s3.fs.size("bucket/out.safetensors")


@pytest.mark.parametrize("verb", ["pack", "unpack", "inspect", "verify", "bench"])
def test_errors_name_the_url(s3: Server, run: Run, verb: str):
    lines = {
        "s3://bucket/no.ph.safetensors": (3, "no such file or folder; check the "),
        "s3://no-bucket/no.ph.safetensors": (3, "check the "),
        "odd://no.ph.safetensors": (2, "odd"),
        "gs://bucket/no.ph.safetensors": (4, "needs a package that is not installed"),
    }
    for url, (code, words) in lines.items():
        done = run(verb, url)
        assert done.code == code
        assert done.error.startswith(f"{url}: ")
        assert words in done.error


def test_missing_credentials_are_told(s3: Server):
    env = {key: value for key, value in os.environ.items() if key not in s3.environment}
    env |= {
        "AWS_ENDPOINT_URL": s3.url,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }
    done = run_command("pack", "s3://bucket/x.safetensors", env={**env, "HOME": "/nowhere"})
    assert done.code == 3
    assert done.error.startswith(
        "s3://bucket/x.safetensors: Unable to locate credentials; check the"
    )
