"""The tables that `gpu.py host` gathers from, and how it times gathers."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu.checks import WrongError
from packhorse.host import PackedTable, pack_table, plan_table
from packhorse.host import table as table_module

if TYPE_CHECKING:
    from benchmarks.gpu.run import Run

__all__ = [
    "KINDS",
    "Pair",
    "device_of",
    "in_turns",
    "let_the_host_be_a_device",
    "make_pair",
    "numbers",
    "require_same",
    "sync",
]

GIB = 4.0  # of a plain table; the command sets it
_BASE_ROWS = 4096
_SMALL_ROWS, _SMALL_COLUMNS = 100, 48
_ROUNDS = 11


def _embeddings(dtype: torch.dtype, n_columns: int) -> Callable[[int, int], torch.Tensor]:
    def make(n_rows: int, limit: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        columns = min(n_columns, limit)
        return (0.05 * torch.randn(n_rows, columns, generator=generator)).to(dtype)

    return make


def _pixels(n_rows: int, limit: int) -> torch.Tensor:
    random = np.random.default_rng(2)
    pixels = random.integers(1, 256, (n_rows, min(784, limit)))
    pixels[random.random(pixels.shape) < 0.5] = 0
    return torch.from_numpy(pixels.astype(np.float32) / np.float32(255))


def _words(n_rows: int, limit: int) -> torch.Tensor:
    random = np.random.default_rng(3)
    rows = np.zeros((n_rows, min(3703, limit)), np.float32)
    for row in rows:
        n = int(random.integers(2, 9))
        row[random.choice(rows.shape[1], n, replace=False)] = np.float32(1 / n)
    return torch.from_numpy(rows)


# Rows, and columns at most, are given.
KINDS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "BF16, 384 columns": _embeddings(torch.bfloat16, 384),
    "FP32, 384 columns": _embeddings(torch.float32, 384),
    "BF16, 128 columns": _embeddings(torch.bfloat16, 128),
    "pixels, FP32": _pixels,
    "words, FP32": _words,
}


class _Repeated:
    """Some rows again and again, as a source of `pack_table`."""

    def __init__(self, base: torch.Tensor, n_rows: int) -> None:
        self._base, self.shape = base, (n_rows, base.shape[1])

    def __getitem__(self, part: slice) -> torch.Tensor:
        places = torch.arange(*part.indices(self.shape[0])) % len(self._base)
        return self._base[places]


class Pair(NamedTuple):
    """A table twice, in memory that the device reads.

    Attributes:
        name: its kind.
        base: the rows of which it consists: row r is `base[r % len(base)]`.
        packed, plain: the table, packed and raw.
    """

    name: str
    base: torch.Tensor
    packed: PackedTable
    plain: PackedTable

    @property
    def row_nbytes(self) -> int:
        """Bytes of a plain row."""
        return self.plain.way.format.row_nbytes

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows that a gather must give."""
        return self.base.to(ids.device)[ids % len(self.base)]

    def view(self, device: torch.device) -> torch.Tensor:
        """The plain rows as a tensor that the device reads in place."""
        nbytes = len(self.plain) * self.plain.way.format.stride
        held = self.plain.memory.tensor(device)[:nbytes].view(len(self.plain), -1)
        return held.view(self.base.dtype)[:, : self.base.shape[1]]


def device_of(run: "Run") -> torch.device:
    """The GPU, or the host for a smoke run."""
    return torch.device("cpu") if run.smoke else torch.device("cuda", torch.cuda.current_device())


def let_the_host_be_a_device(run: "Run") -> None:
    """Makes tables in host memory be gathered by the kernels, in a smoke run."""
    if run.smoke:
        kinds = torch.Tensor, torch.device
        table_module.is_on_device = lambda where: isinstance(where, kinds)


def make_pair(run: "Run", name: str) -> Pair:
    """Packs a table; those of a smoke run are tiny."""
    let_the_host_be_a_device(run)
    base = KINDS[name](*((_SMALL_ROWS, _SMALL_COLUMNS) if run.smoke else (_BASE_ROWS, 1 << 16)))
    n_rows = len(base) if run.smoke else int(GIB * 2**30) // (base.shape[1] * base.itemsize)
    source = _Repeated(base, n_rows)
    device = device_of(run)
    raw = plan_table(base)[0]
    return Pair(
        name,
        base,
        pack_table(source, device=device),
        pack_table(source, device=device, way=raw),
    )


def numbers(run: "Run", n_rows: int, n: int, law: str) -> torch.Tensor:
    """Random numbers of rows on the device: "uniform", or "zipf" with exponent 1.05 (the frequent
    ones are spread over the table)."""
    random = np.random.default_rng(5)
    if law == "uniform":
        found = random.integers(0, n_rows, n)
    else:
        ends = np.cumsum(np.arange(1, n_rows + 1) ** -1.05)
        ranks = np.searchsorted(ends, random.random(n) * ends[-1])
        found = ranks * 2_654_435_761 % n_rows
    return torch.from_numpy(found).to(device_of(run))


def sync(run: "Run") -> None:
    """Waits for the GPU."""
    if not run.smoke:
        torch.cuda.synchronize()


def in_turns(run: "Run", arms: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each arm, from the call to the end of its work on the GPU."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(1 if run.smoke else _ROUNDS):
        for name, call in arms.items():
            call()  # untimed, so that no arm pays for what the one before it left
            sync(run)
            start = time.perf_counter()
            call()
            sync(run)
            if round_ or run.smoke:  # the first compiles
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def require_same(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compares rows bit for bit.

    Raises:
        WrongError: they differ.
    """
    pairs: Sequence[Any] = [part.contiguous().view(torch.uint8) for part in (found, wanted)]
    if found.shape != wanted.shape or not torch.equal(*pairs):
        raise WrongError(f"{what}: rows are not those of the table")
