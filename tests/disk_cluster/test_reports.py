"""Reports whose tensors are described on a cluster say what they say without one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_samples import Ended, result
from dask_samples import local_client
from real_model import real_tensors
from safetensors.numpy import save_file

from packhorse.disk import pack_file
from packhorse.reports import describe
from packhorse.reports.build import make_findings
from packhorse.reports.describe import parts_of
from packhorse.reports.options import Options
from packhorse.reports.results import Findings
from packhorse.reports.sources import find_sources

QUICK = Options(engines=False)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a cluster of two processes."""
    pytest.importorskip("distributed")
    with local_client(tmp_path_factory.mktemp("dask")) as client:
        yield client


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A plain file, a packed one, and a folder of two shards."""
    folder = tmp_path_factory.mktemp("models")
    tensors = {name: t for name, t in real_tensors(2).items() if "embeddings.word" not in name}
    plain, packed, shards = folder / "a.safetensors", folder / "b.ph.safetensors", folder / "c"
    save_file(tensors, plain)
    pack_file(plain, packed)
    shards.mkdir()
    for layer in "01":
        part = {name: t for name, t in tensors.items() if f"layer.{layer}." in name}
        save_file(part, shards / f"model-{layer}.safetensors")
    return [plain, packed, shards]


def comparable(findings: Findings) -> Findings:
    return replace(findings, made="", settings=replace(findings.settings, seconds=0.0))


def test_the_same_findings_with_and_without_a_cluster(client: Any, models: list[Path]) -> None:
    shared = make_findings(models, options=QUICK, client=client)
    assert comparable(shared) == comparable(make_findings(models, options=QUICK))


def test_a_large_source_is_described_in_parts(
    models: list[Path], monkeypatch: pytest.MonkeyPatch, client: Any
) -> None:
    monkeypatch.setattr(describe, "_PART_NBYTES", 1 << 20)
    (source,) = find_sources([models[2]])
    parts = parts_of(source, QUICK)
    assert len(parts) > 3
    edges = [part.tensors for part in parts]
    assert [start for start, _ in edges[1:]] == [stop for _, stop in edges[:-1]]
    shared = make_findings([models[2]], options=QUICK, client=client)
    assert comparable(shared) == comparable(make_findings([models[2]], options=QUICK))


def test_what_cannot_be_read_is_reported_from_the_workers(
    client: Any, models: list[Path], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.ph.safetensors"
    data = bytearray(models[1].read_bytes())
    data[-40] ^= 1
    bad.write_bytes(data)
    (tmp_path / "cut.safetensors").write_bytes(models[0].read_bytes()[:1000])
    found = make_findings(
        [models[0], bad, tmp_path / "cut.safetensors"], options=QUICK, client=client
    )
    assert [row.name for row in found.sources] == ["a.safetensors", "bad.ph.safetensors"]
    assert [problem.source for problem in found.problems] == [
        "bad.ph.safetensors", "cut.safetensors"
    ]  # fmt: skip


def test_the_command_starts_a_cluster_here(
    run: Callable[..., Ended], models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("distributed")
    done = run("report", models[0], "--no-engines", "--json", "--scheduler", "local")
    assert done.err == ""
    assert {row["name"] for row in result(done)["tensors"]} == {
        row.name for row in make_findings([models[0]], options=QUICK).tensors
    }
    monkeypatch.setattr("packhorse.storage.cluster._PATIENCE_S", 1)
    done = run("report", models[0], "--scheduler", "tcp://127.0.0.1:9")
    assert done.code == 3
    assert "no scheduler of Dask answers" in done.error
    assert list(tmp_path.iterdir()) == []
