"""Values that are not tensors: what a checkpoint keeps, and what is refused when it is saved."""

import datetime
import enum
import io
import pathlib
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_ranks import failing, files_of
from dcp_samples import blank, load, save, weights

from packhorse.disk import PackhorseReader, PackhorseWriter, SnapshotStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is ")

ARRAYS = {
    "float": np.linspace(0, 1, 7),
    "ints": np.arange(6, dtype="<i4").reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(20)[::3],
    "empty": np.empty((0, 3), np.float16),
    "no axes": np.array(3),
    "texts": np.array(["a", "bcd"]),
    "bytes": np.array([b"\x00\xff", b"x"]),
    "times": np.array(["2026-01-02", "NaT"], "M8[ns]"),
    "bf16": np.arange(3).astype(ml_dtypes.bfloat16),
    "fp8": np.arange(3).astype(ml_dtypes.float8_e4m3fn),
    "complex": np.array([1 + 2j, np.nan]),
    "bool": np.array([True, False]),
}
SCALARS = {
    "float64": np.float64(1 / 3),
    "float32": np.float32(np.inf),
    "int8": np.int8(-3),
    "bool": np.bool_(True),
    "text": np.str_("é"),
    "bytes": np.bytes_(b"\x01"),
    "time": np.datetime64("2026-01-02T03:04:05", "s"),
    "span": np.timedelta64(3, "h"),
    "bf16": ml_dtypes.bfloat16(1.5),
    "in a tuple": (np.float32(2), {"n": [np.int64(4)]}),
}
RANDOM = {
    "python": random.Random(3).getstate(),
    "numpy": np.random.RandomState(3).get_state(),
    "mt19937": np.random.RandomState(3).get_state(legacy=False),
    "generator": np.random.default_rng(3).bit_generator.state,
    "philox": np.random.Philox(3).state,
    "torch": torch.Generator().manual_seed(3).get_state(),
    "of all devices": [torch.get_rng_state(), torch.get_rng_state()],
    "in a tuple": (torch.get_rng_state(), np.random.RandomState(4).get_state()),
}
BYTES = {"bytes": b"\x00\xff" * 40, "array": bytearray(b"abc"), "set": {1, 2}, "complex": 1j}


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


@pytest.mark.parametrize(
    "state", [ARRAYS, SCALARS, RANDOM, BYTES], ids=["arrays", "scalars", "random", "bytes"]
)
@pytest.mark.parametrize("trusted", [False, True])
def test_plain_values_come_back_equal_with_their_types(
    state: dict[str, Any], trusted: bool, tmp_path: Path
) -> None:
    save({"v": state, "w": weights(5)}, tmp_path, trusted=trusted)
    found = blank({"v": state, "w": weights(5)})
    load(found, tmp_path, trusted=trusted)
    assert_same(found["v"], state)


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    def states() -> dict[str, Any]:
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }

    def draw() -> list[float]:
        return [random.random(), np.random.normal(), torch.rand(1).item()]

    save({"rng": states()}, tmp_path)
    expected = draw()
    found = {"rng": states()}
    load(found, tmp_path)
    random.setstate(found["rng"]["python"])
    np.random.set_state(found["rng"]["numpy"])
    torch.set_rng_state(found["rng"]["torch"])
    assert draw() == expected


def test_a_bytes_io_keeps_its_bytes_and_position(tmp_path: Path) -> None:
    file = io.BytesIO(b"hello")
    file.seek(2)
    save({"f": file}, tmp_path)
    found: dict[str, Any] = {"f": None}
    load(found, tmp_path)
    assert type(found["f"]) is io.BytesIO
    assert found["f"].read() == b"llo"
    assert found["f"].getvalue() == b"hello"
    assert file.tell() == 2


def test_an_array_that_occurs_twice_stays_one(tmp_path: Path) -> None:
    array = np.arange(4)
    save({"v": (array, {"again": array})}, tmp_path)
    found: dict[str, Any] = {"v": None}
    load(found, tmp_path)
    assert found["v"][0] is found["v"][1]["again"]


class Color(enum.Enum):
    RED = 1


class Own:
    pass


class Loud:
    """An object that says when it is loaded."""

    loaded = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        Loud.loaded += 1


REFUSED = {
    "enum": (Color.RED, f"{__name__}.Color"),
    "time": (datetime.datetime(2026, 1, 2), "datetime.datetime"),
    "path": (pathlib.PurePosixPath("a"), "pathlib.PurePosixPath"),
    "own": (Own(), f"{__name__}.Own"),
    "nested": ((1, {"deep": [Own()]}), f"{__name__}.Own"),
    "with an array": ((np.arange(3), Own()), f"{__name__}.Own"),
    "objects": (np.array([None, "a"], object), "numpy"),
    "generator": (np.random.default_rng(), "numpy.random."),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_reader_would_refuse_is_refused_when_saved(kind: str, tmp_path: Path) -> None:
    value, words = REFUSED[kind]
    with failing() as errors:
        save({"w": weights(9), "a": {"b": value}}, tmp_path / "c")
    assert errors[0].startswith(f"TypeError: 'a.b' has {words}")
    assert "torch.serialization.safe_globals" in errors[0]
    assert "trusted=True" in errors[0]
    assert "\x1b" not in errors[0]
    assert "\\x1b" not in errors[0]
    assert not files_of(tmp_path / "c")
    save({"a": {"b": value}}, tmp_path / "c", trusted=True)
    with failing() as errors:
        load({"a": {"b": None}}, tmp_path / "c")
    assert errors[0].startswith(f"CompatibilityError: 'a.b' has {words}")
    assert "torch.serialization.safe_globals" in errors[0]
    assert "x1b" not in errors[0]
    load({"a": {"b": None}}, tmp_path / "c", trusted=True)


def test_a_save_runs_no_code_of_a_class(tmp_path: Path) -> None:
    value = Loud()
    value.field = 1  # type: ignore[attr-defined] # without a field, pickles call nothing
    for trusted in (False, True):
        writer = PackhorseWriter(tmp_path, trusted=trusted)
        try:
            dcp.save({"v": (np.arange(3), value)}, storage_writer=writer)
        except dcp.api.CheckpointException:
            assert not trusted
    assert Loud.loaded == 0


def test_classes_that_the_caller_allows_are_kept(tmp_path: Path) -> None:
    state = {"v": (Color.RED, np.float32(1))}
    with torch.serialization.safe_globals([Color]):
        save(state, tmp_path)
        found: dict[str, Any] = {"v": None}
        load(found, tmp_path)
    assert found == state
    with failing() as errors:
        load(found, tmp_path)
    assert f"'v' has {__name__}.Color" in errors[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "O"},
        {"dtype": "V1000000"},
        {"dtype": 5},
        {"dtype": "ml_dtypes.finfo"},
        {"shape": (3,)},
        {"shape": (-1, -8)},
        {"shape": (1 << 70, 0)},
        {"data": None},
        {"packhorse.stand_in": "object"},
        {"packhorse.stand_in": "BytesIO", "position": -1},
    ],
)
def test_a_hostile_stand_in_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    good = {"packhorse.stand_in": "ndarray", "dtype": "<f8", "shape": (1,), "data": torch.zeros(8)}
    save({"v": (OrderedDict(good | fields),)}, tmp_path)
    for trusted in (False, True):
        with failing() as errors:
            load({"v": None}, tmp_path, trusted=trusted)
        assert errors[0].startswith("CorruptionError: 'v': a damaged stand-in")


def make_other(kind: str, place: Path) -> Path:
    """A checkpoint that PackhorseWriter has not written."""
    if kind == "pytorch":
        dcp.save({"w": weights(3)}, checkpoint_id=place)
    elif kind == "snapshots":
        SnapshotStore(place).take("a", {"w": weights(3)})
    elif kind == "model":
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)
        transformers.GPT2LMHeadModel(config).save_pretrained(place)
    else:
        torch.save({"w": weights(3)}, place)
    return place


@pytest.mark.filterwarnings("ignore")  # of importing transformers
@pytest.mark.parametrize(
    ("kind", "what", "advice"),
    [
        ("pytorch", "holds a checkpoint that PyTorch's own writer has written", "FileSystemReader"),
        ("snapshots", "holds a store of snapshots", "SnapshotStore"),
        ("model", "holds a model folder of Hugging Face transformers", "from_pretrained"),
        ("file", "is a file (a checkpoint of PyTorch", "is a folder"),
    ],
)
def test_checkpoints_of_other_formats_are_named(
    kind: str, what: str, advice: str, tmp_path: Path
) -> None:
    place = make_other(kind, tmp_path / "c")
    before = files_of(place) if place.is_dir() else place.read_bytes()
    with failing() as errors:
        load({"w": torch.zeros(3)}, place)
    assert f"{place}: {what}" in errors[0]
    assert advice in errors[0]
    for overwrite in (False, True):
        with failing() as errors:
            save({"w": weights(3)}, place, overwrite=overwrite)
        assert errors[0].startswith(f"FileExistsError: {place}: {what}")
    assert before == (files_of(place) if place.is_dir() else place.read_bytes())


def test_what_a_folder_without_a_checkpoint_holds_is_named(tmp_path: Path) -> None:
    torch.save({"w": weights(3)}, tmp_path / "a.pt")
    with pytest.raises(Exception, match=r"holds a\.pt, probably a file of torch\.save"):
        PackhorseReader(tmp_path).read_metadata()
    save({"w": weights(3)}, tmp_path)  # such a file may be beside a checkpoint
    other = tmp_path / "ranks"
    writer = PackhorseWriter(other)
    dcp.save({"w": weights(3)}, storage_writer=writer, use_collectives=False)
    with pytest.raises(Exception, match="use_collectives=False"):
        PackhorseReader(other).read_metadata()
