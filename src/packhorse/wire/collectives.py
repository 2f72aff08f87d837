"""`Collectives`: PyTorch's collectives, values in and values out, that send fewer bytes.

Arguments are checked here; `ways` runs an operation, `selector` says in which way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

from packhorse.arguments import resolve_level, resolve_threads
from packhorse.layout import Level
from packhorse.torch_dtypes import short_name
from packhorse.wire import torch_ways
from packhorse.wire.backend import dist, torch
from packhorse.wire.carrier import Carrier, Effort
from packhorse.wire.device_ways import is_on_device, why_not
from packhorse.wire.peers import Peers, as_timeout
from packhorse.wire.pending import Background, Pending
from packhorse.wire.rounds import PIECE_NBYTES
from packhorse.wire.selector import Arm, Choice, Key, Rates, Row, Selector, table_of
from packhorse.wire.statement import ROOT_WORDS, Statement, check_sizes, exchange_statements
from packhorse.wire.sums import OPERATIONS, REDUCTION_WORDS, check_operation
from packhorse.wire.ways import Ways

__all__ = ["Collectives"]

_CHOICES = ("auto", "packed", "raw")
_ASKING = 0xFFFF  # the way, in a statement that asks
_Run = Callable[[Arm, torch.Tensor, torch.Tensor], Effort]
_ON_DEVICE = "on a device nothing is measured: pass choice='packed' or rates to have it packed"


class _Call(NamedTuple):
    """A call, as the ranks compare it when they ask each other.

    Attributes:
        key: its kind.
        nbytes: the bytes that this rank holds.
        argument: the root, or the kind of the reduction.
        words: what the argument means (`statement.exchange_statements`).
        sent: the bytes that go to each rank; empty if the size says it.
        received: the bytes that come from each rank, likewise.
    """

    key: Key
    nbytes: int
    argument: int = 0
    words: Sequence[str] = ()
    sent: Sequence[int] = ()
    received: Sequence[int] = ()


class Collectives:
    """The collectives of a process group.

    All ranks must make their objects with the same options, and call them in the same order. An
    object may be used by one thread at a time. After a failure it refuses all further calls with
    the first error.

    Sums of floats on more than two ranks depend on the order of additions. Packed, and in pieces,
    they are added in the order of the ranks; PyTorch's own have other orders. Where a run must give
    the same bits as another run, pass `choice="packed"` or `choice="raw"`.

    Args:
        group: the process group; None for the default one.
        choice: "auto" to measure and take what is faster, "packed" to pack always, "raw" to run
            PyTorch's own collectives always. On a device "auto" does not measure; it packs only
            if `rates` say that it is faster.
        level: how hard to pack: "fast", "default" or "max".
        timeout: how long a transfer may take, waiting for other ranks included; a duration, or
            seconds. None for five minutes.
        threads: how many to use for packing a piece of 1 MiB; None for one per core, at most 8.
            One is best where ranks share a machine.
        rates: what to choose by instead of measuring.

    Raises:
        ValueError: an option is unknown, there is no process group, or this rank is not in it.

    Example:
        >>> import torch
        >>> from packhorse.wire import Collectives
        >>> def gather(weights: torch.Tensor) -> torch.Tensor:
        ...     collectives = Collectives(timeout=60)
        ...     gathered = torch.empty(collectives.size, *weights.shape, dtype=weights.dtype)
        ...     collectives.all_gather(gathered, weights)
        ...     print(collectives.explain())
        ...     return gathered
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        choice: str = "auto",
        level: Level | str = "default",
        timeout: timedelta | float | None = None,
        threads: int | None = 1,
        rates: Rates | None = None,
    ) -> None:
        if choice not in _CHOICES:
            raise ValueError(f"choice is {choice!r}; it must be one of {', '.join(_CHOICES)}")
        resolved = resolve_level(level)
        options = {"choice": choice, "level": resolved.name.lower(), "rates": repr(rates)}
        self._peers = Peers(group, as_timeout(timeout), {"object": "Collectives", **options})
        self._choice = choice
        self._rates = rates
        self._ways = Ways(Carrier(self._peers, resolved, resolve_threads(threads)))
        self._selector = Selector(self._peers.size, rates)
        self._background = Background()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return self._peers.group

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self._peers.rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self._peers.size

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        label: str = "",
    ) -> Pending | None:
        """Sends a part of a tensor to each rank, and receives one from each.

        Args:
            output: where the parts of all ranks go, one after the other in the first dimension.
            input: the parts for all ranks, likewise.
            output_split_sizes: how many rows each rank sends; None for equal parts.
            input_split_sizes: how many rows each rank gets; None for equal parts.
            async_op: whether to go on in the background.
            label: a name for the calls at this place, where several differ in what they carry; the
                same on all ranks.

        Returns:
            None; or with `async_op` what to wait for.

        Raises:
            PackhorseError: as for all collectives: `CompatibilityError` if the ranks differ in
                versions, options, dtypes or sizes; `CorruptionError` if bytes were damaged on
                their way; `PeerError` if a rank died, did not take part in time, or failed.
            ValueError: dtypes, devices or sizes do not fit.
        """
        _check_alike(output, input)
        received = self._split(output, output_split_sizes, "output")
        sent = self._split(input, input_split_sizes, "input")
        if input.numel() and output.numel() and input.shape[1:] != output.shape[1:]:
            raise ValueError(
                f"rows of input are {list(input.shape[1:])}, those of output "
                f"{list(output.shape[1:])}; they must be alike"
            )
        is_even = output_split_sizes is None and input_split_sizes is None
        nbytes = max(input.nbytes, output.nbytes)
        key = _key("all_to_all_single", input, nbytes if is_even else None, label)
        call = _Call(key, nbytes, sent=sent, received=received)

        def run(arm: Arm, target: torch.Tensor, source: torch.Tensor) -> Effort:
            return self._ways.all_to_all(arm, target, source, received, sent)

        return self._start(call, output, input, run, async_op=async_op)

    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        async_op: bool = False,
        label: str = "",
    ) -> Pending | None:
        """Gathers a tensor of each rank on all of them, as `all_gather_into_tensor` does.

        Args:
            output: where the tensors of all ranks go, one after the other in memory.
            input: this rank's tensor; may be its part of `output`. The same size on all ranks.
            async_op: whether to go on in the background.
            label: as for `all_to_all_single`.

        Returns:
            None; or with `async_op` what to wait for.

        Raises:
            PackhorseError: as for `all_to_all_single`.
            ValueError: dtypes, devices or sizes do not fit.
        """
        _check_alike(output, input)
        self._check_whole(output, input, "output", "input")

        def run(arm: Arm, target: torch.Tensor, source: torch.Tensor) -> Effort:
            return self._ways.all_gather(arm, target, source)

        call = _Call(_key("all_gather", input, output.nbytes, label), output.nbytes)
        return self._start(call, output, input, run, async_op=async_op)

    def broadcast(
        self, tensor: torch.Tensor, src: int, *, async_op: bool = False, label: str = ""
    ) -> Pending | None:
        """Sends a tensor of one rank to all others. It is encoded once.

        Args:
            tensor: what is sent, or where it goes. The same size on all ranks.
            src: the rank that sends, in the default group, as in PyTorch.
            async_op: whether to go on in the background.
            label: as for `all_to_all_single`.

        Returns:
            None; or with `async_op` what to wait for.

        Raises:
            PackhorseError: as for `all_to_all_single`.
            ValueError: the rank is not in the group.
        """
        root = dist.get_group_rank(self.group, src)

        def run(arm: Arm, target: torch.Tensor, source: torch.Tensor) -> Effort:
            del source
            return self._ways.broadcast(arm, target, root)

        key = _key("broadcast", tensor, tensor.nbytes, label)
        call = _Call(key, tensor.nbytes, root, ROOT_WORDS)
        return self._start(call, tensor, tensor, run, async_op=async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        *,
        async_op: bool = False,
        label: str = "",
    ) -> Pending | None:
        """Reduces tensors of all ranks, and gives each rank a part, as `reduce_scatter_tensor`
        does.

        Args:
            output: where this rank's part goes.
            input: the parts of all ranks, one after the other in memory; only read, unless
                `output` lies in it.
            op: SUM, AVG, MIN, MAX or PRODUCT of `torch.distributed.ReduceOp` (sums.py).
            async_op: whether to go on in the background.
            label: as for `all_to_all_single`.

        Returns:
            None; or with `async_op` what to wait for.

        Raises:
            PackhorseError: as for `all_to_all_single`.
            ValueError: dtypes, devices or sizes do not fit, or there is no such reduction.
        """
        name = check_operation(op, input.dtype)
        _check_alike(output, input)
        self._check_whole(input, output, "input", "output")

        def run(arm: Arm, target: torch.Tensor, source: torch.Tensor) -> Effort:
            return self._ways.reduce_scatter(arm, target, source, name)

        key = _key("reduce_scatter", input, input.nbytes, label)
        call = _Call(key, input.nbytes, OPERATIONS.index(name), REDUCTION_WORDS)
        return self._start(call, output, input, run, async_op=async_op)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        *,
        async_op: bool = False,
        label: str = "",
    ) -> Pending | None:
        """Reduces tensors of all ranks in place; afterwards all have the same bits.

        Args:
            tensor: this rank's values, and where the result goes. The same size on all ranks.
            op: as for `reduce_scatter`.
            async_op: whether to go on in the background.
            label: as for `all_to_all_single`.

        Returns:
            None; or with `async_op` what to wait for.

        Raises:
            PackhorseError: as for `all_to_all_single`.
            ValueError: there is no such reduction for this dtype.
        """
        name = check_operation(op, tensor.dtype)

        def run(arm: Arm, target: torch.Tensor, source: torch.Tensor) -> Effort:
            del source
            return self._ways.all_reduce(arm, target, name)

        key = _key("all_reduce", tensor, tensor.nbytes, label)
        call = _Call(key, tensor.nbytes, OPERATIONS.index(name), REDUCTION_WORDS)
        return self._start(call, tensor, tensor, run, async_op=async_op)

    def explain(self) -> str:
        """A table of the kinds of calls: how each runs, what was measured, and why it runs so.

        Times are those of the slowest rank, for a call of the size that was measured last. The
        rates of encoding and decoding, and the ratio, are those of this rank.
        """
        return table_of(self.rows())

    def rows(self) -> list[Row]:
        """What `explain` shows, to compute with."""
        return self._selector.rows()

    def _split(
        self, tensor: torch.Tensor, sizes: Sequence[int] | None, name: str
    ) -> tuple[int, ...]:
        """The bytes of the parts of a tensor."""
        if not tensor.dim():
            raise ValueError(f"{name} has no dimension to split; use unsqueeze(0)")
        n_rows = tensor.shape[0]
        if not sizes:
            if n_rows % self.size:
                raise ValueError(
                    f"{name} has {n_rows} rows, which {self.size} ranks cannot share equally; pass "
                    f"{name}_split_sizes"
                )
            sizes = [n_rows // self.size] * self.size
        if len(sizes) != self.size or min(sizes) < 0 or sum(sizes) != n_rows:
            raise ValueError(
                f"{name}_split_sizes are {list(sizes)}; {self.size} sizes are needed, none < 0, "
                f"which add up to {n_rows}"
            )
        row_nbytes = math.prod(tensor.shape[1:]) * tensor.itemsize
        return tuple(size * row_nbytes for size in sizes)

    def _check_whole(
        self, whole: torch.Tensor, part: torch.Tensor, whole_name: str, part_name: str
    ) -> None:
        if whole.numel() != self.size * part.numel():
            raise ValueError(
                f"{whole_name} has {whole.numel()} elements; {self.size} ranks need {self.size} "
                f"times the {part.numel()} of {part_name}"
            )

    def _start(
        self, call: _Call, output: torch.Tensor, input: torch.Tensor, run: _Run, *, async_op: bool
    ) -> Pending | None:
        def begin() -> None:
            self._run(call, output, input, run)

        if async_op and is_on_device(output):
            begin()  # puts it into the stream of the caller's thread, and does not wait
            return Pending.done(output)
        if async_op:
            return self._background.begin(begin, output)
        self._background.run(begin)
        return None

    def _run(self, call: _Call, output: torch.Tensor, input: torch.Tensor, run: _Run) -> None:
        """Runs a collective on contiguous tensors."""
        source, is_plain = input.detach(), _is_plain(output)
        if not _is_plain(source):
            source = source.resolve_conj().resolve_neg().contiguous()
        if output is input:
            target = source
        elif is_plain:
            target = output.detach()
        else:
            target = source.new_empty(output.shape)
        self._choose_and_run(call, target, lambda arm: run(arm, target, source))
        if not is_plain:
            output.detach().copy_(target)
        torch.autograd.graph.increment_version(output)

    def _choose_and_run(
        self, call: _Call, target: torch.Tensor, run: Callable[[Arm], Effort]
    ) -> None:
        key = call.key
        if key.size_class is not None and not call.nbytes:
            return  # on all ranks
        choose = self._choose_on_device if is_on_device(target) else self._choose
        with self._peers.operation(key.operation):
            choice = choose(call, target)
            start = time.perf_counter()
            effort = run(choice.arm)
            self._selector.learn(key, choice, time.perf_counter() - start, effort)

    def _choose_on_device(self, call: _Call, target: torch.Tensor) -> Choice:
        key, why = call.key, why_not(target)
        if self.size == 1:
            why = "there is one rank, so nothing is sent"
        elif self._choice == "raw":
            why = "choice is raw"
        elif why is None and self._choice == "packed":
            self._selector.note(key, Arm.PACKED, "choice is packed")
            return Choice(Arm.PACKED)
        elif why is None and self._rates is None:
            why = _ON_DEVICE
        if why is not None:
            self._selector.note(key, Arm.TORCH, why)
            return Choice(Arm.TORCH)
        choice = self._selector.glance(key, [Arm.TORCH, Arm.PACKED], call.nbytes)
        assert choice is not None  # given rates answer every time
        return choice

    def _choose(self, call: _Call, target: torch.Tensor) -> Choice:
        key, nbytes = call.key, call.nbytes
        is_move = key.operation not in ("reduce_scatter", "all_reduce")
        arms = [Arm.TORCH] if is_move or torch_ways.can_reduce(target.dtype) else []
        if self.size == 1:
            self._selector.note(key, Arm.PACKED, "there is one rank, so nothing is sent")
            return Choice(Arm.PACKED)
        if self._choice == "raw":
            arm = (*arms, Arm.PIECES)[0]
            self._selector.note(key, arm, "choice is raw")
            return Choice(arm)
        if self._choice == "packed":
            self._selector.note(key, Arm.PACKED, "choice is packed")
            return Choice(Arm.PACKED)
        if not arms or key.size_class is None or nbytes > PIECE_NBYTES:
            arms.append(Arm.PIECES)
        arms.append(Arm.PACKED)
        return self._selector.glance(key, arms, nbytes) or self._ask(call)

    def _ask(self, call: _Call) -> Choice:
        """Asks all ranks what the last timed call took them, and tells what it took this one.
        Compares all that must be alike on the ranks, because PyTorch's own way would not."""
        peers, key = self._peers, call.key
        mine = Statement(
            peers.number & 0xFFFFFFFF, f"{key.operation} {key.dtype}", call.argument, _ASKING, 0,
            call.nbytes if key.size_class is not None else 0,
            seconds=self._selector.own_seconds(key), total=call.nbytes, label=key.label,
        )  # fmt: skip
        sent, received = (sizes or [0] * peers.size for sizes in (call.sent, call.received))
        stated = exchange_statements(
            peers, [mine._replace(nbytes=nbytes) for nbytes in sent], call.words
        )
        check_sizes(peers, stated, received)
        seconds = max(one.seconds for one in stated)
        return self._selector.ask(key, seconds, max(one.total for one in stated))


def _key(operation: str, tensor: torch.Tensor, nbytes: int | None, label: str) -> Key:
    dtype = short_name(tensor.dtype)
    if nbytes is None:  # rows are as long on all ranks
        row = math.prod(tensor.shape[1:]) * tensor.itemsize
        return Key(operation, dtype, None, label or f"in rows of {row} B")
    return Key(operation, dtype, max(nbytes - 1, 0).bit_length(), label)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor holds its values, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _check_alike(output: torch.Tensor, input: torch.Tensor) -> None:
    if output.dtype != input.dtype:
        raise ValueError(f"output is {output.dtype} and input {input.dtype}; they must be alike")
    if output.device != input.device:
        raise ValueError(f"output is on {output.device} and input on {input.device}")
