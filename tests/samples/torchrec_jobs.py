"""Jobs of ranks that shard collections of bags with torchrec: with its sharder, and with ours."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv

ROWS = (5, 40, 300, 64)
DIM = 8


def collection(pooling: str, weighted: bool) -> EmbeddingBagCollection:
    """Four tables with the same weights on all ranks; t1 serves two features."""
    kind = PoolingType.MEAN if pooling == "mean" else PoolingType.SUM
    names = [["f0"], ["f1", "f1b"], ["f2"], ["f3"]]
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=n, embedding_dim=DIM, feature_names=names[i], pooling=kind
        )
        for i, n in enumerate(ROWS)
    ]
    return EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device("cpu"))


def sharded(sharding: str, pooling: str, weighted: bool, sharder: Any) -> Any:
    """The collection, sharded in one way. Embeddings learn by SGD in the backward pass."""
    world = dist.get_world_size()
    module = collection(pooling, weighted)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    ways = {
        "table-wise": [table_wise(i % world) for i in range(4)],
        "row-wise": [row_wise() for _ in range(4)],
        "column-wise": [column_wise(ranks=[i % world, (i + 1) % world]) for i in range(4)],
        "mixed": [
            table_wise(world - 1), row_wise(), column_wise(ranks=[0, world - 1]), data_parallel()
        ],
    }  # fmt: skip
    plan = construct_module_sharding_plan(
        module, {f"t{i}": way for i, way in enumerate(ways[sharding])},
        local_size=world, world_size=world, device_type="cpu",
    )  # fmt: skip
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return sharder.shard(module, plan, env, torch.device("cpu"))


def features_of(kind: str, weighted: bool, step: int) -> KeyedJaggedTensor:
    """This rank's part of a batch: one id in each bag, or 0 to 5."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    keys, size = ["f0", "f1", "f1b", "f2", "f3"], 16
    rows = [ROWS[0], ROWS[1], ROWS[1], ROWS[2], ROWS[3]]
    lengths = torch.ones(len(keys), size, dtype=torch.int64)
    if kind == "many":
        lengths = torch.randint(0, 6, (len(keys), size), generator=generator)
    ids = [
        (torch.rand(int(part.sum()), generator=generator) ** 2 * n).long()
        for part, n in zip(lengths, rows, strict=True)
    ]
    values = torch.cat(ids)
    weights = torch.rand(len(values), generator=generator) if weighted else None
    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths.view(-1), weights=weights)


def exact_grad(values: Tensor, step: int) -> Tensor:
    """Gradients of few bits, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(7 + 100 * dist.get_rank() + step)
    return torch.randint(-8, 9, values.shape, generator=generator).float() / 4


def train(sharder: Any, sharding: str, kind: str, pooling: str, weighted: bool) -> dict[str, Any]:
    """Three steps. Returns bags by name, in the order of torchrec, and what each rank holds."""
    module = sharded(sharding, pooling, weighted, sharder)
    bags, keys = [], None
    for step in range(3):
        found = module(features_of(kind, weighted, step)).wait()
        keys = found.keys()
        bags.append(found.values().detach().clone())
        found.values().backward(exact_grad(found.values(), step))
    local = {}
    for name, value in module.state_dict().items():
        parts = value.local_shards() if hasattr(value, "local_shards") else None
        local[name] = [p.tensor.clone() for p in parts] if parts is not None else [value.clone()]
    return {"bags": bags, "keys": keys, "local": local, "module": module}


def compare(
    sharding: str, kind: str, pooling: str = "sum", weighted: bool = False
) -> dict[str, Any]:
    """Trains with both sharders; says where they differ, and by how much at most."""
    from packhorse.torchrec import DedupEmbeddingBagCollectionSharder

    warnings.simplefilter("ignore")
    theirs = train(EmbeddingBagCollectionSharder(), sharding, kind, pooling, weighted)
    ours = train(DedupEmbeddingBagCollectionSharder(), sharding, kind, pooling, weighted)
    wrong = []
    if ours["keys"] != theirs["keys"] or ours["local"].keys() != theirs["local"].keys():
        wrong.append("names")
    both = zip(ours["bags"], theirs["bags"], strict=True)
    pairs = [(f"bags of step {step}", a, b) for step, (a, b) in enumerate(both)]
    for name, parts in ours["local"].items():
        pairs += [(name, a, b) for a, b in zip(parts, theirs["local"][name], strict=True)]
    wrong += [name for name, a, b in pairs if not torch.equal(a, b)]
    largest = max(float((a - b).abs().max()) for _, a, b in pairs if a.numel())
    return {"wrong": wrong, "largest": largest, "nbytes": ours["module"].exchange.traffic.nbytes}


def compare_packed(sharding: str, kind: str) -> dict[str, Any]:
    """torchrec's own sharder, with its all-to-all and with the packed one."""
    from packhorse.torchrec import packed_all_to_all
    from packhorse.wire import Collectives

    warnings.simplefilter("ignore")
    theirs = train(EmbeddingBagCollectionSharder(), sharding, kind, "sum", False)
    collectives = Collectives(choice="packed", timeout=60)
    with packed_all_to_all(collectives):
        ours = train(EmbeddingBagCollectionSharder(), sharding, kind, "sum", False)
    pairs = list(zip(ours["bags"], theirs["bags"], strict=True))
    for name, parts in ours["local"].items():
        pairs += list(zip(parts, theirs["local"][name], strict=True))
    return {"equal": all(torch.equal(a, b) for a, b in pairs), "explained": collectives.explain()}


def train_bounded(bits: int, bounds: list[float]) -> dict[str, Any]:
    """torchrec's own sharder, table-wise, with codecs of a fixed rate, and without: how far bags
    and weights are from each other."""
    from packhorse.torchrec import Columns, bounded_codecs

    warnings.simplefilter("ignore")
    rank, world = dist.get_rank(), dist.get_world_size()
    # t1 serves two features, so its columns come twice.
    columns: list[list[Columns]] = [[] for _ in range(world)]
    for i, bound in enumerate(bounds):
        columns[i % world] += [Columns(DIM, bound, 0.01)] * (2 if i == 1 else 1)
    registry = bounded_codecs(columns, rank, bits=bits, backward_bits=12)
    theirs = train(EmbeddingBagCollectionSharder(), "table-wise", "one", "sum", False)
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    ours = train(sharder, "table-wise", "one", "sum", False)
    codecs = next(iter(registry.values()))
    first = (ours["bags"][0] - theirs["bags"][0]).abs()
    largest = {
        key: float(first[:, DIM * i : DIM * (i + 1)].max()) for i, key in enumerate(ours["keys"])
    }
    weights = max(
        float((a - b).abs().max())
        for name, parts in ours["local"].items()
        for a, b in zip(parts, theirs["local"][name], strict=True)
    )
    return {"errors": largest, "weights": weights, "doublings": codecs.forward.doublings}


def refusals() -> dict[str, str]:
    """What wrong uses say."""
    from packhorse.torchrec import Columns, DedupEmbeddingBagCollectionSharder, bounded_codecs

    warnings.simplefilter("ignore")
    found = {}
    module = sharded("table-wise", "sum", False, DedupEmbeddingBagCollectionSharder())
    features = features_of("one", False, 0)
    cut = KeyedJaggedTensor(
        keys=features.keys()[:2], values=features.values()[:32], lengths=features.lengths()[:32]
    )
    try:
        module(cut)
    except ValueError as error:
        found["missing"] = str(error)
    registry = bounded_codecs([[Columns(DIM, 0.01, 0.01)]] * dist.get_world_size(), dist.get_rank())
    try:
        sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
        sharded("table-wise", "sum", False, sharder)(features).wait()
    except ValueError as error:
        found["columns"] = str(error)
    return found


def run_cases(cases: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """Runs jobs of this module one after the other in the same processes, whose start is slow."""
    return [globals()[name](*args) for name, args in cases]
