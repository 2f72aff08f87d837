"""Packed bags beside those of torchrec and fbgemm: what they look up and how they are trained."""

import warnings
from typing import Any

import pytest
import torch

from packhorse.host import PackedEmbeddingBag, RowOptimizer, pack_embedding_

pytest.importorskip("fbgemm_gpu", reason="installed by the Makefile, without dependencies")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchrec and fbgemm warn when they are imported
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.optim import RowWiseAdagrad

N_ROWS, N_COLUMNS = 200, 64


def test_bags_are_those_of_a_collection() -> None:
    sizes = {"user": 16, "item": 64}
    configs = [
        EmbeddingBagConfig(
            name=name, num_embeddings=N_ROWS, embedding_dim=columns, feature_names=[name]
        )
        for name, columns in sizes.items()
    ]
    collection = EmbeddingBagCollection(tables=configs)
    lengths = torch.tensor([2, 0, 3, 1, 4, 1])
    values = torch.randint(0, N_ROWS, (int(lengths.sum()),))
    features = KeyedJaggedTensor.from_lengths_sync(["user", "item"], values, lengths)
    pooled = collection(features).to_dict()
    for name, plain in collection.embedding_bags.items():
        packed = PackedEmbeddingBag.from_pretrained(
            plain.weight.detach(), mode="sum", include_last_offset=True
        )
        feature = features[name]
        assert torch.equal(packed(feature.values(), feature.offsets()), pooled[name])
        pack_embedding_(plain)
    again = collection(features).to_dict()
    assert all(torch.equal(again[name], pooled[name]) for name in sizes)
    optimizer = RowOptimizer(collection, torch.optim.SGD, lr=0.1)
    sum(each.sum() for each in again.values()).backward()
    optimizer.step()
    assert not torch.equal(collection(features).values(), torch.cat([*pooled.values()], 1))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (EmbOptimType.EXACT_SGD, torch.optim.SGD),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, RowWiseAdagrad),
    ],
)
def test_training_is_that_of_fused_optimizers(theirs: Any, ours: Any) -> None:
    """To rounding: fbgemm sums and divides in another order."""
    rows = 0.05 * torch.randn(N_ROWS, N_COLUMNS, generator=torch.Generator().manual_seed(0))
    fused = SplitTableBatchedEmbeddingBagsCodegen(
        [(N_ROWS, N_COLUMNS, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=theirs,
        learning_rate=0.1,
        eps=1e-8,
        stochastic_rounding=False,
        device="cpu",
    )
    (weights,) = fused.split_embedding_weights()
    weights.copy_(rows)
    packed = PackedEmbeddingBag.from_pretrained(rows, freeze=False, mode="sum")
    options = {"eps": 1e-8} if ours is RowWiseAdagrad else {}
    optimizer = RowOptimizer(packed, ours, lr=0.1, **options)
    for _ in range(3):
        ids = torch.randint(0, 50, (24,))
        offsets = torch.arange(0, 25, 4)
        bags = fused(ids, offsets), packed(ids, offsets[:-1])
        torch.testing.assert_close(*bags)
        for each in bags:
            each.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(packed.unpacked(), rows)
    torch.testing.assert_close(packed.unpacked(), weights)
