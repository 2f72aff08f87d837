"""A damaged shelf: what is damaged is named, the rest stays readable, and nothing wrong is
returned.

Damage is done in two ways: to a record, through LMDB, and to the bytes of the file, where LMDB's
own pages have no checksums. `PACKHORSE_FLIPS=500 pytest tests/shelf/test_damage.py` flips more
bits.
"""

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import fork_context
from shelf_records import change_record, flip, records_of
from shelf_workload import ModelTensor

from packhorse.disk import Shelf
from packhorse.disk.shelf.records import StateRecord
from packhorse.errors import CompatibilityError, CorruptionError, PackhorseError

N_FLIPS = int(os.environ.get("PACKHORSE_FLIPS", "60"))


def content() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "weights": rng.standard_normal((300, 64)).astype(np.float32),
        "noise": rng.integers(0, 256, (40, 1000)).astype(np.uint8),
        "row": np.arange(7),
    }


def make(folder: Path) -> None:
    """A shelf with tensors, with deltas, patches and zeros, and a tag of an older state."""
    with Shelf(folder) as shelf:
        for name, array in content().items():
            tensor = shelf.create(name, (0, *array.shape[1:]), array.dtype, chunk_nbytes=4096)
            tensor.append(array)
        shelf["gone"] = [1]
        shelf.tag("before")
        del shelf["gone"]
        shelf["weights"][3] = 0
        deltas = shelf.create("deltas", (0, 500), "float32", base="previous", keyframe_every=4)
        deltas.append(np.linspace(0, 1, 6000, dtype=np.float32).reshape(12, 500))
        zeros = shelf.create("zeros", (1000, 64), "float32", chunk_nbytes=4096)
        zeros[500:540] = 1
        shelf.tag("middle")
        shelf["noise"][20] = 1
        shelf["weights"] *= 2
        shelf.rollback("middle")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "data.shelf"
    make(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "data.shelf"))


def read_all(shelf: Shelf) -> dict[str, str]:
    """The digest of each tensor, also of tags, or its error; of each row alone, too."""
    found = {}
    views = {"": shelf} | {f"{tag}: ": shelf.at(tag) for tag in shelf.tags()}
    for prefix, view in views.items():
        for name in view:
            try:
                array = np.asarray(view[name])
                for i in range(0, len(array), 97):
                    assert (view[name][i] == array[i]).all()
                found[prefix + name] = ModelTensor(array).digest()
            except PackhorseError as error:
                found[prefix + name] = f"{type(error).__name__}: {error}"
    return found


def serve(connection: Connection) -> None:
    """Read one damaged shelf after the other."""
    while (folder := connection.recv()) is not None:
        try:
            with Shelf(folder, "r", threads=1) as shelf:
                found: Any = read_all(shelf), [str(problem) for problem in shelf.verify()]
        except (PackhorseError, OSError) as error:
            found = f"{type(error).__name__}: {error}"
        connection.send(found)


class Reader:
    """Another process that reads, because LMDB may end it by a signal."""

    def __init__(self) -> None:
        self._process: BaseProcess | None = None

    def __call__(self, folder: Path, expected: dict[str, str]) -> str:
        """What comes of reading a damaged shelf."""
        if self._process is None:
            self._connection, theirs = fork_context().Pipe()
            self._process = fork_context().Process(target=serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        self._connection.send(folder)
        try:
            return self._judge(self._connection.recv(), expected)
        except EOFError:
            self._process.join()
            code, self._process = self._process.exitcode, None
            return f"exit {code}"

    def end(self) -> None:
        if self._process is not None:
            self._connection.send(None)
            self._process.join()

    def _judge(self, answer: Any, expected: dict[str, str]) -> str:
        if isinstance(answer, str):
            return "refused"
        found, problems = answer
        if found == expected:
            return "only verify() finds it" if problems else "right"
        same = {name: text for name, text in found.items() if "Error: " not in text}
        wrong = [name for name in same if same[name] != expected.get(name)]
        lost = expected.keys() - found.keys()
        if wrong or lost:  # what is more than expected has an error
            return f"wrong: {wrong}, lost: {lost}"
        return "named" if problems else f"not found by verify(): {found}"


@pytest.fixture(scope="module")
def expected(made: Path) -> dict[str, str]:
    with Shelf(made, "r") as shelf:
        assert not shelf.verify()
        found = read_all(shelf)
    assert not any("Error" in text for text in found.values())
    return found


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.end()


def flipped(
    made: Path, tmp_path: Path, places: Iterator[tuple[int, int]], reader: Reader,
    expected: dict[str, str],
) -> Counter[str]:  # fmt: skip
    """What comes of flips of single bits of the file, each in a copy of its own."""
    outcomes = Counter[str]()
    file = next(made.glob("*.mdb")).name
    content = (made / file).read_bytes()
    for number, (byte, bit) in enumerate(places):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        (folder / file).write_bytes(flip(content, 8 * byte + bit))
        outcome = reader(folder, expected)
        if outcome.startswith(("wrong", "not")):
            outcome += f" (byte {byte}, bit {bit})"
        outcomes[outcome] += 1
        shutil.rmtree(folder)
    print(dict(outcomes))
    return outcomes


def test_any_byte_of_the_file_flips(
    made: Path, tmp_path: Path, reader: Reader, expected: dict[str, str]
) -> None:
    rng = random.Random(int(os.environ.get("PACKHORSE_SEED", "0")))
    length = next(made.glob("*.mdb")).stat().st_size
    places = ((rng.randrange(length), rng.randrange(8)) for _ in range(N_FLIPS))
    outcomes = flipped(made, tmp_path, places, reader, expected)
    assert not [each for each in outcomes if each.startswith(("wrong", "not", "exit 1"))], outcomes


def places_of(made: Path, tables: list[str]) -> list[int]:
    """Where in the file the bytes of the records of some tables are, keys included."""
    content = next(made.glob("*.mdb")).read_bytes()
    places: list[int] = []
    for table in tables:
        for key, value in records_of(made, table):
            at = content.find(key + value)
            while at >= 0:  # pages that are free may have the same bytes
                places += range(at, at + len(key + value))
                at = content.find(key + value, at + 1)
    return places


def test_any_byte_of_a_record_flips(
    made: Path, tmp_path: Path, reader: Reader, expected: dict[str, str]
) -> None:
    """Keys, too: a pointer that is not found would be a chunk of zeros."""
    rng = random.Random(int(os.environ.get("PACKHORSE_SEED", "1")))
    at = places_of(made, ["meta", "names", "pointers", "tags"])
    places = ((rng.choice(at), rng.randrange(8)) for _ in range(2 * N_FLIPS))
    outcomes = flipped(made, tmp_path, places, reader, expected)
    bad = ("wrong", "not", "exit", "only")
    assert not [each for each in outcomes if each.startswith(bad)], outcomes
    assert outcomes["named"] > N_FLIPS // 6


def test_the_file_is_cut(
    made: Path, tmp_path: Path, reader: Reader, expected: dict[str, str]
) -> None:
    """Each length gives an error or what is right; never SIGBUS, by which LMDB's map ends."""
    file = next(made.glob("*.mdb"))
    length, outcomes = file.stat().st_size, {}
    for cut in (0, 1, 4096, 8192, 12288, length // 3, length // 2, length - 4096, length - 1):
        folder = tmp_path / f"{cut}"
        shutil.copytree(made, folder)
        os.truncate(folder / file.name, cut)
        outcomes[cut] = reader(folder, expected)
    print(outcomes)
    assert set(outcomes.values()) <= {"refused", "named", "right"}, outcomes


# One record is damaged: the rest stays readable, the shelf can be written to, and the damaged
# tensor can be replaced or removed.


def newest_key(folder: Path, name: str) -> bytes:
    return max(key for key, _ in records_of(folder, "names") if key.startswith(name.encode()))


def check_rest(folder: Path, damaged: set[str], expected: dict[str, str]) -> list[str]:
    """All but some tensors are right, also while others are written. Returns the errors."""
    with Shelf(folder) as shelf:
        found = read_all(shelf)
        assert found.keys() == expected.keys()
        errors = {name: text for name, text in found.items() if text != expected[name]}
        assert errors.keys() == damaged
        assert all(text.startswith("CorruptionError: ") for text in errors.values())
        problems = shelf.verify()
        assert problems
        shelf["new"] = [1]
        shelf["zeros"] += 1
        shelf["zeros"] -= 1
        shelf.tag("later")
        shelf.untag("later")
        del shelf["new"]
        shelf.compact()
        assert read_all(shelf) == found
    return list(errors.values())


def check_replaced(folder: Path, name: str) -> None:
    """The damaged tensor is overwritten, then removed."""
    with Shelf(folder) as shelf:
        assert name in shelf
        shelf[name] = [5, 6]
        assert shelf[name][...].tolist() == [5, 6]
        del shelf[name]
        assert name not in shelf
    with Shelf(folder, "r") as shelf:
        assert name not in list(shelf)


def test_a_chunk(folder: Path, expected: dict[str, str]) -> None:
    """The error names the tensor, the chunk and the place; the other chunks stay readable."""
    with Shelf(folder, "r") as shelf, shelf._session.state() as state:
        record = state.entry("noise")
        pointers = dict(state.all_pointers(record.id, 0, 99, ""))
    key = pointers[7].chunk.to_bytes(8, "big")
    length = len(dict(records_of(folder, "chunks"))[key])
    rows = range(28, 32)
    for byte in (0, 9, 20, 40, length // 2, length - 1):
        change_record(folder, "chunks", key, lambda value, byte=byte: flip(value, 8 * byte))
        errors = check_rest(folder, {"noise", "before: noise", "middle: noise"}, expected)
        for error in errors:
            assert "'noise'" in error
            assert "chunk 7 (rows 28 to 31), stored as" in error
        with Shelf(folder, "r") as shelf:
            (problem,) = {(p.name, p.chunk) for p in shelf.verify() if p.name}
            assert problem == ("noise", 7)
            for row in (0, 27, 32, 39):
                assert (shelf["noise"][row] == content()["noise"][row]).all()
            for row in rows:
                with pytest.raises(CorruptionError, match="'noise': chunk 7"):
                    shelf["noise"][row]
        change_record(folder, "chunks", key, lambda value, byte=byte: flip(value, 8 * byte))
    change_record(folder, "chunks", key, lambda value: flip(value, 8 * length // 2))
    with Shelf(folder) as shelf:
        shelf["noise"][rows.start : rows.stop] = content()["noise"][rows.start : rows.stop]
        assert (shelf["noise"][...] == content()["noise"]).all()
    check_replaced(folder, "noise")


def test_a_chunk_of_a_nested_state(tmp_path: Path) -> None:
    """The error names the tensor in the state, and the chunk."""
    with Shelf(tmp_path) as shelf:
        weights = {f"layer{i}": np.full((2, 4), i, np.float32) for i in range(5)}
        shelf.save("model", {"weights": weights, "step": 3})
        assert len(shelf.load("model")["weights"]) == 5
    with Shelf(tmp_path, "r") as shelf, shelf._session.state() as state:
        entry = state.entry("model")
        assert isinstance(entry, StateRecord)
        (pointer,) = state.pointers(entry.tensors[3], [0], "")
    change_record(
        tmp_path, "chunks", pointer.chunk.to_bytes(8, "big"), lambda value: flip(value, 99)
    )
    error = r"^tensor 'weights\.layer3' of a nested state: .*'model': chunk 0 "
    with Shelf(tmp_path, "r") as shelf, pytest.raises(CorruptionError, match=error):
        shelf.load("model")


def test_a_chunk_is_missing(folder: Path, expected: dict[str, str]) -> None:
    with Shelf(folder, "r") as shelf, shelf._session.state() as state:
        (pointer,) = state.pointers(state.entry("row"), [0], "")
    change_record(folder, "chunks", pointer.chunk.to_bytes(8, "big"), lambda value: None)
    with Shelf(folder, "r") as shelf:
        with pytest.raises(CorruptionError, match=r"'row': chunk 0.*is missing"):
            shelf["row"][...]
        assert read_all(shelf).items() >= {("weights", expected["weights"])}
        assert "is missing" in str(shelf.verify()[0])
    check_replaced(folder, "row")


@pytest.mark.parametrize("change", [flip, lambda value, bit: value[:-1], lambda value, bit: b""])
def test_an_entry(
    folder: Path, expected: dict[str, str], change: Callable[[bytes, int], bytes]
) -> None:
    key = newest_key(folder, "row")
    for bit in (100, 500, 900):
        before = dict(records_of(folder, "names"))[key]
        change_record(folder, "names", key, lambda value, bit=bit: change(value, bit))
        for error in check_rest(folder, {"row", "before: row", "middle: row"}, expected):
            assert "'row'" in error
        change_record(folder, "names", key, lambda value, before=before: before)
    change_record(folder, "names", key, lambda value: change(value, 100))
    check_replaced(folder, "row")


def test_an_earlier_state_stays(folder: Path, expected: dict[str, str]) -> None:
    """The entry of the newest state is damaged, and that of the tag is another one."""
    with Shelf(folder) as shelf:
        shelf["noise"][0] = 5
    key = newest_key(folder, "noise")
    change_record(folder, "names", key, lambda value: flip(value, 900))
    with Shelf(folder) as shelf:
        with pytest.raises(CorruptionError, match="'noise'"):
            shelf["noise"]
        assert (shelf.at("middle")["noise"][...] == content()["noise"]).all()
        shelf.rollback("middle")
        assert read_all(shelf) == expected


def test_a_pointer(folder: Path, expected: dict[str, str]) -> None:
    """Only its chunk cannot be read."""
    pointers = records_of(folder, "pointers")
    with Shelf(folder, "r") as shelf:
        number = shelf._session.record("weights", None).id
    key = max(k for k, _ in pointers if k.startswith(number.to_bytes(8, "big") + b"\0" * 7 + b"\2"))
    for bit in (0, 70, 100, 159):
        change_record(folder, "pointers", key, lambda value, bit=bit: flip(value, bit))
        with Shelf(folder) as shelf:
            weights = expected["weights"]
            with pytest.raises(CorruptionError, match="'weights': the pointer of chunk 2 is"):
                shelf["weights"][...]
            good = [n for n in range(300) if not 32 <= n < 48]
            array = shelf["weights"][good]
            assert (array[3] == 0).all()
            assert (array[4:] == content()["weights"][good][4:]).all()
            shelf["weights"][32:48] = content()["weights"][32:48]
            assert ModelTensor(shelf["weights"][...]).digest() == weights
        shutil.rmtree(folder)
        make(folder)
    change_record(folder, "pointers", key, lambda value: flip(value, 0))
    check_replaced(folder, "weights")


def test_uses(folder: Path, expected: dict[str, str]) -> None:
    """What is wrong about the uses of a chunk never makes a chunk go that is in use."""
    shares = records_of(folder, "shares")
    assert shares
    for key, _ in shares:
        change_record(folder, "shares", key, lambda value: flip(value, 1))
    with Shelf(folder) as shelf:
        assert read_all(shelf) == expected
        assert sum("uses" in str(problem) for problem in shelf.verify()) >= len(shares)
        shelf["deltas"][...] = 0
        shelf["deltas"][0] = 1
        shelf.rollback("middle")
        assert read_all(shelf) == expected
        shelf.untag("before")
        shelf["deltas"] *= 3
        assert (shelf.at("middle")["weights"][4:] == content()["weights"][4:]).all()


def test_a_tag(folder: Path, expected: dict[str, str]) -> None:
    """Nothing is written as long as it is not known what the tag shows."""
    before = dict(records_of(folder, "tags"))[b"before"]
    change_record(folder, "tags", b"before", lambda value: flip(value, 300))
    with Shelf(folder) as shelf:
        assert shelf.tags() == ["middle", "before"]
        with pytest.raises(CorruptionError, match="tag 'before'"):
            shelf.at("before")
        assert [problem.tag for problem in shelf.verify() if problem.tag] == ["before"]
        assert (shelf.at("middle")["noise"][...] == content()["noise"]).all()
        assert (shelf["noise"][...] == content()["noise"]).all()
        with pytest.raises(CorruptionError, match=r"tag 'before'.*before untag\(\)"):
            shelf["x"] = [1]
    change_record(folder, "tags", b"before", lambda value: before)
    with Shelf(folder) as shelf:
        assert read_all(shelf) == expected
    change_record(folder, "tags", b"before", lambda value: flip(value, 300))
    with Shelf(folder) as shelf:
        shelf.untag("before")
        shelf["x"] = [1]
        assert shelf.tags() == ["middle"]
        del shelf["x"]
        assert not shelf.verify()


def test_the_head(folder: Path) -> None:
    for bit in (0, 80, 200, 351):
        change_record(folder, "meta", b"head", lambda value, bit=bit: flip(value, bit))
        for mode in ("r", "r+"):
            with pytest.raises((CorruptionError, CompatibilityError), match=r"head record|version"):
                Shelf(folder, mode)
        change_record(folder, "meta", b"head", lambda value, bit=bit: flip(value, bit))
    with Shelf(folder) as shelf:
        assert not shelf.verify()


def test_damaged_while_it_is_open(folder: Path) -> None:
    """A reader that is open meets the damage at its next read, and nothing else breaks."""
    (path,) = folder.glob("*.mdb")
    key = newest_key(folder, "noise")
    at = path.read_bytes().index(key + dict(records_of(folder, "names"))[key]) + len(key) + 40
    with Shelf(folder, "r", cache_nbytes=0) as shelf:
        assert (shelf["row"][...] == content()["row"]).all()
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"\xff")
        with pytest.raises(CorruptionError, match="'noise'"):
            shelf["noise"]
        assert (shelf["row"][...] == content()["row"]).all()
