"""The kept figures of simulated products of the kernels with warps that fetch:
`benchmarks/results/gpu/simulated_stream.json`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

__all__ = ["STREAM_PATH", "StreamRow", "read_streams", "write_streams"]

STREAM_PATH = Path(__file__).resolve().parents[1] / "results" / "gpu" / "simulated_stream.json"
_KIND = "simulated stream"


@dataclass(frozen=True)
class StreamRow:
    """A product that was predicted and simulated. Times are seconds.

    Attributes:
        matrix: its role in the model.
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        format: name of the weight's format.
        division: the fields of a `StreamConfig`.
        plain: the predicted time of a product with the BF16 weight.
        predicted: by the model of time.
        simulated: by the simulation.
        early: the same if the kernel before lets it start early.
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
        cells = [self.matrix, self.n_tokens, "/".join(map(str, self.division))]
        cells += [f"{self.plain * 1e6:.1f}"]
        times = self.predicted, self.simulated, self.early
        cells += [f"{t * 1e6:.1f} ({self.plain / t:.2f})" for t in times]
        return f"| {' | '.join(map(str, cells))} |"


def write_streams(rows: Sequence[StreamRow], path: Path = STREAM_PATH) -> None:
    """Keeps the figures, with the date and the command."""
    head = {
        "kind": _KIND,
        "device": "NVIDIA H200, simulated",
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python benchmarks/gpu.py simulate --stream --write",
    }
    kept = {**head, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(kept, indent=1) + "\n")


def read_streams(path: Path = STREAM_PATH) -> list[StreamRow]:
    """The kept figures.

    Raises:
        ValueError: the file has figures of another kind.
    """
    kept = json.loads(path.read_text())
    if kept.get("kind") != _KIND:
        raise ValueError(f"{path} has figures of kind {kept.get('kind')!r}, not {_KIND!r}")
    return [StreamRow(**row) for row in kept["rows"]]
