"""Short tensors of a file are decoded together; what is wrong with one is still named."""

import json

import numpy as np
import pytest

from packhorse import _core
from packhorse.disk import unpack_file, verify_file
from packhorse.errors import CorruptionError
from packhorse.layout import DTYPE_BY_NAME
from packhorse.numpy import load_file, save_file
from packhorse.storage.safetensors_header import (
    TensorEntry,
    build_header,
    parse_header,
    read_header,
)

N = 60


@pytest.fixture
def packed(tmp_path):
    """Short tensors with every third one empty, one of 64 KiB, one longer, one that needs a plan,
    and one of integers."""
    rng = np.random.default_rng(0)
    tensors = {f"t{i:02}": rng.standard_normal(400 * (i % 3)).astype("<f4") for i in range(N)}
    tensors |= {
        "u64": rng.standard_normal(1 << 14).astype("<f4"),
        "u65": rng.standard_normal(20_000).astype("<f4"),
        "v": np.arange(2000),
        "w": np.outer(np.exp(rng.normal(0, 9, 64)), np.exp(rng.normal(0, 9, 64))).astype("<f4"),
    }
    save_file(tensors, tmp_path / "a.ph.safetensors")
    return tmp_path / "a.ph.safetensors", tensors


def frames(path):
    header = read_header(path)
    return {entry.name: header.data_offset + entry.start for entry in header.entries}


def damage(path, places):
    data = bytearray(path.read_bytes())
    for at in places:
        data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("threads", [1, 2])
def test_good_tensors_are_no_problems(packed, threads):
    path, tensors = packed
    done = []
    assert verify_file(path, threads=threads, progress=done.append) == []
    assert sum(done) == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("threads", [1, 2])
def test_every_bad_tensor_is_named(packed, tmp_path, threads):
    path, _ = packed
    starts, bad = frames(path), ["t04", "t05", "t31", "u65", "w"]
    # The payload of one, the headers of the others.
    damage(path, [starts[name] + (1000 if name == "t05" else 40) for name in bad])
    problems = verify_file(path, threads=threads)
    assert [problem.tensor for problem in problems] == bad
    assert [problem.offset for problem in problems] == [starts[name] for name in bad]
    for read in (load_file, lambda path: unpack_file(path, tmp_path / "out")):
        with pytest.raises(CorruptionError) as error:
            read(path)
        assert str(error.value) in [problem.message for problem in problems]


def test_frames_in_the_place_of_others_are_named(packed):
    path, _ = packed
    starts = frames(path)
    data = bytearray(path.read_bytes())
    short, long = starts["t01"], starts["t02"]
    data[short : short + 100], data[long : long + 100] = (
        data[long : long + 100], data[short : short + 100]
    )  # fmt: skip
    path.write_bytes(data)
    assert [problem.tensor for problem in verify_file(path)] == ["t01", "t02"]


def test_tensors_are_checked_together(packed, decoded_together):
    path, _ = packed
    assert verify_file(path, threads=1) == []
    assert sum(decoded_together) == N + 3  # all but the long one
    assert len(decoded_together) < 5


NAMES = [
    "", " ", "a", "Z", '"', "\\", 'a"b\\\\c\nd', "/", "\x7f", "\u2028", "\u00e9", "e\u0301",
    "\U0001f40e", "\ud7ff", *map(chr, range(0x20)), "a" * 300, "layers.0.weight",
    "layers.10.weight", "layers.2.weight",
]  # fmt: skip


def test_headers_are_written_as_json_is():
    forms = [("F32", (2, 3)), ("BF16", ()), ("U8", (0, 7)), ("F32", (5,)), ("I64", (1, 1, 1))]
    tensors = {name: forms[i % len(forms)] for i, name in enumerate(NAMES)}
    header = build_header(tensors, {"k\n": "v\u00e9"})
    written, stop = {"__metadata__": {"k\n": "v\u00e9"}}, 0
    ranks = {"I64": 0, "F32": 1, "BF16": 2, "U8": 3}
    for name in sorted(NAMES, key=lambda name: (ranks[tensors[name][0]], name.encode())):
        dtype, shape = tensors[name]
        start, stop = stop, stop + int(np.prod(shape)) * DTYPE_BY_NAME[dtype].bits // 8
        written[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(written, ensure_ascii=False, separators=(",", ":")).encode()
    assert header.text == text + b" " * (-len(text) % 8)
    assert header == parse_header(header.text, label="")
    rows = _core.rows_of_frames(NAMES, [64] * len(NAMES))
    assert [*json.loads(b"{" + rows + b"}")] == NAMES
    assert rows.count(json.dumps("\x1f")[1:-1].encode()) == 1


@pytest.mark.parametrize("shape", [(1 << 62, 1 << 62), (1 << 61,)])
def test_headers_of_impossible_tensors_are_refused(shape):
    with pytest.raises(CorruptionError, match=r"not an integer from 0 to|larger than any memory"):
        build_header({"a": ("F32", shape), "b": ("F32", shape)})


def test_rows_refuse_lists_that_do_not_fit():
    with pytest.raises(ValueError, match="each tensor needs a name"):
        _core.rows_of_tensors(["a"], [], [], TensorEntry)
    with pytest.raises(ValueError, match="there is no such form"):
        _core.rows_of_tensors(["a"], [1], [(0, "U8", (), "", 0)], TensorEntry)
    form = (0, "U8", (1 << 62,), "", 1 << 62)
    with pytest.raises(ValueError, match="larger than any memory"):
        _core.rows_of_tensors(["a", "b"], [0, 0], [form], TensorEntry)
    with pytest.raises(ValueError, match="each frame needs a name"):
        _core.rows_of_frames(["a"], [])
    with pytest.raises(UnicodeEncodeError):
        _core.rows_of_frames(["\ud800"], [1])
