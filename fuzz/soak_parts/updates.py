"""Weight updates from a sender to receivers, over a bad link or through a folder.

Updates get lost, arrive late, twice or damaged, or come from another trainer; receivers end between
`stage` and `commit`, and writers in the middle of a file. The weights of a receiver are always
those of one version, to the bit, and a receiver takes every update that follows what it holds, and
no other.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from packhorse.errors import PackhorseError
from packhorse.wire.updates import (
    DeltaReceiver,
    DeltaSender,
    Update,
    UpdateFolder,
    UpdateMismatchError,
    fold,
)
from soak_parts.case import Case, Part, Place, claim
from soak_parts.children import end_at_call, run_child
from soak_parts.samples import draw_tensors, make_array

__all__ = ["PART"]

_STEPS = (
    *("next",) * 8, "skip", "skip", "repeat", "late", "foreign", "damage", "damage", "anchor",
    "list", "fold", "end", "write",
)  # fmt: skip
_FOLDER_STEPS = (*("publish",) * 5, *("read",) * 5, "join", "end", "prune", "killed", "restart")
_LEVELS = ("fast", "default", "max")
_CALLS = 12  # about as many calls of the system as a file takes to be published
State = dict[str, np.ndarray]


def draw(rng: Random) -> Case:
    """A case of one of the kinds below."""
    kind = rng.choice(("link", "link", "folder"))
    names = _STEPS if kind == "link" else _FOLDER_STEPS
    steps = [[rng.choice(names), rng.getrandbits(32)] for _ in range(rng.randint(3, 25))]
    return {"kind": kind, "tensors": draw_tensors(rng, rng.randint(1, 4), most=5000),
            "steps": steps, "anchor_every": rng.choice((None, 1, 2, 5)),
            "level": rng.choice(_LEVELS), "threads": rng.randint(1, 2),
            "in place": rng.random() < 0.3, "have it": rng.random() < 0.5,
            "own": rng.random() < 0.3}  # fmt: skip


def run(case: Case, place: Place) -> None:
    """Run a case."""
    _RUN[case["kind"]](case, place)


def _first_state(case: Case) -> State:
    return {f"t{i}": make_array(spec) for i, spec in enumerate(case["tensors"])}


def _copy(state: State) -> State:
    return {name: array.copy() for name, array in state.items()}


def _bits(state: State) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state.items()}


def _change(state: State, rng: Random) -> None:
    """A few bytes of some tensors, all of a tensor, or nothing."""
    for array in state.values():
        data = array.reshape(-1).view(np.uint8)
        if not data.size or rng.random() < 0.4:
            continue
        most = data.size if rng.random() < 0.2 else min(data.size, 20)
        at = np.array([rng.randrange(data.size) for _ in range(rng.randint(1, most))])
        data[at] = data[at] ^ 1 if array.dtype == bool else data[at] + rng.randint(1, 3)


class _Trainer:
    """A sender, and the weights of each version that it packed."""

    def __init__(self, case: Case, state: State) -> None:
        self.state = state
        self.sender = DeltaSender(
            self.state, anchor_every=case["anchor_every"], level=case["level"],
            threads=case["threads"], receivers_have_it=case["have it"],
        )  # fmt: skip
        self.versions = [_bits(state)]  # version 0: before the first update
        self.updates: list[Update] = []

    def step(self, rng: Random) -> Update:
        """The next version, as other processes get it: as bytes."""
        _change(self.state, rng)
        update = Update(bytes(self.sender.pack()))
        self.versions.append(_bits(self.state))
        self.updates.append(update)
        claim(update.version == len(self.updates), f"version {update.version} is packed")
        return update


# A link that loses, repeats, delays and damages updates.


class _Link:
    """A trainer and a receiver, and what the receiver must hold."""

    def __init__(self, case: Case, place: Place) -> None:
        self._case = case
        self._place = place
        self.trainer = _Trainer(case, _first_state(case))
        self._weights: State | None = None if case["own"] else _copy(self.trainer.state)
        self.receiver = self._start()

    def _start(self) -> DeltaReceiver:
        return DeltaReceiver(
            self._weights, threads=self._case["threads"], in_place=self._case["in place"]
        )

    def take(self, step: str, rng: Random) -> None:
        """Do one of `_STEPS`."""
        trainer = self.trainer
        if step in ("next", "skip", "list", "fold") or not trainer.updates:
            trainer.step(rng)
        last = trainer.updates[-1]
        if step == "next":
            self._deliver(last, trainer.versions)
        elif step == "repeat":
            self._deliver(last, trainer.versions)
            self._deliver(last, trainer.versions)
        elif step == "late":
            self._deliver(rng.choice(trainer.updates), trainer.versions)
        elif step == "anchor":
            self._deliver(trainer.sender.anchor(), trainer.versions)
        elif step == "foreign":
            self._deliver_foreign(rng)
        elif step == "damage":
            self._deliver_damaged(last, rng)
        elif step in ("list", "fold"):
            self._deliver_several(step, rng)
        elif step == "end":
            self._end_before_commit(last)
        elif step == "write":
            self._write(rng)

    def held(self) -> dict[str, bytes]:
        """The bits of the weights."""
        return _bits(self.receiver.state)

    def follows(self, update: Update, versions: list[dict[str, bytes]]) -> bool:
        """Whether the receiver must take an update."""
        receiver = self.receiver
        is_known = receiver.version is not None and receiver.stream_id == update.stream_id
        if is_known and update.version <= (receiver.version or 0):
            return False
        if update.base_version is None:
            return True
        if is_known and update.base_version != receiver.version:
            return False
        return receiver.has_weights and self.held() == versions[update.base_version]

    def _deliver(self, update: Update, versions: list[dict[str, bytes]]) -> None:
        before, must = self.held(), self.follows(update, versions)
        found = self._place.outcome(lambda: self._unpack(update))
        if isinstance(found, BaseException):
            claim(not must, f"an update that follows is refused: {found}")
            claim(isinstance(found, UpdateMismatchError), f"a good update is called bad: {found!r}")
            claim(self.held() == before, "an update that was refused has changed something")
            return
        claim(must, "an update that does not follow is applied")
        self._check_version(update, versions)

    def _check_version(self, update: Update, versions: list[dict[str, bytes]]) -> None:
        claim(self.held() == versions[update.version], "the weights are not those of the version")
        claim(self.receiver.version == update.version, "the receiver names another version")
        claim(self.receiver.state_hash == update.state_hash, "the receiver names another hash")

    def _unpack(self, payload: Any) -> None:
        staged = self.receiver.stage(payload)
        self._place.operations.commit(self.receiver, staged)

    def _deliver_foreign(self, rng: Random) -> None:
        """An update of a trainer that goes on from other weights."""
        other = _Trainer({**self._case, "have it": True}, _copy(self.trainer.state))
        other.step(rng)
        self._deliver(other.step(rng), other.versions)

    def _deliver_damaged(self, update: Update, rng: Random) -> None:
        data = bytearray(bytes(update))
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        before = self.held()
        found = self._place.outcome(lambda: self._unpack(bytes(data)))
        claim(isinstance(found, BaseException), "a damaged update is applied")
        claim(isinstance(found, PackhorseError), f"a damaged update: {found!r}")
        if self.receiver.is_torn:
            claim(self._case["in place"], "a damaged update tears the weights")
            self._deliver_anchor()
        else:
            claim(self.held() == before, "a damaged update has changed something")

    def _deliver_anchor(self) -> None:
        """What mends torn weights."""
        anchor = self.trainer.sender.anchor()
        self._unpack(anchor)
        self._check_version(anchor, self.trainer.versions)

    def _deliver_several(self, how: str, rng: Random) -> None:
        """All updates that are missing, in one."""
        held = self.receiver.version
        if held is None or self.receiver.stream_id != self.trainer.sender.stream_id:
            return
        updates, versions = self.trainer.updates[held:], self.trainer.versions
        if self.held() != versions[held] or not updates:
            return
        if how == "fold":
            self._deliver(fold(updates, self.receiver.state), versions)
        elif not self._case["in place"]:
            self._unpack([bytes(update) for update in updates])
            self._check_version(updates[-1], versions)

    def _end_before_commit(self, update: Update) -> None:
        """A process that ends between `stage` and `commit` leaves its weights as they were."""
        before = self.held()
        self._place.outcome(lambda: self.receiver.stage(update))
        claim(self.held() == before, "staging has changed something")
        self.receiver = self._start()

    def _write(self, rng: Random) -> None:
        """Something else writes to the weights, which `verify` must notice."""
        trainer = self.trainer
        if self._weights is None or self.receiver.version is None:
            return
        before = self.held()
        _change(self._weights, rng)
        update = trainer.step(rng)
        if self.held() != before and not update.is_anchor:
            found = self._place.outcome(lambda: self.receiver.stage(update, verify=True))
            claim(isinstance(found, UpdateMismatchError), "weights that were written to are a base")
        self.receiver.forget()
        self._deliver(trainer.sender.anchor(), trainer.versions)


def _link(case: Case, place: Place) -> None:
    link = _Link(case, place)
    for step, seed in case["steps"]:
        link.take(step, Random(seed))


# A folder of updates.


class _Readers:
    """Updates in a folder, by one trainer after the other, and receivers that read them."""

    def __init__(self, case: Case, place: Place) -> None:
        self._case = case
        self._place = place
        self._folder = place.folder / "updates"
        self.state = _first_state(case)
        self.receivers: list[DeltaReceiver] = []
        self.join()
        self.restart()

    def restart(self) -> None:
        """A new trainer, which goes on from the weights of the last one."""
        self.state = _copy(self.state)
        self.trainer = _Trainer(self._case, self.state)
        self.writer = UpdateFolder(self._folder)

    def join(self) -> None:
        """One more receiver, with the weights of now or with none."""
        weights = None if self._case["own"] else _copy(self.state)
        self.receivers.append(DeltaReceiver(weights, threads=self._case["threads"]))

    def take(self, step: str, rng: Random) -> None:
        """Do one of `_FOLDER_STEPS`."""
        if step == "publish":
            self.writer.publish(self.trainer.step(rng))
        elif step == "killed":
            self._publish_and_end(rng)
        elif step == "restart":
            self.restart()
            self.writer.publish(self.trainer.step(rng))
        elif step == "join":
            self.join()
        elif step == "prune":
            self._prune(rng)
        else:
            for receiver in self.receivers:
                self._read(receiver, ends=step == "end")

    def _prune(self, rng: Random) -> None:
        n = len(self.writer.entries())
        removed = self.writer.prune(keep_anchors=rng.randint(1, 2))
        claim(len(self.writer.entries()) == n - removed, "prune removes more than it says")

    def _publish_and_end(self, rng: Random) -> None:
        """A writer that is killed; another goes on, and writes the update if it is not there."""
        update = self.trainer.step(rng)
        number, after = rng.randrange(_CALLS), rng.random() < 0.5

        def publish() -> None:
            end_at_call(number, signal.SIGKILL, after=after, naming=False)
            UpdateFolder(self._folder).publish(update)

        ended = run_child(publish, self._place.folder)
        claim(ended.code in (0, -signal.SIGKILL), f"publish: {ended.last_line}", ended.err)
        if not ended.is_good:
            self._place.kill()
        self.writer = UpdateFolder(self._folder)
        is_there = self.writer.stream_id() == update.stream_id and any(
            entry.number == update.version for entry in self.writer.entries()
        )
        try:
            self.writer.publish(update)
        except FileExistsError:
            is_there = is_there or self.writer.stream_id() != update.stream_id
            claim(is_there, "an update is there, and readers do not see it")
            if self.writer.stream_id() != update.stream_id:
                self.restart()  # the trainer began with a file that nobody can find
                self.writer.publish(self.trainer.step(rng))
        claim(self.writer.entries(), "what was published is not there")

    def _read(self, receiver: DeltaReceiver, *, ends: bool) -> None:
        """Bring a receiver to the newest version, or let it end between `stage` and `commit`."""
        before, folder = _bits(receiver.state), UpdateFolder(self._folder)
        staged = folder.stage_newest(receiver)
        claim(_bits(receiver.state) == before, "staging has changed something")
        if ends or staged is None:
            self._check_newest(receiver, is_staged=staged is not None)
            return
        self._place.operations.commit(receiver, staged)
        self._place.accept()
        newest = self.trainer.versions[-1]
        claim(receiver.version == len(self.trainer.updates), "a reader stops before the newest")
        claim(_bits(receiver.state) == newest, "the weights are not those of the version")

    def _check_newest(self, receiver: DeltaReceiver, *, is_staged: bool) -> None:
        """Whoever gets nothing must have the newest version, or no way to it."""
        if is_staged or not self.trainer.updates:
            return
        is_new = receiver.stream_id == self.trainer.sender.stream_id
        has_anchor = any(update.is_anchor for update in self.trainer.updates)
        is_done = is_new and receiver.version == len(self.trainer.updates)
        claim(is_done or not has_anchor, "a reader gets nothing, and there is something newer")


def _folder(case: Case, place: Place) -> None:
    readers = _Readers(case, place)
    for step, seed in case["steps"]:
        readers.take(step, Random(seed))
    for receiver in readers.receivers:
        readers._read(receiver, ends=False)


_RUN: dict[str, Callable[[Case, Place], None]] = {"link": _link, "folder": _folder}
PART = Part("updates", "weight updates that get lost, repeated, damaged and interrupted", draw, run)
