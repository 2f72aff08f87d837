"""Simulated times beside predicted and measured ones, where a simulation has kept them."""

from functools import cache

from benchmarks.gpu import kept_simulations

__all__ = ["simulated_seconds"]


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
    return _kept().get((n_rows, n_columns, n_tokens, format, choice))


@cache
def _kept() -> dict[tuple[int, int, int, str, str], float]:
    if not kept_simulations.PATH.exists():
        return {}
    kept = kept_simulations.read()
    return {
        (row.n_rows, row.n_columns, row.n_tokens, row.format, _choice(row.division)): row.simulated
        for row in [*kept.rows, *kept.compared]
    }


def _choice(division: list[int]) -> str:
    return "fused " + "/".join(map(str, division))
