"""The machine code of the kernels: few instructions for each weight, the tensor cores, no spills.

The assembler that Triton carries compiles them offline, in another process, because Triton's
interpreter is on in this one. docs/decisions.md has the budget from which the limits follow.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packhorse.kernels.matmul import (
    MAX_OWN_TOKENS,
    MatmulConfig,
    default_config,
    shared_nbytes_of,
)
from packhorse.layout import WEIGHT_FORMATS

TOOL = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
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
    command = [sys.executable, str(TOOL), "sass", "--brief", "--json", str(path)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(path.parent / "cache")}
    subprocess.run(command, check=True, env=environment, timeout=600, capture_output=True)
    rows: list[dict[str, Any]] = json.loads(path.read_text())["counts"]
    return rows


def test_each_kernel_takes_few_instructions(counts: list[dict[str, Any]]) -> None:
    kernels = [{row["kernel"] for row in counts if row["architecture"] == n} for n in (90, 80)]
    assert kernels == [LIMITS.keys() - {"W12 N=64"}, {"W12 N=8", "W12 N=64", "W11 N=8"}]
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
