"""Simulated times beside predicted and measured ones, where a simulation has kept them.

`benchmarks/results/gpu/simulated.json` has `rows` and `compared`: lists of products, of which
`n_rows`, `n_columns`, `n_tokens`, `format`, `division` (the fields of a `MatmulConfig`) and
`simulated` (seconds) are read here.
"""

import json
from functools import cache
from pathlib import Path

__all__ = ["KEPT", "simulated_seconds"]

KEPT = Path(__file__).resolve().parents[1] / "results" / "gpu" / "simulated.json"


def simulated_seconds(
    n_rows: int, n_columns: int, n_tokens: int, format: str, choice: str
) -> float | None:
    """Seconds of a product by the simulation; None if it was not simulated.

    Args:
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        format: name of the weight's format.
        choice: how it runs, as the tables print it, such as "fused 16/8/64/4/1/4/1".
    """
    return _kept(KEPT).get((n_rows, n_columns, n_tokens, format, choice))


@cache
def _kept(path: Path) -> dict[tuple[int, int, int, str, str], float]:
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    names = ("n_rows", "n_columns", "n_tokens", "format")
    return {
        (*(row[name] for name in names), "fused " + "/".join(map(str, row["division"]))): row[
            "simulated"
        ]
        for row in [*kept["rows"], *kept["compared"]]
    }
