"""SWAG: moments, samples and predictions, against the formulas in float64."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from codec_battery import ISAS, forced
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from packhorse.disk import Shelf, ShelfTensor
from packhorse.errors import ClosedError, CompatibilityError
from packhorse.learn import SWAG
from packhorse.learn.moments import Moments


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    with Shelf(tmp_path / "shelf") as opened:
        yield opened


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def flat(model: nn.Module) -> np.ndarray:
    parts = [p.detach().double().flatten() for p in model.parameters() if p.requires_grad]
    return torch.cat(parts).numpy()


def joined(state: dict[str, Tensor]) -> np.ndarray:
    return torch.cat([value.double().flatten() for value in state.values()]).numpy()


def wander(model: nn.Module, n: int, spread: float = 0.1) -> Iterator[int]:
    """Move the weights a little, n times."""
    torch.manual_seed(1)
    for step in range(n):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += spread * torch.randn(parameter.shape).to(parameter)
        yield step


def collect(swag: SWAG, model: nn.Module, n: int, spread: float = 0.1) -> np.ndarray:
    """Collect iterates; returns them in float64."""
    rows = []
    for _ in wander(model, n, spread):
        assert swag.collect()
        rows.append(flat(model))
    swag.flush()
    return np.stack(rows)


# Moments.


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 50])
def test_moments_are_those_of_the_rows(shelf: Shelf, n: int) -> None:
    model = small()
    swag = SWAG(model, shelf)
    rows = collect(swag, model, n)
    assert swag.n_collected == swag.rank == n
    np.testing.assert_allclose(joined(swag.mean()), rows.mean(0), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(joined(swag.variance()), rows.var(0), rtol=1e-12, atol=1e-18)
    np.testing.assert_array_equal(np.asarray(shelf["swag/rows"]), rows)
    assert not swag.variance()["0.weight"].requires_grad
    swag.close()
    np.testing.assert_allclose(np.asarray(shelf["swag/mean"]), rows.mean(0), rtol=1e-14)


@pytest.mark.parametrize("isa", ISAS)
def test_sums_are_those_of_welford_on_every_path(isa: str) -> None:
    """Bit for bit, for rows one by one or together, and for NaN and infinities."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((7, 2500)).astype(np.float32)
    rows[2, 5], rows[3, 6] = np.nan, np.inf
    mean, squares = np.zeros(2500), np.zeros(2500)
    with np.errstate(invalid="ignore"):
        for count, row in enumerate(rows, 1):
            delta = row - mean
            mean += delta * (1 / count)
            squares += delta * delta * ((count - 1) / count)
    with forced(isa):
        found = Moments(0, np.zeros(2500), np.zeros(2500))
        found.add(rows[0])
        found.add(*rows[1:])
    assert found.count == 7
    np.testing.assert_array_equal(found.mean, mean)
    np.testing.assert_array_equal(found.squares, squares)


def test_sums_of_rows_of_another_length_are_refused() -> None:
    moments = Moments(0, np.zeros(5), np.zeros(5))
    with pytest.raises(ValueError, match="as long as mean"):
        moments.add(np.zeros(4, np.float32))


def test_the_variance_of_iterates_close_together_keeps_its_digits(shelf: Shelf) -> None:
    """Weights near 1 that differ by the last bits of fp32."""
    model = small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    swag = SWAG(model, shelf)
    rows = collect(swag, model, 200, spread=1e-7)
    assert 1e-8 < rows.std(0).max() < 1e-5
    np.testing.assert_allclose(joined(swag.variance()), rows.var(0), rtol=1e-8)
    naive = np.mean(rows.astype(np.float32) ** 2, 0, dtype=np.float32)
    naive -= np.mean(rows.astype(np.float32), 0, dtype=np.float32) ** 2
    assert np.abs(naive / rows.var(0) - 1).max() > 1  # fp32 by the usual formula is useless


def test_every_kth_iterate_counts(shelf: Shelf) -> None:
    model = small()
    by_call, by_step = SWAG(model, shelf, name="a", every=3), SWAG(model, shelf, name="b", every=3)
    taken = [(by_call.collect(), by_step.collect(step)) for step in wander(model, 8)]
    by_call.flush()
    by_step.flush()
    assert taken == [(step % 3 == 2, step % 3 == 0) for step in range(8)]
    assert (by_call.n_collected, by_step.n_collected) == (2, 3)


@pytest.mark.parametrize("max_rank", [2, 5, 16, 17, 20])
@pytest.mark.parametrize("n", [3, 24, 70])
def test_the_last_iterates_are_kept(shelf: Shelf, max_rank: int, n: int) -> None:
    model = small()
    swag = SWAG(model, shelf, max_rank=max_rank)
    rows = collect(swag, model, n)
    kept = rows[-max_rank:]
    assert (swag.n_collected, swag.rank) == (n, len(kept))
    assert len(shelf["swag/rows"]) <= max(max_rank, 16) + 6
    np.testing.assert_allclose(joined(swag.variance()), rows.var(0), rtol=1e-12)
    draws = drawn(swag, 2, seed=5)
    np.testing.assert_allclose(draws, formula(rows, kept, 2, seed=5), rtol=1e-5, atol=1e-6)
    again = SWAG(small(), shelf, max_rank=max_rank)  # reads what is on the shelf
    np.testing.assert_array_equal(drawn(again, 2, seed=5), draws)


# Samples.


def drawn(swag: SWAG, n: int, **options: float) -> np.ndarray:
    return np.stack([joined(state) for state in swag.sample(n, **options)])


def formula(
    rows: np.ndarray, kept: np.ndarray, n: int, seed: int, scale: float = 1.0
) -> np.ndarray:
    """Samples by the formula of the paper, for the random numbers of a seed."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(n):
        z1 = torch.empty(rows.shape[1]).normal_(generator=generator).double().numpy()
        z2 = torch.empty(len(kept)).normal_(generator=generator).double().numpy()
        deviations = kept - rows.mean(0)
        diagonal = rows.std(0) * z1 / np.sqrt(2)
        low_rank = z2 @ deviations / np.sqrt(2 * (len(kept) - 1))
        samples.append(rows.mean(0) + np.sqrt(scale) * (diagonal + low_rank))
    return np.stack(samples)


@pytest.mark.parametrize(("n", "scale"), [(1, 1.0), (7, 1.0), (3, 0.5)])
def test_samples_follow_the_formula(shelf: Shelf, n: int, scale: float) -> None:
    model = small()
    swag = SWAG(model, shelf)
    rows = collect(swag, model, 40)
    wanted = formula(rows, rows, n, 9, scale)
    np.testing.assert_allclose(drawn(swag, n, seed=9, scale=scale), wanted, rtol=1e-5, atol=1e-6)


def test_deviations_of_iterates_close_together_keep_their_digits(shelf: Shelf) -> None:
    model = small()
    swag = SWAG(model, shelf)
    rows = collect(swag, model, 40, spread=1e-6)
    off = drawn(swag, 5, seed=2) - rows.mean(0)
    wanted = formula(rows, rows, 5, 2) - rows.mean(0)
    assert np.abs(wanted).max() < 1e-4
    np.testing.assert_allclose(off, wanted, atol=2 * np.spacing(np.float32(0.6)))


def test_the_covariance_of_samples_is_right(shelf: Shelf) -> None:
    model = nn.Linear(4, 1)
    swag = SWAG(model, shelf)
    rows = collect(swag, model, 12)
    covariance = np.cov(rows, rowvar=False)
    wanted = np.diag(rows.var(0)) / 2 + covariance / 2
    draws = drawn(swag, 4000, seed=0)
    found = np.cov(draws, rowvar=False)
    scale = np.sqrt(np.outer(wanted.diagonal(), wanted.diagonal()))
    assert np.abs((found - wanted) / scale).max() < 5 * np.sqrt(2 / 4000)
    error = (draws.mean(0) - rows.mean(0)) / np.sqrt(wanted.diagonal() / 4000)
    assert np.abs(error).max() < 5


def test_all_samples_take_one_pass(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    swag = SWAG(model, shelf)
    collect(swag, model, 40)
    names, real = [], ShelfTensor.iter_chunks

    def counted(self: ShelfTensor, nbytes: int | None = None) -> Iterator[np.ndarray]:
        names.append(self.name)
        return real(self, nbytes)

    monkeypatch.setattr(ShelfTensor, "iter_chunks", counted)
    swag.sample(10)
    assert names == ["swag/rows"]
    swag.sample(10, scale=0)
    assert names == ["swag/rows"]


@pytest.mark.parametrize("max_rank", [None, 5])
def test_a_shelf_may_give_tensors_of_torch(tmp_path: Path, max_rank: int | None) -> None:
    found = []
    x = torch.arange(12.0).reshape(4, 3)
    for framework in ("np", "pt"):
        model = small()
        with Shelf(tmp_path / framework, framework=framework) as shelf:
            with SWAG(model, shelf, max_rank=max_rank) as swag:
                collect(swag, model, 20)
            shelf.tag("middle")
            with SWAG(model, shelf, max_rank=max_rank) as swag:  # goes on
                collect(swag, model, 51)
                one = [joined(state) for state in (swag.mean(), swag.variance())]
                one += [drawn(swag, 3, seed=1), swag.predict([x], 4, seed=2).numpy()]
            then = SWAG(model, shelf.at("middle"), max_rank=max_rank)
            found.append([*one, drawn(then, 2, seed=3), joined(then.variance())])
    for array, of_torch in zip(*found, strict=True):
        np.testing.assert_array_equal(array, of_torch)


def test_seeds_decide_samples(shelf: Shelf) -> None:
    model = small()
    swag = SWAG(model, shelf)
    collect(swag, model, 10)
    np.testing.assert_array_equal(drawn(swag, 2, seed=3), drawn(swag, 2, seed=3))
    np.testing.assert_allclose(drawn(swag, 1, seed=3), drawn(swag, 4, seed=3)[:1], atol=1e-6)
    assert (drawn(swag, 1, seed=3) != drawn(swag, 1, seed=4)).all()
    generator = torch.Generator().manual_seed(3)
    first, second = (drawn(swag, 1, seed=generator) for _ in range(2))
    np.testing.assert_array_equal(first, drawn(swag, 1, seed=3))
    assert (first != second).all()
    torch.manual_seed(8)
    first = drawn(swag, 1)
    torch.manual_seed(8)
    np.testing.assert_array_equal(first, drawn(swag, 1))


def test_scale_0_gives_the_mean(shelf: Shelf) -> None:
    model = small()
    swag = SWAG(model, shelf)
    collect(swag, model, 1)
    np.testing.assert_array_equal(joined(swag.sample(1, scale=0)[0]), joined(swag.mean()))
    with pytest.raises(ValueError, match="has 1 iterates; this needs 2"):
        swag.sample()


# What a model may have.


class Odd(nn.Module):
    """Tied, frozen and bf16 parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.low = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(self.embed(ids)) * self.low.float() * self.scalar)
        return self.head(hidden)


def test_tied_frozen_and_bf16_parameters(shelf: Shelf) -> None:
    torch.manual_seed(0)
    model = Odd()
    swag = SWAG(model, shelf)
    rows = collect(swag, model, 20)
    assert rows.shape[1] == 20 + 4 + 1 + 4 + 4  # without the tied head and the frozen layer
    np.testing.assert_array_equal(np.asarray(shelf["swag/rows"]), rows)
    with torch.no_grad():
        model.frozen.bias += 1
    first, second = swag.sample(2)
    assert list(first) == list(model.state_dict())
    assert first["head.weight"] is first["embed.weight"]
    assert first["low"].dtype == torch.bfloat16
    assert first["scalar"].shape == ()
    assert torch.equal(first["frozen.bias"], model.frozen.bias)
    assert torch.equal(first["norm.running_mean"], model.norm.running_mean)
    assert not torch.equal(first["scalar"], second["scalar"])
    with torch.no_grad():
        model.frozen.bias += 1
    assert not torch.equal(first["frozen.bias"], model.frozen.bias)
    model.load_state_dict(first)
    assert torch.equal(model.embed.weight, first["embed.weight"])


def test_rows_of_any_layout_and_dtype(shelf: Shelf) -> None:
    model = nn.Linear(3, 2, dtype=torch.float64)
    model.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.float64).t())
    swag = SWAG(model, shelf)
    rows = collect(swag, model, 3)
    np.testing.assert_array_equal(np.asarray(shelf["swag/rows"]), rows.astype(np.float32))
    assert swag.sample()[0]["weight"].dtype == torch.float64


def test_a_wrapped_model_is_the_model_inside(shelf: Shelf) -> None:
    model = small()
    compiled = nn.Module()  # as `torch.compile` makes it; importing the compiler takes seconds
    compiled._orig_mod = model
    rows = collect(SWAG(compiled, shelf), model, 3)
    again = SWAG(nn.DataParallel(model), shelf)
    np.testing.assert_allclose(joined(again.mean()), rows.mean(0), rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 2, dtype=torch.complex64), "'weight': a real number is needed"),
        (nn.LazyLinear(2), "'weight': a lazy parameter has no shape yet"),
        (nn.Linear(2, 2, device="meta"), "'weight': .* has no memory"),
    ],
)
def test_parameters_that_cannot_be_read(shelf: Shelf, model: nn.Module, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        SWAG(model, shelf)


# Predictions.


def test_predictions_are_averaged(shelf: Shelf) -> None:
    model = small()
    swag = SWAG(model, shelf)
    collect(swag, model, 10)
    kept, x = flat(model), torch.randn(10, 3)
    model[1].eval()
    found = swag.predict(DataLoader(TensorDataset(x, x), 4), 6, seed=1)
    np.testing.assert_array_equal(flat(model), kept)
    assert [module.training for module in model] == [True, False, True]
    probabilities = []
    for state in swag.sample(6, seed=1):
        model.load_state_dict(state)
        probabilities.append(model(x).softmax(-1).detach().double())
    np.testing.assert_allclose(found, torch.stack(probabilities).mean(0), atol=1e-7)
    assert found.dtype == torch.float32
    assert not found.requires_grad


def test_predictions_in_several_passes(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    swag = SWAG(model, shelf)
    collect(swag, model, 10)
    x = [torch.randn(10, 3)]
    whole = swag.predict(x, 7, seed=1)
    monkeypatch.setattr("packhorse.learn.swag._SAMPLES_NBYTES", 4 * 26 * 3)
    np.testing.assert_allclose(swag.predict(x, 7, seed=1), whole, atol=1e-6)


def test_batch_normalisation_is_updated_for_each_sample(shelf: Shelf) -> None:
    torch.manual_seed(0)
    model = Odd()
    swag = SWAG(model, shelf)
    collect(swag, model, 5)
    ids = torch.randint(5, (64,))
    with pytest.raises(ValueError, match=r"batch normalisation, .* give bn_loader="):
        swag.predict([ids], 2)
    kept = model.norm.running_mean.clone()
    found = swag.predict([ids], 3, bn_loader=[ids[:32], ids[32:]], seed=4)
    assert torch.equal(model.norm.running_mean, kept)
    assert model.norm.num_batches_tracked == 0
    wanted = torch.zeros(64, 5)
    for state in swag.sample(3, seed=4):
        model.load_state_dict(state)
        torch.optim.swa_utils.update_bn([ids[:32], ids[32:]], model)
        wanted += model.eval()(ids).detach().softmax(-1) / 3
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_loaders_must_give_the_same_each_time(shelf: Shelf) -> None:
    model = small()
    swag = SWAG(model, shelf)
    collect(swag, model, 5)
    x = torch.randn(10, 3)
    kept = flat(model)
    with pytest.raises(ValueError, match="another order each time; use shuffle=False"):
        swag.predict(DataLoader(TensorDataset(x), 4, shuffle=True))
    with pytest.raises(ValueError, match="gives something only once"):
        swag.predict(iter([x]))
    sizes = iter([10, 9])
    growing = type("Growing", (), {"__iter__": lambda _: iter([x[: next(sizes)]])})()
    with pytest.raises(ValueError, match="10 rows at first and 9 later"):
        swag.predict(growing)
    np.testing.assert_array_equal(flat(model), kept)


# Callers' mistakes.


def test_a_model_that_has_changed(shelf: Shelf) -> None:
    model = small()
    rows = collect(SWAG(model, shelf), model, 3)
    other = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    words = r"parameter '0.weight' had the shape \(4, 3\), and has \(5, 3\) now; give that model"
    with pytest.raises(ValueError, match=words):
        SWAG(other, shelf)
    with pytest.raises(ValueError, match=r"its parameter '2.weight' is '3.weight' now"):
        SWAG(nn.Sequential(*model[:2], nn.Identity(), model[2]), shelf)
    with pytest.raises(ValueError, match="it had 4 parameters, and has 2 now"):
        SWAG(model[:2], shelf)
    with pytest.raises(ValueError, match="begun with max_rank=None, not 3"):
        SWAG(model, shelf, max_rank=3)
    swag = SWAG(model, shelf)
    model[0].requires_grad_(False)
    words = r"the model has changed since .* '0.weight' is '2.weight'"
    with pytest.raises(ValueError, match=words):
        swag.collect()
    model[0].requires_grad_(True)
    assert swag.collect()
    swag.flush()
    np.testing.assert_array_equal(np.asarray(shelf["swag/rows"])[:3], rows)
    assert SWAG(other, shelf, name="other").n_collected == 0


def test_iterates_that_are_not_finite(shelf: Shelf) -> None:
    model = small()
    swag = SWAG(model, shelf)
    rows = collect(swag, model, 3)
    with torch.no_grad():
        model[2].bias[0] = torch.nan
    with pytest.raises(ValueError, match=r"parameter '2.bias' is NaN or infinite; .* not taken"):
        swag.collect()
    with torch.no_grad():  # finite, though the sum is not
        model[2].bias[:] = 3e38
    assert swag.collect()
    swag.flush()
    np.testing.assert_array_equal(np.asarray(shelf["swag/rows"])[:3], rows)


def test_mistakes(shelf: Shelf) -> None:
    model = small()
    with pytest.raises(TypeError, match=r"model is a dict; it must be a torch.nn.Module"):
        SWAG({}, shelf)
    with pytest.raises(ValueError, match="no parameter that requires gradients"):
        SWAG(nn.ReLU(), shelf)
    for argument in ({"every": 0}, {"max_rank": 1}, {"max_pending": 0}):
        with pytest.raises(ValueError, match="must be at least"):
            SWAG(model, shelf, **argument)
    with pytest.raises(TypeError, match=r"every is 1.5; it must be an integer"):
        SWAG(model, shelf, every=1.5)
    for other in ("data.shelf", None):
        with pytest.raises(TypeError, match=r"shelf is a .*; it must be a packhorse.disk.Shelf"):
            SWAG(model, other)
    with pytest.raises(TypeError, match="name is 3; it must be a string"):
        SWAG(model, shelf, name=3)
    with pytest.raises(ValueError, match="the name of a tensor, or its beginning"):
        SWAG(model, shelf, name="a\0")
    swag = SWAG(model, shelf)
    for call in (swag.mean, swag.variance, swag.sample, lambda: swag.predict([torch.zeros(1, 3)])):
        with pytest.raises(ValueError, match="the posterior 'swag' has 0 iterates"):
            call()
    assert len(shelf) == 0  # nothing is written before the first iterate
    collect(swag, model, 2)
    for scale in (-1, float("nan"), float("inf"), "1"):
        with pytest.raises(ValueError, match="scale is"):
            swag.sample(scale=scale)
    for mistake in (lambda: swag.collect("1"), lambda: swag.sample(seed=0.5)):
        with pytest.raises(TypeError, match=r"(step is '1'|seed is 0.5); it must be an integer"):
            mistake()
    for batch in (np.zeros((1, 3)), {"x": torch.zeros(1, 3)}, [np.zeros((1, 3))]):
        with pytest.raises(TypeError, match=r"the loader gives a (ndarray|dict); it must give ten"):
            swag.predict([batch])
    with pytest.raises(ValueError, match="n is 0; it must be at least 1"):
        swag.sample(0)
    swag.close()
    swag.close()
    with pytest.raises(ClosedError, match="this SWAG is closed"):
        swag.collect()
    assert len(swag.sample(2)) == 2


def test_a_posterior_of_a_later_release(shelf: Shelf) -> None:
    model = small()
    collect(SWAG(model, shelf), model, 2)
    about = bytes(np.asarray(shelf["swag/about"])).replace(b'"version": 1', b'"version": 2')
    shelf["swag/about"] = np.frombuffer(about, np.uint8)
    with pytest.raises(CompatibilityError, match="version 2; this release reads up to 1"):
        SWAG(model, shelf)
