"""The benchmarks of tables in host memory: their measurements on small tables, and the document of
their figures."""

import json
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from benchmark_modules import import_afresh
from table_samples import float_rows, noise, sparse_rows

from packhorse.reference.ibp import encode_row, fit_best


@pytest.fixture(scope="module")
def host() -> Iterator[dict[str, ModuleType]]:
    """The modules of benchmarks/host."""
    names = (
        *("embeddings", "gathers", "graphsage", "ibp", "kv", "measure", "packing", "ratios"),
        *("picture", "report", "tables", "training"),
    )
    others = ("common.files", "common.memory_limit", "data.wordnet")
    with import_afresh(*others, *(f"host.{name}" for name in names)) as modules:
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


def test_the_picture_has_a_pair_of_bars_for_each_table(
    host: dict[str, ModuleType], result: dict[str, Any]
) -> None:
    root = ElementTree.fromstring(host["picture"].picture(result["ratios"]))
    texts = [element.text for element in root.iter() if element.tag.endswith("}text")]
    assert texts[-6:-3] == ["MiniLM words, BF16", "75", texts[-4]]
    assert [texts[-6], texts[-3]] == [row["table"] for row in result["ratios"]]


def test_the_kept_page_and_picture_are_those_of_the_kept_figures(
    host: dict[str, ModuleType],
) -> None:
    measure = host["measure"]
    kept = json.loads(measure.RESULT.read_text())
    assert measure.DOCUMENT.read_text() == host["report"].document(kept)
    assert measure.PICTURE.read_text() == host["picture"].picture(kept["ratios"])


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


@pytest.mark.parametrize("bits", [32, 64])
def test_rows_of_ibp_in_cpp_are_those_of_the_slow_coder(
    host: dict[str, ModuleType], bits: int
) -> None:
    rival = host["ibp"]
    if not rival.is_available():
        pytest.skip("needs a compiler and BMI2")
    rows = np.concatenate([float_rows("BF16", 60, 64), noise(16, 20, 64)])
    words = rows.view(f"u{bits // 8}")
    fit = fit_best(words)
    packed = rival.IbpRows(rows.view(np.uint8), fit)
    assert 0.5 < packed.packed_share < 1
    for number, row in enumerate(words):
        expected = encode_row(row, fit) or row.tobytes()
        assert packed.row(number).tobytes()[: len(expected)] == expected
    ids = np.random.default_rng(1).integers(0, 80, 333)
    for threads in (1, 3):
        out = np.empty((333, 128), np.uint8)
        packed.gather(ids, out, threads)
        np.testing.assert_array_equal(out, rows.view(np.uint8)[ids])


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


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_embedding_bags_are_measured_beside_their_rivals(host: dict[str, ModuleType]) -> None:
    embeddings = host["embeddings"]
    embeddings.N_ROWS, embeddings.N_BAGS, embeddings.BAG = 3000, 32, 5
    embeddings.COLUMNS, embeddings.ROUNDS = (128,), 2
    found = embeddings.measure()
    assert [(row["dtype"], row["zipf"]) for row in found] == [
        *(("float32", None), ("float32", 1.05), ("bfloat16", None), ("bfloat16", 1.05))
    ]
    for row in found:
        assert row["nbytes"]["packhorse"] < 0.95 * row["nbytes"]["plain"]
        assert row["lookup_ms"].keys() == row["training_ms"].keys() > {"packhorse"}
    text = host["report"].part({"embeddings": found}, "embeddings")
    assert "| 128 bfloat16 | Zipf 1.05 |" in text


@pytest.fixture(scope="module")
def trained(
    host: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Trainings on a small graph, in this process."""
    folder, rng = tmp_path_factory.mktemp("graph"), np.random.default_rng(0)
    labels = rng.integers(0, 4, 300)
    words = (rng.random((300, 64)) < 0.1 + 0.3 * (np.arange(64) % 4 == labels[:, None])).astype(
        "f4"
    )
    host["training"].write_graph(folder, labels, rng.integers(0, 300, (2, 900)), [words])
    settings = host["graphsage"].Settings(n_words=64, epochs=3, batch=32, n_tested=100)
    threads = torch.get_num_threads()
    try:
        whole = [host["graphsage"].run(arm, folder, settings) for arm in host["training"].ARMS]
        short = host["graphsage"].run("packed", folder, settings._replace(epochs=1, batches=2))
    finally:
        torch.set_num_threads(threads)
    ended = {"killed": False}
    runs = [
        run | ended | {"arm": arm, "limited": False}
        for arm, run in zip(host["training"].ARMS, whole, strict=True)
    ]
    runs.append(short | ended | {"arm": "packed", "limited": True})
    runs.append({"arm": "plain", "limited": True, "killed": True})
    host["training"].check_losses(runs)
    known = {"n_nodes": 300, "n_edges": 900, "limit_nbytes": 10**9, "settings": {"n_words": 64}}
    known["read_ahead_kib"] = host["files"].read_ahead_kib(folder)
    return known | {"runs": runs}


def test_trainings_have_the_same_losses_and_learn(trained: dict[str, Any]) -> None:
    plain, packed, *_, short, killed = trained["runs"]
    assert "losses" not in packed  # they were compared
    assert np.mean(plain["losses"][-7:]) < 0.8 * np.mean(plain["losses"][:7])
    assert plain["accuracy"] == packed["accuracy"] > 0.4
    assert packed["features_nbytes"] < plain["features_nbytes"] == 4 * 300 * 64
    assert [epoch["batches"] for epoch in packed["epochs"]] == [7, 7, 7]
    assert short["epochs"][0]["batches"] == 2
    assert 0 < packed["epochs"][0]["rows"] < packed["epochs"][0]["seconds"]
    assert packed["own_nbytes"] > 10**6
    assert "losses" not in killed


def test_losses_that_differ_are_an_error(host: dict[str, ModuleType]) -> None:
    runs = [
        {"arm": name, "killed": False, "losses": losses}
        for name, losses in {"plain": [1.0, 0.5], "packed": [1.0], "memmap": [1.5]}.items()
    ]
    with pytest.raises(AssertionError, match="memmap: losses differ from those of plain"):
        host["training"].check_losses(runs)


def test_parts_that_are_measured_apart_say_when(
    host: dict[str, ModuleType], trained: dict[str, Any]
) -> None:
    conditions = dict.fromkeys(host["measure"].CONDITIONS, "") | {
        "date": "2026-01-02", "versions": {"torch": "2"}, "load_before": 1.0, "load_after": 2.0,
        "core_scaling": [1.0, 2.0],
        "machine": dict.fromkeys(
            ("cpu", "family_model_stepping", "cores", "memory_gib", "system", "python"), "?"
        ),
    }  # fmt: skip
    kept = {"date": "2025-01-01", "ratios": [], "packing": ["older"], "training": ["older"]}
    joined = host["measure"].join(kept, conditions | {"training": trained})
    assert (joined["date"], joined["packing"]) == ("2025-01-01", ["older"])
    text = host["report"].part(joined, "training")
    assert "Measured on 2026-01-02" in text
    assert "300 synsets, 900 relations" in text
    assert "| plain | killed: out of memory |" in text
    alone = joined | {"training": trained | {"limit_nbytes": None, "not_limited": "no rights"}}
    assert "Not measured with a limit of memory: no rights." in host["report"].part(
        alone, "training"
    )


def test_memory_is_limited(host: dict[str, ModuleType]) -> None:
    limits = host["memory_limit"]
    reason = limits.obstacle()
    if reason is not None:
        pytest.skip(reason)
    code = (
        "import sys; open(sys.argv[1], 'w').write('0')\n"
        "kept = b'x' * (10 << 20); print('some', flush=True)\n"
        "kept = b'x' * (200 << 20); print('too much')\n"
    )
    with limits.memory_limit(100 << 20) as group:
        done = subprocess.run(
            [sys.executable, "-c", code, str(group.entrance)], capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (-9, "some\n")
        peak = group.peak_nbytes()
        assert peak is None or 10 << 20 < peak <= 100 << 20
    assert not group.entrance.exists()


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
