"""The geometry of a tensor: its numbers, equality and pickling, and what does not fit it."""

import pickle

import numpy as np
import pytest

from packhorse import _core
from packhorse.codecs.source import natural_geometry
from packhorse.frame import Frame, compress_buffer, plan_buffer
from packhorse.layout import CHUNK_NBYTES, DTYPE_BY_NAME, DTYPES, Split


def geometry(**numbers: int) -> _core.Geometry:
    defaults = {"unit_nbytes": 2, "split": 2, "chunk_log": 6, "nbytes": 1000}
    return _core.Geometry(**{**defaults, **numbers})


def test_the_numbers_of_a_geometry_follow_from_four() -> None:
    whole, split = geometry(split=0), geometry()
    assert (split.unit_nbytes, split.split, split.chunk_log, split.nbytes) == (2, 2, 6, 1000)
    assert (split.n_units, split.n_planes, split.n_chunks, split.chunk_nbytes) == (500, 2, 8, 128)
    assert whole.n_planes == 1
    assert geometry(nbytes=0).n_chunks == 0
    assert repr(split) == "Geometry(unit_nbytes=2, split=2, chunk_log=6, nbytes=1000)"


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"unit_nbytes": 3}, "unit_nbytes must be"),
        ({"split": 3}, "split must be"),
        ({"unit_nbytes": 1, "split": 1}, "one-byte units"),
        ({"chunk_log": 5}, "chunk_log is out of range"),
        ({"chunk_log": 22}, "chunk_log is out of range"),
        ({"nbytes": 1001}, "multiple of unit_nbytes"),
        ({"chunk_log": 21}, "2 MiB"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(numbers: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        geometry(**numbers)


def test_geometries_are_values() -> None:
    assert geometry() == geometry()
    assert hash(geometry()) == hash(geometry())
    for numbers in ({"unit_nbytes": 4}, {"split": 1}, {"chunk_log": 7}, {"nbytes": 1002}):
        assert geometry(**numbers) != geometry()
    assert geometry() != (2, 2, 6, 1000)
    assert pickle.loads(pickle.dumps(geometry())) == geometry()


def test_a_frame_and_its_plan_can_be_pickled() -> None:
    data = np.arange(3000, dtype=np.uint16).tobytes()
    frame = compress_buffer(data, "U16", (3000,))
    target = bytearray(len(data))
    pickle.loads(pickle.dumps(frame)).decompress_into(target)
    assert target == data
    assert pickle.loads(pickle.dumps(frame.plan)) == plan_buffer(data, "U16", (3000,))


@pytest.mark.parametrize("dtype", [row.name for row in DTYPES])
@pytest.mark.parametrize("n", [0, 8, 100_000, 400_000])
def test_a_frame_is_cut_as_its_plan_says(dtype: str, n: int) -> None:
    row = DTYPE_BY_NAME[dtype]
    data = np.random.default_rng(n).bytes(n * row.bits // 8)
    frame = compress_buffer(data, dtype, (n,))
    assert frame.plan is not None
    assert frame.plan.geometry == frame.header.geometry
    assert Frame.from_buffer(frame.to_bytes()).header.geometry == frame.header.geometry
    natural = natural_geometry(row, len(data))
    assert natural.split == row.splits[-1]
    assert natural.chunk_nbytes in (CHUNK_NBYTES, 2 * CHUNK_NBYTES)
    assert natural.n_chunks >= frame.n_chunks
    assert natural.n_planes >= frame.header.n_planes


SIZE = 1 << 12


def encode(**changes: object) -> int:
    """Encodes BF16 against a base, with some arguments changed."""
    src = np.zeros(SIZE, np.uint8)
    base = _core.Base(np.zeros(SIZE, np.uint8), True, 0)
    leaves = np.zeros(16 + 240, np.uint8)
    made = {
        "geometry": geometry(chunk_log=12, nbytes=SIZE),
        "side": None,
        "base": base,
        "payload": np.zeros(SIZE, np.uint8),
        "table": np.zeros((1, 3), np.uint32),
        "leaves": leaves,
        "base_leaves": leaves.copy(),
        "first": 0,
        **changes,
    }
    context = _core.EncodeContext(2, made["side"], made["base"], SIZE)
    output = _core.EncodeOutput(made["payload"], made["table"], made["leaves"], made["base_leaves"])
    return _core.encode_chunks(src, made["geometry"], context, output, 1, made["first"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"geometry": geometry(chunk_log=12, nbytes=SIZE - 2)}, "whole chunks"),
        ({"geometry": geometry(chunk_log=12, nbytes=SIZE + 2)}, "whole chunks"),
        ({"first": 1}, "first is out of range"),
        ({"first": 1 << 63}, "first is out of range"),
        ({"geometry": geometry(chunk_log=6, nbytes=SIZE)}, "whole leaves"),
        ({"geometry": geometry(chunk_log=12, nbytes=SIZE, split=Split.WHOLE)}, "split into bytes"),
        ({"payload": np.zeros(SIZE - 64, np.uint8)}, "payload is too small"),
        ({"table": np.zeros((2, 3), np.uint32)}, "a row for each chunk"),
        ({"leaves": np.zeros(16, np.uint8)}, "leaves must have"),
        ({"base_leaves": np.zeros(16, np.uint8)}, "leaves must have"),
        ({"base": _core.Base(np.zeros(SIZE, np.uint8), True, 1)}, "as many units"),
        ({"base": _core.Base(np.zeros(2 * SIZE, np.uint8), False, 1)}, "are cast"),
        ({"side": _core.Side(np.zeros(9, np.uint8), 3)}, "a byte for each row"),
    ],
)
def test_what_does_not_fit_the_geometry_is_refused(changes: dict[str, object], words: str) -> None:
    assert encode() == 0  # equal to its base
    with pytest.raises(ValueError, match=words):
        encode(**changes)


def test_a_payload_shorter_than_its_table_is_refused() -> None:
    table = np.array([[0, 3 << 24 | 100]], np.uint32)
    cut = geometry(unit_nbytes=1, split=0, nbytes=64)
    _core.EncodedTensor(np.zeros(128, np.uint8), table, cut, None, None)
    with pytest.raises(ValueError, match="shorter than the table says"):
        _core.EncodedTensor(np.zeros(127, np.uint8), table, cut, None, None)
