"""Trains GraphSAGE on a graph whose features stay packed, with the losses of plain ones.

Needs PyTorch Geometric: pip install 'packhorse[pyg]'.
"""

import torch
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import SAGEConv
from torch_geometric.sampler import BaseSampler, SamplerOutput

from packhorse.host import pack_table

NODES, WORDS, TOPICS, EPOCHS = 3000, 2000, 8, 5


class AllNeighbours(BaseSampler):
    """Takes all edges into a batch; `NeighborLoader` draws some, and needs pyg-lib for that."""

    def __init__(self, edges: torch.Tensor) -> None:
        self.edges = edges

    def sample_from_nodes(self, index, **kwargs) -> SamplerOutput:
        """The nodes of a batch, then their neighbours, and the edges into the batch."""
        source, target = self.edges[:, torch.isin(self.edges[1], index.node)]
        node = torch.cat([index.node, source[~torch.isin(source, index.node)].unique()])
        metadata = index.input_id, None
        local = torch.empty(NODES, dtype=torch.int64).index_put_((node,), torch.arange(len(node)))
        return SamplerOutput(node, local[source], local[target], None, metadata=metadata)

    sample_from_edges = sample_from_nodes  # not called: batches are of nodes


def train(data: Data) -> list[float]:
    """The loss of each batch."""
    torch.manual_seed(0)
    layer, losses = SAGEConv(WORDS, TOPICS), []
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    loader = NodeLoader(data, AllNeighbours(data.edge_index), batch_size=500, shuffle=True)
    for batch in (batch for _ in range(EPOCHS) for batch in loader):
        found = layer(batch.x, batch.edge_index)[: batch.batch_size]
        loss = torch.nn.functional.cross_entropy(found, batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
torch.set_num_threads(1)  # so that sums have one order, and losses can have the same bits
topics = torch.randint(TOPICS, (NODES,))
x = (torch.rand(NODES, WORDS) < 0.03 * (torch.arange(WORDS) % TOPICS == topics[:, None])).float()
table = pack_table(x)
data = Data(x=x, y=topics, edge_index=torch.randint(NODES, (2, 4 * NODES)))
plain = train(data)
packed = train(data.update({"x": table.as_tensor()}))
print(f"loss {packed[0]:.3f} to {packed[-1]:.3f}; the same bits: {packed == plain}")
print(f"features take {table.nbytes:,} bytes instead of {x.nbytes:,}: {table.way.words}")
