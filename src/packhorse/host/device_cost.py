"""A model of time for gathers of packed rows on a GPU: what the link, the programs and the memory
of the device allow. Its results are predictions; nothing here was measured.

A program takes a block of rows at a time: it asks the link for their bytes, waits, decodes, and
writes. So its programs together keep the link busy only if they have enough bytes on the way.
Each figure has its source beside it; figures called "assumed" await measurements.
"""

from dataclasses import dataclass

from packhorse.gpu.models import DeviceModel
from packhorse.table_layout import TableFormat, TableMode

__all__ = ["GatherTime", "default_programs", "instructions_of", "predict_gather", "pulled_by"]

# Bytes that a packet of PCIe takes in addition to its data: framing, sequence number, header of
# three words, checksum (PCI Express Base Specification, transaction and data link layers).
_PACKET_NBYTES = 24
_REQUEST_NBYTES = 128  # of a warp's request at most: a line
_LINK_LATENCY = 1.3e-6  # seconds of a read of host memory (sgl-project/sglang, pull request 40278)
_DEVICE_LATENCY = 0.8e-6  # of memory of the device, through which staged rows go; assumed
_ISSUED = 0.7  # instructions of a scheduler in a cycle; assumed
_SCHEDULERS, _WARP = 4, 32
_WRITE_RATE = 45e9  # bytes a second that one multiprocessor writes; assumed to be what it reads
# For each element, over all threads: counted in machine code (`benchmarks/gpu.py tables`), rounded
# up. Triton 3.6 makes the most of them; 3.9 makes 15 to 23 of dense rows, 29 to 39 with triples.
_INSTRUCTIONS = {
    TableMode.RAW: 2.0,
    TableMode.DENSE: 29.0,
    TableMode.BITMAP: 32.0,
    TableMode.LIST: 5.0,
}
_TRIPLE_INSTRUCTIONS = 39.0
# Times that random rows in pages of 4 KiB take longer, as each waits for its address: words of
# SGLang's log for its tables of n-grams. Rows in pages of 2 MiB are assumed not to wait.
_SMALL_PAGES = 10.0
_LEAST_PROGRAMS = 16


@dataclass(frozen=True)
class GatherTime:
    """What a gather takes, and what limits it.

    Attributes:
        seconds: of the whole gather.
        limit: what takes longest: "link", "programs" (they have too few bytes on the way) or
            "device memory".
    """

    seconds: float
    limit: str


def instructions_of(format: TableFormat) -> float:
    """Instructions for an element, over all threads."""
    return _TRIPLE_INSTRUCTIONS if format.has_triples else _INSTRUCTIONS[format.mode]


def pulled_by(format: TableFormat, pulled_nbytes: float | None = None) -> float:
    """Bytes that a row is assumed to pull: those given, or all of it."""
    return float(format.stride) if pulled_nbytes is None else pulled_nbytes


def predict_gather(
    format: TableFormat,
    n_ids: int,
    n_programs: int,
    block_rows: int,
    device: DeviceModel,
    *,
    pulled_nbytes: float | None = None,
    huge_pages: bool = True,
) -> GatherTime:
    """Predicts a gather of random rows.

    Args:
        format: of the table.
        n_ids: rows that are gathered.
        n_programs: programs, each on a multiprocessor of its own.
        block_rows: rows that a program has on the way at once.
        device: the GPU and its link.
        pulled_nbytes: bytes that a fetch of a row touches, on average; None for all of it.
        huge_pages: whether the table lies in pages of 2 MiB.
    """
    pulled = pulled_by(format, pulled_nbytes)
    n_programs = min(n_programs, device.n_processors, -(-n_ids // block_rows))
    request = min(pulled, _REQUEST_NBYTES)
    link = device.host_link.peak * request / (request + _PACKET_NBYTES)
    link /= 1.0 if huge_pages else _SMALL_PAGES
    numel = block_rows * format.n_columns
    issue = _SCHEDULERS * _WARP * _ISSUED * device.clock
    decoding = numel * instructions_of(format) / issue
    written = block_rows * format.row_nbytes
    work = max(decoding, written / _WRITE_RATE)
    # The next rows travel while the ones before them are decoded.
    is_ahead = format.mode in (TableMode.BITMAP, TableMode.DENSE)
    turn = max(_LINK_LATENCY, work) if is_ahead else _LINK_LATENCY + work
    turn += _DEVICE_LATENCY
    times = {
        "link": n_ids * pulled / link,
        "programs": -(-n_ids // (block_rows * n_programs)) * turn,
        "device memory": n_ids * format.row_nbytes / device.bandwidth,
    }
    limit = max(times, key=lambda name: times[name])
    return GatherTime(times[limit] + device.launch, limit)


def default_programs(
    format: TableFormat,
    block_rows: int,
    device: DeviceModel,
    pulled_nbytes: float | None = None,
) -> int:
    """The fewest programs that are predicted not to be the limit, at least 16; all
    multiprocessors, if rows shrink so far that decoding and writing them is the limit.

    Args:
        format, block_rows, device, pulled_nbytes: as for `predict_gather`.
    """
    n_ids = 1 << 20
    for n_programs in range(_LEAST_PROGRAMS, device.n_processors, _LEAST_PROGRAMS):
        found = predict_gather(
            format, n_ids, n_programs, block_rows, device, pulled_nbytes=pulled_nbytes
        )
        if found.limit != "programs":
            return n_programs
    return device.n_processors
