"""What changed between two models: against NumPy, and against what packing with a base takes."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from base_samples import write_checkpoints
from cases import each
from cli_samples import flip_bytes, frame_offsets
from disk_samples import entry, file_bytes
from real_model import model_path, real_tensors
from safetensors.numpy import load_file, save_file
from transformers import BertConfig, BertModel

from packhorse.disk import SnapshotStore, pack_file
from packhorse.layout import DTYPE_BY_NAME
from packhorse.reports.changes import compare_models
from packhorse.reports.results import ChangeRow, Estimate, Problem
from packhorse.reports.sampling import choose_places
from packhorse.reports.sources import Entry, Source, find_sources, opened

Tensors = Mapping[str, np.ndarray]
WORDS = "embeddings.word_embeddings.weight"


def compare(base: Path, tuned: Path, **options: Any) -> dict[str, ChangeRow]:
    """The rows, where there is no problem."""
    rows, problems = compare_with_problems(base, tuned, **options)
    assert problems == []
    return rows


def compare_with_problems(
    base: Path, tuned: Path, **options: Any
) -> tuple[dict[str, ChangeRow], list[Problem]]:
    with opened(Source("old", str(base))) as old, opened(Source("new", str(tuned))) as new:
        changes, problems = compare_models(old, new, **options)
    assert (changes.base, changes.tuned) == ("old", "new")
    assert len({row.name for row in changes.rows}) == len(changes.rows)
    return {row.name: row for row in changes.rows}, problems


def saved(path: Path, tensors: Tensors) -> Path:
    save_file(dict(tensors), path)
    return path


def as_arrays(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {
        name: tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16).copy()
        for name, tensor in state.items()
        if tensor.dtype == torch.bfloat16
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The real model with one layer, BF16, and the same after a step of AdamW, in which the
    embeddings of words were frozen."""
    folder = tmp_path_factory.mktemp("models")
    config = BertConfig.from_pretrained(model_path().parent, num_hidden_layers=1)
    model = BertModel(config).to(torch.bfloat16)
    given = {n: t for n, t in real_tensors(1).items() if t.dtype == ml_dtypes.bfloat16}
    state = {n: torch.from_numpy(t.view(np.uint16)).view(torch.bfloat16) for n, t in given.items()}
    assert not model.load_state_dict(state, strict=False).missing_keys
    base = saved(folder / "base.safetensors", as_arrays(model.state_dict()))
    model.embeddings.word_embeddings.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    tokens = torch.randint(1000, 30000, (4, 16), generator=torch.Generator().manual_seed(0))
    model.eval()(tokens).last_hidden_state.float().square().mean().backward()
    optimizer.step()
    return base, saved(folder / "tuned.safetensors", as_arrays(model.state_dict()))


def test_a_fine_tune(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Shares are those that NumPy counts; sizes are those of the packed file."""
    rows = compare(*models)
    packed = tmp_path / "tuned.ph.safetensors"
    full, delta = (
        {
            each.name: each.packed_nbytes
            for each in pack_file(models[1], packed, base=base, force=True).tensors
        }
        for base in (None, models[0])
    )
    old, new = load_file(models[0]), load_file(models[1])
    assert list(rows) == list(new)
    for name, row in rows.items():
        n_changed = (old[name].view(np.uint16) != new[name].view(np.uint16)).sum()
        assert row.changed == pytest.approx(n_changed / row.nbytes * 2)
        assert row.change == ("changed" if n_changed else "equal")
        assert (row.dtype, row.shape, row.was) == ("BF16", new[name].shape, None)
        assert row.full == Estimate(full[name])
        assert row.delta == Estimate(delta[name])
    assert rows[WORDS].change == "equal"
    assert rows[WORDS].kind == "embedding"
    assert Counter(row.change for row in rows.values())["changed"] > 10
    query = rows["encoder.layer.0.attention.self.query.weight"]
    assert query.delta is not None
    assert query.changed is not None
    assert 0.01 < query.changed < 0.9
    assert query.delta.nbytes < query.full.nbytes / 2
    assert (query.kind, query.layer) == ("attention", 0)


def test_a_sample_tells_much_the_same(models: tuple[Path, Path]) -> None:
    whole, found = compare(*models), compare(*models, share=0.1)
    assert {n: row.change for n, row in whole.items()} == {n: r.change for n, r in found.items()}
    large = "encoder.layer.0.output.dense.weight"
    assert found[large].changed == pytest.approx(whole[large].changed, rel=0.1)
    for name, row in found.items():
        exact = whole[name]
        assert row.delta is not None
        assert exact.delta is not None
        allowed = row.delta.error + 0.03 * exact.delta.nbytes + 0.0001 * row.nbytes
        assert abs(row.delta.nbytes - exact.delta.nbytes) <= allowed, name
        assert abs(row.full.nbytes - exact.full.nbytes) <= row.full.error + 0.003 * row.nbytes


def test_packed_files_folders_and_snapshots_give_the_same_answer(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    base, tuned = tmp_path / "base.ph.safetensors", tmp_path / "tuned.ph.safetensors"
    pack_file(models[0], base)
    pack_file(models[1], tuned, level="fast")
    shards = tmp_path / "folder"
    shards.mkdir()
    names = list(load_file(models[1]))
    for i in range(3):
        part = {name: load_file(models[1])[name] for name in names[i::3]}
        saved(shards / f"model-{i}.safetensors", part)
    plain = compare(*models, share=0.3)
    assert compare(base, tuned, share=0.3) == plain
    assert compare(base, models[1], share=0.3) == plain
    assert compare(models[0], tuned, share=0.3, threads=2) == plain
    assert compare(models[0], shards, share=0.3, threads=2) == plain
    with SnapshotStore(tmp_path / "store") as store:
        store.take("1", load_file(models[0]))
        store.take("2", load_file(models[1]))
    sources = find_sources([tmp_path / "store"])
    with opened(sources[0]) as first, opened(sources[1]) as second:
        changes, problems = compare_models(first, second, share=0.3)
    assert problems == []
    assert {row.name: row for row in changes.rows} == plain


def test_sizes_that_are_known_are_used_and_progress_is_told(models: tuple[Path, Path]) -> None:
    done: list[int] = []
    known = {WORDS: Estimate(12345, 6)}
    rows = compare(*models, full=known, threads=2, progress=done.append)
    assert rows[WORDS].full == known[WORDS]
    assert sum(done) == sum(row.nbytes for row in rows.values())


def test_one_value_outside_of_the_sample(tmp_path: Path) -> None:
    """The sample is equal; the tensor is not."""
    old = real_tensors(1)[WORDS]
    new = old.copy()
    places = choose_places(Entry(WORDS, "BF16", old.shape, old.nbytes, None), 0.05)
    gap = next(stop for (_, stop), (start, _) in zip(places.runs, places.runs[1:], strict=False)
               if stop < start)  # fmt: skip
    new.reshape(-1).view(np.uint16)[gap // 2] ^= 1
    paths = saved(tmp_path / "a", {WORDS: old}), saved(tmp_path / "b", {WORDS: new})
    row = compare(*paths, share=0.05)[WORDS]
    assert (row.change, row.changed) == ("changed", pytest.approx(1 / old.size))
    assert row.delta is not None
    assert (row.delta.error, row.full.error) == (0, 0)
    assert row.delta.nbytes < 3000
    packed = tmp_path / "b.ph.safetensors"
    pack_file(paths[1], packed)
    assert compare(paths[0], packed, share=0.05)[WORDS] == row
    assert compare(paths[0], paths[0], share=0.05)[WORDS].change == "equal"


def tensor(seed: int, *shape: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape or (40, 30), np.float32)
    return values.astype(ml_dtypes.bfloat16)


@each("form", ["plain", "packed", "mixed"])
def test_moves(form: str, tmp_path: Path) -> None:
    """Renamed tensors; layers of which one was left out; a copy; zeros, which say nothing."""
    zeros = np.zeros(500, ml_dtypes.bfloat16)
    old = {f"layers.{i}.weight": tensor(i) for i in range(4)}
    old |= {"model.head.weight": tensor(9), "embed.weight": tensor(8), "zeros.bias": zeros}
    new = {"layers.0.weight": old["layers.0.weight"], "layers.1.weight": old["layers.2.weight"]}
    new |= {"layers.2.weight": old["layers.3.weight"], "head.weight": old["model.head.weight"]}
    new |= {"embed.weight": old["embed.weight"], "lm_head.weight": old["embed.weight"]}
    new |= {"zeros.bias": zeros, "more.bias": zeros, "reversed.weight": tensor(8)[::-1].copy()}
    paths = [saved(tmp_path / name, tensors) for name, tensors in (("old", old), ("new", new))]
    for i in {"plain": [], "packed": [0, 1], "mixed": [1]}[form]:
        pack_file(paths[i], paths[i].with_suffix(".ph.safetensors"), force=True)
        paths[i] = paths[i].with_suffix(".ph.safetensors")
    rows = compare(paths[0], paths[1])
    assert {name: (row.change, row.was) for name, row in rows.items()} == {
        "layers.0.weight": ("equal", None),
        "layers.1.weight": ("moved", "layers.2.weight"),
        "layers.2.weight": ("moved", "layers.3.weight"),
        "head.weight": ("moved", "model.head.weight"),
        "embed.weight": ("equal", None),
        "lm_head.weight": ("moved", "embed.weight"),
        "zeros.bias": ("equal", None),
        "more.bias": ("new", None),
        "reversed.weight": ("new", None),
    }
    assert rows["head.weight"].changed == 0
    against = {
        each.name: each.packed_nbytes
        for each in pack_file(
            tmp_path / "new", tmp_path / "x", base=tmp_path / "old", force=True
        ).tensors
    }
    assert {n: (row.delta or row.full).nbytes for n, row in rows.items()} == against


def test_equal_tensors_that_moved_come_from_different_ones(tmp_path: Path) -> None:
    """Zeros of several layers; and a tensor that two new ones equal."""
    zeros, weight = np.zeros(50, np.float32), tensor(1)
    old = {"a.0.bias": zeros, "a.1.bias": zeros, "a.weight": weight}
    new = {"b.0.bias": zeros, "b.1.bias": zeros, "b.weight": weight, "c.weight": weight}
    rows = compare(saved(tmp_path / "a", old), saved(tmp_path / "b", new))
    assert {name: (row.change, row.was) for name, row in rows.items()} == {
        "b.0.bias": ("moved", "a.0.bias"), "b.1.bias": ("moved", "a.1.bias"),
        "b.weight": ("moved", "a.weight"), "c.weight": ("moved", "a.weight"),
    }  # fmt: skip


def test_rows_add_up_to_the_file_that_is_packed_against_the_first_model(tmp_path: Path) -> None:
    """Training states with optimizers; tensors that were added, dropped, cast and reshaped."""
    old, new = write_checkpoints(tmp_path)
    rows = compare(old, new)
    packed = pack_file(new, tmp_path / "new.ph.safetensors", base=old).tensors
    found = {
        n: (row.delta or row.full).nbytes for n, row in rows.items() if row.change != "removed"
    }
    assert found == {each.name: each.packed_nbytes for each in packed}
    assert (rows["ids"].change, rows["ids"].was, rows["ids"].changed) == (
        "replaced",
        "I64 [3000]",
        1,
    )


def test_tensors_of_another_dtype_or_shape_and_those_without_a_partner(tmp_path: Path) -> None:
    weights = tensor(1, 300, 500).astype(np.float32) + np.float32(1e-5)
    old = {"cast": weights, "same.cast": weights, "shape": tensor(2, 40, 30), "int": np.arange(9),
           "gone": tensor(3)}  # fmt: skip
    new = {"cast": weights.astype(ml_dtypes.bfloat16), "same.cast": weights.astype(np.float64)}
    new |= {"shape": tensor(2, 30, 40), "int": np.arange(9, dtype=np.int32), "new": tensor(4)}
    rows = compare(saved(tmp_path / "a", old), saved(tmp_path / "b", new))
    assert [row.name for row in rows.values()][-1] == "gone"
    assert {name: (row.change, row.was, row.changed) for name, row in rows.items()} == {
        "cast": ("replaced", "F32 [300, 500]", None),
        "same.cast": ("replaced", "F32 [300, 500]", None),
        "shape": ("replaced", "BF16 [40, 30]", 0),
        "int": ("replaced", "I64 [9]", None),
        "new": ("new", None, None),
        "gone": ("removed", None, None),
    }
    cast = rows["cast"].delta
    assert cast is not None
    assert cast.nbytes < 1000 < rows["cast"].full.nbytes
    assert [name for name, row in rows.items() if row.delta] == ["cast", "shape"]
    assert rows["gone"].full.nbytes > 1000


def test_a_cast_of_which_a_sample_is_taken(tmp_path: Path) -> None:
    weights = real_tensors(1)[WORDS][:8000].astype(np.float32)
    old = saved(tmp_path / "a", {"w": weights})
    new = saved(tmp_path / "b", {"w": weights.astype(ml_dtypes.bfloat16)})
    row = compare(old, new, share=0.1)["w"]
    assert row.delta is not None
    assert row.delta.nbytes < 10_000 < row.full.nbytes


def test_damaged_tensors_leave_the_others(models: tuple[Path, Path], tmp_path: Path) -> None:
    """A tensor of the first model is damaged, another one of the second, in the middle."""
    paths = [tmp_path / "old.ph.safetensors", tmp_path / "new.ph.safetensors"]
    damaged = ["encoder.layer.0.attention.self.key.weight", "encoder.layer.0.output.dense.weight"]
    for path, source, name in zip(paths, models, damaged, strict=True):
        pack_file(source, path)
        start, stop = frame_offsets(path)[name]
        flip_bytes(path, (start + stop) // 2)
    rows, problems = compare_with_problems(paths[0], paths[1], threads=2)
    assert sorted((each.source, each.tensor) for each in problems) == [
        ("new", damaged[1]), ("old", damaged[0]),
    ]  # fmt: skip
    assert all(str(path) in "".join(each.message for each in problems) for path in paths)
    plain = compare(*models)
    assert rows == {name: row for name, row in plain.items() if name not in damaged}


def test_tensors_packed_against_a_base_are_problems(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    pack_file(models[1], tmp_path / "new.ph.safetensors", base=models[0])
    rows, problems = compare_with_problems(models[0], tmp_path / "new.ph.safetensors")
    assert {each.source for each in problems} == {"new"}
    assert all("packed against a base" in each.message for each in problems)
    assert len(rows) + len(problems) == len(compare(*models))


def test_every_dtype_with_empty_tensors_and_scalars(tmp_path: Path) -> None:
    rng, header, data = np.random.default_rng(0), {}, [b"", b""]
    for dtype, row in DTYPE_BY_NAME.items():
        for shape in ([], [0, 3], [16], [40, 24]):
            nbytes, rest = divmod(math.prod(shape) * row.bits, 8)
            if rest:
                continue
            for name in (f"{dtype} {shape}", f"{dtype} {shape} same"):
                old = rng.integers(0, 2, nbytes, np.uint8).tobytes()
                new = old if "same" in name or not old else bytes([old[0] ^ 1]) + old[1:]
                header[name] = entry(len(data[0]), len(data[0]) + nbytes, dtype, shape)
                data = [data[0] + old, data[1] + new]
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, each_data in zip(paths, data, strict=True):
        path.write_bytes(file_bytes(header, each_data))
    rows = compare(*paths)
    assert len(rows) == len(header)
    for name, found in rows.items():
        is_equal = "same" in name or "[0, 3]" in name
        assert found.change == ("equal" if is_equal else "changed"), name
        share = 0 if is_equal else 1 / math.prod(found.shape)
        assert found.changed == pytest.approx(share), name
        assert found.delta is not None
