"""rANS streams decoded on the GPU: a program of one warp for each stream (docs/format.md, 6.4).

The lanes of a round are served in ascending order from one sequence of words, and lane `l` yields
unit `4 * (l mod q) + l div q`. So thread `t` of a warp has the lanes `t`, `q + t`, `2 q + t` and
`3 q + t`: the four vectors `x0` to `x3` here. They yield four neighbouring bytes, stored at once.

The word that a lane takes follows from the number of lanes before it that need one. The set of
lanes that need one is a sum of different bits over the warp, which is one instruction on the GPU;
its ones are then counted. A scan of five dependent shuffles would take longer. Tables of 32 or 64
buckets are kept in registers, one or two entries in each thread; `tl.gather` is then a shuffle.

States and tables come from the core's planner (csrc/tensor/plan.hpp), which has checked everything
that could make a kernel access other memory. Kernels never read words beyond the last one. A second
kernel replaces the marks that escapes leave.
"""

import torch
import triton
import triton.language as tl

from packhorse.kernels.launch import device_of
from packhorse.kernels.plan_fields import (
    ESCAPED_ESCAPES_AT,
    ESCAPED_MARKER,
    ESCAPED_N_ESCAPES,
    ESCAPED_N_UNITS,
    ESCAPED_PLANE_AT,
    ESCAPED_RAW_BITS,
    FIELDS,
    STREAM_CARRIED_AT,
    STREAM_N_UNITS,
    STREAM_N_WORDS,
    STREAM_PLANE_AT,
    STREAM_QUARTER,
    STREAM_WORDS_AT,
)
from packhorse.layout import (
    ENTRY_RANK_SHIFT,
    ENTRY_VALUE_SHIFT,
    MAX_LANES_LOG,
    PROB_BITS,
    PROB_SUM,
    STATE_LOWER_BOUND,
    WORD_BITS,
    Status,
)

__all__ = [
    "decode_rans",
    "decode_rans_kernel",
    "resolve_escapes",
    "resolve_escapes_kernel",
]

_SHORT = tl.constexpr(int(Status.WORDS_EXHAUSTED))
_LEFT = tl.constexpr(int(Status.WORDS_LEFT))
_TOO_LARGE = tl.constexpr(int(Status.FINAL_STATE))
_DIFFER = tl.constexpr(int(Status.ESCAPE_COUNT))
_WARP = tl.constexpr(32)
_N_LANES = tl.constexpr(1 << MAX_LANES_LOG)  # of the widest stream: four for each thread
_PROB_BITS = tl.constexpr(PROB_BITS)
_SLOT_MASK = tl.constexpr(PROB_SUM - 1)
_PLAIN = tl.constexpr(PROB_SUM)  # buckets of a table that has an entry for each slot
_RANK = tl.constexpr(ENTRY_RANK_SHIFT)
_VALUE = tl.constexpr(ENTRY_VALUE_SHIFT)
_LOWER_BOUND = tl.constexpr(STATE_LOWER_BOUND)
_WORD_BITS = tl.constexpr(WORD_BITS)
_ESCAPE_BLOCK = 1024


@triton.jit
def _look_up(x, threshold, first, second, table_ptr, BUCKETS: tl.constexpr):
    """Entries of the slots of 32 states."""
    slot = (x & _SLOT_MASK).to(tl.int32)
    if BUCKETS == _PLAIN:
        return tl.load(table_ptr + slot)
    bucket = slot // (_PLAIN // BUCKETS)
    in_first = slot < tl.gather(threshold, bucket, 0)
    return tl.where(in_first, tl.gather(first, bucket, 0), tl.gather(second, bucket, 0))


@triton.jit
def _advance(x, entry):
    """States after a symbol, before they take a word."""
    return (entry & _SLOT_MASK) * (x >> _PROB_BITS) + ((x + (entry >> _RANK)) & _SLOT_MASK)


@triton.jit
def _count_ones(x):
    """Ones in each u32; the compiler turns this sequence into one instruction."""
    x -= x >> 1 & 0x55555555
    x = (x & 0x33333333) + (x >> 2 & 0x33333333)
    return ((x + (x >> 4) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _refill(x, need, n_before, words_ptr, n_words, ALIGNED: tl.constexpr, CHECKED: tl.constexpr):
    """The states of a quarter after they took words, and the words taken so far in the round."""
    t = tl.arange(0, _WARP)
    # A sum of different bits is their union, and one instruction over the warp.
    needing = tl.sum(need.to(tl.uint32) << t, 0)
    place = (n_before + _count_ones(needing & ((1 << t) - 1))).to(tl.int32)
    if CHECKED:
        need &= place < n_words
    if ALIGNED:
        word = tl.load(words_ptr.to(tl.pointer_type(tl.uint16)) + place, mask=need).to(tl.uint32)
    else:
        high = tl.load(words_ptr + 2 * place + 1, mask=need).to(tl.uint32)
        word = high << 8 | tl.load(words_ptr + 2 * place, mask=need).to(tl.uint32)
    return tl.where(need, x << _WORD_BITS | word, x), n_before + _count_ones(needing)


@triton.jit
def _round(
    x0, x1, x2, x3, n_words, words_ptr, dst_ptr, n, q, threshold, first, second, table_ptr,
    BUCKETS: tl.constexpr, ALIGNED: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """One round. If CHECKED, only `n` units and `n_words` words are left; otherwise enough of both.

    Returns the states, and the number of words taken, or wanted if CHECKED.
    """
    t = tl.arange(0, _WARP)
    live = t < q
    e0 = _look_up(x0, threshold, first, second, table_ptr, BUCKETS)
    e1 = _look_up(x1, threshold, first, second, table_ptr, BUCKETS)
    e2 = _look_up(x2, threshold, first, second, table_ptr, BUCKETS)
    e3 = _look_up(x3, threshold, first, second, table_ptr, BUCKETS)
    y0, y1, y2, y3 = _advance(x0, e0), _advance(x1, e1), _advance(x2, e2), _advance(x3, e3)
    if CHECKED:
        y0 = tl.where(live & (4 * t < n), y0, x0)
        y1 = tl.where(live & (4 * t + 1 < n), y1, x1)
        y2 = tl.where(live & (4 * t + 2 < n), y2, x2)
        y3 = tl.where(live & (4 * t + 3 < n), y3, x3)
    need0, need1 = live & (y0 < _LOWER_BOUND), live & (y1 < _LOWER_BOUND)
    need2, need3 = live & (y2 < _LOWER_BOUND), live & (y3 < _LOWER_BOUND)
    y0, taken = _refill(y0, need0, 0, words_ptr, n_words, ALIGNED, CHECKED)
    y1, taken = _refill(y1, need1, taken, words_ptr, n_words, ALIGNED, CHECKED)
    y2, taken = _refill(y2, need2, taken, words_ptr, n_words, ALIGNED, CHECKED)
    y3, taken = _refill(y3, need3, taken, words_ptr, n_words, ALIGNED, CHECKED)
    units = e0 >> _VALUE | e1 >> _VALUE << 8 | e2 >> _VALUE << 16 | e3 >> _VALUE << 24
    tl.store(dst_ptr + t, units, mask=live)
    return y0, y1, y2, y3, taken.to(tl.int32)


@triton.jit
def _rounds(
    x0, x1, x2, x3, n_words, words_ptr, dst_ptr, n, q, threshold, first, second, table_ptr,
    BUCKETS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """All rounds; returns states and the number of words left, below 0 if there were too few."""
    while (n >= 4 * q) & (n_words >= _N_LANES):
        x0, x1, x2, x3, taken = _round(
            x0, x1, x2, x3, n_words, words_ptr, dst_ptr, n, q, threshold, first, second,
            table_ptr, BUCKETS, ALIGNED, False,
        )  # fmt: skip
        words_ptr += 2 * taken
        n_words -= taken
        dst_ptr += q
        n -= 4 * q
    while n > 0:
        x0, x1, x2, x3, taken = _round(
            x0, x1, x2, x3, n_words, words_ptr, dst_ptr, n, q, threshold, first, second,
            table_ptr, BUCKETS, ALIGNED, True,
        )  # fmt: skip
        words_ptr += 2 * taken
        n_words -= taken
        dst_ptr += q
        n -= 4 * q
    return x0, x1, x2, x3, n_words


@triton.jit
def decode_rans_kernel(
    payload_ptr,  # u8, aligned to 2 bytes
    streams_ptr,  # i64 [streams, FIELDS]
    states_ptr,  # u32 [streams, 4, 32]
    tables_ptr,  # u32 [streams, 3, BUCKETS] or [streams, 4096]
    scratch_ptr,  # u8, aligned to 4 bytes
    status_ptr,  # i32 [streams]
    BUCKETS: tl.constexpr,
):
    """One stream, by one warp."""
    stream = tl.program_id(0).to(tl.int64)
    row = streams_ptr + stream * FIELDS
    words_at = tl.load(row + STREAM_WORDS_AT)
    words_ptr = payload_ptr + words_at
    n_words = tl.load(row + STREAM_N_WORDS).to(tl.int32)
    q = tl.load(row + STREAM_QUARTER).to(tl.int32)
    n = tl.load(row + STREAM_N_UNITS).to(tl.int32)
    dst_ptr = (scratch_ptr + tl.load(row + STREAM_PLANE_AT)).to(tl.pointer_type(tl.uint32))
    carried_at = tl.load(row + STREAM_CARRIED_AT)
    t = tl.arange(0, _WARP)
    lanes_ptr = states_ptr + stream * _N_LANES + t
    x0, x1 = tl.load(lanes_ptr), tl.load(lanes_ptr + _WARP)
    x2, x3 = tl.load(lanes_ptr + 2 * _WARP), tl.load(lanes_ptr + 3 * _WARP)
    if BUCKETS == _PLAIN:
        table_ptr = tables_ptr + stream * _PLAIN
        threshold, first, second = t, x0, x0  # not used
    else:
        table_ptr = tables_ptr + stream * (3 * BUCKETS)
        b = tl.arange(0, BUCKETS)
        threshold = tl.load(table_ptr + b).to(tl.int32)
        first = tl.load(table_ptr + BUCKETS + b)
        second = tl.load(table_ptr + 2 * BUCKETS + b)
    if words_at % 2 == 0:
        x0, x1, x2, x3, n_words = _rounds(
            x0, x1, x2, x3, n_words, words_ptr, dst_ptr, n, q, threshold, first, second,
            table_ptr, BUCKETS, True,
        )  # fmt: skip
    else:
        x0, x1, x2, x3, n_words = _rounds(
            x0, x1, x2, x3, n_words, words_ptr, dst_ptr, n, q, threshold, first, second,
            table_ptr, BUCKETS, False,
        )  # fmt: skip
    largest = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    limit = tl.where(carried_at < 0, _LOWER_BOUND, 2 * _LOWER_BOUND - 1)
    status = tl.where(tl.max(largest.to(tl.int64), 0) > limit, _TOO_LARGE, 0)
    status = tl.where(n_words > 0, _LEFT, tl.where(n_words < 0, _SHORT, status))
    tl.store(status_ptr + stream, status)
    carried_ptr = (scratch_ptr + tl.maximum(carried_at, 0)).to(tl.pointer_type(tl.uint16)) + t
    carries = t < tl.where(carried_at < 0, 0, q)
    tl.store(carried_ptr, x0.to(tl.uint16), mask=carries)
    tl.store(carried_ptr + q, x1.to(tl.uint16), mask=carries)
    tl.store(carried_ptr + 2 * q, x2.to(tl.uint16), mask=carries)
    tl.store(carried_ptr + 3 * q, x3.to(tl.uint16), mask=carries)


@triton.jit
def resolve_escapes_kernel(
    payload_ptr,  # u8
    planes_ptr,  # i64 [planes, FIELDS]
    scratch_ptr,  # u8
    status_ptr,  # i32 [planes]
    BLOCK: tl.constexpr,
):
    """One plane: marked units are replaced by the escapes, in order."""
    plane = tl.program_id(0).to(tl.int64)
    row = planes_ptr + plane * FIELDS
    units_ptr = scratch_ptr + tl.load(row + ESCAPED_PLANE_AT)
    n = tl.load(row + ESCAPED_N_UNITS).to(tl.int32)
    marker = tl.load(row + ESCAPED_MARKER).to(tl.int32)
    escapes_ptr = payload_ptr + tl.load(row + ESCAPED_ESCAPES_AT)
    n_escapes = tl.load(row + ESCAPED_N_ESCAPES).to(tl.int32)
    raw_bits = tl.load(row + ESCAPED_RAW_BITS).to(tl.int32)
    taken = n * 0
    start = n * 0
    while start < n:
        u = start + tl.arange(0, BLOCK)
        marked = tl.load(units_ptr + u, mask=u < n, other=0).to(tl.int32) == marker
        marks = (marked & (u < n)).to(tl.int32)
        n_marks = tl.sum(marks, 0)
        if n_marks > 0:
            place = taken + tl.cumsum(marks, 0) - marks
            there = (marks > 0) & (place < n_escapes)
            symbols = tl.load(escapes_ptr + place, mask=there, other=0).to(tl.int32)
            tl.store(units_ptr + u, (symbols << raw_bits).to(tl.uint8), mask=there)
        taken += n_marks
        start += BLOCK
    tl.store(status_ptr + plane, tl.where(taken == n_escapes, 0, _DIFFER))


def decode_rans(
    payload: torch.Tensor,
    streams: torch.Tensor,
    states: torch.Tensor,
    tables: torch.Tensor,
    scratch: torch.Tensor,
    status: torch.Tensor,
    n_buckets: int,
) -> None:
    """Decodes rANS streams; escapes leave marks, and raw bits are zero.

    The tensors are those of a plan (csrc/tensor/plan.hpp), on one device. Nothing in them is
    checked here.

    Args:
        payload: u8, all chunks; only read.
        streams: i64 (S, 8); `layout.StreamField` names the columns.
        states: u32 (S, 4, 32).
        tables: u32 (S, 3, `n_buckets`), or (S, 4096) if `n_buckets` is 4096.
        scratch: u8, the scratch memory of a plan, aligned to 4 bytes; receives planes and
            carried bytes.
        status: i32 (S,); receives a `layout.Status` for each: `OK`, `WORDS_EXHAUSTED`, `WORDS_LEFT`
            or `FINAL_STATE`.
        n_buckets: 32, 64 or 4096.
    """
    if len(streams):
        with device_of(payload):
            decode_rans_kernel[(len(streams),)](
                payload, streams, states, tables, scratch, status, BUCKETS=n_buckets, num_warps=1
            )


def resolve_escapes(
    payload: torch.Tensor, planes: torch.Tensor, scratch: torch.Tensor, status: torch.Tensor
) -> None:
    """Replaces the marks that escapes left in planes of bytes.

    Args:
        payload: u8, all chunks; only read.
        planes: i64 (E, 8); `layout.EscapedField` names the columns.
        scratch: u8, with the planes.
        status: i32 (E,); receives a `layout.Status` for each: `OK` or `ESCAPE_COUNT`.
    """
    if len(planes):
        with device_of(payload):
            resolve_escapes_kernel[(len(planes),)](
                payload, planes, scratch, status, BLOCK=_ESCAPE_BLOCK, num_warps=4
            )
