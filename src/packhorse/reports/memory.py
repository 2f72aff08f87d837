"""What tensors would take in memory, packed: in that of a GPU, and in that of the host.

The rules are those of `packhorse.device.pack_model_`, by default and with `embeddings="host"`. It
looks at the modules of a model. A file has only names, so a matrix called `weight` is taken for
that of a `torch.nn.Linear`, unless its name is that of an embedding or of an expert. Nothing is
packed for long: exceptions are counted in whole rows (docs/format.md, sections 12 and 14), and all
other bytes follow from the shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packhorse.codecs import table_plan, weight_plan, weights
from packhorse.codecs.table_plan import GRANULES, TableWay, choose_way, sample_places
from packhorse.gpu.host_embeddings import MIN_HOST_NBYTES
from packhorse.layout import DTYPE_BY_NAME, MAX_WEIGHT_COLUMNS, W11, W12, WeightFormat
from packhorse.reports.names import is_input_embedding, kind_of, layer_of, role_of
from packhorse.reports.results import Estimate, MemoryFormat, MemoryRow
from packhorse.reports.sampling import Sample, estimate
from packhorse.reports.sources import Entry, Opened
from packhorse.table_layout import MAX_TABLE_COLUMNS

__all__ = ["describe_memory"]

_NO_ROWS = "no row of it was sampled, because rows are long; look at all of it instead of a sample"
_EXPERT = re.compile(r"experts?[./_]\d+[./]")
_ROUTER = re.compile(r"(^|[._/])(moe|mlp)[./](gate|router)[./]weight$")
_CONV1D = re.compile(r"(^|[./_])c_(attn|fc|proj)\.weight$")
_Bytes = NDArray[np.uint8]


class _Part(NamedTuple):
    """One of the two: bytes, or None; why; the share that the section says beside it; and bytes in
    each format."""

    nbytes: Estimate | None
    note: str
    share: float | None = None
    formats: Mapping[str, MemoryFormat] = MappingProxyType({})


def describe_memory(opened: Opened, sample: Sample, threads: int = 1) -> MemoryRow:
    """What a tensor would take in memory, packed.

    Args:
        opened: the source.
        sample: a sample of the tensor. If it is the whole tensor, the bytes are those that packing
            gives, without error.
        threads: how many threads of the core work on it.
    """
    entry = sample.entry
    device, host = _on_device(sample, threads), _on_host(sample, threads)
    return MemoryRow(
        opened.row.name, entry.name, entry.dtype, entry.shape, entry.nbytes, layer_of(entry.name),
        device.nbytes, device.note, device.share, host.nbytes, host.note, host.share,
        dict(device.formats),
    )  # fmt: skip


def _rows_of(sample: Sample) -> list[_Bytes] | None:
    """The runs as matrices of the bytes of rows; None if they are no whole rows."""
    entry = sample.entry
    row_nbytes = entry.shape[1] * DTYPE_BY_NAME[entry.dtype].bits // 8
    if any(edge % row_nbytes for run in sample.places.runs for edge in run):
        return None
    return [run.reshape(-1, row_nbytes) for run in sample.runs]


# In memory of a GPU.


def _on_device(sample: Sample, threads: int) -> _Part:
    reason = _why_not_multiplied(sample.entry)
    rows = None if reason else _rows_of(sample)
    if rows is None:
        return _Part(None, reason or _NO_ROWS)
    # Data of foreign files may begin at odd bytes.
    bits = [np.require(each.view(np.uint16), requirements=["A", "C"]) for each in rows]
    return _size_weight(sample, bits, threads)


def _why_not_multiplied(entry: Entry) -> str | None:
    """Why `pack_model_` would leave a tensor as it is; None if its size decides."""
    if role_of(entry.name) != "weights":
        return "belongs to the optimizer; no layer multiplies with it"
    if len(entry.shape) != 2:
        n = len(entry.shape)
        return f"{n} dimension{'' if n == 1 else 's'}; only matrices of layers are packed"
    if not re.search(r"(^|\W)weight$", entry.name):
        return "not the weight of a layer; only matrices of layers are packed"
    if kind_of(entry.name) == "embedding" and not is_input_embedding(entry.name):
        return "embeddings=None packs the input embedding only"
    if _EXPERT.search(entry.name):
        return "one of several experts; transformers joins them in one tensor, which stays as it is"
    if _ROUTER.search(entry.name):
        return "a router is no torch.nn.Linear"
    if entry.dtype != "BF16":
        return f"packed weights are BF16, not {entry.dtype}"
    if not 1 <= entry.shape[1] <= MAX_WEIGHT_COLUMNS:
        return f"{entry.shape[1]} columns; at most {MAX_WEIGHT_COLUMNS} can be packed"
    return None


def _size_weight(sample: Sample, rows: Sequence[NDArray[np.uint16]], threads: int) -> _Part:
    entry = sample.entry
    n_rows, n_columns = entry.shape
    formats = {format.name: _size_format(sample, rows, format, threads) for format in (W12, W11)}
    format = _choose_format(rows, n_rows, n_columns, threads)
    nbytes, exceptions = formats[format.name].nbytes, formats[format.name].exceptions
    reason = weight_plan.why_no_gain(nbytes.nbytes, entry.numel, format)
    if reason is not None:
        return _Part(None, reason)
    note = f"{format.name}, {8 * nbytes.nbytes / entry.numel:.2f} bits a weight"
    if _CONV1D.search(entry.name):
        note += ", if its layer is a torch.nn.Linear; GPT-2's Conv1D stays as it is"
    return _Part(nbytes, note, exceptions, formats)


def _size_format(
    sample: Sample, rows: Sequence[NDArray[np.uint16]], format: WeightFormat, threads: int
) -> MemoryFormat:
    counts = [weights.count_exceptions(each, format, threads=threads) for each in rows]
    n_rows, n_columns = sample.entry.shape
    fixed = weights.packed_nbytes(n_rows, n_columns, 0, format)
    nbytes = estimate(sample.places, [4 * count for count in counts], fixed)
    return MemoryFormat(nbytes, sum(counts) / max(sum(each.size for each in rows), 1))


def _choose_format(
    rows: Sequence[NDArray[np.uint16]], n_rows: int, n_columns: int, threads: int
) -> WeightFormat:
    """The format that `pack_model_` chooses."""

    def count(max_rows: int | None = None) -> int:
        return sum(
            weights.count_exceptions(each, W11, threads=threads, max_rows=max_rows) for each in rows
        )

    numel = sum(each.size for each in rows)
    if not weight_plan.suits_w11(
        count(weight_plan.SAMPLED_ROWS) / max(numel, 1), n_rows, n_columns
    ):
        return W12
    return W12 if weight_plan.was_misjudged(count(), numel) else W11


# In memory of the host.


def _on_host(sample: Sample, threads: int) -> _Part:
    reason = _why_no_table(sample.entry)
    rows = None if reason else _rows_of(sample)
    if rows is None:
        return _Part(None, reason or _NO_ROWS)
    return _size_table(sample, rows, threads)


def _why_no_table(entry: Entry) -> str | None:
    """Why the rows of a tensor would not go to memory of the host; None if they would."""
    bits = DTYPE_BY_NAME[entry.dtype].bits
    if kind_of(entry.name) != "embedding" or role_of(entry.name) != "weights":
        return "no embedding; its rows are not looked up one by one"
    if len(entry.shape) != 2:
        return f"a table has rows and columns, not shape {list(entry.shape)}"
    if entry.nbytes < MIN_HOST_NBYTES:
        return f"takes {entry.nbytes} bytes; less than 64 KiB stays where it is"
    if bits not in (8, 16, 32, 64):
        return f"a table has elements of 8, 16, 32 or 64 bits, not {entry.dtype}"
    if entry.shape[1] > MAX_TABLE_COLUMNS:
        return f"{entry.shape[1]} columns; at most {MAX_TABLE_COLUMNS} can be packed"
    return None


def _size_table(sample: Sample, rows: Sequence[_Bytes], threads: int) -> _Part:
    entry = sample.entry
    way = _choose_rows(rows, entry.dtype)
    format, n_rows = way.format, entry.shape[0]
    counts = [table_plan.count_exceptions(each, format, threads=threads) for each in rows]
    fixed = table_plan.packed_nbytes(n_rows, 0, 0, format)
    sizes = [table_plan.packed_nbytes(0, *count, format) - 4 for count in counts]
    nbytes = estimate(sample.places, sizes, fixed)
    return _Part(nbytes, way.words, way.pulled[GRANULES[0]] / format.row_nbytes)


def _choose_rows(rows: Sequence[_Bytes], dtype: str) -> TableWay:
    """The way that `pack_table` chooses. It looks at runs of a table; here, at runs of the rows of
    the sample, in their order."""
    *first, n_rows = accumulate((len(each) for each in rows), initial=0)
    picked = [
        each[max(start - begin, 0) : max(stop - begin, 0)]
        for start, stop in sample_places(n_rows, rows[0].shape[1])
        for begin, each in zip(first, rows, strict=True)
    ]
    chosen = picked[0] if len(picked) == 1 else np.concatenate(picked)
    words: NDArray[Any] = np.ascontiguousarray(chosen).view(f"<u{DTYPE_BY_NAME[dtype].bits // 8}")
    return choose_way(words, dtype)
