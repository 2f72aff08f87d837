"""The kernels' PTX for Hopper, run without a GPU (tests/ptx/README.md): products against FP64 by
the project's bound, decoded weights in every bit, and damaged kernels, which must be noticed.

Each kernel runs in two ways, which must agree in every bit and differ in all: asynchronous work as
late as the program allows and the first warp first, or as early and the last warp first.
`python -m tests.ptx run` takes all four ways, and damaged kernels run in all of them here.
"""

import numpy as np
import pytest
from tests.ptx.kernels import WAYS, Case, Emulation, data_of, is_right
from tests.ptx.mutations import is_noticed, mutations

FEW = [
    Case("few", "W12", (32, 8, 32, 4, 1, 4, 1), 64, 512, 8, early=True),
    Case("few", "W12", (16, 8, 64, 2, 2, 3, 2), 77, 1000, 13, bias=True),
    Case("few", "W12", (32, 32, 32, 4, 1, 3, 3), 100, 512, 31, early=True),
    Case("few", "W11", (32, 16, 32, 4, 1, 3, 1), 50, 600, 40, early=True, by_column=True),
    Case("few", "W11", (16, 8, 16, 8, 2, 2, 1), 33, 1032, 1, bias=True),
]
MANY = [
    Case("many", "W12", (64, 64, 32, 4, 1, 3, 1), 100, 512, 70),
    Case("many", "W12", (128, 64, 64, 4, 2, 2, 1), 150, 1000, 33, bias=True),
    Case("many", "W11", (64, 64, 16, 4, 1, 3, 1), 90, 460, 64, bias=True),
]
DECODE = [
    Case("decode", "W12", (), 70, 999, 0),
    Case("decode", "W11", (), 70, 4999, 9),
    Case("decode", "W12", (), 64, 1024, 0, patterns=True),
    Case("decode", "W11", (), 64, 1024, 0, patterns=True),
]
# Places in the order of the kernel, each with what notices that it is gone.
DAMAGES = [
    (FEW[0], "griddepcontrol.wait", "removed", "before griddepcontrol.wait"),
    (FEW[0], "cp.async.wait_group", "weakened", ""),
    (FEW[0], "bar.sync", "removed", ""),
    (MANY[0], "cp.async.wait_group", "weakened", ""),
    (MANY[0], "bar.sync", "removed", ""),
    (DECODE[1], "bar.sync", "removed", ""),
]


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    return Emulation([*FEW, *MANY, *DECODE], tmp_path_factory.mktemp("ptx"))


def test_the_data_has_what_kernels_treat_apart() -> None:
    for case in (*FEW, *MANY, *DECODE):
        assert data_of(case).arrays.exceptions.size > 5, case.name
    for cases in (FEW, MANY):
        assert {case.is_even for case in cases} == {True, False}
    patterns = data_of(DECODE[2]).elements
    assert len(np.unique(patterns[:-4])) == 60 * 1024
    assert data_of(DECODE[2]).arrays.exceptions.size < 16_000


@pytest.mark.parametrize("case", [*FEW, *MANY, *DECODE], ids=lambda case: case.name)
def test_results_are_right_in_every_order(emulation: Emulation, case: Case) -> None:
    # What lacks an order is a fault in every run, so that one of them looks for it.
    results = [emulation.run(case, **way, track=way["late"]) for way in (WAYS[0], WAYS[-1])]
    for result in results:
        assert is_right(case, result)
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize(
    ("case", "kind", "change", "message"), DAMAGES, ids=lambda value: str(value)[:24]
)
def test_damages_are_noticed(
    emulation: Emulation, case: Case, kind: str, change: str, message: str
) -> None:
    """The first such place in the kernel; `python -m tests.ptx mutations` damages all of them."""
    text = emulation.compiled(case.key()).ptx
    found = [m for m in mutations(text) if (m.kind, m.change) == (kind, change)]
    changed = emulation.mutated(case, found[0].ptx)
    noticed = is_noticed(
        lambda **way: emulation.run(case, changed, **way), lambda result: is_right(case, result)
    )
    assert noticed, found[0]
    assert message in noticed
