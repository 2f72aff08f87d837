"""The benchmark of differences and chains in the core alone, on tiny states."""

from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tests.samples.offline_kernels import KEPT_PROGRAMS

from benchmarks import core, deltas


@pytest.fixture(scope="module")
def program() -> Path:
    """The compiled program, kept for the next run. Nobody times it here, so the compiler need not
    optimise."""
    compiler = core.find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler: g++, clang++ or what CXX names")
    return core.build(compiler, KEPT_PROGRAMS / "deltas", "-O0", source=deltas.SOURCE)


def states(n: int, dtype: type) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    old = random.standard_normal(n, np.float32) * 0.02
    return [old.astype(dtype), (old + 1e-4 * random.standard_normal(n, np.float32)).astype(dtype)]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_chains_are_timed_on_every_code_path(program: Path, dtype: type) -> None:
    old, new = states(300_001, dtype)
    packed = set()
    for isa in core.available_isas():
        found = deltas.measure(program, [old, new, old], isa, 1)
        packed.add(tuple(found.packed))
        assert {"full", "encode", "decode", "alone-2", "rans-2", "chain-2"} < set(found.seconds)
        rows = deltas.rows_of_chain(found)
        assert len(rows) == 4
        assert rows[0].startswith("**range by range** | ")
    ((full, first, second),) = packed
    assert max(first, second) < 0.8 * full


def test_links_of_a_sparse_chain_differ_in_few_places(program: Path) -> None:
    chain = deltas.sparse_chain(*states(600_001, ml_dtypes.bfloat16), 2)
    units = [state.view(np.uint16) for state in chain]
    for before, after in pairwise(units):
        n_changed = np.count_nonzero(before != after)
        assert n_changed == round(deltas.CHANGED_SHARE * 600_001)
    found = deltas.measure(program, chain, core.available_isas()[-1], 1)
    assert max(found.packed[1:]) < 0.05 * found.packed[0]
