"""Updates that a receiver refuses, and commits that are cut short: the weights stay as they were,
or become the new version as a whole."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from update_samples import TinyModel, bits_of, same

from packhorse.errors import BaseMismatchError, CorruptionError
from packhorse.frame.patch import Patch
from packhorse.wire.updates import (
    DeltaReceiver,
    DeltaSender,
    Refusal,
    Update,
    UpdateMismatchError,
)
from packhorse.wire.updates.tensors import Binding


def pair(**options: Any) -> tuple[TinyModel, DeltaSender, TinyModel, DeltaReceiver]:
    """A trained model and one that is served, at version 1."""
    trained, served = TinyModel(1), TinyModel(2)
    packer = DeltaSender(trained, anchor_every=None)
    receiver = DeltaReceiver(into=served, **options)
    receiver.unpack(packer.pack())
    return trained, packer, served, receiver


def later(trained: TinyModel, packer: DeltaSender, n: int = 1) -> list[Update]:
    """The next versions."""
    updates = []
    for _ in range(n):
        trained.step(packer.version)
        updates.append(packer.pack())
    return updates


def refused(
    receiver: DeltaReceiver, served: TinyModel, payload: Any, reason: Refusal, words: str
) -> UpdateMismatchError:
    """Check that an update is refused and changes nothing."""
    before, held = bits_of(served.state_dict()), (receiver.version, receiver.state_hash)
    with pytest.raises(UpdateMismatchError, match=words) as caught:
        receiver.unpack(payload)
    assert bits_of(served.state_dict()) == before
    assert (receiver.version, receiver.state_hash) == held
    assert caught.value.reason is reason
    assert isinstance(caught.value, BaseMismatchError)
    return caught.value


def test_an_update_is_applied_once() -> None:
    trained, packer, served, receiver = pair()
    update, after = later(trained, packer, 2)
    receiver.unpack(update)
    error = refused(receiver, served, update, Refusal.REPEATED, "version 2 is held already")
    assert (error.held, error.needed) == (2, 1)
    receiver.unpack(after)
    refused(receiver, served, update, Refusal.REPEATED, "update from version 3, or for an anchor")
    anchor = packer.anchor()
    error = refused(receiver, served, anchor, Refusal.REPEATED, "the anchor to version 3")
    assert error.needed is None
    assert same(served.state_dict(), trained.state_dict())


def test_an_update_without_a_change_is_applied_once_too() -> None:
    _, packer, served, receiver = pair()
    update = packer.pack()
    assert not update.message.frames
    receiver.unpack(update)
    refused(receiver, served, update, Refusal.REPEATED, "version 2 is held already")


def test_a_missed_update_is_named() -> None:
    trained, packer, served, receiver = pair()
    updates = later(trained, packer, 3)
    error = refused(receiver, served, updates[2], Refusal.MISSED, "ask for versions 2 to 3, or")
    assert (error.held, error.needed) == (1, 3)
    refused(receiver, served, [updates[0], updates[2]], Refusal.MISSED, "version 2 is held")
    refused(receiver, served, [updates[0], updates[0]], Refusal.REPEATED, "version 2 is held")
    receiver.unpack(updates)
    assert same(served.state_dict(), trained.state_dict())


def test_foreign_weights_are_refused() -> None:
    trained = TinyModel(1)
    packer = DeltaSender(trained, receivers_have_it=True)
    served = TinyModel(2)
    receiver = DeltaReceiver(into=served)
    update = later(trained, packer)[0]
    error = refused(receiver, served, update, Refusal.FOREIGN, "no version of this stream is held")
    assert (error.held, error.needed) == (None, 0)
    empty = DeltaReceiver()
    with pytest.raises(UpdateMismatchError, match="holds no weights"):
        empty.unpack(update)
    receiver.unpack(packer.anchor())
    assert same(served.state_dict(), trained.state_dict())


def test_another_sender_with_the_same_weights_can_go_on() -> None:
    """After a restart the trainer has a new stream; what counts is the hash."""
    trained, _, served, receiver = pair()
    packer = DeltaSender(trained, receivers_have_it=True)
    update = later(trained, packer)[0]
    assert update.stream_id != receiver.stream_id
    receiver.unpack(update)
    assert same(served.state_dict(), trained.state_dict())
    assert (receiver.version, receiver.stream_id) == (1, packer.stream_id)


def test_weights_that_something_else_wrote_to() -> None:
    trained, packer, served, receiver = pair()
    update = later(trained, packer)[0]
    with torch.no_grad():
        served.embed.add_(1)
    before = bits_of(served.state_dict())
    with pytest.raises(BaseMismatchError, match="something else wrote to the base"):
        receiver.unpack(update)  # what the update replaces is not what it should be
    assert bits_of(served.state_dict()) == before
    with pytest.raises(UpdateMismatchError, match="foreign"):
        receiver.stage(update, verify=True)
    receiver.forget()
    refused(receiver, served, update, Refusal.FOREIGN, "the weights here have hash")
    receiver.unpack(packer.anchor())
    assert same(served.state_dict(), trained.state_dict())


def test_verify_finds_a_change_where_the_update_has_none() -> None:
    weights = {"a": np.zeros(100_000), "b": np.zeros(100_000)}
    served = {name: tensor.copy() for name, tensor in weights.items()}
    packer = DeltaSender(weights, receivers_have_it=True)
    receiver = DeltaReceiver(into=served)
    receiver.unpack(packer.pack())
    served["b"][7] = 1
    weights["a"][0] = 1
    update = packer.pack()
    with pytest.raises(UpdateMismatchError):
        receiver.stage(update, verify=True)
    receiver.stage(update)  # as documented: not found without


def test_tensors_that_are_tied_on_one_side_only() -> None:
    tied = {"a": np.zeros(9)}
    tied["b"] = tied["a"]
    loose = {"a": np.zeros(9), "b": np.zeros(9)}
    packer = DeltaSender(tied, receivers_have_it=True)
    tied["a"][2] = 1
    update = packer.pack()
    receiver = DeltaReceiver(into=loose)
    receiver.unpack(update)
    assert same(loose, tied)
    stranger = DeltaReceiver(into={"a": np.zeros(9), "b": np.ones(9)})
    with pytest.raises(UpdateMismatchError):
        stranger.unpack(update)
    with pytest.raises(ValueError, match="a and b share memory here"):
        DeltaReceiver(into=tied).unpack(DeltaSender(loose).pack())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda served: served.pop("norm"), "norm: the update has this tensor"),
        (lambda served: served.update(more=torch.zeros(2)), r"'more' \(1 such tensors\)"),
        (lambda served: served.update(norm=torch.zeros(65).bfloat16()), r"norm: it is BF16 \[65\]"),
        (lambda served: served.update(norm=torch.zeros(64)), r"norm: it is F32 \[64\] here"),
        (
            lambda served: served.update(norm=torch.zeros(1).bfloat16().expand(64)),
            "norm: it is expanded",
        ),
    ],
)
def test_tensors_that_do_not_fit(change: Callable[[Any], Any], words: str) -> None:
    served = {name: torch.zeros_like(t) for name, t in TinyModel(1).state_dict().items()}
    change(served)
    before = bits_of({name: t.contiguous() for name, t in served.items()})
    with pytest.raises(ValueError, match=words):
        DeltaReceiver(into=served).unpack(DeltaSender(TinyModel(1)).pack())
    assert bits_of({name: t.contiguous() for name, t in served.items()}) == before


def test_a_read_only_tensor_is_refused_before_the_commit() -> None:
    served = {"a": np.zeros(3), "b": np.zeros(3)}
    served["b"].flags.writeable = False
    update = DeltaSender({"a": np.ones(3), "b": np.ones(3)}).pack()
    with pytest.raises(ValueError, match="b: it is read-only"):
        DeltaReceiver(into=served).stage(update)


def test_other_tensors_can_be_left_alone() -> None:
    served = {"a": np.zeros(3), "b": np.zeros(3)}
    DeltaReceiver(into=served, strict=False).unpack(DeltaSender({"a": np.ones(3)}).pack())
    assert (served["a"].sum(), served["b"].sum()) == (3, 0)


def test_memory_is_bounded_by_the_caller() -> None:
    update = DeltaSender({"a": np.zeros(1000)}).pack()
    with pytest.raises(CorruptionError, match="8000 bytes, more than max_nbytes = 7999"):
        DeltaReceiver(max_nbytes=7999).unpack(update)
    DeltaReceiver(max_nbytes=8000).unpack(update)


def test_a_staged_update_is_for_one_receiver_and_one_state() -> None:
    trained, packer, served, receiver = pair()
    update = later(trained, packer)[0]
    first, second = receiver.stage(update), receiver.stage(update)
    other = DeltaReceiver(into=TinyModel(3))
    with pytest.raises(ValueError, match="stage it again"):
        other.commit(first)
    receiver.commit(first)
    with pytest.raises(ValueError, match="stage it again"):
        receiver.commit(second)
    assert same(served.state_dict(), trained.state_dict())


def test_tensors_that_were_replaced_are_found_again() -> None:
    trained, packer, served, receiver = pair()
    with torch.no_grad():
        served.norm = torch.nn.Parameter(served.norm.clone(), requires_grad=False)
        served.bias.data = served.bias.data.clone()
    receiver.unpack(later(trained, packer)[0])
    assert same(served.state_dict(), trained.state_dict())


def fail_once(monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int) -> None:
    """Let the write of a unit fail once, half-way."""
    write, calls = Binding.write, []

    def failing(self: Binding, i: int, data: Any) -> None:
        calls.append(i)
        if len(calls) == after:
            write(self, i, np.zeros_like(data))
            raise error
        write(self, i, data)

    monkeypatch.setattr(Binding, "write", failing)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("after", [1, 2])
def test_an_interrupt_in_a_commit_comes_after_it(
    monkeypatch: pytest.MonkeyPatch, after: int, threads: int
) -> None:
    trained, packer, served, receiver = pair(threads=threads)
    update = later(trained, packer)[0]
    fail_once(monkeypatch, KeyboardInterrupt(), after)
    with pytest.raises(KeyboardInterrupt):
        receiver.unpack(update)
    assert same(served.state_dict(), trained.state_dict())
    assert (receiver.version, receiver.is_torn) == (2, False)
    receiver.unpack(later(trained, packer)[0])
    assert same(served.state_dict(), trained.state_dict())


def test_a_commit_that_fails_can_be_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, packer, served, receiver = pair()
    update = later(trained, packer)[0]
    staged, other = receiver.stage(update), receiver.stage(update)
    fail_once(monkeypatch, RuntimeError("the device is lost"), 2)
    with pytest.raises(RuntimeError, match="the device is lost"):
        receiver.commit(staged)
    assert receiver.is_torn
    with pytest.raises(UpdateMismatchError, match="failed half-way; ask for an anchor") as caught:
        receiver.stage(update)
    assert caught.value.reason is Refusal.TORN
    with pytest.raises(ValueError, match="stage it again"):
        receiver.commit(other)
    receiver.commit(staged)
    assert same(served.state_dict(), trained.state_dict())
    assert (receiver.version, receiver.is_torn) == (2, False)


def patched_pair(
    names: str,
) -> tuple[dict[str, Any], dict[str, Any], DeltaSender, DeltaReceiver]:
    """Weights, a copy that a receiver patches, and both ends, which hold the same version."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(100_000) for name in names}
    served = {name: tensor.copy() for name, tensor in weights.items()}
    packer = DeltaSender(weights, receivers_have_it=True)
    receiver = DeltaReceiver(into=served, threads=1)
    receiver.unpack(packer.pack())
    return weights, served, packer, receiver


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("lost")])
def test_a_patch_that_fails_half_way_is_written_again(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Tensors of 64 KiB and more are patched, not copied."""
    weights, served, packer, receiver = patched_pair("abc")
    for tensor in weights.values():
        tensor[::100] += 1
    staged = receiver.stage(packer.pack())
    assert not staged.units
    write, calls = Patch.write, []

    def failing(self: Patch, *args: Any) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise error
        write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Patch, "write", failing)
        with pytest.raises(type(error)):
            receiver.commit(staged)
    if isinstance(error, RuntimeError):
        assert receiver.is_torn
        with pytest.raises(UpdateMismatchError):
            receiver.stage(packer.pack())
        receiver.commit(staged)
    assert not receiver.is_torn
    assert same(served, weights)
    assert receiver.state_hash == packer.state_hash


def test_a_write_to_a_tensor_that_is_patched_is_noticed() -> None:
    weights, served, packer, receiver = patched_pair("ab")
    served["b"][5] += 1
    weights["a"][0] = weights["b"][5] = 1
    before = bits_of(served)
    with pytest.raises(BaseMismatchError, match="something else wrote to the base; ask for an an"):
        receiver.stage(packer.pack())
    assert bits_of(served) == before
    receiver.unpack(packer.anchor())
    assert same(served, weights)


def test_an_anchor_repairs_torn_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, packer, served, receiver = pair()
    with monkeypatch.context() as patch:
        fail_once(patch, RuntimeError("lost"), 2)
        with pytest.raises(RuntimeError, match="lost"):
            receiver.unpack(later(trained, packer)[0])
    receiver.unpack(packer.anchor())
    assert same(served.state_dict(), trained.state_dict())
    assert not receiver.is_torn


def test_in_place_finds_most_before_it_writes() -> None:
    trained, packer, served, receiver = pair(in_place=True)
    good = later(trained, packer)[0]
    data = bytearray(bytes(good))
    data[-100] ^= 1  # in the payload of a frame: its checksum tells
    before = bits_of(served.state_dict())
    with pytest.raises(CorruptionError, match="checksum"):
        receiver.stage(data)
    with pytest.raises(ValueError, match="in_place takes one at a time"):
        receiver.stage([good, *later(trained, packer)])
    assert bits_of(served.state_dict()) == before
    staged = receiver.stage(good)
    assert staged.nbytes == 0
    receiver.commit(staged)
    receiver.unpack(packer.anchor())
    assert same(served.state_dict(), trained.state_dict())


def test_in_place_says_that_weights_are_torn() -> None:
    """Another process wrote to the last unit: the first ones are patched when that is found."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(100_000) for name in "abc"}
    served = {name: tensor.copy() for name, tensor in weights.items()}
    packer = DeltaSender(weights, receivers_have_it=True)
    receiver = DeltaReceiver(into=served, in_place=True, threads=1)
    receiver.unpack(packer.pack())
    served["c"][0] = 7
    for tensor in weights.values():
        tensor[0] = 1
    staged = receiver.stage(packer.pack())
    with pytest.raises(BaseMismatchError, match="ask for an anchor"):
        receiver.commit(staged)
    assert receiver.is_torn
    assert served["a"][0] == 1
    assert served["c"][0] == 7
    receiver.unpack(packer.anchor())
    assert same(served, weights)


def test_autograd_learns_of_the_write() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    DeltaReceiver(into={"w": weight}).unpack(DeltaSender({"w": torch.zeros(3)}).pack())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
