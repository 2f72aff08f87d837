"""The kept figures of simulated products in `benchmarks/results/gpu/`.

`simulated.json` and `simulated_a100.json` have those of the Triton kernels, on an H200 and on an
A100; `simulated_stream.json` has those of the kernels with warps that fetch.

They are read where they are printed beside predictions, without Triton.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

__all__ = [
    "A100_PATH",
    "PATH",
    "STREAM_PATH",
    "Agreement",
    "Kept",
    "Row",
    "StreamRow",
    "read",
    "read_streams",
    "simulated_seconds",
    "write",
    "write_streams",
]

_FOLDER = Path(__file__).resolve().parents[1] / "results" / "gpu"
PATH = _FOLDER / "simulated.json"
A100_PATH = _FOLDER / "simulated_a100.json"
STREAM_PATH = _FOLDER / "simulated_stream.json"
_H200 = "NVIDIA H200"
KIND = "simulated"
_STREAM_KIND = "simulated stream"


@dataclass(frozen=True)
class _Product:
    """A product that was predicted and simulated. Times are seconds.

    Attributes:
        matrix: its role in the model.
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        format: name of the weight's format.
        division: the fields of a `MatmulConfig` or `StreamConfig`.
        plain: the predicted time of a product with the BF16 weight.
        predicted: by the model of time.
        simulated: by the simulation.
        early: the same if the kernel starts before the one before it ends, where GPUs can do that.
    """

    matrix: str
    n_rows: int
    n_columns: int
    n_tokens: int
    format: str
    division: list[int]
    plain: float
    predicted: float
    simulated: float
    early: float

    def __str__(self) -> str:
        times = (self.predicted, self.simulated, self.early)
        cells = [self.matrix, self.n_tokens, "/".join(map(str, self.division))]
        cells += [f"{self.plain * 1e6:.1f}"]
        cells += [f"{t * 1e6:.1f} ({self.plain / t:.2f})" for t in times]
        return f"| {' | '.join(map(str, cells))} |"


class StreamRow(_Product):
    """A product by the kernels with warps that fetch."""


@dataclass(frozen=True)
class Row(_Product):
    """A product by a Triton kernel.

    Attributes:
        programs: of the product.
        resident: programs that a multiprocessor runs at once.
        registers: of a thread.
        issue: instructions that a scheduler of the busiest multiprocessor issued in a cycle.
    """

    programs: int
    resident: int
    registers: int
    issue: float


@dataclass(frozen=True)
class Agreement:
    """How far predictions agree with simulations.

    Attributes:
        n: how many products were compared.
        rank_correlation: Spearman's coefficient over all products, of their predicted and simulated
            speeds relative to BF16.
        within_matrices: Spearman's coefficient over the divisions of a matrix, averaged over the
            matrices. Many of these divisions are nearly equal.
        mean_error: mean distance of a predicted time from the simulated one, as a share of it.
        largest_error: the largest such distance.
        loss: mean over the matrices: how much longer the division that is predicted to be the
            fastest takes by simulation than the fastest one, as a share.
    """

    n: int
    rank_correlation: float
    within_matrices: float
    mean_error: float
    largest_error: float
    loss: float

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Agreement":
        """The agreement over some products, of at least two divisions for each matrix."""
        errors = [abs(row.predicted / row.simulated - 1) for row in rows]
        matrices: dict[tuple[str, int], list[Row]] = {}
        for row in rows:
            matrices.setdefault((row.matrix, row.n_tokens), []).append(row)
        correlations, losses = [], []
        for group in matrices.values():
            predicted = [row.predicted for row in group]
            simulated = [row.simulated for row in group]
            correlations.append(_correlation(predicted, simulated))
            chosen = min(group, key=lambda row: row.predicted)
            losses.append(chosen.simulated / min(simulated) - 1)
        predicted = [row.plain / row.predicted for row in rows]
        simulated = [row.plain / row.simulated for row in rows]
        return cls(
            n=len(rows),
            rank_correlation=_correlation(predicted, simulated),
            within_matrices=statistics.fmean(correlations),
            mean_error=statistics.fmean(errors),
            largest_error=max(errors),
            loss=statistics.fmean(losses),
        )

    def __str__(self) -> str:
        return (
            f"{self.n} products: rank correlation {self.rank_correlation:.2f} "
            f"({self.within_matrices:.2f} within a matrix), error {self.mean_error:.0%} on average "
            f"and {self.largest_error:.0%} at most; the division that is predicted to be the "
            f"fastest takes {self.loss:.1%} longer than the fastest"
        )


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's coefficient."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [float(ordered.index(value)) for value in values]


@dataclass(frozen=True)
class Kept:
    """What a run of the simulation gave.

    Attributes:
        triton: the version that compiled the kernels.
        rows: what is chosen untuned.
        compared: the divisions of which predictions were compared; the model was fitted to them.
        agreement: of the compared ones.
        unfitted: products to which the model was not fitted; there may be none.
        unfitted_agreement: of these; None if there are none.
    """

    triton: str
    rows: list[Row]
    compared: list[Row]
    agreement: Agreement
    unfitted: list[Row] = field(default_factory=list)
    unfitted_agreement: Agreement | None = None


def write(kept: Kept, path: Path = PATH) -> None:
    """Keeps the figures, with the date and the command."""
    is_a100 = path == A100_PATH
    command = f"python benchmarks/gpu.py simulate{' --a100' * is_a100} --write"
    _write(KIND, "NVIDIA A100 80 GB" if is_a100 else _H200, command, asdict(kept), path)


def write_streams(rows: Sequence[StreamRow], path: Path = STREAM_PATH) -> None:
    """Keeps the figures of the kernels with warps that fetch."""
    kept = {"rows": [asdict(row) for row in rows]}
    command = "python benchmarks/gpu.py simulate --stream --write"
    _write(_STREAM_KIND, _H200, command, kept, path)


def _write(kind: str, device: str, command: str, kept: dict[str, Any], path: Path) -> None:
    head = {
        "kind": kind,
        "device": f"{device}, simulated",
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
    }
    path.write_text(json.dumps({**head, **kept}, indent=1) + "\n")


def read(path: Path = PATH) -> Kept:
    """The kept figures.

    Raises:
        ValueError: the file has figures of another kind.
    """
    kept = _read(KIND, path)
    rows, compared, unfitted = (
        [Row(**row) for row in kept.get(name, ())] for name in ("rows", "compared", "unfitted")
    )
    agreement = Agreement(**kept["agreement"])
    of_unfitted = Agreement(**kept["unfitted_agreement"]) if unfitted else None
    return Kept(kept["triton"], rows, compared, agreement, unfitted, of_unfitted)


def read_streams(path: Path = STREAM_PATH) -> list[StreamRow]:
    """The kept figures of the kernels with warps that fetch.

    Raises:
        ValueError: the file has figures of another kind.
    """
    return [StreamRow(**row) for row in _read(_STREAM_KIND, path)["rows"]]


def _read(kind: str, path: Path) -> Any:
    kept = json.loads(path.read_text())
    if kept.get("kind") != kind:
        raise ValueError(f"{path} has figures of kind {kept.get('kind')!r}, not {kind!r}")
    return kept


def simulated_seconds(
    n_rows: int, n_columns: int, n_tokens: int, format: str, choice: str
) -> float | None:
    """Seconds of a product that starts early; None if it was not simulated.

    Args:
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        format: name of the weight's format.
        choice: how it runs, as tables print it: "fused 16/8/64/4/1/4/1".
    """
    return _by_choice().get((n_rows, n_columns, n_tokens, format, choice))


@cache
def _by_choice() -> dict[tuple[int, int, int, str, str], float]:
    kept = read()
    products: list[tuple[str, _Product]] = [("stream", row) for row in read_streams()]
    products += [("fused", row) for row in (*kept.unfitted, *kept.compared, *kept.rows)]
    return {
        (r.n_rows, r.n_columns, r.n_tokens, r.format, f"{way} {'/'.join(map(str, r.division))}"): (
            r.early
        )
        for way, r in products
    }
