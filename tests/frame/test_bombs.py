"""Short input that claims to be large is refused at once, before memory is allocated for it.

The bombs are read in a process whose address space can hardly grow (`bomb_child.py`). A reader that
believes a bomb there ends with a MemoryError instead of its documented error. Input that really
expands is refused by the caller's limit.
"""

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import bomb_child
import frame_builder as fb
import numpy as np
import pytest
import zstandard
from bomb_child import FILE_READERS, FRAME_READERS, ROOM
from cli_samples import Ended
from codec_battery import SANITIZED
from disk_samples import entry, file_bytes, leftovers
from frame_builder import SMALL, Raw, Stored, build_file, build_frame, original_file

from packhorse import numpy as ph_numpy
from packhorse import open_file
from packhorse import torch as ph_torch
from packhorse.disk import pack_file, unpack_file, unpack_folder, verify_file, verify_folder
from packhorse.disk.packed_header import min_text_nbytes
from packhorse.errors import CorruptionError
from packhorse.frame import compress_buffer
from packhorse.layout import Mode

TEN_TB = 10**13
SECONDS = 2.0  # of the processor, on a slow one


def frame_of(nbytes: int) -> fb.BuiltFrame:
    """A frame of one stored chunk whose shape claims `nbytes`."""
    return build_frame(b"", "U8", (nbytes,), codings=[Stored()])


def as_file(frame: bytes, nbytes: int) -> bytes:
    """A packed file of one frame whose recorded header claims `nbytes`."""
    header = file_bytes({"a": entry(0, nbytes)})
    return build_file(header, {"a": frame})


def recording(text: bytes) -> bytes:
    """A packed file whose recorded header is this text."""

    def lie(record: dict[str, object]) -> None:
        record["header"] = base64.b64encode(zstandard.compress(text)).decode()

    return build_file(original_file({}), {}, edit_record=lie)


def padded_claim() -> bytes:
    """A file of 100 bytes that claims 10 TB."""
    text = json.dumps({"a": entry(0, TEN_TB)}, separators=(",", ":")).encode()
    return file_bytes(text.ljust(92))


def zstd_frame(nbytes: int) -> bytes:
    """A Zstandard frame of few bytes that declares `nbytes`, and a window of 2 GiB."""
    return b"\x28\xb5\x2f\xfd\xc0\xa8" + nbytes.to_bytes(8, "little") + b"\x01\0\0"


@cache
def zeros(nbytes: int) -> bytes:
    """A good frame of this many zeros."""
    return compress_buffer(np.zeros(nbytes, np.uint8), "U8", (nbytes,)).to_bytes()


def many(n: int) -> bytes:
    """Both headers agree on `n` tensors, and none has a frame."""
    names = [f"layer.{i}" for i in range(n)]
    original = file_bytes({name: entry(0, 0) for name in names})
    return build_file(original, dict.fromkeys(names, b""))


HUGE = 4 * ROOM
TABLE = {"n_chunks": 2**29 - 16, "header_nbytes": 2**32 - 64, "chunk_log": 21}  # they agree

FRAMES: dict[str, Callable[[], bytes]] = {
    "shape of 10 TB": lambda: bytes(frame_of(TEN_TB)),
    "table of 4 GiB": lambda: bytes(frame_of(2**50).lie(**TABLE)),
    "10 TB of chunks": lambda: bytes(SMALL["stored"]().lie(frame_nbytes=TEN_TB)),
    "zstd of 10 TB": lambda: bytes(
        build_frame(bytes(64), "I16", codings=[Raw(Mode.ZSTD, zstd_frame(TEN_TB))])
    ),
    "zstd with a window of 2 GiB": lambda: bytes(
        build_frame(bytes(64), "I16", codings=[Raw(Mode.ZSTD, zstd_frame(64))])
    ),
    "a palette of 4 GiB": lambda: bytes(SMALL["palette"]().patch_stream(0, 4, b"\xff" * 4)),
    "rans of 4 GiB": lambda: bytes(SMALL["rans"]().patch_stream(0, 4, b"\xff" * 4)),
}
FILES: dict[str, Callable[[], bytes]] = {
    "100 bytes that claim 10 TB": padded_claim,
    "a recorded header of 10 TB": lambda: as_file(bytes(frame_of(100)), TEN_TB),
    "a recorded header and a frame of 10 TB": lambda: as_file(bytes(frame_of(TEN_TB)), TEN_TB),
    "a recorded header of 1 PB compressed": lambda: build_file(
        original_file({}),
        {},
        edit_record=lambda r: r.update(header=base64.b64encode(zstd_frame(10**15)).decode()),
    ),
    "90 MB of spaces": lambda: recording(b"{}" + b" " * 90_000_000),
    "90 MB of lists": lambda: recording(b'{"a":[' + b"[]," * 30_000_000 + b"0]}"),
    "90 MB of objects": lambda: recording(b'{"a":[' + b"{}," * 30_000_000 + b"0]}"),
    "a name of 90 MB": lambda: recording(b'{"' + b"a" * 90_000_000 + b'":0}'),
    "1 MB of lists": lambda: recording(b'{"a":[' + b"[]," * 340_000 + b"0]}"),
    "1 MB of objects": lambda: recording(b'{"a":[' + b'{"":0},' * 140_000 + b"0]}"),
    "nested lists": lambda: recording(b'{"a":' + b"[" * 400_000 + b"]" * 400_000 + b"}"),
    "nested lists in the file": lambda: file_bytes(b'{"a":' + b"[" * 10**6 + b"]" * 10**6 + b"}"),
    "a number of a million digits": lambda: recording(b'{"a":' + b"9" * 10**6 + b"}"),
    "numbers of 4000 digits": lambda: recording(b'{"a":[' + (b"9" * 4000 + b",") * 200 + b"0]}"),
    "10,000 tensors without frames": lambda: many(10_000),
}


short_of_memory = pytest.mark.skipif(SANITIZED, reason="the sanitizer does not allow for it")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple]]:
    """What every reader did with every bomb."""
    folder = tmp_path_factory.mktemp("bombs")
    bombs = {
        **{f"{name}.frame": make() for name, make in FRAMES.items()},
        **{f"{name}.file": make() for name, make in FILES.items()},
        "zeros.frame": zeros(HUGE),
        "zeros.file": as_file(zeros(HUGE), HUGE),
    }
    for name, data in bombs.items():
        (folder / name).write_bytes(data)
    done = subprocess.run(
        [sys.executable, bomb_child.__file__, *map(folder.joinpath, bombs)],
        capture_output=True,
        timeout=300,
        check=True,
    )
    assert not leftovers(folder, *bombs)
    return json.loads(done.stdout)


CASES = [
    *((f"{name}.frame", read.__name__) for name in FRAMES for read in FRAME_READERS),
    *((f"{name}.file", read.__name__) for name in FILES for read in FILE_READERS),
]


@short_of_memory
@pytest.mark.parametrize(("bomb", "reader"), CASES)
def test_a_bomb_is_refused_at_once(report: dict, bomb: str, reader: str) -> None:
    """With an error of ours and a readable message, in little time and hardly any memory."""
    kind, message, seconds = report[bomb][reader]
    if kind is None:  # headers alone tell nothing of frames
        assert (bomb, reader) in {
            ("10,000 tensors without frames.file", "logical_nbytes"),
            ("a recorded header of 10 TB.file", "logical_nbytes"),
            ("a recorded header and a frame of 10 TB.file", "logical_nbytes"),
        }
    else:
        assert kind in ("CorruptionError", "TruncationError", "PackhorseError")
    assert len(message) < 1000
    assert seconds < SECONDS


@short_of_memory
@pytest.mark.parametrize("reader", ["load_limited", "unpack"])
def test_a_limit_refuses_what_really_expands(report: dict, reader: str) -> None:
    kind, message, seconds = report["zeros.file"][reader]
    assert (kind, seconds < SECONDS) == ("CorruptionError", True)
    assert f"{HUGE} bytes in total, more than max_nbytes = 1048576" in message


@short_of_memory
@pytest.mark.parametrize("reader", ["load", "load_file", "get_tensor"])
def test_without_a_limit_the_system_refuses(report: dict, reader: str) -> None:
    assert report["zeros.file"][reader][0].endswith("MemoryError")


@short_of_memory
def test_verifying_takes_the_memory_of_a_window(report: dict) -> None:
    """The tensor is four times as large as the memory."""
    assert report["zeros.file"]["verify"][0] is None
    assert report["zeros.file"]["logical_nbytes"][0] is None
    assert report["zeros.frame"]["read_frame"][0].endswith("MemoryError")
    assert report["zeros.frame"]["verify_frame"][0] is None


@short_of_memory
@pytest.mark.parametrize("module", [ph_numpy, ph_torch], ids=["numpy", "torch"])
def test_a_framework_without_memory_says_so(module) -> None:
    with pytest.raises(MemoryError):
        module.FRAMEWORK.empty("U8", (10**15,))


@pytest.mark.parametrize("module", [ph_numpy, ph_torch], ids=["numpy", "torch"])
def test_every_way_to_decode_takes_a_limit(module, tmp_path: Path) -> None:
    tensors = {name: module.FRAMEWORK.empty("U8", (600,)) for name in "ab"}
    data, path = module.save(tensors), tmp_path / "file"
    path.write_bytes(data)
    frame = module.compress(tensors["a"])
    for limit in (1200, None):
        assert module.load(data, max_nbytes=limit).keys() == tensors.keys()
        assert module.load_file(path, max_nbytes=limit).keys() == tensors.keys()
    for read in (
        lambda: module.load(data, max_nbytes=1199),
        lambda: module.load_file(path, max_nbytes=1199),
        lambda: module.decompress(frame, max_nbytes=599),
        lambda: module.decompress(frame.to_bytes(), max_nbytes=599),
    ):
        with pytest.raises(CorruptionError, match=r"(1200|600) bytes.*more than max_nbytes = "):
            read()
    assert len(module.decompress(frame, max_nbytes=600)) == 600


def test_an_open_file_decodes_no_more_at_once_than_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    ph_numpy.save_file({name: np.zeros((60, 10), np.uint8) for name in "ab"}, path)
    with open_file(path, max_nbytes=600) as file:
        assert file.get_tensor("a").size == 600
        with pytest.raises(CorruptionError, match="1200 bytes in total"):
            file.get_tensors()
    with open_file(path, max_nbytes=599) as file:
        assert file.get_slice("a")[:59].size == 590
        with pytest.raises(CorruptionError, match="600 bytes would be decoded"):
            file.get_tensor("a")


def test_files_and_folders_take_a_limit(tmp_path: Path, run: Callable[..., Ended]) -> None:
    folder = tmp_path / "model.ph"
    folder.mkdir()
    path = folder / "x.ph.safetensors"
    ph_numpy.save_file({"a": np.zeros(600, np.uint8)}, path)
    for unpack, source in ((unpack_file, path), (unpack_folder, folder)):
        with pytest.raises(CorruptionError, match=f"^{source}: .*600 bytes.*max_nbytes = 599"):
            unpack(source, tmp_path / "out", max_nbytes=599)
        unpack(source, tmp_path / f"{source.name}.out", max_nbytes=600)
    for verify, source in ((verify_file, path), (verify_folder, folder)):
        assert verify(source, max_nbytes=600) == []
        (problem,) = verify(source, max_nbytes=599)
        assert "max_nbytes = 599" in problem.message
    for verb in ("unpack", "verify"):
        done = run(verb, path, "--max-nbytes", 599)
        assert done.code == 1
        assert "max_nbytes = 599" in done.out + done.err
    assert not leftovers(tmp_path, folder.name, f"{path.name}.out", f"{folder.name}.out")


def test_the_command_line_refuses_a_bomb(tmp_path: Path, run: Callable[..., Ended]) -> None:
    path = tmp_path / "x.ph.safetensors"
    path.write_bytes(padded_claim())
    assert path.stat().st_size == 100
    for verb in ("unpack", "inspect"):
        done = run(verb, path)
        assert done.code == 1
        assert "cut short" in done.error
    assert run("verify", path).code == 1
    assert not leftovers(tmp_path, path.name)


def test_a_long_header_is_recorded_beside_as_many_spaces_as_it_needs(tmp_path: Path) -> None:
    """So any file can be packed, and reading takes memory in proportion to the packed file."""
    source = tmp_path / "a"
    text = json.dumps({"a": entry(0, 5)}).encode() + b" " * 9_000_000
    source.write_bytes(file_bytes(text, b"12345"))
    pack_file(source, tmp_path / "b")
    assert 0 <= (tmp_path / "b").stat().st_size - min_text_nbytes(9_000_000) < 1000
    unpack_file(tmp_path / "b", tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == source.read_bytes()


def test_a_recorded_header_may_be_so_much_longer_and_no_more() -> None:
    free = 1 << 20
    assert ph_numpy.load(recording(b"{}" + b" " * (free - 2))) == {}
    with pytest.raises(CorruptionError, match=r"declares 2000000 bytes, but in \d+ bytes of"):
        ph_numpy.load(recording(b"{}" + b" " * 1_999_998))
