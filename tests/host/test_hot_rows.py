"""Hot rows: every row bit for bit, from the device or from the host, and counted."""

import numpy as np
import pytest
import torch
from table_samples import named_tables
from torch import Tensor

from packhorse.codecs.table_plan import TableWay
from packhorse.host import HotRows, PackedEmbedding, PackedTable, hot_rows, pack_table


@pytest.fixture(params=["host", "kernels"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device stands in for a GPU: the host gathers there, or kernels in the interpreter."""
    monkeypatch.setattr(hot_rows, "_uses_kernels", lambda device: request.param == "kernels")
    return "cpu"


def tables() -> list[tuple[PackedTable, Tensor]]:
    """One of each mode, with exceptions."""
    kinds = {8: np.uint8, 16: np.int16, 32: np.float32, 64: np.int64}
    found = []
    for rows, format in list(named_tables(40, 33).values())[::3]:
        plain = rows.view(kinds[format.element_bits])
        table = pack_table(plain, way=TableWay(format, "by hand", {}, 0.0, 0.0))
        found.append((table, torch.from_numpy(plain)))
    return found


def bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def test_rows_come_from_both_places(place: str) -> None:
    ids = torch.tensor([[0, 7, 39], [7, 12, 1]], dtype=torch.int32)
    for table, plain in tables():
        hot = HotRows(table, torch.tensor([12, 7, 1, 7]), device=place)
        assert hot.ids.tolist() == [1, 7, 12]
        found = hot.gather(ids)
        assert found.shape == (2, 3, 33)
        assert torch.equal(bits(found), bits(plain[ids.long()]))
        assert (hot.n_hits, hot.n_misses, hot.hit_rate) == (4, 2, 4 / 6)
        assert hot.gather(ids[:0]).shape == (0, 3, 33)
        with pytest.raises(IndexError, match="id 40"):
            hot.gather(torch.tensor([7, 40]))
        hot.reset_counts()
        assert (hot.n_hits, hot.n_misses, hot.hit_rate) == (0, 0, 0.0)


def test_changed_rows_are_never_stale(place: str) -> None:
    plain = (0.05 * torch.randn(60, 64)).bfloat16()
    table = pack_table(plain)
    hot = HotRows(table, torch.arange(10), device=place)
    hot.gather(torch.arange(20))
    plain[[3, 15]] = torch.tensor([[1.0], [1e30]]).bfloat16()
    table.update_(torch.tensor([3, 15]), plain[[3, 15]])
    assert torch.equal(hot.gather(torch.arange(60)), plain)


def test_the_most_frequent_rows_are_chosen() -> None:
    table = pack_table((0.05 * torch.randn(1000, 64)).bfloat16())
    batches = [torch.tensor([[5, 5, 5], [9, 9, 1]]), torch.tensor([9, 9, 2])]
    hot = HotRows.of_batches(table, batches, nbytes=250, device="cpu")
    assert hot.ids.tolist() == [5, 9]
    assert hot.nbytes <= 250
    with pytest.raises(ValueError, match="8 bytes hold no row"):
        HotRows.of_batches(table, batches, nbytes=8, device="cpu")
    with pytest.raises(TypeError, match=r"integers, not torch\.float32"):
        HotRows(table, torch.tensor([1.5]), device="cpu")
    with pytest.raises(ValueError, match="no batches"):
        HotRows.of_batches(table, [], nbytes=999, device="cpu")


def test_an_embedding_looks_up_hot_rows_first() -> None:
    plain = torch.randn(50, 64)
    module = PackedEmbedding.from_pretrained(plain)
    module.hot = HotRows(module.table, torch.arange(5), device="cpu")
    ids = torch.tensor([1, 2, 30])
    assert torch.equal(module(ids), plain[ids])
    assert (module.hot.n_hits, module.hot.n_misses) == (2, 1)
    module.load_state_dict({"weight": plain + 1})
    assert torch.equal(module(ids), plain[ids] + 1)
    assert module.hot.n_hits == 4, "the hot rows are those of the new matrix"
