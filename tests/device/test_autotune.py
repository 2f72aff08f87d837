"""How a product gets its kernel: the model of time, the search, and the cache of measurements."""

import dataclasses
import json
import math
import os
import random
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.errors import OutOfResources
from weight_samples import model_rows

from packhorse.device import autotune, choices, product_timer, products
from packhorse.device.autotune import predictor, tune
from packhorse.device.choices import choose
from packhorse.device.cost import predict_decode, predict_plain
from packhorse.device.product_check import WrongProductWarning
from packhorse.device.product_timer import ProductTimer
from packhorse.device.strategy import BUCKETS, INVARIANT_TOKENS, Choice, Strategy, bucket_of
from packhorse.device.stream_cost import stream_candidates
from packhorse.device.tune_cache import TUNE_CACHE, Key, Measured, check_config, order_of
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.gpu import models
from packhorse.gpu.figure_cache import Identity
from packhorse.gpu.models import GENERIC, PRESETS, model_of
from packhorse.gpu.search import Search
from packhorse.gpu.timing import chain_copies
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.matmul import MatmulConfig, default_config
from packhorse.kernels.stream_product import StreamConfig
from packhorse.layout import W11, W12, WEIGHT_FORMATS, WeightFormat
from packhorse.reference.weights import encode_weights

FORMATS = pytest.mark.parametrize("format", WEIGHT_FORMATS.values(), ids=list(WEIGHT_FORMATS))
H200 = PRESETS[0]
CPU = torch.device("cpu")
SHAPES = [(4096, 4096), (4096, 14336), (28672, 4096), (1000, 333), (1, 1), (128256, 8192)]
IDENTITY = Identity("NVIDIA H200", 132, "3.6.0", "0.1")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    choices.use_cache(None)


# The model of time.


def test_presets_are_found_by_the_names_of_drivers() -> None:
    names = {
        "NVIDIA H200": "H200",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA A100-SXM4-80GB": "A100",
        "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
        "NVIDIA GeForce RTX 4090": "generic",
        "NVIDIA H200 NVL": "H200",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb": "H100",
        # Their names contain those of other cards.
        "NVIDIA GH200 480GB": "generic",
        "NVIDIA RTX A1000": "generic",
        "NVIDIA A100X": "generic",
    }
    assert {name: model_of(name).name for name in names} == names


def test_a_slice_of_a_gpu_has_its_share() -> None:
    half = models.scale_model(H200, 66)
    assert half.bandwidth == pytest.approx(H200.bandwidth / 2)
    assert half.bf16_rate == pytest.approx(H200.bf16_rate / 2)
    assert models.scale_model(GENERIC, 216, 1e12).bandwidth == 1e12


def test_a_plain_product_takes_as_long_as_its_bytes_or_its_operations() -> None:
    few, many = (predict_plain(28672, 4096, n, H200) for n in (1, 8192))
    assert few == pytest.approx(28672 * 4096 * 2 / H200.bandwidth, rel=0.1)
    assert many == pytest.approx(2 * 28672 * 4096 * 8192 / H200.bf16_rate, rel=0.05)
    # The tiles of a plain product read tokens from L2 again, too, and the last wave is not full.
    assert predict_plain(28672, 4096, 256, H200) > 2 * 28672 * 4096 * 256 / H200.bf16_rate * 1.1


@FORMATS
def test_a_large_matrix_of_few_tokens_gains_what_its_bytes_save(format: WeightFormat) -> None:
    found = tune(28672, 4096, format, H200, buckets=[1])[1]
    gain = predict_plain(28672, 4096, 1, H200) / found.seconds
    least = {"W12": 1.2, "W11": 0.4}  # its exceptions take as long as its bits
    assert least[format.name] < gain < 16 / format.bits


def test_programs_are_as_many_as_draw_the_bandwidth() -> None:
    """One multiprocessor cannot draw more than its share, so few large programs are slow."""
    for n_rows, n_columns in ((4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096)):
        for n_tokens, measured in tune(n_rows, n_columns, W12, H200, buckets=[1, 8]).items():
            config = measured.choice.config
            assert isinstance(config, MatmulConfig)
            rows = config.block_rows * config.n_tiles
            assert -(-n_rows // rows) * config.n_splits >= 110, (n_rows, n_columns, n_tokens)
    predict = predictor(4096, 4096, W12, H200)
    few, many = (
        predict(Choice(Strategy.FUSED, MatmulConfig(32, 8, 32, 4, 1, 4, n_tiles)), 8)
        for n_tiles in (3, 1)
    )
    assert few > 1.5 * many


def test_what_was_not_counted_or_does_not_fit_takes_forever() -> None:
    predict = predictor(4096, 4096, W12, H200)
    assert predict(Choice(Strategy.FUSED, MatmulConfig(128, 32, 128, 8)), 8) == math.inf
    deep = MatmulConfig(64, 32, 32, 8, 1, 8)
    assert predict(Choice(Strategy.FUSED, deep), 8) == math.inf


def test_warps_share_columns_above_32_tokens_where_gpus_allow_it() -> None:
    """An A100 and an RTX are predicted to gain by it; Hopper and the B200 would refuse it."""
    buckets = [1, 8, 32, 64, 128, 256]
    cards = {n: dataclasses.replace(GENERIC, capability=n) for n in (89, 100, 120)}
    for device in (PRESETS[-1], H200, *cards.values()):
        may = device.capability in (80, 89, 120)
        for n_rows, n_columns in ((6144, 4096), (28672, 4096)):
            for n, measured in tune(n_rows, n_columns, W12, device, buckets=buckets).items():
                config = measured.choice.config
                shares = isinstance(config, MatmulConfig) and config.shares
                assert shares == (may and n > INVARIANT_TOKENS), (device.name, n, config)
                if shares:
                    decoded = predict_decode(n_rows, n_columns, n, W12, device)
                    assert measured.seconds < decoded


@pytest.mark.parametrize("n_tokens", [8, 16, 32])
def test_default_divisions_are_known_to_the_model(n_tokens: int) -> None:
    for format in WEIGHT_FORMATS.values():
        if format is W12 or n_tokens < 32:
            config = default_config(14336, 4096, n_tokens, format)
            choice = Choice(Strategy.FUSED, config)
            assert predictor(14336, 4096, format, H200)(choice, n_tokens) < 2e-4


# The search.


def synthetic(seed: int) -> autotune.Measure:
    """Times that the model cannot know; equal arguments always give equal times."""

    def measure(choice: Choice, n_tokens: int) -> float:
        return random.Random(f"{seed} {choice} {n_tokens}").uniform(1e-6, 1e-5)

    return measure


@FORMATS
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_the_order_of_sums_is_that_of_all_small_batches(
    seed: int | None, format: WeightFormat
) -> None:
    measure = None if seed is None else synthetic(seed)
    found = tune(4096, 14336, format, H200, measure)
    assert set(found) == set(BUCKETS)
    few = [found[n].choice for n in BUCKETS if n <= INVARIANT_TOKENS]
    assert {choice.strategy for choice in few} == {Strategy.FUSED}
    assert len({order_of(choice.config) for choice in few}) == 1  # type: ignore[arg-type]
    for n, measured in found.items():
        if measured.choice.config is not None:
            check_config(measured.choice.config)
        assert measured.seconds == (measure or predictor(4096, 14336, format, H200))(
            measured.choice, n
        )


def test_no_neighbour_of_what_is_found_is_faster() -> None:
    measure, taken = synthetic(7), {}
    search = Search(on_measured=lambda choice, n, t: taken.__setitem__((choice, n), t))
    found = tune(4096, 4096, W12, H200, measure, buckets=[128], search=search)[128]
    assert search.n_measured == len(taken) > 6
    assert found.seconds == min(t for (_, n), t in taken.items() if n == 128)


def test_candidates_without_hope_are_not_measured() -> None:
    predict = predictor(4096, 4096, W12, H200)
    taken: list[tuple[Choice, int]] = []
    search = Search(on_measured=lambda choice, n, _: taken.append((choice, n)))
    tune(4096, 4096, W12, H200, synthetic(1), search=search)
    assert len(taken) == len(set(taken))
    least = {n: min(predict(c, m) for c, m in taken if m == n) for _, n in taken}
    fused = [(c, n) for c, n in taken if c.config is not None]
    assert all(predict(c, n) < math.inf for c, n in fused)
    assert max(predict(c, n) / least[n] for c, n in fused if n <= 32) < 4


def test_what_cannot_run_is_never_chosen() -> None:
    def measure(choice: Choice, n_tokens: int) -> float:
        too_large = isinstance(choice.config, MatmulConfig) and choice.config.block_rows > 16
        return math.inf if too_large else 1e-5

    found = tune(14336, 4096, W12, H200, measure)
    rows = {m.choice.config.block_rows for m in found.values() if m.choice.config is not None}
    assert rows == {16}
    assert found[64].choice == Choice(Strategy.DECODE)
    assert tune(14336, 4096, W12, H200, lambda *_: math.inf) == {}


def test_a_search_ends_in_time_with_what_it_has() -> None:
    search = Search()
    search.is_late = lambda: search.n_measured >= 40
    found = tune(4096, 4096, W12, H200, synthetic(1), search=search)
    assert search.n_measured == 40
    assert set(found) < set(BUCKETS)


def test_gpus_without_bf16_decode_first() -> None:
    old = dataclasses.replace(GENERIC, capability=75)
    found = tune(512, 512, W12, old)
    assert {measured.choice.strategy for measured in found.values()} == {Strategy.DECODE}


# Choices for layers.


@FORMATS
@pytest.mark.parametrize(("n_rows", "n_columns"), SHAPES)
def test_untuned_choices_are_sensible(n_rows: int, n_columns: int, format: WeightFormat) -> None:
    found = [choose(n_rows, n_columns, n, format, CPU) for n in (1, 3, 8, 17, 32, 5000)]
    orders = {order_of(choice.config) for choice in found[:-1]}  # type: ignore[arg-type]
    assert len(orders) == 1
    assert found[-1] == Choice(Strategy.DECODE)
    assert choose(n_rows, n_columns, 4, format, CPU) is found[1]


def test_a_choice_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    first = choose(640, 640, 5, W12, CPU)
    monkeypatch.setattr(choices, "tune", None)
    assert choose(640, 640, 8, W12, CPU) is first


def test_another_batch_of_a_known_matrix_is_chosen_without_a_new_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of sums, which all small batches share, is found once for a matrix."""
    n_predictions = 0
    predict = autotune.predict_fused

    def count(*args: Any) -> float:
        nonlocal n_predictions
        n_predictions += 1
        return predict(*args)

    monkeypatch.setattr(autotune, "predict_fused", count)
    choices._order_of.cache_clear()
    taken, found = [], []
    for n in (8, 1, 4, 32):
        before = n_predictions
        found.append(choose(704, 1408, n, W12, CPU))
        taken.append(n_predictions - before)
    assert max(taken[1:]) < taken[0] / 10
    alone = tune(704, 1408, W12, choices.describe_device(CPU), buckets=[1, 4, 8, 32])
    assert found == [alone[n].choice for n in (8, 1, 4, 32)]


def test_tokens_fall_into_buckets() -> None:
    pairs = [(1, 1), (3, 4), (32, 32), (33, 64), (1025, 4096), (10**6, 4096)]
    assert [bucket_of(n) for n, _ in pairs] == [bucket for _, bucket in pairs]


@FORMATS
@pytest.mark.parametrize("n_tokens", [3, 40])
def test_products_are_right_by_every_choice(n_tokens: int, format: WeightFormat) -> None:
    elements = model_rows(80, 320)
    weights = WeightTensors(*map(torch.from_numpy, encode_weights(elements, format)))
    x = torch.randn(n_tokens, 320, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.from_numpy(elements.view(np.int16)).view(torch.bfloat16)
    exact = x.double() @ weight.double().T
    for choice in (None, Choice(Strategy.DECODE), Choice(Strategy.FUSED)):
        y = products.multiply(x, weights, format, 320, choice=choice)
        torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=2**-7 * exact.abs().max())


def test_what_is_too_large_for_a_gpu_is_decoded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's launcher raises Triton's error, because there is no GPU here that would raise
    it."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    weights = WeightTensors(*map(torch.from_numpy, encode_weights(model_rows(32, 256), W12)))
    x = torch.ones(2, 256).bfloat16()
    decoded = products.multiply(x, weights, W12, 256, choice=Choice(Strategy.DECODE))
    monkeypatch.setitem(products.LAUNCHERS, Strategy.FUSED, refuse)
    with pytest.warns(RuntimeWarning, match="packhorse tune"):
        assert torch.equal(products.multiply(x, weights, W12, 256), decoded)
    monkeypatch.delitem(products.LAUNCHERS, Strategy.FUSED)  # not tried again, and no warning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(products.multiply(x, weights, W12, 256), decoded)
    monkeypatch.setitem(products.LAUNCHERS, Strategy.FUSED, refuse)
    timer = WallTimer(weights, W12, 256, chain_nbytes=1)
    assert timer(Choice(Strategy.FUSED), 2) == math.inf


class WallTimer(ProductTimer):
    """The timer with the clock of a host: it times the interpreter, so its times mean nothing."""

    def time(self, calls: Any) -> float:
        return 1e-3 * len(calls)


def test_the_timer_runs_and_checks_each_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = WeightTensors(*map(torch.from_numpy, encode_weights(model_rows(32, 256), W12)))
    timer = WallTimer(weights, W12, 256, chain_nbytes=1)
    assert timer(Choice(Strategy.FUSED, MatmulConfig(16, 8, 32, 2)), 3) == 4e-3
    assert timer(Choice(Strategy.DECODE), 3) == timer.plain(3) == timer.decoding() == 4e-3
    monkeypatch.setattr(
        product_timer, "run_choice", lambda _, x, *__: torch.zeros(len(x), 32).bfloat16()
    )
    with pytest.warns(WrongProductWarning, match=r"FUSED.*WRONG PRODUCT.*bound"):
        assert timer(Choice(Strategy.FUSED), 3) == math.inf


def test_what_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = WeightTensors(*map(torch.from_numpy, encode_weights(model_rows(32, 256), W12)))

    def fail(*_: Any) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(product_timer, "run_choice", fail)
    with pytest.warns(UserWarning, match="fails here and is left out: PassManager"):
        assert WallTimer(weights, W12, 256, chain_nbytes=1)(Choice(Strategy.FUSED), 3) == math.inf


def test_chains_are_longer_than_the_cache() -> None:
    assert chain_copies(10**9) == 4
    assert chain_copies(6_000_000) * 6_000_000 >= 240_000_000


# The cache.


@cache
def entries() -> dict[Key, dict[int, Measured]]:
    return {
        Key(*shape, format.name): tune(*shape, format, H200)
        for shape in SHAPES[:2]
        for format in (W12, W11)
    }


def test_a_cache_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cache.json"
    before = entries()
    TUNE_CACHE.write(path, IDENTITY, before)
    assert TUNE_CACHE.read(path, IDENTITY) == TUNE_CACHE.load(path, IDENTITY) == before
    assert os.listdir(path.parent) == ["cache.json"]
    key = Key(7, 9, "W12")
    TUNE_CACHE.update(path, IDENTITY, {key: tune(7, 9, W12, H200)})
    assert set(TUNE_CACHE.read(path, IDENTITY)) == {*before, key}


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tune-nvidia-h100-80gb-hbm3.json"
    assert TUNE_CACHE.path("NVIDIA H100 80GB HBM3", tmp_path) == tmp_path / name
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert TUNE_CACHE.path("a").parent == tmp_path / "xdg" / "packhorse"
    monkeypatch.setenv("PACKHORSE_CACHE_DIR", str(tmp_path / "own"))
    assert TUNE_CACHE.path("../..").parent == tmp_path / "own"
    monkeypatch.delenv("PACKHORSE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert TUNE_CACHE.path("a").parent == Path.home() / ".cache" / "packhorse"


@pytest.mark.parametrize(
    "other",
    [
        {"device": "NVIDIA H100"},
        {"n_processors": 16},
        {"triton": "3.7.0"},
        {"packhorse": "0.2"},
    ],
    ids=str,
)
def test_a_cache_of_another_gpu_or_version_is_void(other: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    TUNE_CACHE.write(path, IDENTITY, entries())
    own = dataclasses.replace(IDENTITY, **other)
    with pytest.raises(CompatibilityError, match=next(iter(other))):
        TUNE_CACHE.read(path, own)
    with pytest.warns(RuntimeWarning, match="packhorse tune"):
        assert TUNE_CACHE.load(path, own) == {}
    TUNE_CACHE.update(path, own, {})
    assert TUNE_CACHE.read(path, own) == {}


def test_a_cache_with_a_kernel_that_is_gone_is_void(tmp_path: Path) -> None:
    """Version 1 had a strategy "many". It is told like any other old cache, and replaced."""
    path, key = tmp_path / "cache.json", Key(4096, 4096, "W12")
    TUNE_CACHE.write(path, IDENTITY, {key: tune(4096, 4096, W12, H200, buckets=[64])})
    document = json.loads(path.read_text())
    document["version"] = 1
    row = document["entries"][0]["buckets"][0]
    row["strategy"] = "many"
    row["config"] = {
        "block_rows": 128, "block_tokens": 64, "block_steps": 64,
        "n_warps": 8, "n_splits": 1, "n_stages": 3,
    }  # fmt: skip
    path.write_text(json.dumps(document))
    with pytest.warns(RuntimeWarning, match=r"its version is 1, not 3.*packhorse tune"):
        assert TUNE_CACHE.load(path, IDENTITY) == {}
    TUNE_CACHE.update(path, IDENTITY, entries())
    assert TUNE_CACHE.read(path, IDENTITY) == entries()


def spoil(document: dict[str, Any], *where: Any, value: Any) -> bytes:
    *way, last = where
    place: Any = document
    for step in way:
        place = place[step]
    place[last] = value
    return json.dumps(document).encode()


ENTRY = ("entries", 0)
BUCKET = (*ENTRY, "buckets", 0)
CONFIG = (*BUCKET, "config")
LIES: list[tuple[tuple[Any, ...], Any]] = [
    ((*CONFIG, "block_tokens"), 64),  # only more than 32 tokens may have such blocks
    ((*CONFIG, "block_rows"), 24),
    ((*CONFIG, "block_rows"), 32.0),
    ((*CONFIG, "n_warps"), True),
    ((*CONFIG, "n_warps"), 64),
    ((*CONFIG, "n_splits"), 0),
    ((*CONFIG, "n_stages"), -1),
    ((*CONFIG, "block_steps"), 16),  # not that of the other buckets
    ((*CONFIG, "other"), 1),
    (CONFIG, None),
    (CONFIG, [1]),
    ((*BUCKET, "strategy"), "magic"),
    ((*BUCKET, "strategy"), ["fused"]),
    ((*BUCKET, "strategy"), "many"),
    ((*BUCKET, "strategy"), "decode"),
    ((*BUCKET, "seconds"), -1.0),
    ((*BUCKET, "seconds"), "1"),
    ((*BUCKET, "plain_seconds"), 0.0),
    ((*BUCKET, "n_tokens"), 3),
    ((*BUCKET, "n_tokens"), 4096),
    ((*BUCKET, "more"), 1),
    ((*ENTRY, "buckets"), {}),
    ((*ENTRY, "n_rows"), 0),
    ((*ENTRY, "n_columns"), 65537),
    ((*ENTRY, "form"), "W13"),
    ((*ENTRY, "form"), ["W12"]),
    (ENTRY, 3),
    (("entries", 2), None),
    (("entries",), {}),
    (("identity",), None),
    (("version",), 1),
    (("version",), 4),
    (("version",), True),
    (("more",), 1),
]


@pytest.mark.parametrize(("where", "value"), LIES, ids=str)
def test_a_cache_that_lies_is_void(where: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    TUNE_CACHE.write(path, IDENTITY, entries())
    path.write_bytes(spoil(json.loads(path.read_text()), *where, value=value))
    with pytest.raises((CorruptionError, CompatibilityError)):
        TUNE_CACHE.read(path, IDENTITY)
    with pytest.warns(RuntimeWarning, match="measured choices are not used"):
        assert TUNE_CACHE.load(path, IDENTITY) == {}


def test_a_broken_cache_is_void(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    TUNE_CACHE.write(path, IDENTITY, entries())
    whole = path.read_bytes()
    ends = random.Random(0).sample(range(len(whole) - 2), 40)
    broken = [b"", b"\xff", b"[" * 100_000, b"null", b"NaN", b'{"version": 1, "version": 1}']
    for text in [whole[:end] for end in ends] + broken:
        path.write_bytes(text)
        with pytest.raises((CorruptionError, CompatibilityError)):
            TUNE_CACHE.read(path, IDENTITY)


def test_no_byte_of_a_cache_brings_anything_but_documented_errors(tmp_path: Path) -> None:
    path, chance = tmp_path / "cache.json", random.Random(1)
    TUNE_CACHE.write(path, IDENTITY, {Key(7, 9, "W12"): tune(7, 9, W12, H200, buckets=[1, 64])})
    whole = path.read_bytes()
    for _ in range(400):
        text = bytearray(whole)
        text[chance.randrange(len(text))] = chance.randrange(256)
        path.write_bytes(text)
        try:
            found = TUNE_CACHE.read(path, IDENTITY)
        except (CorruptionError, CompatibilityError):
            continue
        for measured in next(iter(found.values())).values():
            if measured.choice.config is not None:
                check_config(measured.choice.config)


@pytest.mark.parametrize("format", WEIGHT_FORMATS.values(), ids=list(WEIGHT_FORMATS))
@pytest.mark.parametrize("n_tokens", [1, 16, 32, 64, 128, 256])
def test_every_division_for_hopper_can_be_kept(n_tokens: int, format: WeightFormat) -> None:
    shapes = ((4096, 4096), (6144, 4096), (4096, 14336), (8192, 28672), (1024, 8192))
    for n_rows, n_columns in shapes:
        for config in stream_candidates(n_rows, n_columns, n_tokens, format, 132):
            check_config(config)


@pytest.mark.parametrize(
    "config",
    [
        StreamConfig(48, 8, 10, 4, cluster=4),  # stages that pairs of warps took in turns
        StreamConfig(16, 8, 16, 4),  # no cluster
        StreamConfig(128, 256, 3, 3, cluster=4),  # too many registers
    ],
)
def test_divisions_that_a_card_ran_wrongly_cannot_be_kept(config: StreamConfig) -> None:
    with pytest.raises(ValueError, match=r"stages|cluster|rows"):
        check_config(config)


def test_a_folder_in_place_of_the_cache_is_told(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="not used"):
        assert TUNE_CACHE.load(tmp_path, IDENTITY) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TUNE_CACHE.load(tmp_path / "absent.json", IDENTITY) == {}


def test_choices_come_from_the_cache_and_keep_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses the identity of a GPU that this machine does not have."""
    monkeypatch.setattr(choices, "identify", lambda _: IDENTITY)
    monkeypatch.setattr(choices, "describe_device", lambda _: H200)
    config = MatmulConfig(16, 8, 64, 2, 4, 3)
    row = Measured(Choice(Strategy.FUSED, config), 1e-5, 2e-5)
    TUNE_CACHE.write(
        TUNE_CACHE.path(IDENTITY.device, tmp_path), IDENTITY, {Key(512, 512, "W12"): {2: row}}
    )
    choices.use_cache(tmp_path)
    gpu = torch.device("cuda")
    assert choose(512, 512, 2, W12, gpu).config is not None
    assert choose(512, 512, 2, W12, gpu).config == config
    for n in (1, 8, 32):
        assert order_of(choose(512, 512, n, W12, gpu).config) == order_of(config)  # type: ignore[arg-type]
    assert choose(512, 512, 4096, W12, gpu).strategy is Strategy.DECODE
    assert predict_decode(512, 512, 4096, W12, H200) < 1e-4
