"""What the disk hop returns to its callers about files: results, plans, problems and progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from packhorse.frame import Plan, planned_frame_nbytes
from packhorse.storage.locations import Place

__all__ = [
    "FileResult",
    "FolderResult",
    "Problem",
    "Progress",
    "TensorPlan",
    "TensorResult",
    "notice_of",
]

# Growth is reported if it exceeds both this share of the packed size and this number of bytes.
_NOTABLE = 0.05
_NOTABLE_NBYTES = 1 << 14

# Called with the number of unpacked bytes that were handled since the last call.
Progress: TypeAlias = Callable[[int], None]


class TensorResult(NamedTuple):
    """One tensor that was packed or unpacked. (A named tuple, since a file may have a million.)

    Attributes:
        name: the tensor's name.
        dtype: safetensors' name of its dtype.
        shape: its dimensions.
        nbytes: its size.
        packed_nbytes: the size of its frame.
        base_hash: content hash of the base that unpacking the frame needs; None if it needs none.
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
        original_nbytes: the size of the original file, including its header.
        packed_nbytes: the size of the packed file, including its header.
        tensors: the tensors, in the order of the original data.
    """

    source: Place
    output: Place
    original_nbytes: int
    packed_nbytes: int
    tensors: tuple[TensorResult, ...]

    @property
    def ratio(self) -> float:
        """Original size / packed size."""
        return self.original_nbytes / self.packed_nbytes

    @property
    def notice(self) -> str | None:
        """A warning about tensors too small to be packed; None if they make little difference."""
        return notice_of([(part.nbytes, part.packed_nbytes) for part in self.tensors])


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

    @property
    def packed_nbytes(self) -> int:
        """The estimated size of its frame, including the header."""
        return planned_frame_nbytes(self.plan, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that `verify_file` found.

    Attributes:
        path: the file.
        tensor: the tensor's name; None if the file as a whole is bad.
        offset: byte offset of the tensor's frame in the file; None if `tensor` is.
        message: the full error message.
    """

    path: Place
    tensor: str | None
    offset: int | None
    message: str


@dataclass(frozen=True, slots=True)
class FolderResult:
    """What packing or unpacking a model folder did.

    Attributes:
        source: the folder that was read.
        output: the folder that was written.
        original_nbytes: the total size of the original folder's files.
        packed_nbytes: the total size of the packed folder's files.
        files: the model files, in the order of their names.
        n_copied: the number of files that were copied.
    """

    source: Place
    output: Place
    original_nbytes: int
    packed_nbytes: int
    files: tuple[FileResult, ...]
    n_copied: int

    @property
    def ratio(self) -> float:
        """Original size / packed size."""
        return self.original_nbytes / self.packed_nbytes

    @property
    def notice(self) -> str | None:
        """A warning as for a file, about the tensors of all files."""
        tensors = [part for file in self.files for part in file.tensors]
        return notice_of([(part.nbytes, part.packed_nbytes) for part in tensors])


def notice_of(sizes: Sequence[tuple[int, int]]) -> str | None:
    """A warning about tensors that packing makes larger; None if they make little difference.

    Args:
        sizes: the size of each tensor and of its frame, in bytes.
    """
    grown = [(before, after) for before, after in sizes if after > before]
    before, after = (sum(column) for column in zip(*grown, strict=True)) if grown else (0, 0)
    least = max(_NOTABLE_NBYTES, _NOTABLE * sum(packed for _, packed in sizes))
    if after - before <= least:
        return None
    return (
        f"{len(grown):,} of {len(sizes):,} tensors grow when packed, because each frame has a "
        f"header: {after:,} bytes instead of {before:,}"
    )
