"""Files that are not safetensors files, or are of the wrong kind, raise the documented error."""

import json
import os
from collections.abc import Callable

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from disk_samples import entry, file_bytes, leftovers, small_packed_file, write_sample
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packhorse.disk import PackedFile, pack_file, plan_file, unpack_file, verify_file
from packhorse.errors import (
    CompatibilityError,
    CorruptionError,
    PackhorseError,
    TruncationError,
)
from packhorse.layout import DTYPE_BY_NAME
from packhorse.numpy import FRAMEWORK as NUMPY
from packhorse.numpy import save_file
from packhorse.storage import safetensors_header
from packhorse.storage.safetensors_header import (
    FileHeader,
    build_header,
    parse_file_header,
    parse_header,
)

ONE = '"dtype":"U8","shape":[1],"data_offsets":[0,1]'

# header or whole file, data, error, text of the message; `safetensors` refuses each of them as well
BAD = {
    "empty": (b"", TruncationError, "0 bytes"),
    "short": (b"abc", TruncationError, "3 bytes"),
    "text": (b"hello, world, this is no model", CorruptionError, "not a safetensors file"),
    "zip": (b"PK\x03\x04" + bytes(99), CorruptionError, "zip archive.*convert"),
    "pickle": (b"\x80\x02}q\x00X\x04\x00\x00", CorruptionError, "pickle.*convert"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(99), CorruptionError, "GGUF"),
    "json": (b'{\n  "architectures": [],' + bytes(99), CorruptionError, "name the folder"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", CorruptionError, "git lfs pull"),
    "header longer than the file": (file_bytes(b"{}", length=100), TruncationError, "100 bytes"),
    "header longer than allowed": (
        file_bytes(b"{}", length=100_000_001),
        CorruptionError,
        "at most 100000000",
    ),
    "no header": (file_bytes(b""), CorruptionError, "begin with '{'"),
    "list": (file_bytes(b"[]"), CorruptionError, "begin with '{'"),
    "not UTF-8": (file_bytes(b'{"\xff":1}'), CorruptionError, "not UTF-8: byte 0xff at byte 10"),
    "byte order mark": (file_bytes(b"\xef\xbb\xbf{}"), CorruptionError, "begin with"),
    "not JSON": (file_bytes(b'{"a":}'), CorruptionError, "not JSON.* at byte 13"),
    "two objects": (file_bytes(b"{}{}"), CorruptionError, "not JSON.*at byte 10"),
    "zero padding": (file_bytes(b"{}\0\0"), CorruptionError, "not JSON"),
    "control character": (
        file_bytes(b'{"__metadata__":{"a":"\x01"}}'),
        CorruptionError,
        "not JSON.*control",
    ),
    "lone surrogate": (
        file_bytes(b'{"__metadata__":{"a":"\\ud800"}}'),
        CorruptionError,
        "Unicode",
    ),
    "too deep": (
        file_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        CorruptionError,
        "deep",
    ),
    "NaN": (file_bytes(b'{"a":{"x":NaN,' + ONE.encode() + b"}}", b"x"), CorruptionError, "NaN"),
    "metadata is a list": (file_bytes({"__metadata__": []}), CorruptionError, "is a list"),
    "metadata holds a number": (
        file_bytes({"__metadata__": {"k": 1}}),
        CorruptionError,
        "'k' is a number",
    ),
    "duplicate field": (
        file_bytes(f'{{"a":{{"dtype":"U8",{ONE}}}}}'.encode(), b"x"),
        CorruptionError,
        "'dtype' occurs twice",
    ),
    "tensor is a list": (file_bytes({"a": [1, 2]}), CorruptionError, "tensor 'a'.*a list"),
    "no offsets": (
        file_bytes({"a": {"dtype": "U8", "shape": [0]}}),
        CorruptionError,
        "'a' has no 'data_offsets'",
    ),
    "one offset": (
        file_bytes({"a": {**entry(0, 1), "data_offsets": [0]}}, b"x"),
        CorruptionError,
        "'a'.*start, stop",
    ),
    "stop before start": (
        file_bytes({"a": entry(1, 0, shape=[0])}, b"x"),
        CorruptionError,
        r"'a'.*\[1, 0\]",
    ),
    "negative offset": (file_bytes({"a": entry(-1, 0)}, b"x"), CorruptionError, "'a'.*-1"),
    "fraction": (file_bytes({"a": entry(0, 1, shape=[1.0])}, b"x"), CorruptionError, "'a'.*1.0"),
    "truth": (file_bytes({"a": entry(0, 1, shape=[True])}, b"x"), CorruptionError, "'a'.*True"),
    "shape is a string": (
        file_bytes({"a": {**entry(0, 1), "shape": "1"}}, b"x"),
        CorruptionError,
        "'a': shape.*a string",
    ),
    "huge number": (file_bytes({"a": entry(0, 10**29)}, b"x"), CorruptionError, "'a'.*1000"),
    "huge shape": (
        file_bytes({"a": entry(0, 1, shape=[2**40, 2**40])}, b"x"),
        CorruptionError,
        "'a'.*larger than",
    ),
    "unknown dtype": (
        file_bytes({"a": entry(0, 1, "U7")}, b"x"),
        CompatibilityError,
        "'a': unknown dtype 'U7'.*BF16",
    ),
    "size is not the shape's": (
        file_bytes({"a": entry(0, 3, "F32", [1])}, b"xyz"),
        CorruptionError,
        "'a': F32 of shape .*32 bits.*24",
    ),
    "half a byte": (
        file_bytes({"a": entry(0, 2, "F4", [3])}, b"xy"),
        CorruptionError,
        "'a': F4 .*12 bits",
    ),
    "overlap": (
        file_bytes({"a": entry(0, 2), "b": entry(1, 2)}, b"xy"),
        CorruptionError,
        "'b' overlaps tensor 'a'.*byte",
    ),
    "hole": (
        file_bytes({"a": entry(0, 1), "b": entry(2, 3)}, b"xyz"),
        CorruptionError,
        "'b' leaves a hole after tensor 'a'.*byte",
    ),
    "hole at the start": (
        file_bytes({"a": entry(1, 2)}, b"xy"),
        CorruptionError,
        "'a' leaves a hole after the start",
    ),
    "empty tensor inside another": (
        file_bytes({"a": entry(0, 2), "z": entry(1, 1)}, b"xy"),
        CorruptionError,
        "'z' overlaps tensor 'a'",
    ),
    "cut short": (file_bytes({"a": entry(0, 9)}, b"xy"), TruncationError, "cut short.*byte"),
    "more than the tensors": (
        file_bytes({"a": entry(0, 1)}, b"xyz"),
        CorruptionError,
        "2 more bytes follow",
    ),
}

# Packhorse is stricter than the library, which uses the last of two equal keys and skips spaces.
STRICTER = {
    "duplicate tensor": (
        file_bytes(f'{{"a":{{{ONE}}},"a":{{{ONE}}}}}'.encode(), b"x"),
        CorruptionError,
        "'a' occurs twice",
    ),
    "duplicate metadata": (
        file_bytes(b'{"__metadata__":{"k":"1","k":"2"}}'),
        CorruptionError,
        "'k' occurs twice",
    ),
    "space before the header": (file_bytes(b" {}"), CorruptionError, "begin with '{'"),
    "many dimensions": (
        file_bytes({"a": entry(0, 1, shape=[1] * 65)}, b"x"),
        CompatibilityError,
        "65 dimensions.*64",
    ),
    "number beyond all floats": (
        file_bytes(b'{"a":{"x":[-1e999],' + ONE.encode() + b"}}", b"x"),
        CorruptionError,
        "-1e999 is larger than the largest float",
    ),
    "lone surrogate in a list": (
        file_bytes(b'{"a":{"x":[[1,"\\udfff"]],' + ONE.encode() + b"}}", b"x"),
        CorruptionError,
        "Unicode",
    ),
    "overflow behind a zero": (
        file_bytes({"a": entry(0, 0, shape=[0, 2**40, 2**40])}),
        CorruptionError,
        "larger than",
    ),
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> bytes:
    """A small packed file with frames of several modes."""
    return small_packed_file(tmp_path_factory.mktemp("packed"))


@pytest.mark.parametrize("case", [*BAD, *STRICTER])
def test_a_bad_file_gives_its_error_and_leaves_nothing(tmp_path, case):
    data, error, words = {**BAD, **STRICTER}[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    for work in (
        lambda: pack_file(path, tmp_path / "out"),
        lambda: unpack_file(path, tmp_path / "out"),
        lambda: plan_file(path),
        lambda: PackedFile(path, NUMPY),
        lambda: parse_file_header(memoryview(data), str(path)),
    ):
        with pytest.raises(error, match=f"^{path}: .*{words}") as caught:
            work()
        assert type(caught.value) is error
        assert "\n" not in str(caught.value)
    assert not leftovers(tmp_path, "bad.safetensors")
    assert path.read_bytes() == data


LONG = "\x1b" + "a" * 100_000 + "z"
LONG_WINDED = {
    "name": {LONG: {}},
    "dtype": {"a": entry(0, 1, LONG)},
    "shape": {"a": {**entry(0, 1), "shape": [LONG]}},
    "offsets": {"a": {**entry(0, 1), "data_offsets": list(range(100_000))}},
    "number": {"a": {**entry(0, 1), "shape": [10**4000]}},
    "list": {"a": {**entry(0, 1), "shape": [[[1] * 100_000] * 3]}},
    "metadata": {"__metadata__": {LONG: 1}},
    "hole": {"a": entry(0, 1), LONG: entry(2, 3)},
    "overlap": {LONG: entry(0, 2), "b": entry(1, 2)},
}


@pytest.mark.parametrize("case", LONG_WINDED)
def test_a_message_is_short_whatever_the_file_says(tmp_path, case):
    """A long name keeps its two ends, and control characters are escaped."""
    with pytest.raises(PackhorseError) as caught:
        parse_file_header(memoryview(file_bytes(LONG_WINDED[case], b"abc")), "test")
    message = str(caught.value)
    assert len(message) < 1500
    assert "\x1b" not in message
    if case in ("name", "dtype", "metadata", "hole", "overlap"):
        assert "'\\x1baaa" in message
        assert "aaaz'" in message


def test_a_message_about_a_frame_is_short_whatever_its_name(tmp_path):
    path = tmp_path / "a"
    save_file({LONG: np.zeros(100, np.uint8)}, path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (problem,) = verify_file(path)
    assert problem.tensor == LONG
    with PackedFile(path, NUMPY) as file, pytest.raises(CorruptionError) as caught:
        file.get_tensor(LONG)
    for message in (problem.message, str(caught.value)):
        assert "aaaz'" in message
        assert len(message) < 1500


@pytest.mark.parametrize("case", BAD)
def test_the_safetensors_library_refuses_the_same_files(case):
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(BAD[case][0])


NUMBERS = st.one_of(
    st.integers(-1, 40), st.sampled_from([2**31, 2**63, 10**30, 1.5, True, None, "1"])
)
TENSORS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BY_NAME, "U7", 1]),
        "shape": st.lists(NUMBERS, max_size=3) | NUMBERS,
        "data_offsets": st.lists(NUMBERS, max_size=3),
    }
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "c", ""]), TENSORS | NUMBERS, max_size=3)


@settings(max_examples=400, deadline=None)
@given(document=HEADERS, data=st.binary(max_size=40))
@example(document={"a": entry(0, 2), "b": entry(2, 4, "U16", [1])}, data=b"abcd")
def test_what_we_accept_the_library_accepts(document, data):
    whole = file_bytes(document, data)
    try:
        header = parse_file_header(memoryview(whole), "test")
    except PackhorseError:
        return
    theirs = dict(safetensors.deserialize(whole))
    assert {tensor.name: tensor.nbytes for tensor in header.entries} == {
        name: len(tensor["data"]) for name, tensor in theirs.items()
    }


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200), declared=st.none() | st.integers(0, 250))
def test_arbitrary_bytes_give_a_documented_error_or_a_header(data, declared):
    whole = data if declared is None else declared.to_bytes(8, "little") + b"{" + data
    assert_documented(lambda: parse_file_header(memoryview(whole), "test"))


def assert_documented(work: Callable[[], object]) -> None:
    """The operation either works, or its error names the file."""
    message = "test: "
    try:
        work()
    except PackhorseError as error:
        message = str(error)
    assert message.startswith("test: ")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(document=VALUES)
def test_arbitrary_json_gives_a_documented_error_or_a_header(document):
    text = json.dumps({"__metadata__": None, "x": document}).encode()
    assert_documented(lambda: parse_header(text, label="test"))


def test_packed_and_plain_are_not_confused(tmp_path, packed):
    plain, path = tmp_path / "a.safetensors", tmp_path / "b.ph.safetensors"
    write_sample(plain)
    path.write_bytes(packed)
    for work in (lambda: pack_file(path, tmp_path / "out"), lambda: plan_file(path)):
        with pytest.raises(ValueError, match=r"already packed; unpack it first"):
            work()
    for work in (lambda: unpack_file(plain, tmp_path / "out"), lambda: verify_file(plain)):
        with pytest.raises(ValueError, match=r"not a packed file.*pack it first"):
            work()
    assert not leftovers(tmp_path, plain.name, path.name)


def test_a_plain_file_may_have_metadata_of_our_name(tmp_path):
    path = tmp_path / "a"
    for value in ("mine", "{}", "[]", "{"):
        write_sample(path, metadata={"packhorse": value})
        with pytest.raises(ValueError, match="not a packed file"):
            verify_file(path)
        pack_file(path, tmp_path / "b", force=True)
        assert verify_file(tmp_path / "b") == []


@pytest.mark.parametrize(
    "name", ["model.bin", "model.pt", "model.pth", "model.ckpt", "m.pkl", "M.PT"]
)
def test_a_pickle_is_refused_with_the_way_to_convert_it(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"\x80\x02.")
    target = str(path.with_suffix(".safetensors").name)
    with pytest.raises(ValueError, match=r"weights_only=True.*save_file") as caught:
        pack_file(path, tmp_path / "out")
    assert target in str(caught.value)
    with pytest.raises(ValueError, match="weights_only=True"):
        plan_file(path)


def test_the_way_to_convert_a_pickle_works(tmp_path, monkeypatch):
    import torch

    shared = torch.arange(6.0).reshape(2, 3)
    monkeypatch.chdir(tmp_path)
    torch.save({"a": shared, "b": shared.T}, "model.bin")
    with pytest.raises(ValueError, match="convert") as caught:
        pack_file("model.bin", "out")
    exec(str(caught.value).split("`")[1], {})
    back = safetensors.numpy.load_file("model.safetensors")
    assert np.array_equal(back["b"], shared.T.numpy())
    pack_file("model.safetensors", "out")


def test_what_is_absent_or_a_folder_is_told_by_the_system(tmp_path):
    for work in (lambda p: pack_file(p, tmp_path / "out"), verify_file, plan_file):
        with pytest.raises(FileNotFoundError, match="absent"):
            work(tmp_path / "absent")
        with pytest.raises(IsADirectoryError):
            work(tmp_path)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"level": "best"}, ValueError), ({"threads": 0}, ValueError), ({"threads": "2"}, TypeError)],
)
def test_wrong_options_are_refused_before_work_starts(tmp_path, options, error):
    (tmp_path / "a").write_bytes(file_bytes({}))
    with pytest.raises(error, match=r"level|threads"):
        pack_file(tmp_path / "a", tmp_path / "out", **options)
    assert not leftovers(tmp_path, "a")


# What a saver never writes, or writes in another way: replacements in a header that it wrote.
OTHER_TEXTS = (
    (b",", b", "), (b"{", b"{ "), (b"F32", b"F\\u0033\\u0032"), (b"F32", b"F33"), (b"F32", b"BF16"),
    (b'"dtype":"F32",', b""), (b"[4,2]", b"[4,3]"), (b"[4,2]", b"[08]"), (b"[4,2]", b"[-8]"),
    (b"[4,2]", b"[8.0]"), (b"[4,2]", b"[,8]"), (b"[4,2]", b"[8,]"), (b"[4,2]", b"8"),
    (b"[4,2]", b"[]"),
    (b"[4,2]", b"[" + b"1," * 65 + b"8]"), (b"[4,2]", b"[9223372036854775808]"),
    (b"[0,32]", b"[32,0]"),
    (b"[0,32]", b"[0,33]"), (b"[0,32]", b"[1,33]"), (b"[0,32]", b"[0,32,32]"), (b'"a"', b'"b"'),
    (b'"a"', b'"a\\n"'), (b'"a"', b'"a\n"'), (b'"a"', b'"\xff"'), (b'"a"', b'"\xed\xa0\x80"'),
    (b"}}", b"},}"), (b"}}", b"}}}"), (b"}}", b"}"), (b"}}", b"}}\0"),
    (b"}}", b"}}\n"), (b":{", b":["),
    (b'"v"', b"1"), (b'"v"', b"{}"), (b'"v"', b'"v","k":"w"'),
    (b'"v"', b'"}"'), (b'"v"', b'"\\"}"'),
    (b'"__metadata__"', b'"m"'), (b'"a"', b'"__metadata__"'), (b'{"k":"v"}', b"null"),
    (b'{"k":"v"}', b"{}"), (b'{"k":"v"}', b"{"), (b'"v"', b'"v\\'),
)  # fmt: skip


def test_a_header_is_read_in_the_same_way_however_it_is_written() -> None:
    """The core reads headers as savers write them, Python all others, and both find the same."""
    shapes = {
        "a": ("F32", (4, 2)),
        "b": ("BF16", (0, 3)),
        "\N{GREEK SMALL LETTER ALPHA}": ("U8", ()),
    }
    text = build_header(shapes, {"k": "v"}).text
    usual = safetensors_header._usual_header(text)
    assert usual is not None
    assert usual == safetensors_header._any_header(text, "")
    assert parse_header(b"{}", label="") == FileHeader(b"{}", (), None)
    n_usual = 0
    for old, new in OTHER_TEXTS:
        assert old in text
        for changed in (text.replace(old, new), text.replace(old, new, 1)):
            found = safetensors_header._usual_header(changed)
            n_usual += found is not None
            if found is not None:
                assert found == safetensors_header._any_header(changed, ""), changed
    assert n_usual >= 3
    for n in range(len(text.rstrip())):
        assert safetensors_header._usual_header(text[:n]) is None


@settings(deadline=None)
@given(st.data())
def test_a_header_with_flipped_bytes_is_read_in_the_same_way(data: st.DataObject) -> None:
    shapes = {"a": ("F32", (4, 2)), "b": ("BF16", (0, 3)), "c": ("F4", (8,))}
    text = bytearray(build_header(shapes, {"k": "v"}).text)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at] = data.draw(st.sampled_from(b'{}[]",:0123456789\\ abkv_\x00\xff'))
    found = safetensors_header._usual_header(bytes(text))
    if found is not None:
        assert found == safetensors_header._any_header(bytes(text), "")
