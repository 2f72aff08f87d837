"""Simulated times beside predicted and measured ones, where a simulation has kept them.

The file is a list of objects, each of a product: `n_rows`, `n_columns`, `n_tokens`, `choice` (as
the tables print it, such as "fused 16/8/64/4/1/4/1") and `seconds`.
"""

import json
from functools import cache
from pathlib import Path

__all__ = ["KEPT", "simulated_seconds"]

KEPT = Path(__file__).resolve().parents[1] / "results" / "gpu" / "simulated.json"


def simulated_seconds(n_rows: int, n_columns: int, n_tokens: int, choice: str) -> float | None:
    """Seconds of a product by the simulation; None if it was not simulated.

    Args:
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        choice: how it runs, as the tables print it.
    """
    return _kept(KEPT).get((n_rows, n_columns, n_tokens, choice))


@cache
def _kept(path: Path) -> dict[tuple[int, int, int, str], float]:
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())
    names = ("n_rows", "n_columns", "n_tokens", "choice")
    return {tuple(row[name] for name in names): row["seconds"] for row in rows}
