"""A sampler of neighbours for the loaders of PyTorch Geometric, in NumPy.

Their own needs a package that PyPI does not have. The sample of a batch depends on the seed and on
the batch alone, not on the order or on the process.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

__all__ = ["NeighbourSampler"]

_Numbers = NDArray[np.int64]


class NeighbourSampler(BaseSampler):  # type: ignore[misc]
    """Draws some edges into each node, hop by hop; an edge that is drawn twice counts once.

    Args:
        edges: (2, n): from a node, to a node.
        n_nodes: of the graph.
        fanouts: edges that are drawn for a node, in each hop.
        seed: of the draws.
    """

    def __init__(
        self, edges: _Numbers, n_nodes: int, fanouts: tuple[int, ...], seed: int = 0
    ) -> None:
        order = np.argsort(edges[1], kind="stable")
        self._sources = edges[0][order]
        self._starts = np.searchsorted(edges[1][order], np.arange(n_nodes + 1))
        self._fanouts, self._seed = fanouts, seed

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> SamplerOutput:
        """The edges that a batch needs, and their nodes: those of the batch first."""
        nodes = index.node.numpy()
        rng = np.random.default_rng([self._seed, *nodes.tolist()])
        found, frontier, drawn = [nodes], np.unique(nodes), []
        for fanout in self._fanouts:
            drawn.append(self._draw(frontier, fanout, rng))
            frontier = np.setdiff1d(drawn[-1][0], np.concatenate(found))
            found.append(frontier)
        all_nodes, edges = np.concatenate(found), np.concatenate(drawn, 1)
        order = np.argsort(all_nodes, kind="stable")
        local = order[np.searchsorted(all_nodes[order], edges)]
        return SamplerOutput(
            node=torch.from_numpy(all_nodes),
            row=torch.from_numpy(local[0]),
            col=torch.from_numpy(local[1]),
            edge=None,
            metadata=(index.input_id, index.time),
        )

    def _draw(self, nodes: _Numbers, fanout: int, rng: np.random.Generator) -> _Numbers:
        """Edges into nodes: (2, n)."""
        starts = self._starts[nodes]
        degrees = self._starts[nodes + 1] - starts
        offsets = (rng.random((len(nodes), fanout)) * degrees[:, None]).astype(np.int64)
        edges = np.unique((starts[:, None] + offsets)[degrees > 0])
        targets = np.searchsorted(self._starts, edges, side="right") - 1
        return np.stack([self._sources[edges], targets])

    def sample_from_edges(self, index: Any, neg_sampling: Any = None) -> SamplerOutput:
        """Not there: batches are of nodes.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("batches are of nodes")
