"""Round trips: every verb restores its input bit for bit.

The input is unchanged, the slow decoder agrees, and the bytes do not depend on the number of
threads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from claims import check_slice
from codec_battery import ISAS, forced
from snapshot_child import do, make_state, steps
from snapshot_ledger import Ledger
from snapshot_samples import assert_same, bits, odd_state

import packhorse.numpy
from packhorse.disk import SnapshotStore, pack_folder, unpack_folder, verify_file, verify_folder
from packhorse.frame import Frame, plan_buffer
from packhorse.layout import Level
from packhorse.reference import decode_file, decode_frame
from packhorse.storage.safetensors_header import build_header
from soak_parts.case import Case, Part, Place, claim
from soak_parts.commands import run_command
from soak_parts.samples import (
    Spec,
    array_of,
    base_of,
    digest,
    draw_base,
    draw_tensor,
    draw_tensors,
    make_array,
    make_bytes,
    write_file,
    write_folder,
)

__all__ = ["PART"]

_LEVELS = [level.name.lower() for level in Level]
_MAX_SLOW_NBYTES = 40_000  # the slow decoder decodes a megabyte a second
_MANY = 400  # small tensors in one file: more than the files that may be open
_INDEXES: tuple[Any, ...] = (
    *((), 0, -1, slice(3, None), slice(None, None, -2), (..., 0), (slice(1, 9), -1)),
    *((None, slice(1)), slice(5, 2), (slice(None), slice(2, None, 3))),
)


def draw(rng: Random) -> Case:
    """A case of one of the kinds below."""
    kind = rng.choice(["frame"] * 6 + ["frames", "file", "file", "saved", "state", "folder"] * 2
                      + ["many", "store", "checkpoint", "command", "outs"])  # fmt: skip
    case: Case = {"kind": kind, "level": rng.choice(_LEVELS), "threads": rng.randint(1, 3)}
    return case | _DRAWN[kind](rng)


def run(case: Case, place: Place) -> None:
    """Run a case."""
    _RUN[case["kind"]](case, place)
    place.accept()


def _draw_frame(rng: Random) -> Case:
    tensor, base = draw_tensor(rng), draw_base(rng) if rng.random() < 0.4 else None
    if rng.random() < 0.08:  # large enough for plans to be made from samples
        tensor["shape"] = rng.choice(([1024, 1024], [2_000_000], [64, 30_000], [5000, 300]))
    framework, isa = rng.choice(("np", "pt")), rng.choice(ISAS)
    return {"tensor": tensor, "base": base, "in": framework, "isa": isa}


def _frame(case: Case, place: Place) -> None:
    """One tensor in memory: all that `compress` and `decompress` promise."""
    spec, framework = case["tensor"], case["in"]
    verbs = _verbs(framework)
    tensor, data, base = make_array(spec, framework), make_bytes(spec), _base_array(case, "np")
    given = None if base is None else _base_array(case, framework)
    how = {"level": case["level"], "base": given}
    frame = verbs.compress(tensor, threads=case["threads"], **how)
    claim(bits(tensor)[2] == data, "compress changed its input")
    packed = frame.to_bytes()
    other = verbs.compress(tensor, threads=4 - case["threads"], **how)
    claim(other.to_bytes() == packed, "the frame depends on the number of threads")
    with forced(case["isa"]):
        _check_decoded(packed, given, tensor, framework, place)
    _check_parts(packed, base, data)
    _check_estimate(case, data, base)


def _check_decoded(packed: bytes, base: Any, tensor: Any, framework: str, place: Place) -> None:
    decompress = place.operations.decompress if framework == "np" else _verbs("pt").decompress
    if base is not None:
        before = bits(base)
    found = decompress(packed, base=base)
    claim(bits(found) == bits(tensor), "decompress gives other bits")
    out = make_blank(tensor, framework)
    version = getattr(out, "_version", 0)
    decompress(packed, base=base, out=out)
    is_told = framework == "np" or out.numel() == 0 or out._version > version
    claim(is_told, "PyTorch is not told that a tensor was written to")
    claim(bits(out) == bits(tensor), "decompress(out=) gives other bits")
    claim(base is None or bits(base) == before, "the base was changed")


def _check_parts(packed: bytes, base: Any, data: bytes) -> None:
    frame = Frame.from_buffer(packed)
    given = None if base is None else np.frombuffer(base.tobytes(), np.uint8)
    frame.verify(threads=2, base=given)
    start, stop = len(data) // 3, len(data) - len(data) // 7
    part = bytearray(stop - start)
    frame.decompress_into(part, start=start, stop=stop, base=given)
    claim(part == data[start:stop], "a part differs from the whole")
    if len(data) <= _MAX_SLOW_NBYTES:
        slow = decode_frame(packed, base=None if base is None else base.tobytes())
        claim(slow.data == data, "the slow decoder gives other bytes")


def _check_estimate(case: Case, data: bytes, base: Any) -> None:
    spec = case["tensor"]
    given = None if base is None else base.tobytes()
    dtype = None if base is None else bits(base)[0]
    plan = plan_buffer(
        data, spec["dtype"], spec["shape"], level=case["level"], base=given, base_dtype=dtype
    )
    claim(plan.estimated_nbytes >= 0, f"an estimate is {plan.estimated_nbytes} bytes")


def _base_array(case: Case, framework: str) -> Any:
    if case["base"] is None:
        return None
    dtype, data = base_of(case["tensor"], case["base"])
    return array_of(data, dtype, case["tensor"]["shape"], framework)


def make_blank(tensor: Any, framework: str) -> Any:
    """A tensor of the same dtype and shape with other bits."""
    dtype, shape, data = bits(tensor)
    return array_of(bytes(byte ^ 0x5A for byte in data[:64]) + data[64:], dtype, shape, framework)


def _verbs(framework: str) -> Any:
    if framework == "np":
        return packhorse.numpy
    from packhorse import torch as packhorse_torch

    return packhorse_torch


def _draw_frames(rng: Random) -> Case:
    n = rng.choice((0, 1, 3, 20, 200))
    specs = draw_tensors(rng, n, most=300_000 if n < 20 else 3000)
    bases = [draw_base(rng) if rng.random() < 0.5 else None for _ in specs]
    return {"tensors": specs, "bases": bases if rng.random() < 0.6 else None}


def _frames(case: Case, place: Place) -> None:
    """Many tensors at once."""
    specs, bases = case["tensors"], case["bases"]
    arrays = [make_array(spec) for spec in specs]
    given = bases and [
        _base_array({"tensor": spec, "base": base}, "np")
        for spec, base in zip(specs, bases, strict=True)
    ]
    how = {"level": case["level"], "bases": given, "threads": case["threads"]}
    frames = packhorse.numpy.compress_all(arrays, **how)
    for i, frame in enumerate(frames):
        base = None if not given else given[i]
        alone = packhorse.numpy.compress(arrays[i], level=case["level"], base=base)
        claim(
            frame.to_bytes() == alone.to_bytes(), f"frame {i} differs from that of the tensor alone"
        )
    found = packhorse.numpy.decompress_all(frames, bases=given, threads=case["threads"])
    for spec, array in zip(specs, found, strict=True):
        claim(array.tobytes() == make_bytes(spec), "decompress_all gives other bits")


def _draw_file(rng: Random) -> Case:
    specs = draw_tensors(rng, rng.choice((0, 1, 2, 5, 12)), in_file=True)
    bases = [draw_base(rng) for _ in specs] if rng.random() < 0.4 else None
    metadata = rng.choice((None, {}, {"format": "pt", "note": 'é "\\" \x1b'}))
    return {"tensors": specs, "bases": bases, "metadata": metadata}


def _draw_many(rng: Random) -> Case:
    specs = draw_tensors(rng, rng.choice((2, _MANY, 4 * _MANY)), most=50, in_file=True)
    return {"tensors": specs, "bases": None, "metadata": None}


def _file(case: Case, place: Place) -> None:
    """A file by `pack` and `unpack`."""
    source, packed = place.folder / "a.safetensors", place.folder / "a.ph.safetensors"
    write_file(source, case["tensors"], case["metadata"])
    before, base = digest(source), _write_base(case, place.folder)
    how = {"threads": case["threads"], "base": base}
    place.operations.pack_file(source, packed, level=case["level"], **how)
    claim(digest(source) == before, "packing changed the source")
    claim(verify_file(packed, **how) == [], "verify finds something in a good file")
    back = place.folder / "back.safetensors"
    place.operations.unpack_file(packed, back, **how)
    claim(digest(back) == before, "unpack gives another file")
    content = None if base is None else base.read_bytes()
    if source.stat().st_size <= _MAX_SLOW_NBYTES:
        slow = decode_file(packed.read_bytes(), base=content)
        claim(slow == source.read_bytes(), "the slow decoder gives another file")
    _check_reading(case, packed, base)
    _check_reading(case, source, None)


def _check_reading(case: Case, path: Path, base: Path | None) -> None:
    with packhorse.open_file(path, threads=case["threads"], base=base) as file:
        claim(sorted(file.keys()) == sorted(f"t{i}" for i in range(len(case["tensors"]))), "keys")
        for i, spec in enumerate(case["tensors"]):
            array = file.get_tensor(f"t{i}")
            claim(bits(array)[2] == make_bytes(spec), f"t{i} has other bits")
            check_slice(file.get_slice(f"t{i}"), array, _INDEXES[i % len(_INDEXES)])


def _write_base(case: Case, folder: Path) -> Path | None:
    if case["bases"] is None:
        return None
    tensors = {}
    for i, (spec, base) in enumerate(zip(case["tensors"], case["bases"], strict=True)):
        tensors[f"t{i}"] = (*base_of(spec, base), spec["shape"])
    header = build_header({name: (dtype, shape) for name, (dtype, _, shape) in tensors.items()})
    path = folder / "base.safetensors"
    path.write_bytes(header.prefix() + b"".join(tensors[e.name][1] for e in header.entries))
    return path


def _draw_saved(rng: Random) -> Case:
    return {"tensors": draw_tensors(rng, rng.choice((1, 4, 30))), "in": rng.choice(("np", "pt"))}


def _saved(case: Case, place: Place) -> None:
    """`save_file` and `load_file`, then the same with that file as the base."""
    verbs, old, new = _verbs(case["in"]), place.folder / "old", place.folder / "new"
    tensors = {f"t{i}": make_array(spec, case["in"]) for i, spec in enumerate(case["tensors"])}
    how = {"threads": case["threads"]}
    verbs.save_file(tensors, old, level=case["level"], **how)
    assert_same(_sorted(verbs.load_file(old, **how)), _sorted(tensors))
    verbs.save_file(tensors, new, level=case["level"], base=old, **how)
    assert_same(_sorted(verbs.load_file(new, base=old, **how)), _sorted(tensors))
    data = verbs.save(tensors, **how)
    assert_same(_sorted(verbs.load(data, **how)), _sorted(tensors))


def _sorted(tensors: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(tensors.items()))


def _draw_state(rng: Random) -> Case:
    return {"tensors": draw_tensors(rng, 6), "odd": rng.random() < 0.3}


def _state(case: Case, place: Place) -> None:
    """Nested states by `packhorse.torch.save`, against an older one too."""
    verbs = _verbs("pt")
    tensors = [make_array(spec, "pt") for spec in case["tensors"]]
    state = {"a": tensors[:3], "b": {"c": tuple(tensors[3:]), 7: None}, "lr": 0.1}
    if case["odd"]:
        state["odd"] = {key: item for key, item in odd_state().items() if key != "arrays"}
    path = place.folder / "state"
    verbs.save(state, path, level=case["level"], threads=case["threads"])
    found = verbs.load(path, threads=case["threads"])
    assert_same(found, state)
    again = verbs.save(state, base=found, threads=case["threads"])
    assert_same(verbs.load(again, base=found), state)


def _draw_folder(rng: Random) -> Case:
    shards = [draw_tensors(rng, rng.randint(1, 4), in_file=True) for _ in range(rng.randint(1, 3))]
    return {"shards": shards, "index": rng.random() < 0.7, "below": rng.random() < 0.5}


def _folder(case: Case, place: Place) -> None:
    """A model folder."""
    source, packed, back = (place.folder / name for name in ("llama", "llama.ph", "back"))
    write_folder(case, source)
    before = digest(source)
    pack_folder(source, packed, level=case["level"], threads=case["threads"])
    claim(verify_folder(packed) == [], "verify finds something in a good folder")
    unpack_folder(packed, back, threads=case["threads"])
    claim(digest(back) == before == digest(source), "the folder is another")


def _draw_command(rng: Random) -> Case:
    shards = [draw_tensors(rng, rng.randint(1, 3), most=3000) for _ in range(2)]
    return {"shards": shards, "index": True, "below": rng.random() < 0.5, "scale": rng.random()}


def _command(case: Case, place: Place) -> None:
    """A folder by the command, against a base that is a folder too."""
    source, base, packed, back = (
        str(place.folder / name) for name in ("llama", "base", "llama.ph", "back")
    )
    write_folder(case, Path(source))
    older = [[{**spec, "seed": spec["seed"] % 2} for spec in specs] for specs in case["shards"]]
    write_folder({**case, "shards": older}, Path(base))
    before = digest(Path(source)), digest(Path(base))
    run = [["pack", source, "-o", packed, "--base", base, "--level", case["level"]],
           ["verify", packed, "--base", base], ["inspect", packed, "--json"],
           ["unpack", packed, "-o", back, "--base", base]]  # fmt: skip
    for args in run:
        ended = run_command(place, args)
        claim(ended.is_good, f"exit code {ended.code} of {args}: {ended.last_line}")
    claim(digest(Path(back)) == before[0], "the folder is another")
    claim((digest(Path(source)), digest(Path(base))) == before, "the source was changed")


def _draw_outs(rng: Random) -> Case:
    return {"tensors": [draw_tensor(rng, most=3000)] * 2, "shift": rng.choice((0, 1, 64))}


def _outs(case: Case, place: Place) -> None:
    """Overlapping memory for two tensors must be refused."""
    array = make_array(case["tensors"][0])
    frames = packhorse.numpy.compress_all([array, array], threads=case["threads"])
    room = np.zeros(2 * array.nbytes + case["shift"] + 1, np.uint8)
    if array.nbytes <= case["shift"]:
        return
    outs = [
        room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        for start in (0, case["shift"] - case["shift"] % array.itemsize)
    ]
    try:
        packhorse.numpy.decompress_all(frames, outs=outs, threads=case["threads"])
    except ValueError:
        return
    claim(False, "two tensors were decoded to overlapping memory")


def _draw_store(rng: Random) -> Case:
    return {
        "seed": rng.getrandbits(32),
        "steps": rng.randint(3, 15),
        "cache": rng.choice((0, 10**6)),
    }


def _store(case: Case, place: Place) -> None:
    """A store that goes through many operations and is then read in all ways."""
    folder, ledger, names = place.folder / "store", Ledger(), []
    rng = Random(case["seed"])
    how = {"threads": case["threads"], "level": case["level"], "cache_nbytes": case["cache"]}
    with SnapshotStore(folder, max_chain=3, **how) as store:
        for (kind, what), _ in zip(steps(rng, names), range(case["steps"]), strict=False):
            do(store, kind, what, names)
            ledger.done(kind, what)
        reader = SnapshotStore(folder, **how)
        ledger.check(reader, place.operations.restore)
        claim(reader.verify() == [], "verify finds something in a good store")
        for name, seed in ledger.seeds.items():
            into = make_state(seed + 1)
            into["seed"] = 0
            assert_same(reader.restore(name, into=into), make_state(seed))
            reader.restore_file(name, folder.with_suffix(".safetensors"), force=True)
        future = store.take_async("later", make_state(1))
        future.result()
        assert_same(place.operations.restore(reader, "later"), make_state(1))


def _draw_checkpoint(rng: Random) -> Case:
    return {"tensors": draw_tensors(rng, rng.randint(1, 5)), "n": rng.randint(1, 4)}


def _checkpoint(case: Case, place: Place) -> None:
    """Checkpoints of PyTorch, each based on the one before."""
    from dcp_samples import blank, load, save

    for n in range(case["n"]):
        state = checkpoint_state(case["tensors"], n)
        base = str(place.folder / f"{n - 1}") if n else None
        save(state, place.folder / f"{n}", base=base, threads=case["threads"], level=case["level"])
    for n in range(case["n"]):
        state = checkpoint_state(case["tensors"], n)
        found = blank(state)
        load(found, place.folder / f"{n}", threads=case["threads"])
        assert_same(found, state)


def checkpoint_state(specs: list[Spec], n: int) -> dict[str, Any]:
    """A state some steps later: some bytes of each tensor have changed."""
    tensors = {}
    for i, spec in enumerate(specs):
        data = bytearray(make_bytes(spec))
        if spec["dtype"] != "BOOL":
            data[:n] = bytes(byte ^ 1 for byte in data[:n])
        tensors[f"t{i}"] = array_of(bytes(data), spec["dtype"], spec["shape"], "pt")
    return {"model": tensors, "n": n}


_DRAWN: dict[str, Callable[[Random], Case]] = {
    "frame": _draw_frame,
    "frames": _draw_frames,
    "file": _draw_file,
    "many": _draw_many,
    "saved": _draw_saved,
    "state": _draw_state,
    "folder": _draw_folder,
    "command": _draw_command,
    "outs": _draw_outs,
    "store": _draw_store,
    "checkpoint": _draw_checkpoint,
}
_RUN: dict[str, Callable[[Case, Place], None]] = {
    "frame": _frame,
    "frames": _frames,
    "file": _file,
    "many": _file,
    "saved": _saved,
    "state": _state,
    "folder": _folder,
    "command": _command,
    "outs": _outs,
    "store": _store,
    "checkpoint": _checkpoint,
}
PART = Part("round-trips", "whatever goes in comes out, by every verb", draw, run)
