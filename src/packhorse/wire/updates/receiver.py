"""`DeltaReceiver`: brings a model's weights from one version to the next, or leaves them alone.

`stage` does everything that takes time or can fail, while the engine goes on: it checks that the
update follows what is held, decodes what changes against the live weights, which it only reads, and
compares the content sum that each unit will have with the update's. `commit` then writes what is
decoded: the elements that change, if they are few and the unit is one tensor in host memory in C
order, and otherwise all of the unit. So an update that is damaged, repeated, out of order or for
other weights changes nothing.

A commit only goes forward. It writes bytes that are all there, and an exception in its midst
(Ctrl-C) is raised again once the writes are done. If a write itself fails, as on a device that is
lost, the weights are torn: the receiver says so, commits the same staged update again if asked, and
refuses everything else but an anchor.

The hash of the weights is known from the last commit, and computed only if none is known or if the
caller asks for it. A unit's new sum follows from the sum before and from what the update changes,
and is compared in any case. So it is noticed if something else wrote to elements that the update
changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from packhorse.arguments import resolve_threads
from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import content_sum
from packhorse.errors import CorruptionError
from packhorse.frame import Frame
from packhorse.frame.patch import Patch
from packhorse.framework import resolve_framework
from packhorse.threads import map_tensors
from packhorse.wire.updates.changes import Changes, changes_by_frame, changes_of
from packhorse.wire.updates.contents import Contents, state_hash
from packhorse.wire.updates.decoding import (
    check_payload,
    decode_unit,
    patch_for_unit,
)
from packhorse.wire.updates.message import Header, Message, read_message
from packhorse.wire.updates.refusals import Refusal, UpdateMismatchError
from packhorse.wire.updates.tensors import Binding, Tensors, named_tensors
from packhorse.wire.updates.update import Update

if TYPE_CHECKING:
    from typing_extensions import Buffer

    # An update, or several in the order of their versions.
    Payload: TypeAlias = Buffer | Update | Sequence[Buffer | Update]

__all__ = ["DeltaReceiver", "StagedUpdate"]

_NO_STATE = b"\xff" * 16  # no unit can be expected to have this sum; zeros have zeros


class StagedUpdate:
    """An update, or several in a row, that a receiver has checked and decoded.

    `DeltaReceiver.stage` makes it, and `DeltaReceiver.commit` applies it.

    Example:
        >>> import numpy as np
        >>> from packhorse.wire.updates import DeltaReceiver, DeltaSender
        >>> receiver = DeltaReceiver(into={"w": np.zeros(4)})
        >>> staged = receiver.stage(DeltaSender({"w": np.ones(4)}).pack())
        >>> staged.version, staged.names, staged.nbytes
        (1, ['w'], 32)
    """

    def __init__(
        self, receiver: DeltaReceiver, n_commits: int, binding: Binding, is_anchor: bool
    ) -> None:
        """Private: `DeltaReceiver.stage` makes it."""
        self.receiver = receiver
        self.n_commits = n_commits  # of the receiver, when this was staged
        self.binding = binding
        self.is_anchor = is_anchor
        self.header: Header | None = None  # of the last update
        self.before: list[bytes] = []  # hashes of all units of what is held
        self.hashes: list[bytes] = []  # of all units afterwards
        self.units: dict[int, ByteArray] = {}  # new bytes of changed units
        self.patches: dict[int, Patch] = {}  # of changed units, against the live weights
        self.frames: dict[int, Frame] = {}  # of a single update: against the live weights
        self.done: set[int] = set()  # units that are written

    @property
    def version(self) -> int:
        """The version that it leads to."""
        assert self.header is not None
        return self.header.number

    @property
    def stream_id(self) -> bytes:
        """The stream of the last update."""
        assert self.header is not None
        return self.header.stream

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the decoded units, and the changes of others, take."""
        patches = sum(patch.nbytes for patch in self.patches.values())
        return patches + sum(data.size for data in self.units.values())

    @property
    def names(self) -> list[str]:
        """Names of the tensors that are written; small tensors of one dtype are written
        together."""
        parts = [part for i in self.changed() for part in self.binding.unit(i).parts]
        return sorted(part.name for part in parts)

    def changes(self) -> Iterator[Changes]:
        """The elements that differ from the live weights, tensor by tensor, until it is committed.

        Yields:
            A name, the indices of elements in C order (I32, or I64 if the tensor has 2^31 elements
            or more) and their new values, both as tensors of one dimension in host memory.

        Raises:
            CompatibilityError: a tensor has several elements in a byte.
        """
        threads = self.receiver.threads
        for i in self.changed():
            found = None
            if i in self.frames:
                found = changes_by_frame(self.binding, i, self.frames[i], self.before[i], threads)
            if found is None:
                found = changes_of(self.binding, i, self.new_bytes(i, threads))
            yield from found

    def changed(self) -> list[int]:
        """The units that are written."""
        return sorted(self.units.keys() | self.patches.keys() | self.frames.keys())

    def new_bytes(self, i: int, n_threads: int) -> ByteArray:
        """The new bytes of a unit.

        Args:
            i: one of `changed()`.
            n_threads: how many threads to use, if it was not decoded before.

        Returns:
            The bytes of its tensors, end to end; not to be written to.

        Raises:
            CorruptionError: the frame's hash is wrong, if it was not decoded before.
        """
        if i in self.units:
            return self.units[i]
        if i in self.patches:
            data = self.binding.read(i).copy()
            self.patches[i].write(data, n_threads)
            return data
        frame = self.frames[i]
        base = None if frame.base_hash is None else self.binding.read(i)
        return decode_unit(frame, base, frame.base_hash, n_threads)


class DeltaReceiver:
    """Applies a sender's updates to the tensors of a model.

    Use it from one thread at a time. `stage` may run while other threads read the tensors. From
    `stage` to the end of `commit`, nothing else may write to them or replace them.

    Attributes:
        version: the version that is held; None if none of a stream was applied.
        stream_id: the stream it belongs to; None if none was applied.
        is_torn: whether a commit failed half-way, so that the weights are of no version.
        threads: the number of threads that work.

    Example:
        >>> import numpy as np
        >>> from packhorse.wire.updates import DeltaReceiver, DeltaSender
        >>> receiver = DeltaReceiver()
        >>> staged = receiver.stage(bytes(DeltaSender({"w": np.arange(3.0)}).pack()))
        >>> receiver.commit(staged)
        >>> receiver.state["w"]
        array([0., 1., 2.])
    """

    def __init__(
        self,
        into: Tensors | None = None,
        *,
        framework: str = "np",
        threads: int | None = None,
        in_place: bool = False,
        strict: bool = True,
        max_nbytes: int | None = None,
    ) -> None:
        """
        Args:
            into: the tensors to write to: an object with `state_dict()`, or a mapping from names to
                tensors of NumPy or PyTorch. It is asked for its tensors at each `stage`. None to
                hold the weights as a state of its own, which the first anchor makes.
            framework: "np" or "pt", for a state of its own.
            threads: the number of threads; None for one per core, at most 8.
            in_place: patch the tensors in `commit`, one unit after the other, instead of decoding
                in `stage`. That needs memory for what changes in one unit per thread, instead of in
                all of them; but it lengthens the pause. An
                update whose hashes are wrong is then found when some units are written already: the
                weights are torn.
            strict: whether `into` may have no tensors that the updates do not have.
            max_nbytes: the most bytes of tensors that are allowed; None for no limit.

        Raises:
            ValueError: an argument is out of range.
            MissingBackendError: the framework is not installed.
        """
        self._source = into
        self._own = resolve_framework(framework) if into is None else None
        self.threads = resolve_threads(threads)
        self._in_place = in_place
        self._strict = strict
        self._max_nbytes = max_nbytes
        self._binding: Binding | None = None
        self._hashes: list[bytes] | None = None
        self._n_commits = 0
        self.is_torn = False
        self.version: int | None = None
        self.stream_id: bytes | None = None

    @property
    def state(self) -> dict[str, Any]:
        """The tensors by name; empty if the receiver has a state of its own and got no anchor."""
        return {} if self._source is None else named_tensors(self._source)

    @property
    def has_weights(self) -> bool:
        """Whether there are weights to start from: tensors that were given, or a state of its
        own."""
        return self._source is not None

    @property
    def state_hash(self) -> bytes | None:
        """Hash of the weights, as known from the last commit, 16 bytes; None if it is not known."""
        if self._hashes is None or self._binding is None:
            return None
        return state_hash(self._binding.contents, self._hashes)

    def forget(self) -> None:
        """Forgets the version and the hash of the weights, because something else has written to
        them. The next update must be an anchor, or start from the weights as they are now."""
        self._hashes = None
        self.version = self.stream_id = None

    def stage(self, payload: Payload, *, verify: bool = False) -> StagedUpdate:
        """Checks an update, and decodes it to memory of its own. The weights are only read.

        Args:
            payload: an update, or a list of several in the order of their versions, which are then
                committed together. Those before an anchor are skipped.
            verify: hash the live weights even if their hash is known.

        Returns:
            What `commit` takes. It needs memory for the changed units.

        Raises:
            TruncationError: there are fewer bytes than the update says.
            CorruptionError: the update is damaged, or its tensors take more than `max_nbytes`.
            CompatibilityError: it is of a version or kind that this release does not know.
            BaseMismatchError: it does not follow what is held: it was applied already, earlier
                ones are missing, or the weights are not its base. The error is an
                `UpdateMismatchError`, which says which version is held and which is needed.
            ValueError: the tensors are not those of the update.
            TypeError: not an update, or not tensors.
        """
        first, *more = self._read(payload)
        if more and self._in_place:
            raise ValueError("several updates at once need memory; in_place takes one at a time")
        staged = self._begin(first, verify)
        for message in more:
            assert staged.header is not None
            self._check_order(message.header, staged.header.stream, staged.header.number)
            self._add(message, staged)
        return staged

    def commit(self, staged: StagedUpdate) -> None:
        """Applies a staged update: copies the changed units to the tensors. This is the pause.

        Args:
            staged: the result of `stage`, with nothing committed since.

        Raises:
            ValueError: it is of another receiver, or another update was committed meanwhile, or a
                tensor cannot be written to.
            CorruptionError: with `in_place`, the update's hashes are wrong. The weights are torn.
        """
        self.check_staged(staged)
        interrupt = self._write(staged)
        self._finish(staged)
        if interrupt is not None:
            raise interrupt

    def check_staged(self, staged: StagedUpdate) -> None:
        """Refuses what `commit` must not apply.

        Args:
            staged: what `commit` would be given.

        Raises:
            ValueError: as `commit`.
        """
        is_mine = staged.receiver is self and staged.n_commits == self._n_commits
        if not is_mine or (self.is_torn and not staged.is_anchor and not staged.done):
            raise ValueError(
                "the update was staged for another receiver or before another commit; stage it "
                "again"
            )

    def unpack(self, payload: Payload, *, verify: bool = False) -> None:
        """`stage` and `commit` in one.

        Args:
            payload: as for `stage`.
            verify: as for `stage`.

        Raises:
            PackhorseError: as `stage` and `commit`.
            TypeError, ValueError: as `stage` and `commit`.
        """
        self.commit(self.stage(payload, verify=verify))

    def changes(self, payload: Payload, *, verify: bool = False) -> Iterator[Changes]:
        """The elements that an update changes, for an engine that patches its own weights. Nothing
        is written.

        Args:
            payload: as for `stage`.
            verify: as for `stage`.

        Returns:
            What `StagedUpdate.changes` yields.

        Raises:
            PackhorseError: as `stage`.
            TypeError, ValueError: as `stage`.
        """
        return self.stage(payload, verify=verify).changes()

    def _read(self, payload: Payload) -> list[Message]:
        """The updates that count: from the last anchor on."""
        payloads: Sequence[Any] = payload if isinstance(payload, list | tuple) else [payload]
        if not payloads:
            raise ValueError("there is no update to stage")
        known = None if self._binding is None else self._binding.contents
        messages: list[Message] = []
        for each in payloads:
            message = each.message if isinstance(each, Update) else read_message(each, known)
            known = message.contents
            if message.header.is_anchor:
                messages.clear()
            messages.append(message)
        return messages

    def _begin(self, message: Message, verify: bool) -> StagedUpdate:
        """Stages an update on top of what is held."""
        header, contents = message.header, message.contents
        if self._max_nbytes is not None and contents.nbytes > self._max_nbytes:
            raise CorruptionError(
                f"the update has tensors of {contents.nbytes} bytes, more than max_nbytes = "
                f"{self._max_nbytes}"
            )
        self._check_order(header, self.stream_id, self.version)
        binding = self._bind(contents, header)
        staged = StagedUpdate(self, self._n_commits, binding, header.is_anchor)
        if header.is_anchor:
            staged.before = [content_sum(b"")] * len(contents.units)
        else:
            staged.before = self._held_hashes(binding, verify)
        staged.hashes = staged.before
        self._add(message, staged)
        return staged

    def _check_order(self, header: Header, stream: bytes | None, held: int | None) -> None:
        """Refuses an update that does not follow a version, as far as versions can tell."""
        if self.is_torn and not header.is_anchor:
            words = "an earlier commit failed half-way; ask for an anchor"
            raise _refusal(Refusal.TORN, header, held, words)
        if held is None or stream != header.stream or self.is_torn:
            return  # the hash decides
        if header.number <= held or (not header.is_anchor and header.base_number < held):
            words = f"version {held} is held already, so it must not be applied again; ask for the "
            words += f"update from version {held}, or for an anchor"
            raise _refusal(Refusal.REPEATED, header, held, words)
        if not header.is_anchor and header.base_number > held:
            words = f"version {held} is held; ask for versions {held + 1} to {header.base_number}, "
            raise _refusal(Refusal.MISSED, header, held, words + "or for an anchor")

    def _check_base(self, message: Message, hashes: list[bytes]) -> None:
        """Refuses an update whose base is another state than the one with these hashes."""
        header, contents = message.header, message.contents
        found = state_hash(contents, hashes)
        if found != header.base_hash:
            held = self.version if self.stream_id == header.stream else None
            words = f"the weights here have hash {found.hex()}, and its base has "
            words += f"{header.base_hash.hex()}; "
            words += "no version of this stream" if held is None else f"version {held}"
            raise _refusal(Refusal.FOREIGN, header, held, f"{words} is held; ask for an anchor")

    def _bind(self, contents: Contents, header: Header) -> Binding:
        """The tensors of the update here."""
        held = self._binding
        is_alike = held is not None and held.contents.digest == contents.digest
        if self._own is not None and (self._source is None or not is_alike):
            return self._bind_own(contents, header)
        tensors = named_tensors(self._source)
        if held is not None and is_alike and held.is_of(tensors):
            return held
        binding = Binding(contents, tensors, holds_whole=True)
        if not self._strict:
            return binding
        parts = [part.name for part in contents.parts if not part.is_whole]
        if parts:
            raise ValueError(
                f"the update has only a range of {parts[0]!r}; ShardedReceiver takes one update of "
                "each sender"
            )
        others = binding.others()
        if others:
            raise ValueError(
                f"the update does not have {others[0]!r} ({len(others)} such tensors), which is "
                "here; pass strict=False to leave such tensors alone"
            )
        return binding

    def _bind_own(self, contents: Contents, header: Header) -> Binding:
        """New tensors for a state of the receiver's own; they become its state in `commit`."""
        if not header.is_anchor:
            words = "this receiver holds no weights of this kind; ask for an anchor"
            raise _refusal(Refusal.FOREIGN, header, self.version, words)
        assert self._own is not None
        for part in contents.parts:
            self._own.check_form(part.form.dtype, part.form.shape)
        tensors = {
            part.name: self._own.empty(part.form.dtype, part.form.shape) for part in contents.parts
        }
        tensors |= {alias: tensors[name] for alias, name in contents.aliases.items()}
        return Binding(contents, tensors, holds_whole=True)

    def _held_hashes(self, binding: Binding, verify: bool) -> list[bytes]:
        """The hash of each unit of the live weights."""
        held = self._binding
        is_alike = held is not None and held.contents.digest == binding.contents.digest
        if self._hashes is not None and is_alike and not verify:
            return list(self._hashes)

        def work(i: int, n_threads: int) -> bytes:
            if binding.differing_alias(i) is not None:  # names that are tied at the sender
                return _NO_STATE
            return content_sum(binding.read(i), threads=n_threads)

        return map_tensors(work, [unit.nbytes for unit in binding.contents.units], self.threads)

    def _add(self, message: Message, staged: StagedUpdate) -> None:
        """Decodes one update against the live weights, or against what is staged before it."""
        frames, contents, hashes = message.frames, message.contents, staged.hashes
        if not message.header.is_anchor:
            self._check_base(message, hashes)
        after = list(hashes)
        for i, frame in frames.items():
            if frame.base_hash not in (None, hashes[i]):
                words = "its frame has a base that is not the update's"
                raise CorruptionError(f"{contents.units[i].label}: {words}")
            after[i] = frame.content_hash
        if state_hash(contents, after) != message.header.state_hash:
            raise CorruptionError("the frames do not make the state that the update names")
        order = list(frames)

        def work(at: int, n_threads: int) -> ByteArray | Patch | None:
            i = order[at]
            if self._in_place:
                check_payload(frames[i])
                return None
            return _decoded(frames[i], i, staged, n_threads)

        decoded = map_tensors(work, [contents.units[i].nbytes for i in order], self.threads)
        staged.frames = frames if staged.header is None else {}
        for i, found in zip(order, decoded, strict=True):
            staged.patches.pop(i, None)
            if isinstance(found, Patch):
                staged.patches[i] = found
            elif found is not None:
                staged.units[i] = found
        staged.hashes, staged.header = after, message.header

    def _write(self, staged: StagedUpdate) -> BaseException | None:
        """Writes all units. Returns an exception that came from outside, such as Ctrl-C."""
        todo = [i for i in staged.changed() if _is_decoded(staged, i) or i not in staged.done]

        def work(at: int, n_threads: int) -> None:
            i = todo[at]
            if not self._patch(staged, i, n_threads):
                data = staged.new_bytes(i, n_threads)
                self.is_torn = True  # until all units are written
                staged.binding.write(i, data)
            staged.done.add(i)

        try:
            map_tensors(work, [staged.binding.unit(i).nbytes for i in todo], self.threads)
        except (KeyboardInterrupt, SystemExit) as interrupt:
            for at, i in enumerate(todo):
                if _is_decoded(staged, i) or i not in staged.done:
                    work(at, 1)
            return interrupt
        return None

    def _patch(self, staged: StagedUpdate, i: int, n_threads: int) -> bool:
        """Patches a unit whose changes are known, or one that was not decoded, if it is one tensor
        in host memory in C order.

        Raises:
            CorruptionError: the unit was not decoded, and is not what its sum says.
        """
        if i in staged.units:
            return False
        memory = staged.binding.memory(i)
        if i in staged.patches:
            assert memory is not None
            self.is_torn = True  # until all units are written
            staged.patches[i].write(memory, n_threads)
            return True
        frame = staged.frames[i]
        if frame.base_hash is None or memory is None:
            return False
        patch = patch_for_unit(frame, memory, frame.base_hash, n_threads)
        if patch is None:
            return False
        self.is_torn = True  # until all units are written
        patch.write(memory, n_threads)
        return True

    def _finish(self, staged: StagedUpdate) -> None:
        """Makes a written update what the receiver holds."""
        assert staged.header is not None
        binding = staged.binding
        if self._own is not None:
            self._source = binding.tensors
        self._binding, self._hashes = binding, staged.hashes
        self.stream_id, self.version = staged.header.stream, staged.header.number
        self.is_torn = False
        self._n_commits += 1
        binding.mark_written(staged.changed())


def _is_decoded(staged: StagedUpdate, i: int) -> bool:
    """Whether what is written to a unit is at hand, so that it can be written again."""
    return i in staged.units or i in staged.patches


def _decoded(frame: Frame, i: int, staged: StagedUpdate, n_threads: int) -> ByteArray | Patch:
    """A unit after an update, against the live weights, or against what is staged before it.

    Args:
        frame: its frame.
        i: the unit.
        staged: the updates before.
        n_threads: how many to use.
    """
    if frame.base_hash is None:
        return decode_unit(frame, None, None, n_threads)
    base_hash = staged.hashes[i]
    if _is_decoded(staged, i):
        return decode_unit(frame, staged.new_bytes(i, n_threads), base_hash, n_threads)
    base = staged.binding.read(i)
    if staged.binding.memory(i) is not None:
        patch = patch_for_unit(frame, base, base_hash, n_threads)
        if patch is not None:
            return patch
    return decode_unit(frame, base, base_hash, n_threads)


def _refusal(reason: Refusal, header: Header, held: int | None, words: str) -> UpdateMismatchError:
    kind = "anchor" if header.is_anchor else f"update from version {header.base_number}"
    return UpdateMismatchError(
        f"the {kind} to version {header.number} is refused ({reason.value}): {words}",
        reason=reason,
        held=held,
        needed=None if header.is_anchor else header.base_number,
    )
