"""Ways to send a weight update: each gives back every bit, and a wrong one is noticed."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from benchmark_modules import import_afresh

# A package that zipnn imports uses it.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
ARMS = (
    *("raw", "raw, one piece", "zstd-1", "XOR + zstd-1", "gaps + XOR + zstd-1"),
    *("COO + zstd-1", "int32 + values", "zipnn delta", "packhorse frames", "packhorse updates"),
    "packhorse updates, in place",
)
RNG = np.random.default_rng(3)
SHAPES = (("a", (40, 33)), ("bias", (1000,)), ("one", (1,)), ("c", (3, 5, 200)), ("d", (70_000, 3)))


@pytest.fixture(scope="module")
def wire() -> Iterator[dict[str, ModuleType]]:
    """The modules of updates and their arms."""
    names = ("data.sets", "wire.arms_updates", "wire.update_data")
    with import_afresh(*names) as modules:
        yield {name.partition(".")[2]: module for name, module in modules.items()}


def _update(wire: dict[str, ModuleType], base: Any, new: Any, shapes: Any = SHAPES) -> Any:
    return wire["update_data"].Update("u", "test", base, new, shapes)


def _random(wire: dict[str, ModuleType], share: float) -> Any:
    """Random bits, of which a share of the elements changes to other random bits."""
    size = sum(int(np.prod(shape)) for _, shape in SHAPES)
    base = RNG.integers(0, 1 << 16, size, np.uint16)
    new = base.copy()
    chosen = RNG.random(size) < share
    new[chosen] ^= RNG.integers(1, 1 << 16, int(chosen.sum()), np.uint16)
    return _update(wire, base, new)


def _run_of_changes(wire: dict[str, ModuleType]) -> Any:
    """Only neighbours change, as when one row of a matrix does."""
    size = sum(int(np.prod(shape)) for _, shape in SHAPES)
    base = RNG.integers(0, 1 << 16, size, np.uint16)
    new = base.copy()
    new[66:99] ^= 1
    new[-3:] ^= 1
    return _update(wire, base, new)


def _real(wire: dict[str, ModuleType]) -> Any:
    """Real weights, one unit in the last place of some of them."""
    data = wire["sets"].make("model_bf16", limit_nbytes=400_000)
    base = data.array.view(np.uint16).copy()
    new = base.copy()
    new[RNG.random(base.size) < 0.01] += 1
    return _update(wire, base, new, tuple((name, t.shape) for name, t in data.tensors))


MAKERS = {
    "nothing changed": lambda wire: _random(wire, 0),
    "all changed": lambda wire: _random(wire, 1),
    "few": lambda wire: _random(wire, 0.0003),
    "many": lambda wire: _random(wire, 0.1),
    "neighbours": _run_of_changes,
    "real weights": _real,
    "stand-in": lambda wire: wire["update_data"].stand_in("1.2", 1),
}


def _arm(wire: dict[str, ModuleType], name: str) -> Any:
    arms, absent = wire["arms_updates"].available([name])
    if name in absent:
        pytest.skip(absent[name])
    return arms[name]


def test_arms_are_those_of_the_tables(wire: dict[str, ModuleType]) -> None:
    assert tuple(wire["arms_updates"].ARMS) == ARMS
    arms, absent = wire["arms_updates"].available()
    assert {*arms} | {*absent} == {*ARMS}


@pytest.mark.parametrize("case", MAKERS)
@pytest.mark.parametrize("name", ARMS)
def test_every_bit_comes_back(wire: dict[str, ModuleType], name: str, case: str) -> None:
    arm, update = _arm(wire, name), MAKERS[case](wire)
    nbytes = wire["arms_updates"].prove(arm, update, 2)
    assert nbytes > 0 or case == "nothing changed"


@pytest.mark.parametrize("name", ARMS)
def test_an_update_can_be_sent_again(wire: dict[str, ModuleType], name: str) -> None:
    update = _random(wire, 0.01)
    target = update.base.copy()
    codec = _arm(wire, name).make(update, 1, target)
    for _ in range(3):
        target[:] = update.base
        codec.prepare(lambda parts: parts)
        codec.apply(codec.decode(codec.encode()), target)
        assert np.array_equal(target, update.new)


def test_sizes_are_those_of_the_formats(wire: dict[str, ModuleType]) -> None:
    update = wire["update_data"].stand_in("1.2", 4 << 20)
    changes = np.count_nonzero(update.base != update.new)
    sizes = {name: wire["arms_updates"].prove(_arm(wire, name), update) for name in ARMS[:9]}
    assert sizes["raw"] == sizes["raw, one piece"] == update.new.nbytes == 4 << 20
    assert sizes["int32 + values"] == 6 * changes
    # The note on the formats has 94, 60 and 56 times for this share of changes.
    for name, ratio in {"gaps + XOR + zstd-1": 94, "XOR + zstd-1": 60, "COO + zstd-1": 56}.items():
        assert update.new.nbytes / sizes[name] == pytest.approx(ratio, rel=0.15)


def test_stand_ins_change_about_as_many_elements_as_they_say(wire: dict[str, ModuleType]) -> None:
    for name in wire["update_data"].STAND_INS:
        update = wire["update_data"].stand_in(name, 4 << 20)
        assert 100 * update.density == pytest.approx(float(name), rel=0.15)
        assert update.byte_density == pytest.approx(update.density / 2, rel=0.2)
        assert [end for *_, end in update.spans()][-1] == update.new.size


def test_a_wrong_arm_is_noticed(
    wire: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    arms, update = wire["arms_updates"], _random(wire, 0.01)
    arm = arms.ARMS["int32 + values"]
    codec = arms.IndexValues
    monkeypatch.setattr(codec, "_changed", lambda self: np.flatnonzero(self._new != self._base)[1:])
    with pytest.raises(RuntimeError, match="u is not restored bit for bit"):
        arms.prove(arm, update)
    monkeypatch.undo()

    def early(self: Any, parts: Any) -> Any:
        self._target[0] += 1
        return parts[0].view(np.int32), parts[1].view(np.uint16)

    monkeypatch.setattr(codec, "decode", early)
    with pytest.raises(RuntimeError, match="the weights changed before the update was applied"):
        arms.prove(arm, update)
