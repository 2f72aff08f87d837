"""Many files on a Dask cluster: one of processes of this machine, whose workers are killed."""

import json
import os
import signal
import subprocess
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_samples import (
    COMMAND,
    Ended,
    contents,
    default_signals,
    flip_bytes,
    frame_offsets,
    run_command,
    tensors,
    write_folder,
    write_model,
)
from dask_samples import MEMORY, held, killing_the_writer, local_client, suicide, wait_for
from s3_server import Server
from safetensors.numpy import load_file, save_file

from packhorse.disk import (
    ManyResult,
    pack_file,
    pack_folder,
    pack_many,
    unpack_many,
    verify_folder,
    verify_many,
)
from packhorse.disk.container import pack_range
from packhorse.storage.tasks import perform

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries of AWS are warned of

Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a cluster of two processes."""
    pytest.importorskip("distributed")
    with local_client(tmp_path_factory.mktemp("dask")) as client:
        yield client


@pytest.fixture(params=["cluster", "here"])
def client(request: pytest.FixtureRequest) -> Any:
    """The client of a cluster, or none: the same work in this process."""
    return request.getfixturevalue("cluster") if request.param == "cluster" else None


def statuses(result: ManyResult) -> dict[str, int]:
    return dict(Counter(report.status for report in result))


def write_slow(path: Path, seed: int = 0) -> Path:
    """A file that takes long enough to pack at level max that its worker can be killed."""
    parts = {f"{name}.{i}": array for i in range(12)
             for name, array in tensors(seed + i, 4096).items()}  # fmt: skip
    save_file(parts, path)
    return path


def left_over(folder: Path) -> list[Path]:
    return list(folder.rglob(".packhorse-*"))


def test_many_files(client: Any, tmp_path: Path):
    """Tiny ones, a damaged one in their middle, a large one in parts, and a folder."""
    tiny = [write_model(tmp_path / f"{i:03}.safetensors", i, 4) for i in range(20)]
    tiny[10].write_bytes(tiny[10].read_bytes()[:-3])
    large = write_model(tmp_path / "large.safetensors", 1, 2000)
    folder = write_folder(tmp_path / "llama")
    (folder / "empty").mkdir()
    before = contents(tmp_path)
    sources, out = [*tiny, large, folder], tmp_path / "out"
    out.mkdir()
    done: list[int] = []
    result = pack_many(sources, out, client=client, part_nbytes=1_500_000, progress=done.append)
    assert statuses(result) == {"packed": 22, "failed": 1, "copied": 3}
    assert [str(report.source) for report in result][:21] == [*map(str, tiny), str(large)]
    (failed,) = result.failed
    assert (failed.source, "cut short" in str(failed.error)) == (tiny[10], True)
    assert {report.n_parts for report in result if report.source == large} == {3}
    assert all(bool(report.worker) == (client is not None) for report in result)
    files = [path for path in folder.rglob("*") if path.is_file() and "index" not in path.name]
    assert sum(done) == sum(path.stat().st_size for path in [*tiny, large, *files])
    pack_file(large, tmp_path / "same")
    assert (out / "large.ph.safetensors").read_bytes() == (tmp_path / "same").read_bytes()
    pack_folder(folder, tmp_path / "same.ph")
    assert contents(out / "llama.ph") == contents(tmp_path / "same.ph")
    assert left_over(tmp_path) == []
    assert before.items() <= contents(tmp_path).items()

    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    again = pack_many(sources, out, client=client)
    assert statuses(again) == {"skipped": 25, "failed": 1}
    assert again.packed_nbytes == result.packed_nbytes
    assert stamps == {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    packed = [path for path in sorted(out.iterdir()) if path.name != "010.ph.safetensors"]
    assert statuses(verify_many(packed, client=client)) == {"verified": 23}
    back = tmp_path / "back"
    back.mkdir()
    unpacked = unpack_many(packed, back, client=client)
    assert statuses(unpacked) == {"unpacked": 22, "copied": 3}
    assert (back / "large.safetensors").read_bytes() == large.read_bytes()
    assert contents(back / "llama") == contents(folder)
    assert statuses(unpack_many(packed, back, client=client, check="whole")) == {"skipped": 25}


@pytest.mark.parametrize("part_nbytes", [1 << 31, 9_000_000], ids=["whole", "parts"])
def test_a_worker_is_killed(cluster: Any, tmp_path: Path, part_nbytes: int):
    source, out = write_slow(tmp_path / "slow.safetensors"), tmp_path / "out"
    out.mkdir()
    with killing_the_writer(cluster, out) as killed:
        result = pack_many([source], out, client=cluster, level="max", part_nbytes=part_nbytes)
    assert killed
    assert statuses(result) == {"packed": 1}
    pack_file(source, tmp_path / "same", level="max")
    assert [path.name for path in out.iterdir()] == ["slow.ph.safetensors"]
    assert (out / "slow.ph.safetensors").read_bytes() == (tmp_path / "same").read_bytes()


def test_a_worker_is_killed_while_it_uploads(cluster: Any, s3: Server, tmp_path: Path):
    folder = write_folder(tmp_path / "llama")
    s3.fs.put(f"{folder}/", "bucket/llama/", recursive=True)
    killed: list[int] = []

    def before(method: str, path: str, query: str) -> None:
        if method == "PUT" and "/model-" in path:
            wait_for(lambda: killed)

    s3.before = before
    options = {"client": cluster, "storage_options": s3.options}
    with killing_the_writer(cluster, Path(tempfile.gettempdir()), killed):
        result = pack_many(["s3://bucket/llama"], "s3://bucket/out", **options)
    assert killed
    assert statuses(result).keys() <= {"packed", "copied", "skipped"}  # a task may be done twice
    assert result.ok
    pack_folder(folder, tmp_path / "same.ph")
    for path in (path for path in (tmp_path / "same.ph").rglob("*") if path.is_file()):
        name = path.relative_to(tmp_path / "same.ph").as_posix()
        assert s3.fs.cat_file(f"bucket/out/llama.ph/{name}") == path.read_bytes()
    assert len(s3.names("bucket/out")) == 5
    again = pack_many(["s3://bucket/llama"], "s3://bucket/out", **options)
    assert statuses(again) == {"skipped": 5}
    assert s3.uploads() == []


def test_parts_at_a_url(client: Any, s3: Server, tmp_path: Path):
    model = write_model(tmp_path / "model.safetensors", rows=1000)
    s3.fs.put(str(model), "bucket/model.safetensors")
    s3.fs.pipe_file("bucket/model.ph.safetensors.txt", b"mine")
    options = {"client": client, "storage_options": s3.options}
    result = pack_many(["s3://bucket/model.safetensors"], part_nbytes=600_000, **options)
    assert (statuses(result), result.files[0].n_parts) == ({"packed": 1}, 3)
    pack_file(model, tmp_path / "same")
    packed = s3.fs.cat_file("bucket/model.ph.safetensors")
    assert packed == (tmp_path / "same").read_bytes()
    assert len(s3.names()) == 3  # and no part


def test_a_folder_goes_on_when_its_shard_is_repaired(client: Any, tmp_path: Path):
    folder, packed = write_folder(tmp_path / "llama"), tmp_path / "llama.ph"
    shard = folder / "model-00002-of-00002.safetensors"
    good = shard.read_bytes()
    shard.write_bytes(good[:-1])
    result = pack_many([folder], client=client)
    assert statuses(result) == {"packed": 1, "copied": 2, "failed": 2}
    assert "is not complete, because 1 of its files failed" in str(result.failed[0].error)
    with pytest.raises(ValueError, match="check is 'all'"):
        pack_many([folder], client=client, check="all")
    assert [path.name for path in left_over(packed)] == [".packhorse-unfinished.json"]
    # Another command does not take over, and what a killed one has left is removed.
    other = pack_many([folder], client=client, level="fast")
    assert "an interrupted command with other arguments" in str(other.failed[0].error)
    (packed / ".packhorse-0-0.part").touch()
    (packed / ".packhorse-0-0.tmp").touch()
    shard.write_bytes(good)
    assert statuses(pack_many([folder], client=client)) == {"skipped": 3, "packed": 1, "copied": 1}
    pack_folder(folder, tmp_path / "same")
    assert contents(packed) == contents(tmp_path / "same")
    assert verify_folder(packed) == []


def test_parts_are_of_one_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The source is written to between two parts."""
    model = write_model(tmp_path / "model.safetensors", rows=1000)

    def pack_and_touch(*args: Any, **options: Any) -> Any:
        packed = pack_range(*args, **options)
        os.utime(model)
        return packed

    monkeypatch.setattr("packhorse.disk.cluster.work.pack_range", pack_and_touch)
    (report,) = pack_many([model], part_nbytes=600_000)
    assert str(report.error).startswith(f"{model}: changed while it was being read")
    assert [path.name for path in tmp_path.iterdir()] == [model.name]


def test_only_the_wanted_output_is_skipped(client: Any, tmp_path: Path):
    model, packed = tmp_path / "a.safetensors", tmp_path / "a.ph.safetensors"
    save_file(tensors(rows=2000), model)
    pack_many([model], client=client)
    times = model.stat()
    found = load_file(model)
    save_file(found | {"layers.0.weight": found["layers.0.weight"][::-1].copy()}, model)
    os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))  # seems as old as it was
    cases: list[tuple[str, dict[str, Any]]] = [
        ("has other values in tensor 'layers.0.weight'", {}),
        ("was packed at level default", {"level": "max"}),
    ]
    for words, options in cases:
        (report,) = pack_many([model], client=client, **options)
        assert isinstance(report.error, FileExistsError)
        assert f"a.ph.safetensors: already exists, and {words}; allow rep" in str(report.error)
        assert statuses(pack_many([model], client=client, force=True, **options)) == {"packed": 1}
    flip_bytes(packed, frame_offsets(packed)["layers.0.weight"][1] - 100)
    assert statuses(pack_many([model], client=client, level="max")) == {"skipped": 1}
    (report,) = pack_many([model], client=client, level="max", check="whole")
    assert "already exists, and is damaged" in str(report.error)
    (report,) = verify_many([packed], client=client)
    assert (report.status, report.ok, len(report.problems)) == ("damaged", False, 1)
    (report,) = unpack_many([packed], client=client)
    assert report.status == "skipped"


def test_a_complete_folder_is_kept(client: Any, tmp_path: Path):
    """An existing folder is not marked as unfinished, unless it may be replaced."""
    folder, packed = write_folder(tmp_path / "llama"), tmp_path / "llama.ph"
    pack_folder(folder, packed)
    assert statuses(pack_many([folder], client=client)) == {"skipped": 5}
    (packed / "config.json").write_text("{}")
    (packed / "tokenizer" / "vocab.txt").unlink()
    kept = contents(packed)
    result = pack_many([folder], client=client)
    assert statuses(result) == {"skipped": 2, "failed": 2}
    assert {str(report.error).partition(": ")[2][:16] for report in result.failed} == {
        "already exists, ", "missing in a fol",
    }  # fmt: skip
    assert contents(packed) == kept
    assert statuses(pack_many([folder], client=client, force=True))["copied"] == 2
    (packed / "mine.txt").touch()
    (report,) = pack_many([folder], client=client, force=True)
    assert "contains mine.txt, which the new folder would not have" in str(report.error)


def test_against_a_base(client: Any, tmp_path: Path):
    base = write_folder(tmp_path / "base")
    tuned = write_folder(tmp_path / "tuned")
    result = pack_many([tuned], client=client, base=base, part_nbytes=300_000)
    assert sum(report.n_delta for report in result) >= 4
    pack_folder(tuned, tmp_path / "same", base=base)
    assert contents(tmp_path / "tuned.ph") == contents(tmp_path / "same")
    assert verify_many([tmp_path / "same"], base=base, client=client).ok
    assert not verify_many([tmp_path / "same"], client=client).ok
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot be the base"):
        pack_many([tuned / "model-00001-of-00002.safetensors"], base=tmp_path / "empty")


def test_a_poisonous_task_is_reported(cluster: Any):
    """A task that kills its worker fails alone; Dask would try it on four workers."""
    cluster.run_on_scheduler(lambda dask_scheduler: setattr(dask_scheduler, "allowed_failures", 0))
    try:
        outcomes = list(perform(suicide, deque(["kill"]), cluster))
        outcomes += perform(suicide, deque(["a", "b"]), cluster)
    finally:
        cluster.run_on_scheduler(
            lambda dask_scheduler: setattr(dask_scheduler, "allowed_failures", 3)
        )
    (poison, *others) = outcomes
    assert isinstance(poison.error, OSError)
    assert "probably memory ran out" in str(poison.error)
    assert sorted(outcome.value for outcome in others) == ["a", "b"]


def test_tasks_wait_for_memory(cluster: Any):
    wait_for(lambda: len(cluster.nthreads()) == 2)
    for nbytes, overlap, threads in ((MEMORY // 3, False, 2), (MEMORY // 5, True, 1)):
        spans = [outcome.value for outcome in perform(held, deque([nbytes] * 6), cluster)]
        assert {span[3] for span in spans} == {threads}
        pairs = [
            (a, b) for a in spans for b in spans if a is not b and a[0] == b[0] and a[1] <= b[1]
        ]
        assert any(b[1] < a[2] for a, b in pairs) is overlap


def test_the_command(cluster: Any, run: Run, tmp_path: Path):
    address, out = cluster.scheduler.address, tmp_path / "out"
    out.mkdir()
    model, bad = write_model(tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
    bad.write_bytes(b"no")
    folder = write_folder(tmp_path / "llama")
    words = ("pack", model, bad, folder, "-o", out, "--scheduler", address)
    planned = run(*words, "--dry-run", "--part-nbytes", 100_000, "--json")
    rows = {row["src"]: row for row in json.loads(planned.out)["results"]}
    assert list(out.iterdir()) == []
    assert (rows[str(model)]["status"], rows[str(model)]["n_tasks"]) == ("planned", 6)
    done = run(*words)
    assert (done.code, done.error.startswith(f"{bad}: not a safetensors file")) == (1, True)
    assert done.out.startswith("3 packed, 1 failed, 3 copied\n")
    assert f" {model} " in done.out
    again = run(*words, "--check", "whole", "--json")
    document = json.loads(again.out)
    assert [row["status"] for row in document["results"]].count("skipped") == 6
    assert [row["path"] for row in document["errors"]] == [str(bad)]
    packed = [out / "a.ph.safetensors", out / "llama.ph"]
    assert run("verify", *packed, "--scheduler", address).code == 0
    assert run("unpack", packed[1], "-o", out / "back", "--scheduler", address).code == 0
    assert contents(out / "back") == contents(folder)
    flip_bytes(packed[0], packed[0].stat().st_size - 100)
    damaged = run("verify", *packed, "--scheduler", address)
    assert (damaged.code, damaged.out.count("bad: ")) == (1, 1)
    for option in (("--check", "quick"), ("--part-nbytes", 5)):
        refused = run("pack", model, *option)
        assert (refused.code, refused.error[-20:]) == (2, "it needs --scheduler")


@pytest.mark.slow
def test_the_command_is_interrupted(tmp_path: Path):
    """On a cluster of its own, by Ctrl-C in a terminal, which reaches all processes."""
    source, out = write_slow(tmp_path / "slow.safetensors"), tmp_path / "out"
    out.mkdir()
    words = ["pack", source, "-o", out, "--level", "max", "--scheduler", "local"]
    with subprocess.Popen(
        [COMMAND, *map(str, words)], stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=default_signals,
    ) as process:  # fmt: skip
        wait_for(lambda: list(out.iterdir()))
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate()
    assert (process.returncode, list(out.iterdir())) == (130, [])
    assert error.count("\n") == 1
    assert "stopped by SIGINT; finished output was kept, unfinished output was removed" in error
    assert run_command(*words).code == 0
    pack_file(source, tmp_path / "same", level="max")
    assert (out / "slow.ph.safetensors").read_bytes() == (tmp_path / "same").read_bytes()
