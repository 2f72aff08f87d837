"""The kernels in CUDA C++, run without a GPU (tests/ptx/README.md): products against FP64, copies
as early and as late as the program allows, two orders of warps, and damaged kernels.

The expected order is checked too: each access to shared memory must be in order with those of other
warps, by barriers, mbarriers and `__syncwarp` alone.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from tests.ptx.faults import Fault
from tests.ptx.kernels import WAYS
from tests.ptx.mutations import is_noticed, mutations
from tests.ptx.program import parse
from tests.ptx.stream import CASES, DAMAGED, StreamCase, is_right, run_stream, stream_ptx

from packhorse.errors import MissingBackendError
from packhorse.gpu.nvrtc import compiler
from packhorse.gpu.stream_kernels import stream_source


def _has_compiler() -> bool:
    try:
        compiler()
    except MissingBackendError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_compiler(), reason="needs NVRTC: nvidia-cuda-nvrtc")

FEW, CLUSTER, MANY = DAMAGED
# Two that resemble those to damage are left to `python -m tests.ptx run`.
CHOSEN = [case for i, case in enumerate(CASES) if i not in (1, 7)] + DAMAGED
DAMAGES = [
    (FEW, "fence.mbarrier_init", 0, "without fence.mbarrier_init"),
    (FEW, "mbarrier.try_wait", 0, ""),
    (FEW, "mbarrier.arrive", 0, "wait for each other"),
    (FEW, "fence.proxy.async", 0, "without fence.proxy.async"),
    (FEW, "cp.async.wait_group", 0, "shared memory"),
    (FEW, "bar.warp.sync", 0, "shared memory"),
    (FEW, "griddepcontrol.wait", 0, "before griddepcontrol.wait"),
    (CLUSTER, "barrier.cluster.wait", 0, "mbarrier"),
    (MANY, "bar.sync", 0, ""),
    (MANY, "bar.warp.sync", 0, "shared memory"),
    (MANY, "fence.proxy.async", 0, "without fence.proxy.async"),
    (MANY, "wgmma.wait_group", 0, "written while a product uses it"),
    # Consumers read sums of exceptions, which other warps leave in device memory.
    (MANY, "mbarrier.try_wait", 3, "another warp wrote"),
]


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_products_are_right_in_every_order(case: StreamCase) -> None:
    """In two ways that differ in all; `python -m tests.ptx run` takes four."""
    results = [run_stream(case, **way, track=way["late"]) for way in (WAYS[0], WAYS[-1])]
    for result in results:
        assert is_right(case, result)
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize(
    ("case", "kind", "which", "message"), DAMAGES, ids=lambda value: str(value)[:24]
)
def test_damages_are_noticed(case: StreamCase, kind: str, which: int, message: str) -> None:
    found = [m for m in mutations(stream_ptx(case), "multiply") if m.kind == kind]
    changed = parse(found[which].ptx, "multiply")
    noticed = is_noticed(
        lambda **way: run_stream(case, changed, **way), lambda result: is_right(case, result)
    )
    assert noticed, str(found[which])
    assert message in noticed


def test_stages_that_do_not_stay_with_their_warps_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five stages for four pairs of warps: on an H200, one product in some hundred was wrong."""
    monkeypatch.setattr("packhorse.kernels.stream_product._check_few", lambda config: None)
    config = replace(FEW.config, n_weight_stages=5)
    source = re.sub(r"static_assert\(kMany \|\| \(kWeightStages %[^;]*;", "", stream_source())
    monkeypatch.setattr("tests.ptx.stream.stream_source", lambda: source)
    with pytest.raises(Fault, match="takes an older one"):
        run_stream(replace(FEW, config=config), late=True, backwards=True, track=True)
