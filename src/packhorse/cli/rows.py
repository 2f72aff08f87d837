"""The rows that actions return and the renderer draws; `--json` prints them as they are.

Sizes are in bytes, times in seconds, speeds in uncompressed GB (10^9 bytes) per second. A ratio is
original bytes / packed bytes, headers counted.
"""

from dataclasses import dataclass

__all__ = [
    "BenchRow",
    "BenchedFile",
    "ErrorRow",
    "FileRow",
    "InspectedFile",
    "PlanRow",
    "PlaneRow",
    "PlannedFile",
    "ProblemRow",
    "SharedFile",
    "TensorRow",
    "TunedBucket",
    "TunedMatrix",
    "VerifiedFile",
    "gb_per_s",
    "ratio",
]


def ratio(nbytes: int, packed_nbytes: int) -> float:
    """Original / packed; 1 if the packed size is 0."""
    return nbytes / packed_nbytes if packed_nbytes else 1.0


def gb_per_s(nbytes: int, seconds: float) -> float:
    """Speed in 10^9 bytes per second; 0 if no time passed."""
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0


@dataclass(frozen=True)
class ErrorRow:
    """A source that failed."""

    path: str
    exit_code: int
    message: str


@dataclass(frozen=True)
class FileRow:
    """A file or folder that was packed or unpacked; `nbytes` is the unpacked size in both cases.

    `n_files` counts model files, `n_copied` the other files of a folder, `n_delta` the tensors that
    are differences from a base. `notice` is a warning about tensors too small to be packed.
    """

    src: str
    dst: str
    n_files: int
    n_copied: int
    n_tensors: int
    n_delta: int
    nbytes: int
    packed_nbytes: int
    ratio: float
    seconds: float
    gb_per_s: float
    notice: str | None


@dataclass(frozen=True)
class PlanRow:
    """What packing would do to one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    estimated_nbytes: int
    ratio: float
    level: str
    split: str
    reason: str


@dataclass(frozen=True)
class PlannedFile:
    """What packing would do to one file; `notice` as in `FileRow`."""

    src: str
    dst: str
    nbytes: int
    estimated_nbytes: int
    ratio: float
    notice: str | None
    tensors: list[PlanRow]


@dataclass(frozen=True)
class PlaneRow:
    """One plane of a packed tensor; `modes` counts chunks by mode."""

    name: str
    nbytes: int
    packed_nbytes: int
    ratio: float
    modes: dict[str, int]


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a packed file; `base_hash` and `base_dtype` are those of its base, or None."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    packed_nbytes: int
    ratio: float
    level: str
    split: str
    n_chunks: int
    content_hash: str
    base_hash: str | None
    base_dtype: str | None
    planes: list[PlaneRow]


@dataclass(frozen=True)
class InspectedFile:
    """A packed file. `metadata` is the original's; `base_name` is the file name of the base that
    `n_delta` of its tensors need."""

    path: str
    nbytes: int
    packed_nbytes: int
    ratio: float
    metadata: dict[str, str]
    n_delta: int
    base_name: str | None
    tensors: list[TensorRow]


@dataclass(frozen=True)
class ProblemRow:
    """One problem; `tensor` is None if it concerns the file as a whole."""

    path: str
    tensor: str | None
    offset: int | None
    message: str


@dataclass(frozen=True)
class VerifiedFile:
    """A packed file or folder whose checksums were checked."""

    path: str
    ok: bool
    n_files: int
    packed_nbytes: int
    seconds: float
    problems: list[ProblemRow]


@dataclass(frozen=True)
class SharedFile:
    """A file that was handled on a cluster. `status` is that of `packhorse.disk.FileReport`; sizes
    are 0 if they are not known, `worker` is the address of the one that wrote the file."""

    src: str
    dst: str | None
    status: str
    n_tensors: int
    n_delta: int
    n_tasks: int
    nbytes: int
    packed_nbytes: int
    ratio: float
    seconds: float
    worker: str | None
    problems: list[ProblemRow]


@dataclass(frozen=True)
class BenchRow:
    """All tensors of one dtype, coded in memory."""

    dtype: str
    n_tensors: int
    nbytes: int
    packed_nbytes: int
    ratio: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    bit_exact: bool


@dataclass(frozen=True)
class BenchedFile:
    """A file whose tensors were coded in memory."""

    path: str
    level: str
    threads: int
    bit_exact: bool
    dtypes: list[BenchRow]
    total: BenchRow


@dataclass(frozen=True)
class TunedBucket:
    """The best choice for up to `n_tokens` tokens, with the seconds of a product: packed, and with
    the plain BF16 matrix."""

    n_tokens: int
    strategy: str
    config: dict[str, int] | None
    seconds: float
    plain_seconds: float | None
    speedup: float | None


@dataclass(frozen=True)
class TunedMatrix:
    """The choices for a matrix: `measured` on a GPU and stored in `cache`, or predicted."""

    n_rows: int
    n_columns: int
    format: str
    n_matrices: int
    gpu: str
    measured: bool
    cache: str | None
    buckets: list[TunedBucket]
