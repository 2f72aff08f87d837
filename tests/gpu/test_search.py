"""The search and the cache that hops share, with made-up choices and keys; and links of GPUs."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from packhorse.errors import CorruptionError
from packhorse.gpu.figure_cache import FigureCache, Identity, require_keys
from packhorse.gpu.models import GENERIC, PRESETS
from packhorse.gpu.search import Measurements, Search, expect_best, find_best

IDENTITY = Identity("a GPU", 2, "1", "2")


@dataclass(frozen=True)
class Gather:
    """A way to fetch rows."""

    n_rows: int
    n_warps: int


FIELDS = {"n_rows": (1, 2, 4, 8), "n_warps": (1, 2, 4)}


def predict(choice: Gather, table: str) -> float:
    return abs(choice.n_rows - 4) + abs(choice.n_warps - 1) + 1.0


def search_for(measured: dict[Gather, float], table: str) -> tuple[Gather, float] | None:
    """The best of several choices that run, for the rows of a table."""
    start = expect_best(Gather, FIELDS, lambda config: predict(config, table))
    assert start == Gather(4, 1)
    search: Search[Gather, str] = Search()
    times = Measurements(predict, lambda choice, _: measured.get(choice, math.inf), search)

    def cost(config: Gather, hopeless: float) -> float:
        return times.take(config, table, hopeless * predict(start, table))

    return find_best(start, FIELDS, cost)


def test_a_search_goes_down_from_what_is_expected() -> None:
    times = {Gather(4, 1): 9.0, Gather(8, 1): 7.0, Gather(8, 4): 5.0, Gather(4, 4): 6.0}
    assert search_for(times | {Gather(4, 2): 10.0}, "users") == (Gather(4, 1), 9.0), "no hope"
    times.pop(Gather(4, 1))
    assert search_for(times, "users") == (Gather(8, 4), 5.0)


def test_the_smallest_is_tried_where_nothing_else_runs() -> None:
    assert search_for({Gather(1, 1): 3.0}, "users") == (Gather(1, 1), 3.0)
    assert search_for({}, "users") is None
    assert expect_best(Gather, FIELDS, lambda _: math.inf) is None


def parse(entry: Any) -> tuple[str, Gather]:
    require_keys(entry, {"table", "n_rows", "n_warps"}, "an entry")
    return entry["table"], Gather(entry["n_rows"], entry["n_warps"])


def dump(table: str, gather: Gather) -> dict[str, Any]:
    return {"table": table, "n_rows": gather.n_rows, "n_warps": gather.n_warps}


def test_a_cache_holds_what_its_owner_can_parse(tmp_path: Path) -> None:
    cache = FigureCache("gather", 3, parse, dump, "figures are not used: {}")
    path = cache.path("A GPU (80 GB)", tmp_path)
    assert path.name == "gather-a-gpu-80-gb.json"
    cache.write(path, IDENTITY, {"users": Gather(1, 2)})
    cache.update(path, IDENTITY, {"items": Gather(2, 1)})
    assert cache.read(path, IDENTITY) == {"users": Gather(1, 2), "items": Gather(2, 1)}
    path.write_text(path.read_text().replace('"table"', '"chair"'))
    with pytest.raises(CorruptionError, match=r"entry 0: an entry must have"):
        cache.read(path, IDENTITY)
    with pytest.warns(RuntimeWarning, match="figures are not used: entry 0"):
        assert cache.load(path, IDENTITY) == {}


def test_links_are_those_of_the_datasheets() -> None:
    links = {model.name: (model.host_link, model.peer_link) for model in (*PRESETS, GENERIC)}
    assert [round(link.peak / 1e9, 1) for link in links["H200"] if link] == [63.0, 450.0]
    assert [round(link.peak / 1e9, 1) for link in links["A100"] if link] == [31.5, 300.0]
    assert links["generic"][1] is None
