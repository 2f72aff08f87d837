"""The trace of a reinforcement learning run, with a tiny model."""

import fcntl
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from benchmark_modules import import_afresh

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    *("rl_trace", "data.language_model", "data.rl_masters", "data.rl_policy"),
    *("data.rl_pretraining", "data.rl_trace", "data.rl_tuning"),
)
RATE = 1e-3
STEPS = 5


class Stopped(Exception):
    """Stands for a run that is killed."""


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    with import_afresh(*MODULES) as found:
        yield found


@pytest.fixture(scope="module")
def recipe(modules: dict[str, ModuleType]) -> dict[str, Any]:
    """What the runs of these tests share."""
    texts = [path.read_bytes() for path in sorted((ROOT / "benchmarks").rglob("*.py"))]
    return {
        "pretraining": modules["data.rl_pretraining"].Pretraining(
            modules["data.language_model"].ModelShape(512, 32, 64, 2, 2),
            steps=24,
            context=32,
            warm_up=4,
            cool_down=8,
            save_every=5,
        ),
        "tuning": modules["data.rl_tuning"].Tuning(
            prompts=4, n_prompt=4, n_new=12, warm_up=2, save_every=2
        ),
        "corpus": modules["data.rl_pretraining"].Corpus(texts, 512),
    }


def _tune(
    modules: dict[str, ModuleType],
    recipe: dict[str, Any],
    weights: dict[str, Any],
    folder: Path,
    n_steps: int,
    stop_after: int | None = None,
) -> None:
    def on_step(record: dict[str, Any]) -> None:
        if record["step"] == stop_after:
            raise Stopped

    modules["data.rl_tuning"].tune(
        recipe["tuning"],
        RATE,
        n_steps,
        folder,
        corpus=recipe["corpus"],
        shape=recipe["pretraining"].shape,
        weights=weights,
        on_step=on_step,
    )


@pytest.fixture(scope="module")
def folder(modules: dict[str, ModuleType], recipe: dict[str, Any], tmp_path_factory: Any) -> Path:
    """The folder of a trace that was made in one go."""
    folder: Path = tmp_path_factory.mktemp("trace")
    pretrain = modules["data.rl_pretraining"].pretrain
    weights = pretrain(recipe["pretraining"], recipe["corpus"], folder)
    _tune(modules, recipe, weights, folder, STEPS)
    return folder


@pytest.fixture(scope="module")
def weights(modules: dict[str, ModuleType], recipe: dict[str, Any], folder: Path) -> Any:
    pretraining = modules["data.rl_pretraining"]
    return pretraining.pretrain(recipe["pretraining"], recipe["corpus"], folder)


def test_the_model_learns_before_it_is_tuned(modules: dict[str, ModuleType], folder: Path) -> None:
    path = folder / modules["data.rl_pretraining"].CHECKPOINT
    losses = modules["data.rl_masters"].checkpoint_record(path)["losses"]
    assert len(losses) == 24
    assert np.mean(losses[-4:]) < 0.95 * np.mean(losses[:4])


def test_pretraining_that_was_stopped_gives_the_same_bits(
    modules: dict[str, ModuleType], recipe: dict[str, Any], weights: Any, tmp_path: Path
) -> None:
    def on_step(step: int, loss: float) -> None:
        if step == 13:
            raise Stopped

    pretrain = modules["data.rl_pretraining"].pretrain
    with pytest.raises(Stopped):
        pretrain(recipe["pretraining"], recipe["corpus"], tmp_path, on_step)
    again = pretrain(recipe["pretraining"], recipe["corpus"], tmp_path)
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_a_run_that_was_stopped_gives_the_same_bits(
    modules: dict[str, ModuleType],
    recipe: dict[str, Any],
    weights: Any,
    folder: Path,
    tmp_path: Path,
    stop_after: int,
) -> None:
    trace = modules["data.rl_trace"]
    with pytest.raises(Stopped):
        _tune(modules, recipe, weights, tmp_path, STEPS, stop_after)
    assert len(trace.records(tmp_path, RATE)) == stop_after + 1
    _tune(modules, recipe, weights, tmp_path, STEPS)
    pairs = zip(trace.steps(folder, RATE), trace.steps(tmp_path, RATE), strict=True)
    for (step, wanted), (other, found) in pairs:
        assert step == other
        assert {n: a.tobytes() for n, a in wanted.items()} == {
            n: a.tobytes() for n, a in found.items()
        }
    told = [[_without_time(r) for r in trace.records(f, RATE)] for f in (folder, tmp_path)]
    assert told[0] == told[1]


def _without_time(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "cpu_seconds"}


def test_states_are_those_of_the_model_and_records_tell_their_changes(
    modules: dict[str, ModuleType], weights: Any, folder: Path
) -> None:
    trace = modules["data.rl_trace"]
    states = dict(trace.steps(folder, RATE))
    records = trace.records(folder, RATE)
    assert list(states) == [record["step"] for record in records] == list(range(STEPS + 1))
    for name, array in states[0].items():
        assert array.dtype == ml_dtypes.bfloat16
        assert np.array_equal(array.astype(np.float32), weights[name].bfloat16().float().numpy())
    for before, after in itertools.pairwise(states):
        old, new = (_bits(states[step]) for step in (before, after))
        n_changed = int((old != new).sum())
        assert n_changed == records[after]["n_changed"] == sum(records[after]["ulps"]) > 0
        assert records[after]["changed"] == pytest.approx(n_changed / len(old))


def _bits(state: dict[str, Any]) -> Any:
    return np.concatenate([array.reshape(-1).view(np.uint16) for array in state.values()])


def test_a_longer_run_goes_on_from_a_shorter_one(
    modules: dict[str, ModuleType],
    recipe: dict[str, Any],
    weights: Any,
    folder: Path,
    tmp_path: Path,
) -> None:
    records = modules["data.rl_trace"].records
    _tune(modules, recipe, weights, tmp_path, 3)
    _tune(modules, recipe, weights, tmp_path, STEPS)
    assert records(tmp_path, RATE)[-1]["sha256"] == records(folder, RATE)[-1]["sha256"]


def test_a_run_of_another_recipe_is_refused(
    modules: dict[str, ModuleType], recipe: dict[str, Any], weights: Any, tmp_path: Path
) -> None:
    _tune(modules, recipe, weights, tmp_path, 2)
    other = recipe | {"tuning": modules["data.rl_tuning"].Tuning(word="def", save_every=2)}
    with pytest.raises(ValueError, match="made with another recipe"):
        _tune(modules, other, weights, tmp_path, 3)
    with pytest.raises(ValueError, match="made with another first_sha256"):
        _tune(modules, recipe, {n: w + 1 for n, w in weights.items()}, tmp_path, 3)


def test_two_processes_do_not_do_the_same_run(
    modules: dict[str, ModuleType], recipe: dict[str, Any], weights: Any, tmp_path: Path
) -> None:
    with (tmp_path / "0.001.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match=r"another process has locked .*0\.001\.lock"):
            _tune(modules, recipe, weights, tmp_path, 1)
    _tune(modules, recipe, weights, tmp_path, 1)


def test_a_missing_trace_names_the_command(
    modules: dict[str, ModuleType], folder: Path, tmp_path: Path
) -> None:
    for place, there in ((tmp_path, "none"), (folder, "0.001")):
        with pytest.raises(FileNotFoundError, match=rf"there are: {there}.*make rl-trace"):
            modules["data.rl_trace"].steps(place, 7e-6)


def test_another_state_than_was_made_is_refused(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    trace = modules["data.rl_trace"]
    with trace.writable_store(tmp_path, RATE) as store:
        store.take(trace.snapshot_name(0), {"w": np.ones(999)}, metadata={"sha256": "0" * 64})
    with pytest.raises(ValueError, match="weights of step 0 do not have the SHA-256"):
        list(trace.steps(tmp_path, RATE))


def test_changes_are_counted_in_ulps(modules: dict[str, ModuleType]) -> None:
    before = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, -2.0, 3.0]).bfloat16()
    steps = torch.tensor([0, 1, 2, 5, 1, 0, -1, 0], dtype=torch.int16)
    after = (before.view(torch.int16) + steps).view(torch.bfloat16)
    after[5] = -0.0
    found = modules["data.rl_tuning"].changes({"w": before}, {"w": after})
    assert found == {"changed": 6 / 8, "n_changed": 6, "ulps": [4, 1, 1]}
    tiny = torch.tensor([1, -(2**15) + 1], dtype=torch.int16).view(torch.bfloat16)
    across = modules["data.rl_tuning"].changes({"w": tiny[:1]}, {"w": tiny[1:]})
    assert across["ulps"] == [0, 1, 0]  # from the smallest number over zero to its negative


def test_sampling_agrees_with_the_policy_that_is_trained(
    modules: dict[str, ModuleType], recipe: dict[str, Any], weights: Any
) -> None:
    """The cached steps of the worker give the probabilities that the whole sequence gives."""
    model = modules["data.language_model"].LanguageModel(recipe["pretraining"].shape, seed=0)
    model.load_state_dict(weights)
    policy = modules["data.rl_policy"]
    prompts = recipe["corpus"].rows(3, 5, (1,))
    rollouts = policy.sample(model, prompts, group=4, n_new=9, seed=2)
    assert rollouts.ids.shape == (12, 14)
    assert torch.equal(rollouts.ids[:, :5], prompts.repeat_interleave(4, 0))
    with torch.no_grad():
        scores = model.logits(rollouts.ids[:, :-1])[:, 4:].log_softmax(-1)
    wanted = scores.gather(2, rollouts.new[:, :, None])[:, :, 0]
    torch.testing.assert_close(rollouts.log_probs, wanted, rtol=1e-4, atol=1e-4)


def test_the_gradient_favours_what_was_rewarded(modules: dict[str, ModuleType]) -> None:
    policy = modules["data.rl_policy"]
    gains = policy.advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]), 3)
    assert gains[0] > 0 > gains[1]
    assert gains[3:].tolist() == [0.0, 0.0, 0.0]
    new = torch.zeros(6, 2, requires_grad=True)
    loss, outside = policy.loss(new, torch.zeros(6, 2), gains, 0.2)
    loss.backward()
    assert outside == 0
    assert (new.grad[0] < 0).all()
    assert (new.grad[1:3] > 0).all()
    assert (new.grad[3:] == 0).all()


def test_a_ratio_that_has_gone_far_no_longer_counts(modules: dict[str, ModuleType]) -> None:
    gains = torch.tensor([1.0, 1.0, -1.0, -1.0])
    new = torch.tensor([[0.5], [-0.5], [0.5], [-0.5]], requires_grad=True)
    loss, outside = modules["data.rl_policy"].loss(new, torch.zeros(4, 1), gains, 0.2)
    loss.backward()
    assert outside == 1
    assert [bool(g) for g in new.grad[:, 0]] == [False, True, True, False]


def test_the_command_summarises_what_is_there(
    modules: dict[str, ModuleType], folder: Path, tmp_path: Path, capsys: Any
) -> None:
    results = tmp_path / "results.json"
    command = modules["rl_trace"].main
    assert command(["--table", "--out", str(folder), "--results", str(results)]) == 0
    assert "| 0.001 | 5 |" in capsys.readouterr().out
    row = json.loads(results.read_text())["rates"][0]
    assert row["changed"]["min"] <= row["changed"]["mean"] <= row["changed"]["max"]
    assert len(row["changed_of_steps"]) == len(row["reward_of_steps"]) == STEPS
    assert sum(row["ulp_shares"]) == pytest.approx(1, abs=1e-4)
    assert command(["--table", "--out", str(tmp_path / "none"), "--results", str(results)]) == 1
    assert "make rl-trace" in capsys.readouterr().err
