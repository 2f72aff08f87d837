"""Packed features in PyTorch Geometric: its loaders give the same batches as with plain ones, in
workers and in the main process."""

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData, TensorAttr
from torch_geometric.loader import NeighborLoader, NodeLoader
from torch_geometric.loader.utils import filter_custom_hetero_store, infer_filter_per_worker
from torch_geometric.sampler import BaseSampler

from benchmarks.host.neighbours import NeighbourSampler
from packhorse.errors import MissingBackendError
from packhorse.host import TableTensor, pack_table
from packhorse.integrations import pyg
from packhorse.pyg import PackedFeatureStore

N_NODES = 500


@pytest.fixture(scope="module")
def plain() -> Data:
    rng = np.random.default_rng(0)
    x = (rng.random((N_NODES, 300)) < 0.02).astype(np.float32)
    edges = torch.from_numpy(rng.integers(0, N_NODES, (2, 2000)))
    return Data(x=torch.from_numpy(x), y=torch.arange(N_NODES), edge_index=edges)


@pytest.fixture(scope="module")
def sampler(plain: Data) -> BaseSampler:
    return NeighbourSampler(plain.edge_index.numpy(), N_NODES, (5, 3))


@pytest.fixture(scope="module")
def store(plain: Data) -> PackedFeatureStore:
    store = PackedFeatureStore()
    store[None, "x", None] = plain.x
    store[None, "y", None] = plain.y
    return store


def batches(
    data: Any, sampler: BaseSampler, workers: int = 0, per_worker: bool | None = None
) -> list[dict[str, Any]]:
    loader = NodeLoader(
        data,
        sampler,
        torch.arange(0, N_NODES, 2),
        batch_size=90,
        num_workers=workers,
        filter_per_worker=per_worker,
    )
    return [batch.to_dict() for batch in loader]


def same(one: Tensor, other: Tensor) -> bool:
    return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("per_worker", [None, False])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["data", "store"])
def test_batches_are_those_of_plain_features(
    kind: str,
    workers: int,
    per_worker: bool | None,
    plain: Data,
    sampler: BaseSampler,
    store: PackedFeatureStore,
) -> None:
    packed = Data(x=pack_table(plain.x).as_tensor(), y=plain.y, edge_index=plain.edge_index)
    data = packed if kind == "data" else (store, plain)
    found, expected = batches(data, sampler, workers, per_worker), batches(plain, sampler)
    assert len(found) == 3
    for one, other in zip(found, expected, strict=True):
        assert len(one["x"]) > len(one["input_id"])
        for name in ("x", "y", "edge_index", "n_id", "input_id"):
            assert same(one[name], other[name])
        if workers and per_worker is None:
            assert one["x"].is_shared()  # so that it was not copied on its way


def test_a_graph_with_packed_features_is_a_graph(plain: Data) -> None:
    packed = Data(x=pack_table(plain.x).as_tensor(), y=plain.y, edge_index=plain.edge_index)
    assert packed.validate()
    assert (packed.num_nodes, packed.num_node_features) == (N_NODES, 300)
    assert repr(packed) == repr(plain)
    rows = torch.tensor([7, 3, 400])
    assert same(packed.subgraph(rows).x, plain.subgraph(rows).x)
    assert isinstance(packed.clone().cpu().x, TableTensor)
    with pytest.raises(NotImplementedError, match=r"data\.to\(device, 'y', 'edge_index'\)"):
        packed.to("meta")
    assert packed.to("meta", "y").y.is_meta
    assert infer_filter_per_worker(packed)
    packed.x = packed.x.table.as_tensor("cuda")
    assert not infer_filter_per_worker(packed)


def test_graphs_of_several_types() -> None:
    x = {name: torch.rand(n, 40) for name, n in {"paper": 30, "author": 20}.items()}
    store, graph = PackedFeatureStore(), HeteroData()
    for name, rows in x.items():
        store[name, "x", None] = rows
        graph[name].x = rows
    graph["author", "writes", "paper"].edge_index = torch.zeros(2, 1, dtype=torch.int64)
    nodes = {"paper": torch.tensor([3, 29]), "author": torch.tensor([5])}
    edge = {("author", "writes", "paper"): torch.tensor([0])}
    batch = filter_custom_hetero_store(store, graph, nodes, edge, edge, {})
    for name, ids in nodes.items():
        assert same(batch[name].x, x[name][ids])
    assert batch["author", "writes", "paper"].edge_index.tolist() == [[0], [0]]


def test_rows_are_found_by_any_index(plain: Data, store: PackedFeatureStore) -> None:
    for index in (torch.tensor([3, 3]), torch.arange(N_NODES) < 4, slice(2, 9), 7, [[5], [6]]):
        index = torch.tensor(index) if isinstance(index, list) else index
        for name in ("x", "y"):
            assert torch.equal(store[None, name, index], plain[name][index])
    found = store.get_tensor(None, "x", np.array([4]), convert_type=True)
    np.testing.assert_array_equal(found, plain.x[[4]].numpy())
    assert isinstance(store[None, "x", None], TableTensor)
    assert torch.equal(store[None, "x", :], plain.x)
    assert store.get_tensor_size(None, "x") == (N_NODES, 300)
    assert store.get_tensor_size(None, "x", slice(2, 9)) == (7, 300)
    assert store.get_tensor_size(None, "z") is None


def test_sources_of_all_kinds_are_stored(tmp_path: Path) -> None:
    rows = np.arange(60, dtype=np.float32).reshape(20, 3)
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=rows.shape)
    mapped[:] = rows
    table = pack_table(rows)
    store = PackedFeatureStore(shared=True)
    for i, source in enumerate((rows, torch.from_numpy(rows), mapped, table, table.as_tensor())):
        store["node", f"x{i}", None] = source
        found = store["node", f"x{i}", torch.tensor([19, 2])]
        assert found.tolist() == rows[[19, 2]].tolist()
    assert store["node", "x3", None].table is store["node", "x4", None].table is table
    attrs = store.get_all_tensor_attrs()
    assert [attr.attr_name for attr in attrs] == ["x0", "x1", "x2", "x3", "x4"]
    assert not attrs[0].is_set("index")
    assert repr(store) == f"PackedFeatureStore(5 tensors, {store.nbytes:,} bytes)"


def test_rows_are_replaced_and_removed() -> None:
    store, rows = PackedFeatureStore(), torch.rand(20, 6)
    backwards = torch.arange(19, -1, -1)
    store["node", "x", backwards] = rows.flip(0)  # all rows, by number
    store["node", "y", None] = torch.arange(20)
    new = torch.rand(2, 6)
    rows[[4, 2]] = new
    assert store.update_tensor(new, "node", "x", torch.tensor([4, 2]))
    store["node", "x", 7] = rows[7] = new[0]
    mask = torch.zeros(20, dtype=torch.bool)
    mask[5] = True
    for index in (slice(1, 9, 3), torch.tensor([-1, 0]), mask, [11]):
        rows[index] = torch.rand(rows[index].shape)
        store["node", "x", index] = rows[index]
    with pytest.raises(IndexError, match="id 20 is out of range: the table has 20 rows"):
        store["node", "x", torch.tensor([20])] = rows[:1]
    store["node", "y", slice(0, 2)] = torch.tensor([8, 9])
    assert torch.equal(store["node", "x", None], rows)
    assert store["node", "y", None][:3].tolist() == [8, 9, 2]
    assert store.remove_tensor("node", "x", None)
    assert not store.remove_tensor("node", "x", None)
    with pytest.raises(KeyError, match="no tensor 'x' of 'node' in the store, but 'y' of 'node'"):
        store["node", "x", None]
    with pytest.raises(ValueError, match="put all rows first, with index=None"):
        store["node", "x", torch.tensor([4, 2])] = new


def test_replaced_elements_leave_the_callers_array_alone() -> None:
    store, labels = PackedFeatureStore(), torch.arange(5)
    attributes = {"group_name": "paper", "attr_name": "y"}
    store.put_tensor(labels, index=None, **attributes)
    store.put_tensor(torch.tensor([99]), index=torch.tensor([2]), **attributes)
    assert store.get_tensor(index=None, **attributes).tolist() == [0, 1, 99, 3, 4]
    assert labels.tolist() == [0, 1, 2, 3, 4]


def test_a_worker_is_told_not_to_use_a_gpu(plain: Data, sampler: BaseSampler) -> None:
    store = PackedFeatureStore("cuda")
    store._held[None, "x"] = pack_table(plain.x).as_tensor("cuda")
    with pytest.raises(RuntimeError, match="filter_per_worker=False"):
        batches((store, plain), sampler, workers=1)


def test_other_classes_of_attributes(plain: Data) -> None:
    class NoGroup(TensorAttr):  # type: ignore[misc]
        def __init__(self, attr_name: Any = None, index: Any = None) -> None:
            super().__init__(None, attr_name, index)

    store = PackedFeatureStore(tensor_attr_cls=NoGroup)
    store["x", None] = plain.x
    assert torch.equal(store["x", torch.tensor([5])], plain.x[[5]])


def test_without_pytorch_geometric_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    with pytest.raises(MissingBackendError, match=r"pip install 'packhorse\[pyg\]'"):
        runpy.run_path(pyg.__file__)


def test_a_neighbour_loader_with_a_sampler_of_ours(
    plain: Data, sampler: BaseSampler, store: PackedFeatureStore
) -> None:
    nodes = torch.tensor([5, 9])
    loader = NeighborLoader((store, plain), [5, 3], nodes, neighbor_sampler=sampler, batch_size=2)
    (batch,) = loader
    assert same(batch.x, plain.x[batch.n_id])
