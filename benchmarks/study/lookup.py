"""Finds figures in the result that `study.py` keeps."""

from typing import Any

__all__ = ["PARTS", "PAYS", "Case", "Found", "Row", "ratio", "total", "way_ratio"]

Row = dict[str, Any]
Case = tuple[str, int | None, int]  # of engines: part, step, and steps back to the base
PARTS = ("weights", "masters", "first moments", "second moments")
PAYS = 0.95  # of the size packed alone: what a difference must stay below to pay
_GENERAL = ("gzip", "bz2", "xz", "zstd", "lz4")


def total(row: Row, key: str) -> int:
    """A sum over all kinds of tensors.

    Args:
        row: of "series", "gaps" or "models".
        key: such as "nbytes" or "delta".
    """
    return sum(sizes.get(key, 0) for sizes in row["kinds"].values())


def ratio(row: Row, key: str = "full") -> float:
    """Plain bytes over packed bytes, of all kinds of tensors; key says how they are packed."""
    return total(row, "nbytes") / total(row, key)


def way_ratio(row: Row) -> float:
    """Plain bytes over packed bytes of one way in a comparison of engines."""
    return row["nbytes"] / row["packed_nbytes"]


class Found:
    """The result, and the questions that the page asks it.

    Attributes:
        result: all figures.
        runs: the names of the runs; the others are compared with the first.
    """

    def __init__(self, result: Row) -> None:
        """Look into a result.

        Args:
            result: what `study.py` keeps.
        """
        self.result = result
        self.runs = list(result["runs"])

    def run(self, name: str) -> Row:
        """What there is of a run."""
        return self.result["runs"][name]

    def series(self, run: str, part: str) -> list[Row]:
        """The states of a part, in the order of steps."""
        return [row for row in self.run(run)["series"] if row["part"] == part]

    def state(self, run: str, part: str, step: int) -> Row:
        """One state of a part."""
        return next(row for row in self.series(run, part) if row["step"] == step)

    def gaps(self, run: str, part: str, anchor: int) -> list[Row]:
        """The differences of a part that end at the anchor, the nearest first."""
        rows = self.run(run)["gaps"]
        return [row for row in rows if row["part"] == part and row["anchor"] == anchor]

    def gap(self, run: str, part: str, anchor: int, gap: int) -> Row:
        """One difference."""
        return next(row for row in self.gaps(run, part, anchor) if row["gap"] == gap)

    def delta_ratio(self, run: str, part: str, anchor: int, gap: int = 1) -> float:
        """The ratio of a difference."""
        return ratio(self.gap(run, part, anchor, gap), "delta")

    def unchanged(self, run: str, anchor: int, gap: int = 1) -> float:
        """The share of bf16 weights that are the same in two states."""
        row = self.gap(run, "weights", anchor, gap)
        return total(row, "same") / (total(row, "nbytes") / 2)

    def last_paying_gap(self, run: str, part: str, anchor: int) -> int:
        """The greatest measured gap at which the difference takes at most `PAYS` of the state
        packed alone; 0 if there is none."""
        rows = self.gaps(run, part, anchor)
        paying = [r["gap"] for r in rows if total(r, "delta") <= PAYS * total(r, "full")]
        return max(paying, default=0)

    def greatest_harm(self) -> float:
        """The greatest measured share by which a difference took more than the state alone."""
        rows = [row for run in self.runs for row in self.run(run)["gaps"]]
        return max(0.0, *(total(row, "delta") / total(row, "full") - 1 for row in rows))

    def engines(self, case: Case) -> Row:
        """One comparison of engines."""
        tables = self.result["engines"]
        return next(t for t in tables if (t["part"], t["step"], t["gap"]) == case)

    def way(self, case: Case, start: str) -> float:
        """The ratio of the way whose name begins so."""
        rows = self.engines(case)["rows"]
        return way_ratio(next(row for row in rows if row["name"].startswith(start)))

    def best_engine(self, case: Case, *, grouped: bool) -> tuple[str, float]:
        """The general-purpose engine that packs best, and its ratio."""
        rows = [
            row
            for row in self.engines(case)["rows"]
            if row["name"].startswith(_GENERAL) and row["name"].endswith("grouped") == grouped
        ]
        best = max(rows, key=way_ratio)
        return best["name"].split(",")[0], way_ratio(best)
