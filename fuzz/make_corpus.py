"""Make the seeds of the fuzz targets: `python fuzz/make_corpus.py FOLDER`.

`run.py` does this before it fuzzes. The seeds are frames and files of every dtype, level, split and
mode. They are small, because a fuzzer mutates small inputs best. The bytes before the data in each
seed are described at the top of the target's file. Nothing here depends on the layout of streams.
Frames that no encoder makes, both valid and lying ones, come from the tests. Inputs that once broke
something are kept in `fuzz/corpus/TARGET/found-WHAT`.
"""

import json
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packhorse import _core
from packhorse._core import Base, EncodeContext, EncodeOutput, Geometry, Side
from packhorse.codecs.base import ByteArray, encode_plane
from packhorse.codecs.bounded import Segment, encode_bounded
from packhorse.codecs.content import content_hash, empty_leaves
from packhorse.disk.container import pack_tensors
from packhorse.frame import Frame, compress_buffer
from packhorse.frame.header import (
    FrameHeader,
    frame_header_nbytes,
    padded,
    write_header,
)
from packhorse.layout import (
    BOUNDED_DTYPES,
    DTYPE_BY_NAME,
    DTYPES,
    STREAM_NBYTES_BITS,
    DType,
    Level,
    Mode,
    Rounding,
    Split,
)
from packhorse.numpy import FRAMEWORK as NUMPY
from packhorse.storage.safetensors_header import build_header
from packhorse.wire.embeddings.requests import Wanted, pack_request
from packhorse.wire.pieces import PieceEncoder, capacity_of
from packhorse.wire.repeats import RowFinder, RowMemory
from packhorse.wire.updates import DeltaSender, Shards

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "samples"))
from frame_builder import SMALL
from fuzz_request import HOLDERS
from fuzz_update import weights as updated_weights
from lying_frames import LIES
from sample_store import build_store, catalogue_parts, checkpoint_manifests, snapshot_manifests
from sample_units import (
    FEW,
    KINDS,
    PLANES,
    make_halves,
    make_matrix,
    make_plane,
    make_runs,
    make_step,
    make_units,
)
from table_samples import named_tables

__all__ = ["TARGETS", "modes_of", "seed_frames", "write_seeds"]

Seeds = Iterator[tuple[str, bytes]]
_CHUNK_LOG = 9
_MAX_LIE_NBYTES = 1024
_DELTA_DTYPES = ("U8", "I16", "I32", "I64", "BF16", "F16", "F32", "F64", "F8_E4M3")


def build_frame(
    data: bytes, dtype: DType, shape: tuple[int, ...], chunk_log: int, level: Level, n_rows: int = 0
) -> Frame:
    """A frame with small chunks, or with side data (`n_rows`), which the planner makes only for
    larger tensors."""
    split, source = dtype.splits[-1], np.frombuffer(data, np.uint8)
    n_columns = source.size // dtype.unit_nbytes // n_rows if n_rows else 0
    side = np.empty(n_rows + n_columns, np.uint8)
    if n_rows:
        whole = Geometry(dtype.unit_nbytes, split, chunk_log, source.size)
        _core.make_side_data(source, whole, n_rows, side)
    step = dtype.unit_nbytes << chunk_log
    context = EncodeContext(level, Side(side, n_rows) if n_rows else None, None, 0)
    tables, payload = [], b""
    for start in range(0, source.size, step):  # the core needs large chunks, or only one
        piece = source[start : start + step]
        geometry = Geometry(dtype.unit_nbytes, split, chunk_log, piece.size)
        table = np.empty((1, 1 + geometry.n_planes), np.uint32)
        dst = np.empty(padded(piece.size), np.uint8)
        output = EncodeOutput(dst, table, empty_leaves(piece.size), None)
        used = _core.encode_chunks(piece, geometry, context, output, 1)
        tables.append(table)
        payload += dst[:used].tobytes()
    return _seal(data, dtype, shape, chunk_log, level, np.concatenate(tables), payload, side)


def _seal(
    data: bytes,
    dtype: DType,
    shape: tuple[int, ...],
    chunk_log: int,
    level: Level,
    table: np.ndarray,
    payload: bytes,
    side: ByteArray,
) -> Frame:
    stream = encode_plane(side, Mode.RANS) if side.size else None
    mode, text = (Mode.STORED, side.tobytes()) if stream is None else (Mode.RANS, stream)
    header_nbytes = frame_header_nbytes(
        len(shape), len(table), table.shape[1] - 1, len(text), has_base=False
    )
    geometry = Geometry(dtype.unit_nbytes, dtype.splits[-1], chunk_log, len(data))
    header = FrameHeader(
        dtype, shape, geometry, level, content_hash(data), header_nbytes,
        header_nbytes + len(payload), table, int(side.size > 0),
        mode << STREAM_NBYTES_BITS | len(text), text,
    )  # fmt: skip
    packed = np.empty(header.frame_nbytes, np.uint8)
    write_header(header, packed[:header_nbytes])
    packed[header_nbytes:] = np.frombuffer(payload, np.uint8)
    frame = Frame.from_buffer(packed)
    frame.verify()
    return frame


def seed_frames() -> Iterator[tuple[str, Frame]]:
    """Small frames, by name."""
    for dtype in DTYPES:
        level = list(Level)[dtype.code % len(Level)]
        for kind in KINDS:
            data = make_units(kind, dtype)
            shape = (len(data) * 8 // dtype.bits,)
            yield f"{dtype.name}-{kind}", compress_buffer(data, dtype.name, shape, level=level)
        if dtype.bits == 8 * dtype.unit_nbytes:
            data = make_units("weights", dtype, 1200)
            yield f"{dtype.name}-chunks", build_frame(data, dtype, (3, 400), _CHUNK_LOG, level)
    for dtype in DTYPES:  # classes, by prediction and by plane 0
        if Split.FLOAT in dtype.splits and dtype.name != "C64":
            data, level = make_matrix(dtype, 32, 80), list(Level)[1 + dtype.code % 2]
            yield f"{dtype.name}-matrix", build_frame(data, dtype, (32, 80), 12, level, 32)
    for kind in KINDS:  # more lanes, more dimensions
        data = make_units(kind, DTYPES[0], 1 << 14)
        yield f"large-{kind}", compress_buffer(data, "BF16", (2, 64, 64), level="max")
    for name in ("U16", "I32", "I64"):
        for kind, units in make_runs(DTYPE_BY_NAME[name].unit_nbytes).items():
            yield f"{name}-matches-{kind}", compress_buffer(units.tobytes(), name, units.shape)
    for name in ("U8", "I32"):
        shape = (3000 * 8 // DTYPE_BY_NAME[name].bits,)
        yield f"{name}-nibbles", compress_buffer(make_halves(3000), name, shape)
    for number, plane_of in enumerate(PLANES):
        data, level = make_plane(3000, *plane_of).tobytes(), list(Level)[1 + number % 2]
        yield f"plane-{number}", build_frame(data, DTYPES[1], (3000,), 12, level)
    for dtype in DTYPES:
        if dtype.name not in _DELTA_DTYPES:
            continue
        # With the base that harness.py makes for every frame.
        base = (0x3C00 + 3 * np.arange(700 * dtype.unit_nbytes // 2)).astype("<u2").tobytes()
        for scale in (0.6, 30, FEW):
            data = make_step(base, dtype.unit_nbytes, scale)
            frame = compress_buffer(data, dtype.name, (7, 100), base=base)
            yield f"{dtype.name}-delta-{scale:g}", frame
    for shape in ((), (0, 3), (1, 1, 1)):
        data = bytes(4 * int(np.prod(shape)))
        yield f"shape-{len(shape)}", compress_buffer(data, "F32", shape)


def modes_of(frame: Frame) -> set[Mode]:
    """The modes in a frame."""
    return {mode for plane in frame.planes() for mode in plane.modes}


def decode_tensor_seeds() -> Seeds:
    """Choices, cut, length, range, side data, table, payload."""
    for number, (name, frame) in enumerate(seed_frames()):
        if Mode.ZSTD in modes_of(frame) or frame.base_hash is not None:
            continue
        packed = frame.to_bytes()
        header = frame.header
        bits = header.dtype.unit_nbytes.bit_length() - 1 | header.split << 2
        choices = bytes([number % 3, number % 4, bits, header.chunk_log])
        part = struct.pack("<I", header.nbytes)[:3] + struct.pack("<HH", 1000, 60000)
        n_rows, n_columns = header.matrix
        side = np.empty(n_rows + n_columns, np.uint8)
        if n_rows:
            data = bytearray(header.nbytes)
            frame.decompress_into(data)
            units = np.frombuffer(data, np.uint8)
            _core.make_side_data(units, header.geometry, n_rows, side)
        part += struct.pack("<HH", n_rows, side.size) + side.tobytes()
        yield name, choices + part + header.table.tobytes() + packed[header.header_nbytes :]
    yield from delta_seeds()


def fuzz_base(n_units: int, unit_nbytes: int) -> bytes:
    """The base that `decode_tensor.cpp` makes: noise of xorshift64."""
    state, units = 0x2545F4914F6CDD1D, b""
    for _ in range(n_units):
        state ^= state << 13 & (1 << 64) - 1
        state ^= state >> 7
        state ^= state << 17 & (1 << 64) - 1
        units += state.to_bytes(8, "little")[:unit_nbytes]
    return units


def delta_seeds() -> Seeds:
    """As `decode_tensor_seeds`, with a base, which bits 5 and 6 of the cut announce."""
    for number, (dtype, scale) in enumerate(
        product((row for row in DTYPES if row.name in _DELTA_DTYPES), (0.5, 40, 1e6, FEW))
    ):
        base = fuzz_base(1500, dtype.unit_nbytes)
        data = make_step(base, dtype.unit_nbytes, min(scale, 8.0**dtype.unit_nbytes))
        is_float = Split.FLOAT in dtype.splits
        geometry = Geometry(dtype.unit_nbytes, dtype.splits[-1], 11, len(data))
        table = np.empty((1, 1 + geometry.n_planes), np.uint32)
        dst = np.empty(padded(len(data)), np.uint8)
        units = Base(np.frombuffer(base, np.uint8), is_float, 0)
        context = EncodeContext(Level.DEFAULT, None, units, 4 * len(data))
        output = EncodeOutput(dst, table, empty_leaves(len(data)), empty_leaves(len(base)))
        source = np.frombuffer(data, np.uint8)
        used = _core.encode_chunks(source, geometry, context, output, 1)
        bits = dtype.unit_nbytes.bit_length() - 1 | dtype.splits[-1] << 2 | 1 << 5 | is_float << 6
        head = bytes([number % 4, number % 4, bits, 11]) + struct.pack("<I", len(data))[:3]
        head += struct.pack("<HHHH", 1000, 60000, 0, 0)
        yield f"delta-{dtype.name}-{scale:g}", head + table.tobytes() + dst[:used].tobytes()


def decode_plane_seeds() -> Seeds:
    """Instruction set, mode, length, stream."""
    for number, (n, plane_of) in enumerate(product((300, 2000, 9000), PLANES)):
        plane, dst = make_plane(n, *plane_of), np.empty(n, np.uint8)
        for mode in Mode:
            try:
                nbytes = _core.encode_plane(plane, int(mode), dst)
            except ValueError:  # this mode has no stream of its own
                continue
            head = bytes([number % 3, mode]) + struct.pack("<I", n - 1)[:3]
            yield f"{mode.name.lower()}-{number}", head + dst[:nbytes].tobytes()


def round_trip_seeds() -> Seeds:
    """Choices, cut, length, side data, noise, pattern."""
    cuts = sorted({(dtype.unit_nbytes, split) for dtype in DTYPES for split in dtype.splits})
    sizes = ((60, 6), (300, 9), (1000, 11), (2000, 13), (8300, 16))
    for number, (size, split) in enumerate(cuts):
        row = next(row for row in DTYPES if row.unit_nbytes == size and split in row.splits)
        for kind, (n_units, chunk_log) in zip(KINDS, sizes, strict=True):
            choices = bytes([number % 3, number * 37 & 0xFF, size.bit_length() - 1 | split << 2])
            length = struct.pack("<I", n_units * size)[:3]
            side = struct.pack("<HH", 50 * (number % 2), 4) + b"\1\2\3\4"
            noise = struct.pack("<QH", 0xFF << 8 * (number % 8), number)
            head = choices + bytes([chunk_log]) + length + side + noise
            yield f"{size}-{split}-{kind}", head + make_units(kind, row, 64)
            if size > 1 and not split:
                continue  # the planner splits a tensor with a base
            near = struct.pack("<QH", 0x3F << number % 3, number % 5)  # of its base
            with_base = bytes([*choices[:2], choices[2] | (1 if number % 2 else 3) << 5])
            head = with_base + bytes([chunk_log]) + length + side + near
            yield f"{size}-{split}-{kind}-base", head + make_units(kind, row, 64)
    for level in (1, 2):  # more than one chunk: those are large
        head = bytes([level, 4 | level, 1 | Split.FLOAT << 2, 17]) + struct.pack("<I", 300_000)[:3]
        side = struct.pack("<HH", 200, 4) + b"\5\1\3\2"
        noise = struct.pack("<QH", 0x01FF, 0)
        yield f"chunks-{level}", head + side + noise + make_units("weights", DTYPES[10], 64)


def short_tensor_seeds() -> Seeds:
    """Choices, dtype, length, noise, pattern."""
    quiet, noisy = struct.pack("<QH", 0, 0), struct.pack("<QH", 0x0F0F, 3)
    rows = [row for row in DTYPES if Split.FLOAT not in row.splits]
    for number, row in enumerate(rows):
        units = {kind: make_units(kind, row) for kind in KINDS} | {"halves": make_halves(3000)}
        if row.unit_nbytes > 1:
            runs = make_runs(row.unit_nbytes)
            units |= {kind: run[:1000].tobytes() for kind, run in runs.items()}
        for kind, pattern in units.items():
            head = bytes([number % 4 | len(kind) % 16 << 2, row.code])
            length = struct.pack("<I", len(pattern))[:3]
            yield f"{row.name}-{kind}", head + length + quiet + pattern
        longest = struct.pack("<I", 1 << 16)[:3]
        yield f"{row.name}-longest", head + longest + noisy + units["weights"]
        yield f"{row.name}-padding", head + struct.pack("<I", 60)[:3] + quiet + units["few"][:60]


def frame_seeds() -> Seeds:
    """Control, frame: as it is and sealed anew."""
    frames = [(name, frame.to_bytes()) for name, frame in seed_frames()]
    frames += [(f"made-{name}", bytes(build())) for name, build in SMALL.items()]
    lies = [(f"lie-{number}", lie.frame()) for number, lie in enumerate(LIES.values())]
    frames += [(name, frame) for name, frame in lies if len(frame) <= _MAX_LIE_NBYTES]
    for number, (name, frame) in enumerate(frames):
        yield name, bytes([number * 8 + number % 8 & 0xFF]) + frame


def piece_seeds() -> Seeds:
    """Control, dtype, elements of the piece, message."""
    whole = [dtype for dtype in DTYPES if dtype.bits % 8 == 0]
    kinds = ("weights", "noise", "weights_rows", "noise_rows")
    for number, (row, kind) in enumerate(product(whole, kinds)):
        values, _, has_rows = kind.partition("_")
        data = make_units(values, row, 2048 if has_rows else 300)
        piece = np.frombuffer(data, np.uint8)
        if has_rows:  # of 64 bytes, after one in an earlier piece
            rows = piece[:2048].reshape(-1, 64)[np.arange(96) * 7 % 37 % 32]
            piece = np.concatenate([np.arange(64, dtype=np.uint8), rows.reshape(-1)])
        start = 64 if has_rows else 0
        memory = np.empty(capacity_of(row.name, piece.size), np.uint8)
        level = None if number % 7 == 0 and not has_rows else Level(1 + number % 3)
        finder = RowFinder(RowMemory(), [piece], 64, has_past=True)
        encoder = PieceEncoder(row.name, level, 1, finder)
        message = memory[: encoder.encode(piece, start, memory)]
        n = 8 * (piece.size - start) // row.bits
        control = (start // 64) << 5 | number % 4 << 3 | number % 8
        yield (
            f"{row.name}-{kind}",
            struct.pack("<BBH", control, whole.index(row), n) + message.tobytes(),
        )


def request_seeds() -> Seeds:
    """Control, request: sets, dense and sparse, bags, and nothing, of each holder."""
    rng = np.random.default_rng(8)
    for number, (rows, seed) in enumerate(product(HOLDERS, range(6))):
        wanted = []
        for shard, n_rows in enumerate(rows):
            kind = (shard + seed) % 4
            ids = np.unique(rng.integers(0, n_rows, 0 if kind == 0 else 20 * kind))
            lengths = None
            if kind == 3:
                lengths = rng.integers(1, 1 + seed + 1, len(ids))
                ids = rng.integers(0, n_rows, lengths.sum())
            wanted.append(Wanted(ids, lengths))
        message = pack_request(wanted, rows)
        yield f"{number // 6}-{seed}", bytes([number // 6]) + message.tobytes()


def _tensors(number: int) -> dict[str, tuple[DType, bytes]]:
    rows = [DTYPES[(3 * number + i) % len(DTYPES)] for i in range(3)]
    kinds = [KINDS[(number + i) % len(KINDS)] for i in range(3)]
    return {
        f"layer.{i}": (row, make_units(kind, row, 48))
        for i, (row, kind) in enumerate(zip(rows, kinds, strict=True))
    }


def file_seeds() -> Seeds:
    """The four forms that `fuzz_file.py` lists."""
    for number in range(8):
        tensors = _tensors(number)
        shapes = {
            name: (row.name, (len(data) * 8 // row.bits,)) for name, (row, data) in tensors.items()
        }
        original = build_header(shapes, {"format": "np"} if number % 2 else None)
        buffers = [tensors[entry.name][1] for entry in original.entries]
        packed = pack_tensors(original, buffers)
        yield f"raw-{number}", bytes([4 * number & 0xFC]) + packed
        frames = b"".join(
            compress_buffer(data, *shapes[entry.name]).to_bytes()
            for entry, data in zip(original.entries, buffers, strict=True)
        )
        text = struct.pack("<H", len(original.text)) + original.text
        yield f"built-{number}", bytes([1 + 16 + 4 * (number % 3)]) + text + frames
        yield f"written-{number}", bytes([2 + 16 * (number % 2)]) + text + _written(packed)
    yield from _based_seeds()
    yield from _index_seeds()


def file_header_seeds() -> Seeds:
    """JSON, as savers write it. Others are unusual, so that the core refuses them."""
    for name, seed in file_seeds():
        if name.startswith(("raw", "based")) and "written" not in name:
            data = seed[1:]
            yield name, data[8 : 8 + int.from_bytes(data[:8], "little")]
    forms = {"a": ("F32", ()), "b.\u00e9": ("BF16", (2, 0, 3)), "c": ("U8", (1,) * 8)}
    for number, metadata in enumerate((None, {}, {"format": "pt"}, {"{[\u00e9\\": '"}, {"'})):
        text = build_header(forms, metadata).text
        yield f"usual-{number}", text
        for k, (old, new) in enumerate(((b'"b', b'"\\n'), (b'":', b'" :'), (b'e":[', b'e":[0'))):
            yield f"made-{number}-{k}", text.replace(old, new, 1)


def _based_seeds() -> Seeds:
    """Files whose frames have the base that harness.py makes."""
    for number, dtype in enumerate(_DELTA_DTYPES):
        unit_nbytes = DTYPE_BY_NAME[dtype].unit_nbytes
        base = (0x3C00 + 3 * np.arange(400 * unit_nbytes // 2)).astype("<u2").tobytes()
        data, held = make_step(base, unit_nbytes, 3), NUMPY.empty(dtype, (400,))
        NUMPY.fill(held, lambda memory, base=base: np.copyto(memory, np.frombuffer(base, np.uint8)))
        shapes = {"a": (dtype, (20, 20)), "b": ("U8", (4,))}
        original = build_header(shapes)
        buffers = [{"a": data, "b": b"\0\1\1\1"}[entry.name] for entry in original.entries]
        packed = pack_tensors(original, buffers, base={"a": held})
        yield f"based-{number}", bytes([4 * number & 0xFC]) + packed
        text = struct.pack("<H", len(original.text)) + original.text
        yield f"based-written-{number}", bytes([2 + 16 * (number % 2)]) + text + _written(packed)


def _written(packed: bytes) -> bytes:
    nbytes = int.from_bytes(packed[:8], "little")
    header = json.loads(packed[8 : 8 + nbytes])
    header["__metadata__"]["packhorse"] = "@RECORD@"
    text = json.dumps(header).encode()
    return struct.pack("<H", len(text)) + text + packed[8 + nbytes :]


def _index_seeds() -> Seeds:
    files = {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "other"}
    renamed = {name: file.replace(".safe", ".ph.safe") for name, file in files.items()}
    for number, metadata in enumerate(({}, {"metadata": {"total_size": 12.5}})):
        original = json.dumps({**metadata, "weight_map": files}).encode()
        packed = json.dumps({**metadata, "weight_map": renamed, "packhorse": "@"})
        text = struct.pack("<H", len(original)) + original
        yield f"index-{number}", b"\3" + text + packed.replace('"@"', "@RECORD@").encode()


def manifest_seeds() -> Seeds:
    """Control, text without its checksum or the parts of a page."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        build_store(store)
        texts = snapshot_manifests(store)
        catalogue = catalogue_parts(store)
    yield "catalogue", b"\x08" + catalogue
    yield "store", b"\3" + texts.pop("store")
    for name, text in texts.items():
        yield name, b"\0" + text
        for part in ("frames", "tensors", "state"):  # each of them breaks one rule
            document = json.loads(text)
            document[part] = document[part][::-1] if part != "state" else {"tuple": [1.5, "\u00e9"]}
            yield f"lie-{name}-{part}", b"\1" + json.dumps(document).encode()
    for name, text in checkpoint_manifests().items():
        yield name, b"\2" + text


def update_seeds() -> Seeds:
    """Control, update: anchors and deltas of the target, and tensors of another sender."""

    def packed(change: Callable[[dict[str, Any]], object]) -> bytes:
        state = updated_weights()
        sender = DeltaSender(state, threads=1, receivers_have_it=True)
        change(state)
        return bytes(sender.pack())

    anchor = bytes(DeltaSender(updated_weights(), threads=1).pack())
    yield "anchor", b"\0" + anchor
    yield "own state", b"\x09" + anchor
    yield "nothing", b"\1" + packed(lambda state: None)
    large = packed(lambda state: np.add(state["long"], 1, out=state["long"], where=_every(50)))
    yield "large", b"\1" + large
    yield "in place", b"\5" + large
    yield "scalar", b"\1" + packed(lambda state: state["n"].fill(3))
    yield "small", b"\1" + packed(lambda state: state["b"].fill(3))
    two = {"x": np.zeros((3, 0)), "y": np.arange(999)}
    shards = Shards(1, 2, {"y": ((1 << 20,), 77)})
    yield "ranges", b"\x09" + bytes(DeltaSender(two, shards=shards, threads=1).pack())


def _every(n: int) -> NDArray[np.bool_]:
    """Which elements of the longest tensor of `update_seeds` change."""
    return np.arange(updated_weights()["long"].size) % n == 0


def weights_seeds() -> Seeds:
    """Code path, format and threads, columns, breaks, elements."""
    dtype = DTYPE_BY_NAME["BF16"]
    for kind, n_columns in product(KINDS, (1, 37, 96, 300)):
        for choice, breaks in enumerate((b"", b"\0\0\0\1", b"", b"\4\0\0\1\3\4\0\2")):
            head = struct.pack("<BBHB", choice, choice, n_columns - 1, len(breaks) // 4)
            name = f"{kind}-{n_columns}-{choice}"
            yield name, head + breaks + make_units(kind, dtype, 2 * n_columns + 64)


def tables_seeds() -> Seeds:
    """Code path, threads, the fields of a format, breaks, values, elements."""
    for n_columns in (5, 37):
        for i, (name, (rows, format)) in enumerate(named_tables(12, n_columns).items()):
            breaks = (b"", b"\0\0\0\1", b"\3\4\0\2\4\1\0\1")[i % 3]
            size = format.element_nbytes.bit_length() - 1
            flags = format.has_sign | format.has_row_value << 1
            head = struct.pack(
                "<4BH4BHBIB",
                *(i % 4, i % 3, format.mode, size, format.n_columns - 1, format.code_bits),
                *(format.rest_bits, format.shift, flags, format.capacity, i % 2),
                *(format.background, len(breaks) // 4),
            )
            values = np.array(format.values, f"<u{format.element_nbytes}").tobytes()
            yield f"{name.replace(' ', '-')}-{n_columns}", head + breaks + values + rows.tobytes()


def bounded_seeds() -> Seeds:
    """What to do and threads; elements with numbers to encode them by, and messages and coded
    messages of such elements, with their models."""
    for dtype, rounding in product(BOUNDED_DTYPES, Rounding):
        for bits, bound, center in (
            (1, 1.0, 0.0),
            (4, 0.05, 0.5),
            (7, 1e-3, 0.0),
            (16, 1e-40, 0.0),
        ):
            numbers = struct.pack("<dd8s", bound, center, b"seed")
            elements = make_units("weights", dtype, 700)
            n = len(elements) // dtype.unit_nbytes
            name = f"{dtype.name}-{rounding.name.lower()}-{bits}"
            for form in (0, 8):
                choice = dtype.code - BOUNDED_DTYPES[0].code | int(rounding) << 2 | form
                yield f"encode-{name}-{form}", bytes([bits, 4, choice, bits]) + numbers + elements
            segments = [Segment(n - 30, bound, bits), Segment(30, 1.0, 5)]
            try:
                message = encode_bounded(elements, dtype.name, segments, rounding=rounding)
            except ValueError:
                continue  # nothing fits this bound
            yield f"message-{name}", bytes([bits, 2 + bits % 2]) + message.tobytes()
            models = _core.choose_code_models(message)
            tables = _core.CodeTables(np.frombuffer(models, np.uint8))
            room = np.empty(_core.max_coded_nbytes(message.size, tables), np.uint8)
            nbytes = _core.encode_coded(message, tables, bits % 2 == 0, room, 1)
            head = bytes([bits, 1]) + struct.pack("<H", len(models)) + models
            yield f"coded-{name}", head + room[:nbytes].tobytes()


TARGETS = {
    "bounded": bounded_seeds,
    "decode_tensor": decode_tensor_seeds,
    "decode_plane": decode_plane_seeds,
    "round_trip": round_trip_seeds,
    "short_tensor": short_tensor_seeds,
    "tables": tables_seeds,
    "weights": weights_seeds,
    "frame": frame_seeds,
    "file": file_seeds,
    "file_header": file_header_seeds,
    "manifest": manifest_seeds,
    "update": update_seeds,
    "piece": piece_seeds,
    "request": request_seeds,
}


def write_seeds(folder: Path) -> None:
    """Write all seeds to `<folder>/<target>/`."""
    for target, seeds in TARGETS.items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for name, seed in seeds():
            (folder / target / name).write_bytes(seed)


if __name__ == "__main__":
    write_seeds(Path(sys.argv[1]))
