"""The machine code of the kernels: few instructions for each weight, the tensor cores, no spills;
and the kept counts of it, which are those of the kernels as they are.

The assembler that Triton carries compiles them offline, in another process, because Triton's
interpreter is on in this one. docs/decisions.md has the budget from which the limits follow.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import triton
from tests.samples.offline_kernels import run_offline

from benchmarks.gpu.triton_sources import source_hash
from packhorse.device import counts as model_counts
from packhorse.kernels import matmul
from packhorse.kernels.matmul import (
    MAX_OWN_TOKENS,
    MatmulConfig,
    default_config,
    shared_nbytes_of,
)
from packhorse.layout import WEIGHT_FORMATS

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "benchmarks" / "gpu.py"
KEPT = {
    version: json.loads((ROOT / f"benchmarks/results/gpu/sass_triton_{version}.json").read_text())
    for version in ("3.6", "3.9")
}
RENEW = "write it again with Triton {version} and `python benchmarks/gpu.py {command}`"
LIMITS = {
    "W12 N=8": 3.2,
    "W12 N=16": 3.8,
    "W12 N=32": 5.0,
    "W12 N=64": 6.5,
    "W12 N=8 odd columns": 3.2,
    "W11 N=8": 2.8,
    "W11 N=16": 3.8,
    "W11 N=8 odd columns": 3.2,
    "W12 decode": 4.5,
    "W11 decode": 4.5,
}
SHARED_NBYTES = {90: 227 << 10, 80: 163 << 10}  # of a program, by NVIDIA's tables


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("sass") / "counts.json"
    run_offline(TOOL, "sass", "--brief", "--json", path)
    rows: list[dict[str, Any]] = json.loads(path.read_text())["counts"]
    return rows


def test_each_kernel_takes_few_instructions(counts: list[dict[str, Any]]) -> None:
    kernels = [{row["kernel"] for row in counts if row["architecture"] == n} for n in (90, 80)]
    only_kept = {"W12 N=16", "W11 N=16"}
    assert kernels == [
        LIMITS.keys() - {"W12 N=64"} - only_kept,
        {"W12 N=8", "W12 N=64", "W11 N=8"},
    ]
    for row in counts:
        assert 1 < row["instructions"] <= LIMITS[row["kernel"]], row
        assert 1 < row["integer"] < row["instructions"], row


def test_nothing_spills_and_all_fits(counts: list[dict[str, Any]]) -> None:
    for row in counts:
        assert row["loop_spills"] == 0, row
        assert row["spills"] <= 8, row  # once for a program
        assert row["shared_nbytes"] <= SHARED_NBYTES[row["architecture"]], row


def test_products_take_the_shared_memory_that_is_expected(counts: list[dict[str, Any]]) -> None:
    """Otherwise launches would fail although the divisions seem to fit."""
    for row in counts:
        name, n = row["kernel"].split()[0], row["kernel"].split()[1].removeprefix("N=")
        limit = SHARED_NBYTES[row["architecture"]]
        if n == "decode":
            continue
        format = WEIGHT_FORMATS[name]
        config = default_config(14336, 4096, int(n), format, shared_nbytes=limit)
        if int(n) > MAX_OWN_TOKENS:
            config = MatmulConfig(128, 64, 32, 4, 1, 3)
        assert row["shared_nbytes"] == shared_nbytes_of(config, format), row


def test_decoding_does_not_depend_on_fused_arithmetic(counts: list[dict[str, Any]]) -> None:
    """TRITON_DEFAULT_FP_FUSION makes no difference: products with powers of two are exact."""
    decoders = [row for row in counts if "decode" in row["kernel"]]
    assert len(decoders) == 2
    assert all(row["unfused"] for row in decoders)


def test_products_use_the_tensor_cores(counts: list[dict[str, Any]]) -> None:
    for row in counts:
        assert (row["tensor"] > 0) == ("decode" not in row["kernel"]), row


def test_no_product_of_triton_runs_on(counts: list[dict[str, Any]]) -> None:
    """Hopper's asynchronous products read registers that a compiler may overwrite too early. Only
    the kernels in CUDA C++ have them, and `test_hazards.py` checks these."""
    assert {row["hopper"] for row in counts} == {0}


# What is kept.


@pytest.mark.parametrize("version", KEPT)
def test_the_kept_counts_are_of_these_kernels(version: str, counts: list[dict[str, Any]]) -> None:
    kept = KEPT[version]
    command = f"sass --json benchmarks/results/gpu/sass_triton_{version}.json"
    renew = RENEW.format(version=kept["triton"], command=command)
    assert kept["source"] == source_hash(), f"the kernels have changed since; {renew}"
    rows = {(row["kernel"], row["architecture"]): row for row in kept["counts"]}
    assert {name for name, _ in rows} == set(LIMITS)
    assert all(row["loop_spills"] == row["hopper"] == 0 for row in rows.values())
    assert all(row["instructions"] <= LIMITS[row["kernel"]] for row in rows.values())
    if kept["triton"] == triton.__version__:
        for row in counts:
            assert row == rows[row["kernel"], row["architecture"]], renew


def test_the_model_of_time_counted_these_kernels() -> None:
    renew = RENEW.format(version="3.6", command="counting")
    assert source_hash() in str(model_counts.__doc__), f"the kernels have changed since; {renew}"


def test_the_page_of_decisions_has_the_kept_counts() -> None:
    text = (ROOT / "docs" / "decisions.md").read_text()
    tables = {
        (version, row["architecture"], row["kernel"]): f"{row['instructions']:.2f}"
        for version, kept in KEPT.items()
        for row in kept["counts"]
    }
    names = {name: name.replace(" N=", ", ") + " tokens" for name in LIMITS if "odd" not in name}
    names |= {name: name.replace("decode", "to BF16") for name in LIMITS if "decode" in name}
    for kernel, name in names.items():
        columns = (("3.9", 90), ("3.6", 90), ("3.9", 80))
        cells = [tables.get((*column, kernel), "-") for column in columns]
        assert f"| {' | '.join([name, *cells, str(LIMITS[kernel])])} |" in text


def test_only_what_is_compiled_changes_the_hash(tmp_path: Path) -> None:
    for path in Path(matmul.__file__).parent.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    weights = tmp_path / "weights.py"
    source, before = weights.read_text(), source_hash(tmp_path)
    assert before == source_hash()
    for old, new, is_same in (
        ("@triton.jit\n", "# a comment\n@triton.jit\n", True),
        ("0x5140", "0x5141", False),
        ("tl.load(low + columns, mask=mask", "tl.load(low + columns + 1, mask=mask", False),
    ):
        assert old in source
        weights.write_text(source.replace(old, new))
        assert (source_hash(tmp_path) == before) == is_same
