"""Whole tensors without a base are decoded in one call; parts, deltas and what is damaged are still
handled one by one."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_ranks import digest, failing
from dcp_samples import blank, load, load_box, pack_file, patch, save, shards_of, weights

from packhorse import _core
from packhorse._core import OpenFrame
from packhorse.torch_framework import TorchFramework

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is ")

N = 40
NORMS = {f"norm{i:02}": weights(96, seed=i).bfloat16() for i in range(N)}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of each tensor that a call of its own has decoded."""
    found: list[int] = []
    real = _core.unpack_frames

    def counted(frames: Sequence[OpenFrame], dsts: Any, check: bool, threads: int) -> Any:
        found.append(frames[0].nbytes)
        return real(frames, dsts, check, threads)

    monkeypatch.setattr(_core, "unpack_frames", counted)
    return found


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("where", ["path", "memory://"])
def test_whole_tensors_are_decoded_together(
    tmp_path: Path, where: str, threads: int, decoded_together: list[int], alone: list[int]
) -> None:
    url = str(tmp_path) if where == "path" else f"memory://{tmp_path.name}{threads}"
    state = NORMS | {"long": weights(300, 500), "scalar": torch.tensor(2.5), "ids": weights(0)}
    save(state, url)
    found = blank(state)
    versions = [tensor._version for tensor in found.values()]
    reader = load(found, url, threads=threads)
    assert digest(found) == digest(state)
    assert (sum(decoded_together), alone) == (N + 2, [])  # all but the empty one
    assert (
        len(decoded_together) <= 2
    )  # for the values, of which there are none, and for the tensors
    assert reader.stats.n_chunks == N + 4
    changed = [tensor._version > old for tensor, old in zip(found.values(), versions, strict=True)]
    assert changed == [tensor.numel() > 0 for tensor in state.values()]


def test_tensors_that_are_copied_are_decoded_together_too(
    tmp_path: Path, decoded_together: list[int], alone: list[int]
) -> None:
    """Tensors with strides, and of another dtype than the stored one."""
    state = {name: weights(30, 40, seed=i) for i, name in enumerate("abcdef")}
    save(state, tmp_path)
    found: dict[str, Any] = {name: torch.zeros(40, 30).T for name in "abc"}
    found |= {name: torch.zeros(30, 40, dtype=torch.float64) for name in "def"}
    load(found, tmp_path)
    assert all(torch.equal(found[name], state[name].to(found[name].dtype)) for name in state)
    assert (sum(decoded_together), alone) == (6, [])


def test_batches_are_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded_together: list[int]
) -> None:
    save(NORMS, tmp_path)
    monkeypatch.setattr("packhorse.threads._BATCH_NBYTES", 10 * 192)
    found = blank(NORMS)
    load(found, tmp_path)
    assert digest(found) == digest(NORMS)
    assert [n for n in decoded_together if n] == [10] * 4


def test_memory_that_the_core_does_not_know_is_written_alone(
    tmp_path: Path, decoded_together: list[int], alone: list[int]
) -> None:
    """Complex tensors, which might be conjugated, among others."""
    state = {"a": torch.complex(weights(5, 5), weights(5, 5, seed=1)), "b": weights(60)}
    save(state, tmp_path)
    found = blank(state)
    load(found, tmp_path)
    assert digest(found) == digest(state)
    assert (sum(decoded_together), alone) == (1, [200])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_damaged_chunk_among_many_is_named(tmp_path: Path, threads: int) -> None:
    save(NORMS, tmp_path)
    frames = {index.fqn: shard.frame for index, shard in shards_of(tmp_path).items()}
    bad = frames["norm17"]
    patch(pack_file(tmp_path), bad.offset + 70 + 64, b"\xff" * 9)
    texts = []
    for names in (NORMS, ["norm17"]):
        with failing() as errors:
            load({name: torch.zeros_like(NORMS[name]) for name in names}, tmp_path, threads=threads)
        texts.append(errors[0])
    assert texts[0] == texts[1]
    place = rf"{pack_file(tmp_path)}: tensor 'norm17': byte (\d+): chunk 0 of 1: "
    found = re.search(place, texts[0])
    assert found is not None
    assert bad.offset < int(found[1]) < bad.offset + bad.nbytes


def test_the_first_of_the_damaged_headers_is_named(tmp_path: Path) -> None:
    save(NORMS, tmp_path)
    frames = {index.fqn: shard.frame for index, shard in shards_of(tmp_path).items()}
    for name in ("norm05", "norm17"):
        patch(pack_file(tmp_path), frames[name].offset + 40, b"\xff")
    texts = []
    for names in (NORMS, ["norm05"]):
        found = {name: torch.zeros_like(NORMS[name]) for name in names}
        with failing() as errors:
            load(found, tmp_path)
        assert not any(bool(tensor.any()) for tensor in found.values())
        texts.append(errors[0])
    assert texts[0] == texts[1]
    assert f"{pack_file(tmp_path)}: tensor 'norm05': byte " in texts[0]


def test_deltas_mixed_with_plain_frames(
    tmp_path: Path, decoded_together: list[int], alone: list[int]
) -> None:
    """Some tensors are deltas, some unchanged and some new; a copy has a master that is read, too,
    and one that is not."""

    def state(number: int) -> dict[str, Any]:
        masters = {f"m{i}": weights(40, 50, seed=i) + number * 1e-5 for i in range(3)}
        moved = {f"d{i}": weights(64, 64, seed=9 + i).bfloat16() for i in range(6)}
        for tensor in moved.values():
            tensor[number] += 1
        new = {f"n{i}": weights(70, seed=99 * number + i) for i in range(8)}
        copies = {f"c{i}": master.bfloat16() for i, master in enumerate(masters.values())}
        return masters | moved | new | copies | {"same": weights(33)}

    for number in range(3):
        base = tmp_path / str(number - 1) if number else None
        save(state(number), tmp_path / str(number), base=base)
    frames = {index.fqn: shard.frame for index, shard in shards_of(tmp_path / "2").items()}
    plain = {name for name, frame in frames.items() if frame.base is None}
    assert {"same", "n0", "n7"} <= plain
    assert {"d0", "d5", "c0"} & plain == set()
    for threads in (1, 2):
        for names in (list(frames), [name for name in frames if name != "m1"]):
            wanted = {name: state(2)[name] for name in names}
            found = blank(wanted)
            decoded_together.clear()
            alone.clear()
            load(found, tmp_path / "2", threads=threads)
            assert digest(found) == digest(wanted)
            assert sum(decoded_together) == len([name for name in names if name in plain])


def test_a_load_of_rows_decodes_only_them(tmp_path: Path, decoded_together: list[int]) -> None:
    """A shard of which a rank wants a part is decoded by itself."""
    save({"w": weights(100, 100)}, tmp_path)
    found, _ = load_box(tmp_path, (10, 0), (5, 100))
    assert torch.equal(found, weights(100, 100)[10:15])
    assert sum(decoded_together) == 0
    whole, _ = load_box(tmp_path, (0, 0), (100, 100))
    assert torch.equal(whole, weights(100, 100))
    assert sum(decoded_together) == 1


def test_nothing_is_decoded_twice_to_the_same_memory_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied weights may differ in a checkpoint, and nobody may see a mixture of them."""
    together: list[list[tuple[int, int]]] = []
    real = TorchFramework.views

    def seen(framework: TorchFramework, tensors: Sequence[torch.Tensor]) -> Any:
        together.append(sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors))
        return real(framework, tensors)

    monkeypatch.setattr(TorchFramework, "views", seen)
    values = [weights(150_000, seed=seed).bfloat16() for seed in range(4)]
    save({str(i): value for i, value in enumerate(values)}, tmp_path)
    memory = torch.zeros(200_000, dtype=torch.bfloat16)
    tied, later, alone = memory[:150_000], memory[50_000:], torch.zeros_like(values[3])
    load({"0": tied, "1": tied[:], "2": later, "3": alone}, tmp_path, threads=2)
    (spans,) = filter(None, together)  # there are no values beside the tensors
    assert len(spans) == 4
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert torch.equal(memory, torch.cat([values[1][:50_000], values[2]]))
    assert torch.equal(alone, values[3])
