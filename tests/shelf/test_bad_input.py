"""What a caller can do wrong: one clear line each, and the shelf is as it was."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.disk import Shelf, ShelfTensor
from packhorse.errors import ClosedError, CorruptionError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shelf to be copied: each commit waits for the disk."""
    folder = tmp_path_factory.mktemp("made") / "data.shelf"
    with Shelf(folder) as opened:
        opened["x"] = np.arange(12.0).reshape(4, 3)
        opened["scalar"] = np.float32(1)
        opened.save("state", {"w": np.ones(2)})
        opened.tag("begin")
    return folder


@pytest.fixture
def shelf(tmp_path: Path, made: Path) -> Iterator[Shelf]:
    """A shelf, which must be whole and unchanged in the end."""
    shutil.copytree(made, tmp_path / "data.shelf")
    with Shelf(tmp_path / "data.shelf", timeout=0.1) as opened:
        n_commits = opened.info().n_commits
        yield opened
    with Shelf(tmp_path / "data.shelf", "r") as opened:
        assert opened.verify() == []
        assert opened.info().n_commits == n_commits
        assert opened.keys() == ["scalar", "state", "x"]
        assert opened["x"].numpy().tolist() == np.arange(12.0).reshape(4, 3).tolist()


Call = Callable[[Shelf], object]

SHAPES: list[tuple[Any, type[Exception], str]] = [
    ((2, -1), ValueError, r"the shape \(2, -1\) has a negative size"),
    (-1, ValueError, "negative size"),
    ((2.7, 3), TypeError, r"the shape is \(2.7, 3\); it must have integers only"),
    ("abc", TypeError, "the shape is 'abc'; it must have integers only"),
    (None, TypeError, "the shape is None"),
    ((2, None), TypeError, "integers only"),
    ((1 << 63,), ValueError, r"has more than 2\*\*63 bytes"),
    ((0, 1 << 61), ValueError, r"has more than 2\*\*63 bytes"),
    ((1 << 31, 1 << 31), ValueError, r"has more than 2\*\*63 bytes"),
    ((1,) * 65, ValueError, "the shape has 65 axes; it may have 64"),
]


@pytest.mark.parametrize(("shape", "kind", "message"), SHAPES, ids=lambda value: str(value)[:20])
def test_wrong_shapes(shelf: Shelf, shape: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        shelf.create("x", shape, "float64", replace=True)


OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"base": "next"}, ValueError, "base is 'next'; it must be 'previous' or None"),
    ({"keyframe_every": 0}, ValueError, "keyframe_every is 0; it must be at least 1"),
    ({"keyframe_every": 2.5}, TypeError, "keyframe_every is 2.5; it must be an integer"),
    ({"keyframe_every": "3"}, TypeError, "keyframe_every is '3'"),
    ({"chunk_nbytes": 4095}, ValueError, "chunk_nbytes is 4095; it must be from 4096 to 16777216"),
    ({"chunk_nbytes": 5000.5}, TypeError, "chunk_nbytes is 5000.5; it must be an integer"),
    ({"replace": False}, ValueError, "there is 'x' already; name another, or pass replace=True"),
]


@pytest.mark.parametrize(("options", "kind", "message"), OPTIONS, ids=str)
def test_wrong_options_of_create(
    shelf: Shelf, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        shelf.create("x", (2, 2), "float64", **{"replace": True, **options})


SIZES: list[tuple[Any, type[Exception], str]] = [
    (-1, ValueError, "'x' cannot have -1 rows"),
    (2.0, TypeError, "n_rows is 2.0; it must be an integer"),
    (None, TypeError, "n_rows is None"),
    (1 << 63, ValueError, r"more than 2\*\*63 bytes"),
    (1 << 59, ValueError, r"more than 2\*\*63 bytes"),
]


@pytest.mark.parametrize(("n_rows", "kind", "message"), SIZES, ids=str)
def test_wrong_sizes(shelf: Shelf, n_rows: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        shelf["x"].resize(n_rows)


NAMES: list[tuple[Any, type[Exception], str]] = [
    ("", ValueError, "'': the name of a tensor has 1 to 400 bytes in UTF-8 and no NUL"),
    ("a\0", ValueError, "the name of a tensor has 1 to 400 bytes"),
    ("é" * 201, ValueError, "the name of a tensor has 1 to 400 bytes"),
    ("\ud800", ValueError, r"'\\ud800' is not Unicode text"),
    (3, TypeError, "the name of a tensor is a string, not int"),
    (None, TypeError, "the name of a tensor is a string, not NoneType"),
    (("x",), TypeError, "the name of a tensor is a string, not tuple"),
]
NAMED: dict[str, Callable[[Shelf, Any], object]] = {
    "get": lambda shelf, name: shelf[name],
    "set": lambda shelf, name: shelf.__setitem__(name, 1),
    "copy": lambda shelf, name: shelf.__setitem__(name, shelf["x"]),
    "delete": lambda shelf, name: shelf.__delitem__(name),
    "create": lambda shelf, name: shelf.create(name, 1, "u1"),
    "rename": lambda shelf, name: shelf.rename(name, "y"),
    "rename to": lambda shelf, name: shelf.rename("x", name),
    "save": lambda shelf, name: shelf.save(name, {}),
    "load": lambda shelf, name: shelf.load(name),
}


@pytest.mark.parametrize("call", NAMED)
@pytest.mark.parametrize(("name", "kind", "message"), NAMES, ids=lambda value: repr(value)[:9])
def test_wrong_names(
    shelf: Shelf, call: str, name: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        NAMED[call](shelf, name)
    assert name not in shelf


TAGGED: dict[str, Callable[[Shelf, Any], object]] = {
    "tag": lambda shelf, name: shelf.tag(name),
    "untag": lambda shelf, name: shelf.untag(name),
    "at": lambda shelf, name: shelf.at(name),
    "rollback": lambda shelf, name: shelf.rollback(name),
}


@pytest.mark.parametrize("call", TAGGED)
@pytest.mark.parametrize(("name", "kind", "message"), NAMES, ids=lambda value: repr(value)[:9])
def test_wrong_tags(
    shelf: Shelf, call: str, name: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message.replace("tensor", "tag")):
        TAGGED[call](shelf, name)


@pytest.mark.parametrize("prefix", [3, None, "\ud800", "x\0"], ids=repr)
def test_wrong_prefixes(shelf: Shelf, prefix: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"its beginning, (is|has)|Unicode text"):
        shelf.keys(prefix)


ABSENT: dict[str, tuple[Call, str]] = {
    "get": (lambda shelf: shelf["absent"], "data.shelf: there is no tensor 'absent'"),
    "at": (lambda shelf: shelf.at("begin")["absent"], "tag 'begin': there is no tensor 'absent'"),
    "delete": (lambda shelf: shelf.__delitem__("absent"), "there is no tensor 'absent'"),
    "rename": (lambda shelf: shelf.rename("absent", "y"), "there is no tensor 'absent'"),
    "load": (lambda shelf: shelf.load("absent"), "there is no state 'absent'"),
    "tag": (lambda shelf: shelf.at("absent"), "data.shelf: there is no tag 'absent'"),
    "untag": (lambda shelf: shelf.untag("absent"), "there is no tag 'absent'"),
    "rollback": (lambda shelf: shelf.rollback("absent"), "there is no tag 'absent'"),
}


@pytest.mark.parametrize("call", ABSENT)
def test_what_is_not_there(shelf: Shelf, call: str) -> None:
    with pytest.raises(KeyError, match=ABSENT[call][1]):
        ABSENT[call][0](shelf)


MIXED_UP: dict[str, tuple[Call, type[Exception], str]] = {
    "a state": (lambda s: s["state"], TypeError, r"a nested state; read it with load\('state'\)"),
    "a tensor": (lambda s: s.load("x"), TypeError, r"'x' is a tensor; use shelf\['x'\]"),
    "a taken name": (lambda s: s.rename("x", "scalar"), ValueError, "there is 'scalar' already"),
    "its own name": (lambda s: s.rename("x", "x"), ValueError, "there is 'x' already; remove it"),
    "a taken tag": (lambda s: s.tag("begin"), ValueError, "a tag 'begin' already; untag it first"),
    "a scalar's rows": (lambda s: s["scalar"].resize(3), ValueError, "'scalar' has no axes"),
    "a scalar's end": (lambda s: s["scalar"].append(3), ValueError, "'scalar' has no axes; rows"),
    "a scalar's runs": (lambda s: next(s["scalar"].iter_chunks()), TypeError, "over a 0-d tensor"),
    "runs of words": (lambda s: next(s["x"].iter_chunks("9")), TypeError, "nbytes is '9'; it must"),
    "runs to apply": (lambda s: s["x"].apply(abs, 1e6), TypeError, "nbytes is 1000000.0; it must"),
    "a scalar's length": (lambda s: len(s["scalar"]), TypeError, r"len\(\) of unsized object"),
    "a tag's rows": (
        lambda s: s.at("begin")["x"].__setitem__(0, 1), PermissionError,
        r"tag 'begin' cannot be changed; write to the shelf itself, or go back with rollback\('beg",
    ),
    "a tag's size": (
        lambda s: s.at("begin")["x"].resize(1), PermissionError, "tag 'begin' cannot be changed",
    ),
    "a tag's end": (
        lambda s: s.at("begin")["x"].append([1, 2, 3]), PermissionError, "tag 'begin' cannot be",
    ),
    "a tag's elements": (
        lambda s: s.at("begin")["x"].__iadd__(1), PermissionError, "tag 'begin' cannot be changed",
    ),
    "no copy": (lambda s: np.array(s["x"], copy=False), ValueError, "is always a copy"),
}  # fmt: skip


@pytest.mark.parametrize("call", MIXED_UP)
def test_what_is_something_else(shelf: Shelf, call: str) -> None:
    act, kind, message = MIXED_UP[call]
    with pytest.raises(kind, match=message):
        act(shelf)


VALUES: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, "safetensors has no dtype for object; convert the array first"),
    ({}, TypeError, "no dtype for object"),
    ("text", TypeError, "no dtype for <U4"),
    ([[1], [1, 2]], ValueError, "inhomogeneous"),
    (np.zeros(2, complex), TypeError, "no dtype for complex128; convert the array first"),
    (np.zeros(2, "M8[s]"), TypeError, "no dtype for datetime64"),
    (np.zeros(2, [("a", "f4")]), TypeError, "no dtype for"),
    (np.zeros(2, np.longdouble), TypeError, "no dtype for float128"),
    (np.ma.masked_equal([1, 2], 1), TypeError, "a masked array has elements that are missing"),
]


@pytest.mark.parametrize(("value", "kind", "message"), VALUES, ids=lambda value: repr(value)[:20])
def test_wrong_values(shelf: Shelf, value: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        shelf["x"] = value


DTYPES = ["nope", "S3", object, 3, "complex128", "M8[s]", "torch.float32", ("f4", (2,))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_dtypes(shelf: Shelf, dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"data type|no dtype for|several"):
        shelf.create("y", 3, dtype)


def test_wrong_values_of_pytorch(shelf: Shelf) -> None:
    torch = pytest.importorskip("torch")
    wrong = {
        "a dense PyTorch tensor is needed": torch.eye(3).to_sparse(),
        "no dtype for torch.complex128": torch.zeros(2, dtype=torch.complex128),
        "Tensor on device meta has no memory": torch.empty(2, 3, device="meta"),
    }
    for message, tensor in wrong.items():
        with pytest.raises(TypeError, match=message):
            shelf["x"] = tensor
        with pytest.raises(TypeError, match=message):
            shelf["x"][:2] = tensor
    with pytest.raises(TypeError, match=r"no dtype for torch.complex128"):
        shelf.create("y", 3, torch.complex128)


OPENED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mode": "w"}, ValueError, r"mode is 'w'; it must be 'r' or 'r\+'"),
    ({"mode": None}, ValueError, "mode is None"),
    ({"framework": "jax"}, ValueError, "framework is 'jax'; it must be one of 'np'"),
    ({"level": 9}, ValueError, "level is 9; it must be one of 'fast', 'default', 'max'"),
    ({"threads": 0}, ValueError, "threads is 0; it must be at least 1"),
    ({"threads": 1.5}, TypeError, "threads must be an integer or None, not float"),
    ({"cache_nbytes": -1}, ValueError, "cache_nbytes is -1; it must be a number of bytes"),
    ({"cache_nbytes": 1e9}, ValueError, r"cache_nbytes is 1000000000.0; it must be"),
    ({"timeout": -1}, ValueError, "timeout is -1; it must be a number of seconds"),
    ({"timeout": None}, ValueError, "timeout is None"),
    ({"timeout": float("nan")}, ValueError, "timeout is nan"),
    ({"timeout": float("inf")}, ValueError, "timeout is inf"),
    ({"path": 3}, TypeError, "expected str, bytes or os.PathLike object, not int"),
    ({"path": "s3://b/x"}, ValueError, "s3://b/x: a shelf lies in a folder of a local disk, never"),
]


@pytest.mark.parametrize(("options", "kind", "message"), OPENED, ids=str)
def test_wrong_options_of_a_shelf(
    tmp_path: Path, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    path = tmp_path / "new.shelf"
    with pytest.raises(kind, match=message):
        Shelf(**{"path": path, **options})
    assert not path.exists()


def test_what_is_no_shelf(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"none: there is no shelf; open it with mode 'r\+'"
    ):
        Shelf(tmp_path / "none", "r")
    (tmp_path / "file").write_text("text")
    with pytest.raises(FileExistsError, match="file: is a file; a shelf is a folder; name another"):
        Shelf(tmp_path / "file")
    with pytest.raises(FileExistsError, match="file: is a file; a shelf is a folder; name another"):
        Shelf(tmp_path / "file", "r")
    with pytest.raises(FileExistsError, match=r"no shelf, and not empty \(it has 'file'\); name"):
        Shelf(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no shelf in this folder"):
        Shelf(tmp_path, "r")
    (tmp_path / "damaged").mkdir()
    for content in (b"", b"text" * 5000):
        (tmp_path / "damaged" / "shelf-1.mdb").write_bytes(content)
        for mode in ("r", "r+"):
            with pytest.raises(
                CorruptionError, match=r"shelf-1.mdb: (not a shelf|the file is)"
            ) as caught:
                Shelf(tmp_path / "damaged", mode)
            assert str(caught.value).count("shelf-1.mdb") == 1


WRITES: dict[str, Call] = {
    "set": lambda shelf: shelf.__setitem__("x", 1),
    "delete": lambda shelf: shelf.__delitem__("x"),
    "create": lambda shelf: shelf.create("y", 1, "u1"),
    "rename": lambda shelf: shelf.rename("x", "y"),
    "save": lambda shelf: shelf.save("y", {}),
    "tag": lambda shelf: shelf.tag("y"),
    "untag": lambda shelf: shelf.untag("begin"),
    "rollback": lambda shelf: shelf.rollback("begin"),
    "compact": lambda shelf: shelf.compact(),
    "transaction": lambda shelf: shelf.transaction().__enter__(),
}
ROWS_WRITTEN: dict[str, Callable[[ShelfTensor], object]] = {
    "rows": lambda x: x.__setitem__(0, 1),
    "append": lambda x: x.append([1, 2, 3]),
    "resize": lambda x: x.resize(1),
    "in place": lambda x: x.__iadd__(1),
    "apply": lambda x: x.apply(np.sqrt),
}


def test_a_shelf_that_is_open_for_reading_only(shelf: Shelf) -> None:
    message = r"data.shelf: the shelf is open for reading only; open it with mode 'r\+'"
    with Shelf(shelf.path, "r") as other:
        for write in WRITES.values():
            with pytest.raises(PermissionError, match=message):
                write(other)
        for change in ROWS_WRITTEN.values():
            with pytest.raises(PermissionError, match=message):
                change(other["x"])


def test_a_shelf_that_is_open_for_writing_already(shelf: Shelf) -> None:
    with pytest.raises(BlockingIOError, match=r"data.shelf"):
        Shelf(shelf.path)
    with pytest.raises(BlockingIOError, match=r"data.shelf"):
        Shelf(f"{shelf.path.parent}/../{shelf.path.parent.name}/data.shelf")


READS: dict[str, Call] = {
    "get": lambda shelf: shelf["x"],
    "in": lambda shelf: "x" in shelf,
    "keys": lambda shelf: shelf.keys(),
    "len": len,
    "iter": list,
    "load": lambda shelf: shelf.load("state"),
    "info": lambda shelf: shelf.info(),
    "verify": lambda shelf: shelf.verify(),
    "tags": lambda shelf: shelf.tags(),
    "at": lambda shelf: shelf.at("begin"),
    "reading": lambda shelf: shelf.reading().__enter__(),
}
ROWS_READ: dict[str, Callable[[ShelfTensor], object]] = {
    "shape": lambda x: x.shape,
    "rows": lambda x: x[0],
    "numpy": lambda x: x.numpy(),
    "runs": lambda x: next(x.iter_chunks()),
}


def test_a_shelf_that_is_closed(shelf: Shelf, tmp_path: Path) -> None:
    other = Shelf(tmp_path / "other.shelf")
    other["x"] = np.arange(6.0).reshape(2, 3)
    other.save("state", {})
    other.tag("begin")
    x, then, view = other["x"], other.at("begin")["x"], other.at("begin")
    started = x.iter_chunks(8)
    next(started)
    other.close()
    other.close()
    assert other.is_closed
    message = "other.shelf: the shelf is closed; open it again"
    for call in (*READS.values(), *WRITES.values()):
        with pytest.raises(ClosedError, match=message):
            call(other)
    for use in (*ROWS_READ.values(), *ROWS_WRITTEN.values()):
        with pytest.raises(ClosedError, match=message):
            use(x)
    for read in ROWS_READ.values():
        with pytest.raises(ClosedError, match=message):
            read(then)
    with pytest.raises(ClosedError, match=message):
        view.keys()
    with pytest.raises(ClosedError, match=message):
        next(started)
    with pytest.raises(ClosedError, match=message):
        shelf["x"] = x
    assert repr(x) == "ShelfTensor('x', not there)"


def test_closing_waits_for_the_transaction_of_another_thread(tmp_path: Path) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def write() -> None:
        with shelf.transaction():
            begun.set()
            may_end.wait(10)
            shelf["x"] = np.arange(3)

    shelf = Shelf(tmp_path / "data.shelf", timeout=0.4)
    thread = threading.Thread(target=write)
    thread.start()
    assert begun.wait(10)
    with pytest.raises(TimeoutError, match="a transaction of another thread goes on for more than"):
        shelf.close()
    assert not shelf.is_closed
    threading.Timer(0.05, may_end.set).start()
    shelf.close()
    thread.join()
    with Shelf(tmp_path / "data.shelf", "r") as shelf:
        assert shelf["x"].numpy().tolist() == [0, 1, 2]
