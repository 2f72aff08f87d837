"""The states that a run of the study has kept, by their parts."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from benchmarks.data import sets
from benchmarks.data.trainer import file_name
from benchmarks.study.runs import StudyRun

__all__ = ["DTYPES", "PARTS", "States"]

# Weights are what the model computes with; masters are what the optimizer works on.
PARTS = ("weights", "masters", "first moments", "second moments")
DTYPES: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}
Tensors = dict[str, NDArray[Any]]


class States:
    """What a run has kept.

    Attributes:
        run: the run.
        manifest: what the run says of itself.
    """

    def __init__(self, run: StudyRun, folder: Path) -> None:
        """Open the folder of a run.

        Args:
            run: the run.
            folder: its folder.

        Raises:
            FileNotFoundError: the run is not complete.
        """
        path = folder / sets.TRAINING_MANIFEST
        if not path.exists():
            raise FileNotFoundError(
                f"there is no complete run in {folder}; make it with: make study"
            )
        self.run = run
        self.manifest: dict[str, Any] = json.loads(path.read_text())
        self._folder = folder

    def dtype(self, part: str) -> str:
        """safetensors' name of the dtype of a part."""
        return "BF16" if part == "weights" or not self.run.masters else "F32"

    def parts(self, step: int) -> list[str]:
        """The parts that a step has kept."""
        return [part for part in PARTS if self._file(step, part) in self.manifest["files"]]

    def tensors(self, step: int, part: str) -> Tensors:
        """The tensors of a part by their names, each in its own shape.

        Args:
            step: a step that was kept.
            part: a part that it has.

        Raises:
            ValueError: the file is not the one that the run wrote.
        """
        name = self._file(step, part)
        dtype = "F32" if self.run.masters else "BF16"
        sha256 = self.manifest["files"][name]["sha256"]
        found = sets.kept_tensors(self._folder, name, sha256, dtype, DTYPES[dtype])
        wanted = DTYPES[self.dtype(part)]
        return {key: np.ascontiguousarray(t.astype(wanted)) for key, t in found.items()}

    def _file(self, step: int, part: str) -> str:
        """The file of a part; bf16 copies are rounded from the file of their masters."""
        if part == "masters" and not self.run.masters:
            return ""
        word = {"first moments": "first", "second moments": "second"}.get(part, "weights")
        kind = self.run.kinds()[word]
        return file_name(kind, step) if kind else ""
