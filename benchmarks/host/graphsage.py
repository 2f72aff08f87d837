"""A run of GraphSAGE whose features are plain, packed, or a file that is mapped: what
`training.py` starts as a process.

All three take the way of PyTorch Geometric: `Data(x=...)`, whose rows its loader gathers for each
batch. One thread, so that sums have one order, and losses are the same bits.
"""

import mmap
import resource
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import SAGEConv

from benchmarks.host.neighbours import NeighbourSampler
from packhorse.host import pack_table

__all__ = ["ARMS", "Settings", "run"]

FEATURES, GRAPH = "features.bin", "graph.npz"


class Settings(NamedTuple):
    """What a run does.

    Attributes:
        n_words: columns of the features.
        epochs: rounds over the nodes that are trained on.
        batch: nodes of a batch.
        hidden: width of the hidden layer.
        fanouts: edges that are drawn into a node, by hop.
        n_tested: nodes that are kept from training.
        batches: that an epoch has at most; None for all.
    """

    n_words: int = 3703
    epochs: int = 3
    batch: int = 512
    hidden: int = 64
    fanouts: tuple[int, ...] = (10, 5)
    n_tested: int = 20_000
    batches: int | None = None


def _mapped(path: Path, n_words: int) -> Any:
    return np.memmap(path, np.float32, "r").reshape(-1, n_words)


def _mapped_for_random(path: Path, n_words: int) -> Any:
    x = _mapped(path, n_words)
    x._mmap.madvise(mmap.MADV_RANDOM)  # so that the system reads no pages ahead
    return x


def _packed(path: Path, n_words: int) -> Any:
    x = _mapped(path, n_words)

    def let_go(done: int, of: int) -> None:
        x._mmap.madvise(mmap.MADV_DONTNEED)  # or pages of the file would count as ours

    return pack_table(x, threads=1, progress=let_go).as_tensor()


ARMS: dict[str, Callable[[Path, int], Any]] = {
    "plain": lambda path, n: torch.from_numpy(np.fromfile(path, np.float32)).reshape(-1, n),
    "packed": _packed,
    "memmap": _mapped,
    "memmap, random": _mapped_for_random,
}


class _Model(torch.nn.Module):
    def __init__(self, n_words: int, hidden: int, n_labels: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(n_words, hidden), SAGEConv(hidden, n_labels)

    def forward(self, batch: Data) -> torch.Tensor:
        found = self.first(batch.x, batch.edge_index).relu()
        return self.second(found, batch.edge_index)[: batch.batch_size]


class _Watch:
    """Seconds that gathering takes, and the peak of this process's own memory."""

    def __init__(self) -> None:
        self.seconds, self._begun, self.own_nbytes = 0.0, 0.0, 0

    def begin(self, sample: Any) -> Any:
        self._begun = time.perf_counter()
        return sample

    def end(self, batch: Data) -> Data:
        self.seconds += time.perf_counter() - self._begun
        self.own_nbytes = max(self.own_nbytes, _memory("RssAnon:") + _memory("RssShmem:"))
        return batch


def run(arm: str, folder: Path, settings: Settings) -> dict[str, Any]:
    """Train, and test what was learned.

    Args:
        arm: one of `ARMS`.
        folder: has the features and the graph.
        settings: of the run.

    Returns:
        The loss of each batch, and the figures of report.py.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    begun = time.perf_counter()
    x = ARMS[arm](folder / FEATURES, settings.n_words)
    ready = time.perf_counter() - begun
    graph = np.load(folder / GRAPH)
    labels, edges = torch.from_numpy(graph["labels"]), graph["edges"]
    data = Data(x=x, y=labels, edge_index=torch.from_numpy(edges))
    watch, sampler = _Watch(), NeighbourSampler(edges, len(labels), settings.fanouts)
    nodes = torch.randperm(len(labels))
    model = _Model(settings.n_words, settings.hidden, int(labels.max()) + 1)
    tested, trained = nodes[: settings.n_tested], nodes[settings.n_tested :]
    loader = _loader(data, sampler, trained, settings, watch)
    losses, epochs = _train(model, loader, watch, settings)
    is_whole = settings.batches is None
    right = _count_right(model, _loader(data, sampler, tested, settings, watch)) if is_whole else 0
    return {
        "losses": losses,
        "ready": ready,
        "epochs": epochs,
        "accuracy": right / len(tested) if is_whole else None,
        "features_nbytes": getattr(x, "packed_nbytes", x.nbytes),
        "own_nbytes": watch.own_nbytes,
        "resident_nbytes": _memory("VmHWM:"),
    }


def _loader(
    data: Data, sampler: NeighbourSampler, nodes: torch.Tensor, settings: Settings, watch: _Watch
) -> NodeLoader:
    return NodeLoader(
        data,
        sampler,
        nodes,
        transform_sampler_output=watch.begin,
        transform=watch.end,
        batch_size=settings.batch,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
    )


def _train(
    model: _Model, loader: NodeLoader, watch: _Watch, settings: Settings
) -> tuple[list[float], list[dict[str, float]]]:
    optimizer, losses, epochs = torch.optim.Adam(model.parameters(), lr=0.01), [], []
    for _ in range(settings.epochs):
        before, rows = resource.getrusage(resource.RUSAGE_SELF), watch.seconds
        begun, n = time.perf_counter(), len(losses)
        for batch in islice(loader, settings.batches):
            loss = functional.cross_entropy(model(batch), batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        after = resource.getrusage(resource.RUSAGE_SELF)
        epochs.append(
            {
                "batches": len(losses) - n,
                "seconds": time.perf_counter() - begun,
                "rows": watch.seconds - rows,
                "faults": after.ru_majflt - before.ru_majflt,
                "read_nbytes": 512 * (after.ru_inblock - before.ru_inblock),
            }
        )
    return losses, epochs


@torch.no_grad()
def _count_right(model: _Model, loader: NodeLoader) -> int:
    """Nodes whose label is found."""
    return sum(
        int((model(batch).argmax(1) == batch.y[: batch.batch_size]).sum()) for batch in loader
    )


def _memory(field: str) -> int:
    """Bytes that the system counts for this process; 0 where it does not."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    return 0
