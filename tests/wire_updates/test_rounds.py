"""Rounds of updates: whatever a sender packs, the receiver holds the same bits afterwards."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from update_samples import (
    LEARNING_RATES,
    TinyModel,
    bits_of,
    masters,
    mixed_state,
    nudge,
    same,
    train_step,
    trained_state,
)

from packhorse.errors import ChangedError
from packhorse.frame.follow import Follower
from packhorse.wire.updates import (
    DeltaReceiver,
    DeltaSender,
    ShardedReceiver,
    Shards,
    Update,
    fold,
    sender,
)
from packhorse.wire.updates.message import HEADER_NBYTES

SMALL_UPDATE_NBYTES = 1200  # header, names and one frame of a few tensors


@pytest.mark.parametrize("framework", ["np", "pt"])
@pytest.mark.parametrize("in_place", [False, True])
def test_every_dtype_and_size_arrives_bit_for_bit(framework: str, in_place: bool) -> None:
    state, other = mixed_state(framework, 1), mixed_state(framework, 2)
    packer = DeltaSender(state, anchor_every=3)
    receiver = DeltaReceiver(into=other, in_place=in_place)
    kinds = []
    for step in range(5):
        nudge(state, step)
        update = packer.pack()
        kinds.append(update.is_anchor)
        receiver.unpack(bytes(update))
        assert same(other, state)
        assert receiver.state_hash == packer.state_hash == update.state_hash
        assert receiver.version == packer.version == step + 1
    assert kinds == [True, False, False, True, False]


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_a_receiver_can_have_a_state_of_its_own(framework: str) -> None:
    state = mixed_state(framework)
    packer, receiver = DeltaSender(state), DeltaReceiver(framework=framework)
    assert receiver.state == {}
    for step in range(3):
        receiver.unpack(packer.pack())
        assert same(receiver.state, state)
        nudge(state, step)


def test_a_model_keeps_its_addresses_ties_and_views() -> None:
    trained, served = TinyModel(1), TinyModel(2)
    packer, receiver = DeltaSender(trained), DeltaReceiver(into=served)
    addresses = [tensor.data_ptr() for tensor in served.state_dict().values()]
    for step in range(3):
        receiver.unpack(packer.pack())
        assert same(served.state_dict(), trained.state_dict())
        trained.step(step)
    assert [tensor.data_ptr() for tensor in served.state_dict().values()] == addresses
    assert served.head is served.embed


def test_tied_tensors_are_sent_once() -> None:
    rng = np.random.default_rng(0)
    tied = {"a": rng.integers(0, 256, 1 << 18, np.uint8)}
    tied["b"] = tied["a"]
    update = DeltaSender(tied).pack()
    assert update.nbytes < 1.01 * (1 << 18)
    assert update.names == ["a", "b"]
    untied = {name: np.zeros(1 << 18, np.uint8) for name in tied}
    DeltaReceiver(into=untied).unpack(update)
    assert same(untied, tied)


def test_tensors_without_a_change_cost_a_few_bytes() -> None:
    rng = np.random.default_rng(0)
    state = {f"layers.{i}.weight": rng.standard_normal((8, 1024)) for i in range(300)}
    packer = DeltaSender(state)
    packer.pack()
    nothing = packer.pack()
    assert nothing.nbytes < HEADER_NBYTES + 5 * 300
    state["layers.7.weight"][0, 0] = 1
    one = packer.pack()
    assert one.nbytes < nothing.nbytes + SMALL_UPDATE_NBYTES
    assert [row.names for row in one.report if row.nbytes] == [("layers.7.weight",)]
    receiver = DeltaReceiver()
    receiver.unpack(packer.anchor())
    assert same(receiver.state, state)


def test_many_small_tensors_share_frames() -> None:
    state = {f"experts.{i}.bias": np.arange(i, i + 50, dtype=np.float32) for i in range(3000)}
    packer = DeltaSender(state)
    receiver = DeltaReceiver(into={name: t * 0 for name, t in state.items()})
    receiver.unpack(packer.pack())
    for tensor in state.values():
        tensor[3] += 1
    update = packer.pack()
    assert update.nbytes < 30_000  # ten bytes a tensor, its name included
    assert len(update.message.frames) == 1
    receiver.unpack(update)
    assert same(receiver.state, state)


@pytest.mark.parametrize("lr", LEARNING_RATES)
def test_real_weights_take_a_fraction(lr: float) -> None:
    weights = masters()
    state = trained_state(weights)
    packer = DeltaSender(state, receivers_have_it=True, count_changed=True)
    receiver = DeltaReceiver(into={name: t.copy() for name, t in state.items()})
    for step in range(2):
        train_step(weights, lr, step)
        state = trained_state(weights)
        update = packer.pack(state)
        assert not update.is_anchor
        receiver.unpack(bytes(update))
        assert same(receiver.state, state)
    rows = update.report
    n_changed = sum(row.changed * row.logical_nbytes / 2 for row in rows)
    # A position and a value take 6 bytes in the wire formats that others use.
    assert update.nbytes < 6 * n_changed / 2.5
    assert sum(row.nbytes for row in rows) < update.nbytes < sum(r.nbytes for r in rows) + 4000
    assert {row.kind for row in rows} <= {"delta", "same"}


def test_the_bytes_do_not_depend_on_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender.os, "urandom", bytes)
    made = []
    for threads in (1, 4):
        state = mixed_state("np")
        packer = DeltaSender(state, threads=threads)
        first = bytes(packer.pack())
        nudge(state, 1)
        made.append((first, bytes(packer.pack())))
    assert made[0] == made[1]


def test_strides_and_devices_do_not_matter() -> None:
    wide = torch.zeros(40, 60, dtype=torch.bfloat16)
    served = {"columns": wide[:, 10:30], "turned": torch.zeros(300, 200).t(), "plain": wide[:, 40]}
    trained = {name: torch.randn(t.shape).to(t.dtype) for name, t in served.items()}
    packer, receiver = DeltaSender(trained), DeltaReceiver(into=served)
    for _ in range(3):
        receiver.unpack(packer.pack())
        assert same(served, trained)
        trained["columns"][3, 4] += 1
        trained["turned"][5, 6] += 1
    assert not wide[:, :10].any()
    assert not wide[:, 30:40].any()


def test_the_copy_of_the_sender_can_be_a_file(tmp_path: Path) -> None:
    state = mixed_state("np")
    packer = DeltaSender(state, snapshot=tmp_path / "copy")
    receiver = DeltaReceiver(into=mixed_state("np", 9))
    for step in range(2):
        receiver.unpack(packer.pack())
        assert same(receiver.state, state)
        nudge(state, step)
    assert packer.nbytes <= (tmp_path / "copy").stat().st_size < packer.nbytes + 64 * len(state)


def test_a_late_joiner_takes_an_anchor_a_chain_or_a_fold() -> None:
    trained = TinyModel(1)
    packer = DeltaSender(trained, anchor_every=None, receivers_have_it=True)
    old = TinyModel(1)
    updates: list[Update] = []
    for step in range(4):
        trained.step(step)
        updates.append(packer.pack())
    final = trained.state_dict()
    folded = fold(updates, base=old)
    assert (folded.base_version, folded.version, folded.is_anchor) == (0, 4, False)
    assert folded.nbytes < sum(update.nbytes for update in updates)
    assert same(old.state_dict(), TinyModel(1).state_dict())  # only read
    for payload in (folded, updates, packer.anchor(), fold([packer.anchor()])):
        joiner = TinyModel(1)
        receiver = DeltaReceiver(into=joiner)
        receiver.unpack(payload)
        assert same(joiner.state_dict(), final)
        assert (receiver.version, receiver.state_hash) == (4, packer.state_hash)
    trained.step(9)
    receiver.unpack(packer.pack())
    assert same(joiner.state_dict(), trained.state_dict())


def test_a_fold_over_an_anchor_is_an_anchor() -> None:
    state = {"w": np.zeros(100_000, np.float32)}
    packer = DeltaSender(state, anchor_every=2)
    chain = []
    for step in range(4):
        state["w"][step] = 1
        chain.append(packer.pack())
    assert [update.is_anchor for update in chain] == [True, False, True, False]
    folded = fold(chain)
    assert (folded.is_anchor, folded.version, folded.base_version) == (True, 4, None)
    receiver = DeltaReceiver()
    receiver.unpack(folded)
    assert same(receiver.state, state)
    stranger = DeltaSender(state).pack()
    with pytest.raises(ValueError, match="several streams"):
        fold([chain[0], stranger])


def test_changes_are_positions_and_values() -> None:
    trained = TinyModel(1)
    served = {name: t.clone() for name, t in trained.state_dict().items() if name != "head"}
    served["head"] = served["embed"]
    patched = {name: tensor.clone() for name, tensor in served.items()}
    packer = DeltaSender(trained, receivers_have_it=True)
    receiver = DeltaReceiver(into=served)
    for step in range(2):
        trained.step(step)
        update = packer.pack()
        for name, indices, values in receiver.changes(update):
            assert indices.dtype == torch.int32
            assert values.dtype == patched[name].dtype
            assert bool((indices.diff() > 0).all())
            nbytes = values.element_size()
            rows = patched[name].view(-1).view(torch.uint8).view(-1, nbytes)
            rows[indices.long()] = values.view(torch.uint8).view(-1, nbytes)
        receiver.unpack(update)
        patched["head"] = patched["embed"]
        assert same(patched, served)
        assert same(served, trained.state_dict())


def test_senders_can_have_ranges() -> None:
    whole = TinyModel(1)
    names = ["embed", "norm", "fp8"]

    def parts(i: int) -> tuple[dict[str, Any], Shards]:
        state, ranges = {}, {}
        for name in names:
            tensor = whole.state_dict()[name]
            step = -(-tensor.numel() // 3)
            ranges[name] = (tuple(tensor.shape), min(i * step, tensor.numel()))
            state[name] = tensor.view(-1)[i * step : (i + 1) * step]
        if i == 1:
            state["bias"] = whole.bias
        return state, Shards(i, 3, ranges)

    served = {name: torch.zeros_like(whole.state_dict()[name]) for name in [*names, "bias"]}
    packers = [DeltaSender(state, shards=shards) for state, shards in map(parts, range(3))]
    receiver = ShardedReceiver(served, n_shards=3)
    for step in range(3):
        updates = [packer.pack() for packer in packers]
        receiver.unpack([bytes(updates[i]) for i in (2, 0, 1)])
        assert same(served, {name: whole.state_dict()[name] for name in served})
        assert receiver.version == step + 1
        whole.step(step)
    before = bits_of(served)
    updates = [packer.pack() for packer in packers]
    with pytest.raises(ValueError, match="one update of each of 3 shards"):
        receiver.unpack(updates[:2])
    with pytest.raises(ValueError, match="different versions"):
        receiver.unpack([*updates[:2], packers[2].pack()])
    with pytest.raises(ValueError, match="only a range of 'embed'"):
        DeltaReceiver(into=served).stage(packers[0].anchor())
    assert bits_of(served) == before


def test_shards_must_cover_each_element_once() -> None:
    def stage(*places: tuple[int, int], extra: bool = False) -> None:
        updates = []
        for i, (start, stop) in enumerate(places):
            shards = Shards(i, len(places), {"w": ((10,), start)})
            updates.append(DeltaSender({"w": np.zeros(stop - start)}, shards=shards).pack())
        served = {"w": np.ones(10)} | ({"b": np.ones(1)} if extra else {})
        ShardedReceiver(served, n_shards=len(places)).stage(updates)

    stage((0, 4), (4, 10))
    with pytest.raises(ValueError, match="w: elements 3:4 are in two shards"):
        stage((0, 4), (3, 10))
    with pytest.raises(ValueError, match="w: elements 4:5 are in no shard"):
        stage((0, 4), (5, 10))
    with pytest.raises(ValueError, match="w: elements 8:10 are in no shard"):
        stage((0, 4), (4, 8))
    with pytest.raises(ValueError, match="no shard has 'b'"):
        stage((0, 4), (4, 10), extra=True)


def test_a_tensor_that_pytorch_writes_to_while_it_is_packed_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {"a": torch.zeros(100_000), "b": torch.zeros(100_000)}
    packer, receiver = DeltaSender(state, threads=1), DeltaReceiver(framework="pt")
    receiver.unpack(packer.pack())
    state["a"][0] = state["b"][0] = 1
    follow = Follower.follow

    def writing(self: Follower, *args: Any) -> Any:
        state["b"] += 1
        return follow(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Follower, "follow", writing)
        with pytest.raises(ChangedError, match="b: it was written to while it was packed"):
            packer.pack()
    with pytest.raises(ValueError, match="no version is packed"):
        packer.anchor()
    update = packer.pack()  # the copy was new already
    assert (update.is_anchor, update.version) == (True, 2)
    receiver.unpack(update)
    assert same(receiver.state, state)


@pytest.mark.parametrize("threads", [1, 2])
def test_an_update_agrees_with_the_copy_while_another_thread_writes(threads: int) -> None:
    """NumPy does not count writes. What is sent is what is kept, so later updates fit."""
    rng = np.random.default_rng(0)
    state = {name: rng.standard_normal(300_000).astype("f4") for name in "abc"}
    packer, receiver = DeltaSender(state, threads=threads), DeltaReceiver()
    receiver.unpack(packer.pack())
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            number += 1
            for tensor in state.values():
                tensor[number % 97 :: 301] += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            receiver.unpack(packer.pack())
            assert receiver.state_hash == packer.state_hash
    finally:
        done.set()
        writer.join()
    receiver.unpack(packer.pack())
    assert same(receiver.state, state)


def test_few_changes_take_little_memory_until_they_are_committed() -> None:
    weights = masters()
    state = trained_state(weights)
    served = {name: tensor.copy() for name, tensor in state.items()}
    packer = DeltaSender(state, receivers_have_it=True)
    receiver = DeltaReceiver(into=served)
    chain = []
    for seed in range(3):
        train_step(weights, LEARNING_RATES[0], seed)
        chain.append(packer.pack(trained_state(weights)))
    before = bits_of(served)
    staged = receiver.stage(chain[0])
    large = sum(unit.nbytes for unit in staged.binding.contents.units if len(unit.parts) == 1)
    small = staged.binding.contents.nbytes - large
    assert staged.nbytes < small + large / 20
    assert bits_of(served) == before
    together = receiver.stage(chain)  # the second is decoded against the first
    assert bits_of(served) == before
    receiver.commit(together)
    assert same(served, trained_state(weights))
    assert receiver.state_hash == packer.state_hash


def test_units_that_rest_and_wake_up() -> None:
    """A unit that did not change is only compared the next time."""
    state = {name: np.zeros(40_000, np.float32) for name in "abc"}
    packer, receiver = (
        DeltaSender(state, receivers_have_it=True),
        DeltaReceiver(into={name: tensor.copy() for name, tensor in state.items()}),
    )
    for step, names in enumerate(["", "a", "", "bc", "abc", "c", ""]):
        for name in names:
            state[name][step::1000] += 1
        update = packer.pack()
        assert len(update.message.frames) == len(names)
        receiver.unpack(update)
        assert same(receiver.state, state)


def test_a_sender_keeps_to_its_tensors() -> None:
    a = np.zeros(10)
    packer = DeltaSender({"a": a, "b": a})
    packer.pack()
    with pytest.raises(ValueError, match="'c' is in one of them only"):
        packer.pack({"a": a, "b": a, "c": a})
    with pytest.raises(ValueError, match="b shared memory with another tensor"):
        packer.pack({"a": a, "b": a.copy()})
    with pytest.raises(ValueError, match=r"a: it is F64 \[11\] here, and F64 \[10\]"):
        packer.pack({"a": np.zeros(11), "b": a})
    assert not packer.pack({"a": a, "b": a}).is_anchor


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DeltaSender({}), "tensors of one framework"),
        (lambda: DeltaSender({"a": np.zeros(1), "b": torch.zeros(1)}), "one framework"),
        (lambda: DeltaSender([("a", np.zeros(1)), ("a", np.zeros(1))]), "occurs twice"),
        (lambda: DeltaSender({"": np.zeros(1)}), "empty name"),
        (lambda: DeltaSender({"a": np.zeros(1)}, anchor_every=0), "anchor_every is 0"),
        (lambda: DeltaSender({"a": np.zeros(1)}, shards=Shards(2, 2, {})), "shard 2 of 2"),
        (
            lambda: DeltaSender({"a": np.zeros(3)}, shards=Shards(0, 2, {"a": ((4,), 2)})),
            "elements 2:5 are not inside",
        ),
        (
            lambda: DeltaSender({"a": np.zeros(3)}, shards=Shards(0, 2, {"b": ((4,), 0)})),
            "'b', which is not among",
        ),
    ],
)
def test_mistakes_of_a_caller(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("state", [3, "weights", {"a": 3}, {3: np.zeros(1)}, {"a": ["x"]}])
def test_other_objects_are_no_state(state: Any) -> None:
    with pytest.raises(TypeError):
        DeltaSender(state)
