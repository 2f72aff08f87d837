"""The benchmark of arrays: its document, and its codecs on small data."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from benchmark_modules import import_afresh

ROOT = Path(__file__).resolve().parents[2]
RNG = np.random.default_rng(0)


@pytest.fixture
def benchmarks() -> Iterator[dict[str, ModuleType]]:
    with import_afresh("arrays", "codecs.measure", "codecs.peers", "data.sets") as modules:
        yield modules


@pytest.mark.parametrize("name", ["arrays"])
def test_documents_are_what_the_kept_figures_give(
    benchmarks: dict[str, ModuleType], name: str
) -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    written = (ROOT / "docs" / f"benchmarks_{name}.md").read_text()
    assert written == benchmarks[name].document(kept)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.int64, np.uint8])
def test_codecs_of_chunks_prove_their_round_trips(
    benchmarks: dict[str, ModuleType], dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, sets = benchmarks["arrays"], benchmarks["data.sets"]
    monkeypatch.setattr(arrays, "CHUNK_NBYTES", 1 << 10)
    array = (RNG.normal(0, 1, 64 * 40 + 9) * 50).astype(dtype)
    shapes = (("matrix", (64, 40)), ("bias", (9,)))
    data = sets.DataSet("small", "?", array, sets.digest(array), "noise", shapes)
    for codec in arrays.CONTENDERS:
        entered = benchmarks["codecs.measure"].enter(
            codec, data, benchmarks["codecs.peers"].Setup(), arrays.CONTENDERS
        )
        if codec == "pcodec" and dtype is np.uint8:
            assert "refuses" in entered
        else:
            assert entered.ratio > 0.1
            n_chunks = len(entered.codec.prepare(data))
            assert n_chunks > 2 or codec == "np.copyto"
