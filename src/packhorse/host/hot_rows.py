"""`HotRows`: rows of a packed table that are fetched often, packed in memory of a GPU as well.

The link to the host then carries only the other rows. Packed rows take less memory than plain ones,
so that more of them are there.

Which rows these are is fixed when they are chosen, by counts of ids. On traces of a Zipf
distribution that stays the same, such a choice finds more rows than the least recently used ones
would, and nearly as many as counts that go on for ever; and it needs no writes to device memory
and no locks (docs/decisions.md has the figures). Where the distribution drifts, choose anew from
time to time: that takes as long as to fetch these rows once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from packhorse.host.places import require_integers
from packhorse.host.table import PackedTable, pack_table
from packhorse.late_import import import_late
from packhorse.torch_dtypes import TORCH_DTYPES

__all__ = ["HotRows"]

_ID_NBYTES = 8


class HotRows:
    """Fetches rows of a table, of which some are in device memory.

    Args:
        table: the table. If its rows change, the hot ones are fetched anew at the next `gather`, so
            this is for look-ups rather than for training.
        ids: integers, (n,): the rows to keep on the device; repetitions do not matter.
        device: where to keep them, and where rows come out; "cpu" to try without a GPU.

    Attributes:
        table: the table.
        ids: int64, (n,): the hot rows, ascending, on the device.
        n_hits: rows that were found among them, since `reset_counts`.
        n_misses: rows that were not.

    Raises:
        IndexError: there is no such row.
        TypeError: ids are no integers.

    Example:
        >>> import torch
        >>> from packhorse.host import HotRows, pack_table
        >>> table = pack_table(torch.randn(1000, 128).bfloat16())
        >>> hot = HotRows(table, torch.tensor([3, 5, 8]), device="cpu")
        >>> rows = hot.gather(torch.tensor([5, 700]))
        >>> hot.n_hits, hot.n_misses
        (1, 1)
    """

    def __init__(
        self, table: PackedTable, ids: Tensor, *, device: torch.device | str = "cuda"
    ) -> None:
        require_integers(ids)
        self.table = table
        self.device = torch.device(device)
        self.ids = torch.unique(ids.long()).to(self.device)
        self.reset_counts()
        self._fill()

    @classmethod
    def of_batches(
        cls,
        table: PackedTable,
        batches: Iterable[Tensor],
        *,
        nbytes: int,
        device: torch.device | str = "cuda",
    ) -> HotRows:
        """The rows that batches ask for most often.

        Args:
            table: the table.
            batches: tensors of ids, of any shape.
            nbytes: of device memory, at most.
            device: as for the class.

        Raises:
            IndexError, TypeError: as the class.
            ValueError: there is no batch, or not even one row fits.
        """
        flat = [batch.reshape(-1).cpu() for batch in batches]
        if not flat:
            raise ValueError("there are no batches to count ids in")
        ids, counts = torch.unique(torch.cat(flat), return_counts=True)
        each = table.way.format.stride + _ID_NBYTES + table.fast_nbytes / max(len(table), 1)
        n = int(nbytes / each)
        if n < 1:
            raise ValueError(f"{nbytes} bytes hold no row; a packed one takes {each:.0f}")
        order = torch.argsort(counts, descending=True, stable=True)
        return cls(table, ids[order[:n]], device=device)

    @property
    def nbytes(self) -> int:
        """Bytes that the hot rows take on the device."""
        return self._packed.nbytes + _ID_NBYTES * len(self.ids)

    @property
    def hit_rate(self) -> float:
        """The share of rows that were on the device, of all since the object was made or
        `reset_counts` was called; 0 if there was none."""
        n = self.n_hits + self.n_misses
        return self.n_hits / n if n else 0.0

    def reset_counts(self) -> None:
        """Begins to count anew, so that `hit_rate` is that of the batches to come."""
        self.n_hits = self.n_misses = 0

    def gather(self, ids: Tensor) -> Tensor:
        """Rows by number, bit for bit, on the device.

        Args:
            ids: integers of any shape, on any device.

        Raises:
            IndexError, TypeError: as `PackedTable.gather`.
        """
        require_integers(ids)
        if self._n_updates != self.table.n_updates:
            self._fill()
        flat = ids.reshape(-1).to(self.device, torch.int64)
        places = torch.searchsorted(self.ids, flat).clamp_(max=max(len(self.ids) - 1, 0))
        is_hit = self.ids[places] == flat if len(self.ids) else torch.zeros_like(flat).bool()
        hits, misses = (mask.nonzero()[:, 0] for mask in (is_hit, ~is_hit))
        rows = torch.empty((len(flat), self.table.shape[1]), dtype=self._dtype, device=self.device)
        others = self.table.gather(flat[misses], threads=torch.get_num_threads())
        rows[misses] = others.to(self.device)  # first, because it checks its ids
        rows[hits] = self._gather_hot(places[hits])
        self.n_hits += len(hits)
        self.n_misses += len(misses)
        return rows.reshape(*ids.shape, self.table.shape[1])

    @property
    def _dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.table.dtype]

    def _fill(self) -> None:
        """Packs the hot rows as the table is packed, and puts them on the device."""
        self._n_updates = self.table.n_updates
        rows = self.table.gather(self.ids.cpu())
        self._packed = pack_table(rows, way=self.table.way)
        self._tensors = None
        if _uses_kernels(self.device):
            kernels = import_late("packhorse.kernels.tables")
            arrays = self._packed.arrays
            held = torch.from_numpy(arrays.rows).to(self.device)
            self._tensors = kernels.upload_table(held, arrays[1:], self._packed.way.format)

    def _gather_hot(self, places: Tensor) -> Tensor:
        if self._tensors is None:
            rows: Tensor = self._packed.gather(places, threads=torch.get_num_threads())
            return rows
        out = torch.empty((len(places), self.table.shape[1]), dtype=self._dtype, device=self.device)
        format = self._packed.way.format
        as_integers = out.view(self._tensors.values.dtype)
        import_late("packhorse.kernels.tables").gather_rows(
            self._tensors, format, places, as_integers
        )
        return out


def _uses_kernels(device: torch.device) -> bool:
    """Whether kernels gather there; otherwise the host does."""
    return device.type != "cpu"
