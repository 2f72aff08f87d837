"""The benchmarks of tables in host memory: their measurements on small tables, and the document of
their figures."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from benchmark_modules import import_afresh
from table_samples import float_rows, sparse_rows


@pytest.fixture(scope="module")
def host() -> Iterator[dict[str, ModuleType]]:
    """The modules of benchmarks/host."""
    names = ("gathers", "kv", "measure", "packing", "ratios", "report", "tables")
    with import_afresh("data.wordnet", *(f"host.{name}" for name in names)) as modules:
        yield {name.rpartition(".")[2]: module for name, module in modules.items()}


@pytest.fixture(scope="module")
def result(host: dict[str, ModuleType]) -> dict[str, Any]:
    """A run on two small tables."""
    host["gathers"].LARGE_NBYTES = host["packing"].MIN_NBYTES = 1 << 20
    host["gathers"].BATCH_NBYTES = 1 << 20
    host["gathers"].ROUNDS = host["packing"].ROUNDS = 2
    kind = host["tables"].Table
    found = [
        kind("MiniLM words, BF16", "BF16", float_rows("BF16", 500, 384)),
        kind("Fashion-MNIST / 255, FP32", "F32", sparse_rows(32, 300, 784)),
    ]
    return {
        "ratios": [host["ratios"].measure(table) for table in found],
        "gathers": [line for table in found for line in host["gathers"].measure(table, 1)],
        "packing": [host["packing"].measure(table) for table in found],
    }


def test_tables_are_measured_beside_their_rivals(result: dict[str, Any]) -> None:
    dense, sparse = result["ratios"]
    assert dense["ways"]["chosen for 32"]["pulled"]["32"] == pytest.approx(1.333, abs=1e-3)
    assert 1.2 < dense["ibp"]["ratio"] < 1.4
    assert dense["exponent_bound"] > 1.4
    assert sparse["ways"]["chosen for 32"]["ratio"] > sparse["ibp"]["ratio"] > 5
    assert {line["what"] for line in result["gathers"]} == {
        "rows in the cache",
        "larger than the cache",
    }
    assert all(line["gbps"][name] > 0 for line in result["gathers"] for name in line["gbps"])


def test_keys_and_values_are_measured(host: dict[str, ModuleType]) -> None:
    kv = host["kv"]
    kv.N_SEQUENCES, kv.ROUNDS, kv.LENGTHS, kv.DTYPES = 1, 1, (70,), kv.DTYPES[:1]
    found = kv.measure()
    pages = {row["dtype"]: row for row in found["pages"] if row["model"] == "MiniLM"}
    assert 1.3 < pages["BF16"]["ratio"] < 1.45
    assert pages["BF16"]["refused"] == 0
    frames = {(row["dtype"], row["level"]): row["ratio"] for row in found["frames"]}
    assert frames["BF16", "default"] > 1.47 > frames["BF16", "fast"] > 1.4
    text = host["report"].part({"kv": found}, "kv")
    assert "| MiniLM | BF16 | 1.3" in text
    assert "| 70 |" in text


def test_the_document_shows_targets_and_losses(
    host: dict[str, ModuleType], result: dict[str, Any]
) -> None:
    text = host["report"].targets(result)
    assert "| MiniLM words, BF16: times less pulled at 32 B | 1.333 | >= 1.333 | met |" in text
    for name in ("ratios", "gathers", "packing"):
        assert "| MiniLM words, BF16 |" in host["report"].part(result, name)
    slow = {**result, "packing": [{**result["packing"][0], "gbps": 0.5}]}
    assert "| packing: slowest, GB/s a core | 0.50 | >= 1.5 | MISSED |" in host["report"].targets(
        slow
    )


def test_wordnet_is_a_graph_with_bags_of_words(host: dict[str, ModuleType]) -> None:
    data = host["wordnet"]
    if not data.is_there():
        pytest.skip(data.HOW)
    graph = data.load()
    assert len(graph.labels) == len(graph.glosses) > 110_000
    assert graph.edges.max() < len(graph.labels)
    assert set(graph.labels.tolist()) == set(range(data.N_LABELS))
    rows = data.features(3703, "share", slice(0, 50))
    np.testing.assert_allclose(rows.sum(1), 1, rtol=1e-5)
    assert set(np.unique(data.features(200, "present", slice(0, 50)))) == {0.0, 1.0}


def test_wordnet_is_parsed(
    host: dict[str, ModuleType], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two synsets in the form of wndb(5WN)."""
    noun = (
        "  1 This software and database is being provided to you\n"
        "00001740 03 n 01 entity 0 001 ~ 00001930 n 0000 | a thing that is a thing  \n"
        "00001930 03 n 02 thing 0 it 1 002 @ 00001740 n 0000 + 00002000 a 0101 | an entity  \n"
    )
    adjective = "00002000 00 s 01 able 0 001 & 00001740 n 0000 | like a thing  \n"
    for name, text in {"noun": noun, "verb": "", "adj": adjective, "adv": ""}.items():
        (tmp_path / f"data.{name}").write_text(text)
    data = host["wordnet"]
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    data.load.cache_clear()
    graph = data.load()
    assert graph.labels.tolist() == [3, 3, 0]
    assert graph.edges.T.tolist() == [[0, 1], [1, 0], [1, 2], [2, 0]]
    assert graph.glosses[1] == ["an", "entity"]
    places = data.vocabulary(7)
    assert places["thing"] == 0  # in two glosses; all others are in one
    assert set(places) == {"thing", "that", "is", "an", "entity", "like"}
    shares = data.features(7, "share")
    assert shares[:, 0].tolist() == [np.float32(1 / 3), 0, 0.5]
    weights = data.features(7, "tf-idf")
    np.testing.assert_allclose(weights[0, 0], 2 * np.log(3 / 2), rtol=1e-6)
    data.load.cache_clear()
