"""The work of `packhorse tune`: finds the matrices of a command line, and returns a row for each.

The device hop searches and measures. This module finds the matrices in the headers of model files,
without loading the files, and turns the device hop's results into rows.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.cli.failures import UsageError
from packhorse.cli.jobs import check_source
from packhorse.cli.memory import has_memory_for
from packhorse.cli.rows import TunedBucket, TunedMatrix
from packhorse.codecs.weights import WeightArrays
from packhorse.disk.folder_index import PLAIN_SUFFIX
from packhorse.disk.folder_items import files_in
from packhorse.disk.packed_header import is_packed, parse_packed_header
from packhorse.errors import MissingBackendError
from packhorse.layout import MAX_WEIGHT_COLUMNS, WEIGHT_FORMATS
from packhorse.storage.safetensors_header import FileHeader
from packhorse.storage.source import header_at

if TYPE_CHECKING:
    from packhorse.device.tune_cache import Measured
from packhorse.storage.locations import Place

__all__ = ["TuneJob", "check_gpu", "measure", "predict", "tune_jobs"]

_PACKED_SUFFIX = f"weight.{WeightArrays._fields[0]}"  # its columns include padding
_ROOM_NBYTES = 1 << 33  # PyTorch needs an eighth of it, and more with CUDA
_MIN_ROWS = 64  # smaller matrices are not worth the time


@dataclass(frozen=True)
class TuneJob:
    """A matrix and a format.

    Attributes:
        n_rows: outputs.
        n_columns: inputs.
        format: name of the format.
        n_matrices: how many matrices of this shape the models have; 0 for a shape of `--shape`.
    """

    n_rows: int
    n_columns: int
    format: str
    n_matrices: int

    @property
    def src(self) -> str:
        """The job's name in messages."""
        return f"{self.n_rows}x{self.n_columns} {self.format}"


def tune_jobs(
    sources: Iterable[str], shapes: Iterable[str], formats: Iterable[str]
) -> list[TuneJob]:
    """The named shapes, then the matrices of model files and folders, the largest first.

    Args:
        sources: model files and folders, packed or not.
        shapes: shapes as "ROWSxCOLUMNS".
        formats: names of formats.

    Raises:
        OSError: a source is missing.
        PackhorseError: a file is bad.
        UsageError: a shape is malformed, a source has no matrices, or there is no source and no
            shape.
    """
    counts: Counter[tuple[int, int]] = Counter()
    for source in sources:
        found = Counter(_matrices(check_source(source)))
        if not found:
            raise UsageError(f"{source}: no BF16 matrices of linear layers; name one with --shape")
        counts += found
    named = [_parse_shape(text) for text in shapes]
    if not counts and not named:
        raise UsageError("nothing to tune; name a model, or a matrix with --shape ROWSxCOLUMNS")
    order = sorted(counts, key=lambda shape: -counts[shape] * shape[0] * shape[1])
    every = dict.fromkeys([*named, *order])
    return [TuneJob(*shape, format, counts[shape]) for shape in every for format in formats]


def _parse_shape(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d{0,8})[xX]([1-9]\d{0,8})", text)
    if found is None or int(found[2]) > MAX_WEIGHT_COLUMNS:
        raise UsageError(
            f"{text!r} is not a shape; give ROWSxCOLUMNS (outputs x inputs), such as 4096x14336, "
            f"with at most {MAX_WEIGHT_COLUMNS} columns"
        )
    return int(found[1]), int(found[2])


def _matrices(source: Place) -> list[tuple[int, int]]:
    """Shapes of the BF16 weights of linear layers, packed or not.

    These are all matrices called weight except embeddings. If there is no output layer, the first
    embedding is added, because it then serves as output layer too.
    """
    paths = [source]
    if source.is_dir():
        paths = [place for place, path, _ in files_in(source) if path.name.endswith(PLAIN_SUFFIX)]
    weights, embeddings, has_head = [], [], False
    for path in paths:
        for entry in _original(path).entries:
            is_plain = entry.dtype == "BF16" and entry.name.endswith("weight")
            is_array = entry.dtype == "U8" and entry.name.endswith(_PACKED_SUFFIX)
            if len(entry.shape) != 2 or not (is_plain or is_array):
                continue
            shape = entry.shape[0], entry.shape[1]
            has_head |= "lm_head" in entry.name or entry.name.startswith("output.weight")
            if re.search(r"embed|wte|wpe", entry.name):
                embeddings.append(shape)
            elif shape[0] >= _MIN_ROWS and shape[1] <= MAX_WEIGHT_COLUMNS:
                weights.append(shape)
    return weights + ([] if has_head else embeddings[:1])


def _original(path: Place) -> FileHeader:
    header = header_at(path)
    return parse_packed_header(header, label=str(path)).original if is_packed(header) else header


def check_gpu(name: str | None, *, dry_run: bool) -> None:
    """Checks, before the first matrix, what would fail for every matrix.

    Args:
        name: the preset to predict for.
        dry_run: whether to predict instead of measuring.

    Raises:
        MissingBackendError: PyTorch or Triton is not installed.
        OSError: there is no GPU to measure on.
        ValueError: there is no such preset.
    """
    require_backend()
    from packhorse.device.matrix_tuning import find_gpu, resolve_model

    if dry_run:
        resolve_model(name)
    else:
        find_gpu()


def predict(job: TuneJob, gpu: str | None) -> list[TunedMatrix]:
    """Predicts the choices for a matrix by the model of time.

    Args:
        job: the matrix.
        gpu: name of a preset; None for this machine's GPU, or an H200 if there is none.

    Raises:
        ValueError: there is no such preset.
    """
    from packhorse.device.matrix_tuning import predict_choices, resolve_model

    model = resolve_model(gpu)
    found = predict_choices(job.n_rows, job.n_columns, WEIGHT_FORMATS[job.format], model)
    return [_row(job, model.name, None, found)]


def measure(job: TuneJob, folder: Path | None, *, again: bool) -> list[TunedMatrix]:
    """Tunes a matrix on this machine's GPU, unless the cache has it.

    Args:
        job: the matrix.
        folder: the folder of the cache; None for the usual one.
        again: whether to measure again what the cache has.

    Raises:
        OSError: there is no GPU, it has too little memory, or the cache cannot be written.
    """
    from packhorse.device.matrix_tuning import find_gpu, tune_on_gpu
    from packhorse.device.tune_cache import TUNE_CACHE
    from packhorse.gpu.detect import identify

    gpu, format = find_gpu(), WEIGHT_FORMATS[job.format]
    try:
        found = tune_on_gpu(job.n_rows, job.n_columns, format, gpu, folder=folder, again=again)
    except MemoryError as error:  # of the GPU: a lack of host memory has other remedies
        raise OSError(f"{job.src}: {error}; end other programs that use the GPU") from error
    name = identify(gpu).device
    return [_row(job, name, str(TUNE_CACHE.path(name, folder)), found)]


def require_backend() -> None:
    """Checks that the device hop can be imported.

    Raises:
        MissingBackendError: PyTorch or Triton is not installed.
        MemoryError: there is too little memory for them.
    """
    if not has_memory_for("packhorse.device.matrix_tuning", _ROOM_NBYTES):
        raise MemoryError
    try:
        import packhorse.device.matrix_tuning  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"torch", "triton"}:
            raise
        raise MissingBackendError(
            f"tuning needs {error.name}; install it with: pip install 'packhorse[gpu]'"
        ) from error


def _row(job: TuneJob, gpu: str, cache: str | None, found: "dict[int, Measured]") -> TunedMatrix:
    buckets = []
    for n_tokens, measured in sorted(found.items()):
        config = measured.choice.config
        plain = measured.plain_seconds
        buckets.append(
            TunedBucket(
                n_tokens=n_tokens,
                strategy=measured.choice.strategy.value,
                config=None if config is None else asdict(config),
                seconds=measured.seconds,
                plain_seconds=plain,
                speedup=None if plain is None else plain / measured.seconds,
            )
        )
    return TunedMatrix(
        n_rows=job.n_rows,
        n_columns=job.n_columns,
        format=job.format,
        n_matrices=job.n_matrices,
        gpu=gpu,
        measured=cache is not None,
        cache=cache,
        buckets=buckets,
    )
