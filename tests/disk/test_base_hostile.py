"""Bases that are missing, wrong, damaged or in the way, and packed files that lie about their
bases. Each gives the documented error, which names file, tensor and base, and nothing is left
behind."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import frame_builder as fb
import numpy as np
import pytest
import safetensors.torch
import torch
from base_samples import N_BASED, checkpoints, write_checkpoints, write_folder
from disk_samples import leftovers

import packhorse
import packhorse.numpy
import packhorse.torch
from packhorse.disk import (
    PackedFile,
    pack_file,
    pack_folder,
    plan_file,
    plan_folder,
    unpack_file,
    unpack_folder,
    verify_file,
    verify_folder,
)
from packhorse.errors import BaseMismatchError, CorruptionError, PackhorseError, TruncationError
from packhorse.frame import Frame, compress_buffer, content_hash
from packhorse.numpy import FRAMEWORK as NUMPY
from packhorse.reference import decode_file
from packhorse.storage.safetensors_header import read_header

Pair = tuple[Path, Path]
FILES = ("old.safetensors", "new.safetensors", "new.ph.safetensors")


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_checkpoints(tmp_path)


@pytest.fixture
def packed(pair: Pair) -> Path:
    """The newer file, packed against the older."""
    old, new = pair
    pack_file(new, new.with_name("new.ph.safetensors"), base=old)
    return new.with_name("new.ph.safetensors")


def readers(packed: Path, base: object) -> dict[str, Callable[[], object]]:
    """All ways to decode the tensors of a packed file."""
    data = packed.read_bytes()

    def read(name: str, index: object) -> object:
        with packhorse.open_file(packed, base=base) as file:
            return file.get_tensor(name) if index is None else file.get_slice(name)[index]

    return {
        "unpack": lambda: unpack_file(packed, packed.with_name("back"), base=base),
        "load_file": lambda: packhorse.torch.load_file(packed, base=base),
        "load": lambda: packhorse.torch.load(data, base=base),
        "get_tensor": lambda: read("ids", None),
        "get_slice": lambda: read("ids", slice(3, 5)),
    }


def changed(tensors: dict[str, torch.Tensor], **changes: torch.Tensor | None) -> dict:
    names = {name.replace("_", "."): tensor for name, tensor in changes.items()}
    return {name: t for name, t in {**tensors, **names}.items() if t is not None}


def test_a_missing_base_is_told_before_any_output(tmp_path, packed):
    """The message names the file, the tensor, the base's hash and name, and the remedy."""
    with PackedFile(packed, NUMPY) as file:
        hashes = {name: file.frame(name).base_hash for name in file.offset_keys()}
    first = next(name for name in hashes if hashes[name])
    for what, read in readers(packed, None).items():
        with pytest.raises(BaseMismatchError) as told:
            read()
        message = str(told.value)
        name = "ids" if what.startswith("get") else first
        assert message.startswith(f"{packed if what != 'load' else 'the bytes given'}: tensor ")
        assert re.search(
            r"a base of \w+ with content hash [0-9a-f]{32}, called 'old\.safe", message
        )
        assert "--base PATH, in Python base=" in message
        if what not in ("load_file", "load"):  # with several threads, any of these may come first
            assert f"tensor {name!r}" in message
            assert hashes[name].hex() in message
    with pytest.raises(BaseMismatchError, match=rf"\({N_BASED - 1} more tensors"):
        unpack_file(packed, tmp_path / "back")
    assert not leftovers(tmp_path, *FILES)


def test_a_missing_base_is_one_problem_and_the_rest_is_verified(packed):
    (problem,) = verify_file(packed)
    assert problem.path == packed
    assert problem.tensor is not None
    assert "--base PATH" in problem.message
    data = bytearray(packed.read_bytes())
    header = read_header(packed)
    noise = next(entry for entry in header.entries if entry.name == "noise")
    data[header.data_offset + noise.stop - 200] ^= 1
    packed.write_bytes(data)
    problems = verify_file(packed)
    assert {problem.tensor for problem in problems} >= {"noise"}
    assert len(problems) == 2


WRONG: dict[str, tuple[Callable[[dict], dict], str]] = {
    "other values": (
        lambda old: changed(old, ids=old["ids"] + 7),
        r"the one given has [0-9a-f]{32}, and is in \S+; the right one was called 'old\.safe",
    ),
    "another shape": (
        lambda old: changed(old, ids=old["ids"][:2990]),
        r"the one in \S+ is I64 of shape \[2990\]",
    ),
    "another dtype": (
        lambda old: changed(old, ids=old["ids"].double()),
        r"the one in \S+ is F64 of shape \[3000\]",
    ),
    "rounded already": (
        lambda old: changed(old, cast_weight=old["cast.weight"].to(torch.bfloat16)),
        r"'cast\.weight': a base of F32 .* is BF16 of shape",
    ),
    "no such tensor": (
        lambda old: changed(old, ids=None),
        r"\S+wrong\.safetensors has no tensor of that name",
    ),
    "no tensors": (lambda old: {}, "has no tensor of that name"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
def test_another_base_is_refused(tmp_path, packed, what, is_packed):
    make, words = WRONG[what]
    base = tmp_path / "wrong.safetensors"
    safetensors.torch.save_file(make(checkpoints()[0]), base)
    if is_packed:
        pack_file(base, tmp_path / "w")
        (tmp_path / "w").replace(base)
        words = r"the one in \S+ has content hash [0-9a-f]{32}" if what == "other values" else words
    for name, read in readers(packed, base).items():
        if what == "rounded already" and name.startswith("get"):
            continue  # the tensors that they read have the right base
        with pytest.raises(BaseMismatchError, match=words) as told:
            read()
        assert "content hash" in str(told.value)
        assert str(base) in str(told.value)
    problems = verify_file(packed, base=base)
    assert len(problems) == (N_BASED if what == "no tensors" else 1)
    assert all(problem.tensor and problem.offset for problem in problems)
    assert not leftovers(tmp_path, *FILES, base.name)


def test_a_base_that_is_cut_short_is_told_at_any_length(tmp_path, pair, packed):
    old, new = pair
    data = old.read_bytes()
    base = tmp_path / "cut.safetensors"
    for length in (0, 5, 8, 100, len(data) // 2, len(data) - 1):
        base.write_bytes(data[:length])
        for work in (
            lambda: pack_file(new, tmp_path / "x", base=base),
            lambda: plan_file(new, base=base),
            lambda: verify_file(packed, base=base),
            *readers(packed, base).values(),
        ):
            with pytest.raises(TruncationError, match=re.escape(str(base))):
                work()
    assert not leftovers(tmp_path, *FILES, base.name)


def test_a_damaged_packed_base_is_named(tmp_path, pair, packed):
    old, new = pair
    base = tmp_path / "old.ph.safetensors"
    pack_file(old, base)
    header = read_header(base)
    ids = next(entry for entry in header.entries if entry.name == "ids")
    data = bytearray(base.read_bytes())
    data[header.data_offset + ids.stop - 100] ^= 1
    base.write_bytes(data)
    for work in (
        lambda: pack_file(new, tmp_path / "x", base=base),
        *readers(packed, base).values(),
    ):
        with pytest.raises(CorruptionError, match=rf"{re.escape(str(base))}: tensor 'ids'"):
            work()
    (problem,) = verify_file(packed, base=base)
    assert problem.tensor == "ids"
    assert not leftovers(tmp_path, *FILES, base.name)


@pytest.mark.parametrize("base", ["nothing.safetensors", "empty", "config.json", 7])
def test_what_is_no_base_is_refused(tmp_path, pair, packed, base):
    (tmp_path / "empty" / "below").mkdir(parents=True)
    (tmp_path / "config.json").write_text("{}")
    safetensors.torch.save_file(
        {"a": torch.ones(3)}, tmp_path / "empty" / "below" / "x.safetensors"
    )
    errors = {"nothing.safetensors": FileNotFoundError, "empty": ValueError, 7: TypeError}
    path = base if base == 7 else tmp_path / base
    for work in (
        lambda: pack_file(pair[1], tmp_path / "x", base=path),
        lambda: verify_file(packed, base=path),
        *readers(packed, path).values(),
    ):
        with pytest.raises(errors.get(base, PackhorseError)):
            work()
    with pytest.raises(TypeError, match=r"the base of 'ids' must be a tensor, not list"):
        pack_file(pair[1], tmp_path / "x", base={"ids": [1, 2]})
    assert not leftovers(tmp_path, *FILES, "empty", "config.json")


def test_what_is_packed_against_a_base_is_no_base(tmp_path, pair, packed):
    new = pair[1]
    later = {name: tensor + 1 for name, tensor in checkpoints()[1].items() if name == "ids"}
    safetensors.torch.save_file(later, tmp_path / "later")
    with pytest.raises(
        BaseMismatchError, match=rf"{re.escape(str(packed))}: tensor 'ids' is itself"
    ):
        pack_file(tmp_path / "later", tmp_path / "x", base=packed)
    pack_file(tmp_path / "later", tmp_path / "packed", base=new)
    with pytest.raises(BaseMismatchError, match=r"'ids'.*is itself packed against a base; unpack"):
        unpack_file(tmp_path / "packed", tmp_path / "x", base=packed)
    with pytest.raises(BaseMismatchError):
        decode_file((tmp_path / "packed").read_bytes(), base=packed.read_bytes())
    # If the folder also has the tensor in a frame without a base, that frame is used.
    unpack_file(tmp_path / "packed", tmp_path / "x", base=tmp_path)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "later").read_bytes()


def test_the_base_is_not_written_over(tmp_path, pair, packed):
    old, new = pair
    (tmp_path / "link").symlink_to(old)
    before = old.read_bytes()
    for work in (
        lambda dst: pack_file(new, dst, base=old, force=True),
        lambda dst: unpack_file(packed, dst, base=old, force=True),
        lambda dst: packhorse.torch.save_file(checkpoints()[1], dst, base=old),
    ):
        for output in (old, tmp_path / "link"):
            with pytest.raises(ValueError, match="the output is the base itself"):
                work(output)
    base, model = (write_folder(tmp_path / name, checkpoints()[0], 2) for name in ("base", "model"))
    pack_folder(model, tmp_path / "packed", base=base)
    for output in (base, tmp_path):
        with pytest.raises(ValueError, match="the base is inside this output"):
            unpack_folder(tmp_path / "packed", output, base=base, force=True)
    assert old.read_bytes() == before


def test_a_model_is_not_its_own_base(tmp_path, pair):
    """A file packed against itself would be empty, and lost with the original."""
    _, new = pair
    (tmp_path / "link").symlink_to(new)
    for base in (new, tmp_path / "link"):
        with pytest.raises(ValueError, match="the base is the file itself"):
            pack_file(new, tmp_path / "x", base=base)
    alone = tmp_path / "alone"
    alone.mkdir()
    safetensors.torch.save_file(checkpoints()[1], alone / "new.safetensors")
    with pytest.raises(ValueError, match="the base is the file itself"):
        pack_file(alone / "new.safetensors", tmp_path / "x", base=alone)
    model = write_folder(tmp_path / "model", checkpoints()[1], 3)
    for work in (lambda: pack_folder(model, tmp_path / "x", base=model),
                 lambda: plan_folder(model, base=model / "vae" / "..")):  # fmt: skip
        with pytest.raises(ValueError, match="the base is the folder itself"):
            work()
    # If the folder also has an older file, only the file itself is left out.
    result = pack_file(new, tmp_path / "x", base=tmp_path)
    assert sum(tensor.base_hash is not None for tensor in result.tensors) == N_BASED


# Folders


def test_folders_tell_a_missing_base_before_any_output(tmp_path, monkeypatch):
    old, new = checkpoints()
    base, model = write_folder(tmp_path / "base", old, 3), write_folder(tmp_path / "model", new, 2)
    packed = tmp_path / "packed"
    pack_folder(model, packed, base=base)
    monkeypatch.setattr(
        "packhorse.disk.folder_output.atomic_folder", lambda *args: pytest.fail("output was begun")
    )
    below = tmp_path / "half"
    below.mkdir()
    for path in base.glob("*.safetensors"):
        (below / path.name).symlink_to(path)
    for wrong, words in (
        (None, r"packed/model-00001-of-00002.ph.safetensors: tensor '.*called 'base', is needed"),
        (below, r"packed/vae/diffusion.ph.safetensors: .*half/vae has no tensor of that name"),
    ):
        with pytest.raises(BaseMismatchError, match=words):
            unpack_folder(packed, tmp_path / "back", base=wrong)
    problems = verify_folder(packed)
    assert {problem.path.name for problem in problems} == {
        "model-00001-of-00002.ph.safetensors",
        "model-00002-of-00002.ph.safetensors",
        "diffusion.ph.safetensors",
    }
    assert [problem.path.name for problem in verify_folder(packed, base=below)] == [
        "diffusion.ph.safetensors"
    ]


def test_a_wrong_base_of_a_folder_leaves_nothing(tmp_path):
    old, new = checkpoints()
    base, model = write_folder(tmp_path / "base", old, 3), write_folder(tmp_path / "model", new, 2)
    pack_folder(model, tmp_path / "packed", base=base)
    wrong = write_folder(tmp_path / "wrong", changed(old, ids=old["ids"] + 7), 3)
    with pytest.raises(BaseMismatchError, match=r"ph\.safetensors: tensor 'ids'.*wrong/model-0"):
        unpack_folder(tmp_path / "packed", tmp_path / "back", base=wrong)
    with pytest.raises(ValueError, match=r"no \*\.safetensors file in any folder where"):
        pack_folder(model, tmp_path / "x", base=tmp_path / "model" / "..")
    assert not leftovers(tmp_path, "base", "model", "packed", "wrong")


def test_interrupted_work_leaves_nothing(tmp_path, pair, packed):
    def stop(nbytes: int) -> None:
        raise KeyboardInterrupt

    old, new = pair
    for work in (
        lambda: pack_file(new, tmp_path / "x", base=old, progress=stop),
        lambda: unpack_file(packed, tmp_path / "x", base=old, progress=stop),
    ):
        with pytest.raises(KeyboardInterrupt):
            work()
    assert not leftovers(tmp_path, *FILES)


# Packed files that lie


def based_file(**hooks: Callable) -> tuple[bytes, bytes, bytes]:
    """A packed file of one tensor with a base, its original, and the file of the base."""
    units = np.random.default_rng(3).integers(0, 60_000, 3000, np.uint16)
    old, new = units.tobytes(), (units + (units % 7 == 0)).tobytes()
    original = fb.original_file({"w": ("U16", (3000,), new)}, None)
    frame = compress_buffer(new, "U16", (3000,), base=old).to_bytes()
    assert Frame.from_buffer(frame).base_hash == content_hash(old)
    base = fb.original_file({"w": ("U16", (3000,), old)}, None)
    return fb.build_file(original, {"w": frame}, **hooks), original, base


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "x" * 100_000, "\x1b[2J", 7, None, {}, ["a"], ""]
)
def test_what_a_file_calls_its_base_is_never_opened_and_never_refused(tmp_path, monkeypatch, name):
    data, original, base = based_file(edit_record=lambda record: record.update(base=name))
    (tmp_path / "p").write_bytes(data)
    (tmp_path / "b").write_bytes(base)
    unpack_file(tmp_path / "p", tmp_path / "back", base=tmp_path / "b")
    assert (tmp_path / "back").read_bytes() == original
    assert decode_file(data, base=base) == original
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(
        "os.open", lambda path, *args: opened.append(str(path)) or real(path, *args)
    )
    with pytest.raises(BaseMismatchError) as told:
        packhorse.numpy.load_file(tmp_path / "p")
    assert opened == [str(tmp_path / "p")]
    assert len(str(told.value)) < 1000 + len(str(tmp_path))
    with PackedFile(tmp_path / "p", NUMPY) as file:
        assert file.base_name == (name if isinstance(name, str) else None)


def test_a_base_beside_the_packed_file_is_not_taken_unasked(packed, pair):
    assert pair[0].parent == packed.parent
    with pytest.raises(BaseMismatchError):
        packhorse.numpy.load_file(packed)


def test_every_flipped_bit_of_a_based_file_is_noticed_or_harmless(tmp_path):
    data, original, base = based_file()
    (tmp_path / "b").write_bytes(base)
    start = 8 + int.from_bytes(data[:8], "little")
    rng = np.random.default_rng(3)
    for bit in rng.choice(8 * (len(data) - start), 600, replace=False):
        damaged = bytearray(data)
        damaged[start + bit // 8] ^= 1 << bit % 8
        (tmp_path / "p").write_bytes(damaged)
        outcomes = []
        for work in (
            lambda: unpack_file(tmp_path / "p", tmp_path / "x", base=tmp_path / "b", force=True),
            lambda bytes_=bytes(damaged): decode_file(bytes_, base=base),
        ):
            try:
                work()
                outcomes.append(None)
            except PackhorseError as error:
                outcomes.append(type(error))
        problems = verify_file(tmp_path / "p", base=tmp_path / "b")
        assert bool(problems) == (outcomes[0] is not None)
        assert outcomes[0] == outcomes[1]
        if not problems:
            assert (tmp_path / "x").read_bytes() == original


def test_every_truncation_of_a_based_file_is_told(tmp_path):
    data, _, base = based_file()
    (tmp_path / "b").write_bytes(base)
    for length in range(0, len(data), 37):
        (tmp_path / "p").write_bytes(data[:length])
        with pytest.raises(TruncationError):
            unpack_file(tmp_path / "p", tmp_path / "x", base=tmp_path / "b")


def test_the_record_of_the_base_is_only_there_where_it_is_needed(packed):
    metadata = read_header(packed).metadata or {}
    assert json.loads(metadata["packhorse"])["base"] == "old.safetensors"
