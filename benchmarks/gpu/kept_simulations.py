"""The kept figures of simulated products: `benchmarks/results/gpu/simulated.json` for an H200, and
`simulated_a100.json`.

They are read where they are printed beside predictions, without Triton.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

__all__ = ["A100_PATH", "PATH", "Agreement", "Kept", "Row", "read", "simulated_seconds", "write"]

PATH = Path(__file__).resolve().parents[1] / "results" / "gpu" / "simulated.json"
A100_PATH = PATH.with_stem("simulated_a100")
KIND = "simulated"


@dataclass(frozen=True)
class Row:
    """A product that was predicted and simulated. Times are seconds.

    Attributes:
        matrix: its role in the model.
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        format: name of the weight's format.
        division: the fields of a `MatmulConfig`.
        plain: the predicted time of a product with the BF16 weight.
        predicted: by the model of time.
        simulated: by the simulation.
        early: the same if the kernel starts before the one before it ends, where GPUs can do that.
        programs: of the product.
        resident: programs that a multiprocessor runs at once.
        registers: of a thread.
        issue: instructions that a scheduler of the busiest multiprocessor issued in a cycle.
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
    programs: int
    resident: int
    registers: int
    issue: float

    def __str__(self) -> str:
        times = (self.predicted, self.simulated, self.early)
        cells = [self.matrix, self.n_tokens, "/".join(map(str, self.division))]
        cells += [f"{self.plain * 1e6:.1f}"]
        cells += [f"{t * 1e6:.1f} ({self.plain / t:.2f})" for t in times]
        return f"| {' | '.join(map(str, cells))} |"


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
        compared: the divisions of which predictions were compared.
        agreement: of the compared ones.
    """

    triton: str
    rows: list[Row]
    compared: list[Row]
    agreement: Agreement


def write(kept: Kept, path: Path = PATH) -> None:
    """Keeps the figures, with the date and the command."""
    is_a100 = path == A100_PATH
    head = {
        "kind": KIND,
        "device": f"NVIDIA {'A100 80 GB' if is_a100 else 'H200'}, simulated",
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python benchmarks/gpu.py simulate{' --a100' * is_a100} --write",
    }
    path.write_text(json.dumps({**head, **asdict(kept)}, indent=1) + "\n")


def read(path: Path = PATH) -> Kept:
    """The kept figures.

    Raises:
        ValueError: the file has figures of another kind.
    """
    kept = json.loads(path.read_text())
    if kept.get("kind") != KIND:
        raise ValueError(f"{path} has figures of kind {kept.get('kind')!r}, not {KIND!r}")
    return Kept(
        kept["triton"], _rows(kept["rows"]), _rows(kept["compared"]), Agreement(**kept["agreement"])
    )


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
    return _by_choice(PATH).get((n_rows, n_columns, n_tokens, format, choice))


@cache
def _by_choice(path: Path) -> dict[tuple[int, int, int, str, str], float]:
    kept = read(path)
    return {
        (r.n_rows, r.n_columns, r.n_tokens, r.format, f"fused {'/'.join(map(str, r.division))}"): (
            r.early
        )
        for r in (*kept.compared, *kept.rows)
    }


def _rows(rows: Iterable[dict[str, object]]) -> list[Row]:
    return [Row(**row) for row in rows]  # type: ignore[arg-type]
