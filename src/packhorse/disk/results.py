"""What the disk hop tells its callers about files: results, plans and problems, and progress."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from packhorse.frame import Plan

__all__ = [
    "FileResult",
    "FolderResult",
    "Problem",
    "Progress",
    "TensorPlan",
    "TensorResult",
]

# Called with the logical bytes that were done since the last call.
Progress: TypeAlias = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class TensorResult:
    """One tensor that was packed or unpacked.

    Attributes:
        name: the tensor's name.
        dtype: safetensors' name of its dtype.
        shape: its dimensions.
        nbytes: its size.
        packed_nbytes: the size of its frame.
        base_hash: content hash of the base that the frame is not unpacked without; None if it needs
            none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    packed_nbytes: int
    base_hash: bytes | None = None


@dataclass(frozen=True, slots=True)
class FileResult:
    """What packing or unpacking a file did.

    Attributes:
        source: the file that was read.
        output: the file that was written.
        original_nbytes: the whole original file, header counted.
        packed_nbytes: the whole packed file, header counted.
        tensors: in the order of the original data.
    """

    source: Path
    output: Path
    original_nbytes: int
    packed_nbytes: int
    tensors: tuple[TensorResult, ...]

    @property
    def ratio(self) -> float:
        """Original by packed size."""
        return self.original_nbytes / self.packed_nbytes


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """What packing would do with one tensor.

    Attributes:
        name: the tensor's name.
        dtype: safetensors' name of its dtype.
        shape: its dimensions.
        nbytes: its size.
        plan: the choice, with the reason.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that `verify_file` found.

    Attributes:
        path: the file.
        tensor: the tensor's name; None if the file as a whole is bad.
        offset: byte offset of the tensor's frame in the file; None like `tensor`.
        message: what is wrong, complete.
    """

    path: Path
    tensor: str | None
    offset: int | None
    message: str


@dataclass(frozen=True, slots=True)
class FolderResult:
    """What packing or unpacking a model folder did.

    Attributes:
        source: the folder that was read.
        output: the folder that was written.
        original_nbytes: all files of the original folder.
        packed_nbytes: all files of the packed folder.
        files: the model files, in the order of their names.
        n_copied: files that are the same in both.
    """

    source: Path
    output: Path
    original_nbytes: int
    packed_nbytes: int
    files: tuple[FileResult, ...]
    n_copied: int

    @property
    def ratio(self) -> float:
        """Original by packed size."""
        return self.original_nbytes / self.packed_nbytes
