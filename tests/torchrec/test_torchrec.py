"""torchrec with our sharder, codecs and all-to-all, on real ranks: the bits are torchrec's own."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from wire_ranks import run_ranks, values

pytest.importorskip("fbgemm_gpu", reason="installed by the Makefile, without dependencies")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchrec and fbgemm warn when they are imported
    import torchrec_jobs as jobs

SHARDINGS = ("table-wise", "row-wise", "column-wise", "mixed")
BOUNDS = [0.25, 0.02, 0.1, 0.05]
OTHER_SUMS = [
    ("row-wise", "many", "sum", False),
    ("table-wise", "many", "mean", False),
    ("column-wise", "many", "sum", True),
]
# All jobs run in the same processes, since importing torchrec takes seconds.
CASES: dict[int, list[tuple[str, tuple[Any, ...]]]] = {
    2: [
        *(("compare", (sharding, "one")) for sharding in SHARDINGS),
        *(("compare", (sharding, "many")) for sharding in ("table-wise", "column-wise")),
        *(("compare", case) for case in OTHER_SUMS),
        *(("compare_packed", (sharding, "one")) for sharding in SHARDINGS[:3]),
        ("train_bounded", (12, BOUNDS)),
        ("train_bounded", (2, [0.001] * 4)),
        ("refusals", ()),
    ],
    4: [("compare", (sharding, "one")) for sharding in SHARDINGS],
}
Found = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank found in a job: `found(world, job, *args)`."""
    ran: dict[int, list[list[Any]]] = {}

    def find(world: int, job: str, *args: Any) -> list[Any]:
        if world not in ran:
            store = tmp_path_factory.mktemp("ranks") / "store"
            ran[world] = values(
                run_ranks(world, jobs.run_cases, CASES[world], store=store, limit=300)
            )
        return [of_rank[CASES[world].index((job, args))] for of_rank in ran[world]]

    return find


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_one_id_in_each_bag_gives_the_bits_of_torchrec(
    found: Found, world: int, sharding: str
) -> None:
    """Bags, and weights after three steps of SGD, for gradients whose sums are exact."""
    for one in found(world, "compare", sharding, "one"):
        assert one["wrong"] == []
        assert one["nbytes"] > 0


@pytest.mark.parametrize("sharding", ["table-wise", "column-wise"])
def test_sums_of_several_ids_give_the_bits_of_torchrec(found: Found, sharding: str) -> None:
    for one in found(2, "compare", sharding, "many"):
        assert one["wrong"] == []


@pytest.mark.parametrize("case", OTHER_SUMS, ids=str)
def test_other_orders_of_sums_differ_in_the_last_bits_only(
    found: Found, case: tuple[Any, ...]
) -> None:
    """torchrec adds partial sums of ranks if tables are cut by rows, and scales rows of means."""
    for one in found(2, "compare", *case):
        assert "names" not in one["wrong"]
        assert one["largest"] < 1e-5


@pytest.mark.parametrize("sharding", SHARDINGS[:3])
def test_packed_all_to_all_gives_the_bits_of_torchrec(found: Found, sharding: str) -> None:
    for one in found(2, "compare_packed", sharding, "one"):
        assert one["equal"]
        assert sharding == "row-wise" or "pooled embeddings" in one["explained"]


def test_codecs_of_fixed_rate_keep_the_bound_of_each_table(found: Found) -> None:
    limits = {"f0": 0.25, "f1": 0.02, "f1b": 0.02, "f2": 0.1, "f3": 0.05}
    for one in found(2, "train_bounded", 12, BOUNDS):
        assert one["doublings"] == 0
        assert all(error <= limits[key] for key, error in one["errors"].items())
        assert one["errors"]["f0"] > 0.02  # the loose bound is used, and not the tightest for all
        assert 0 < one["weights"] < 1


def test_too_few_bits_double_the_bound_and_count_it(found: Found) -> None:
    assert all(one["doublings"] > 0 for one in found(2, "train_bounded", 2, [0.001] * 4))


def test_wrong_uses_are_refused(found: Found) -> None:
    for one in found(2, "refusals"):
        assert "features ['f1b', 'f2', 'f3'] are missing" in one["missing"]
        assert "these codecs were made for rank" in one["columns"]
