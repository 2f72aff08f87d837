"""Exchanges embeddings between ranks, each distinct row once, forward and backward.

The batch is split among the ranks (data-parallel), the tables too (model-parallel). A rank asks
each holder for the distinct rows that its part of the batch needs, gets each once, and makes
the bags itself. In the backward pass it adds up the gradients of a row over its part of the batch
and sends each sum once. Nothing is lost: with `RawRows` the bags have the bits that
`torch.nn.EmbeddingBag` gives, and gradients are fp32 sums in a defined order (`sums`).

A batch takes three messages from each rank to each other one: ids, rows, gradients; each has all
tables in it. What a rank holds itself does not travel, and stays exact if the codec is lossy.
All ranks must call in the same order, and all must run the backward pass, or none.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from packhorse.wire.backend import dist, torch
from packhorse.wire.embeddings.requests import Wanted, pack_request, unpack_request
from packhorse.wire.embeddings.routes import Bags, Choice, Layout, Route, Sending, route
from packhorse.wire.embeddings.rows import Piece, RawRows, RowCodec
from packhorse.wire.embeddings.sums import pool
from packhorse.wire.embeddings.tables import Table
from packhorse.wire.exchange import ByteExchange
from packhorse.wire.peers import Peers, as_timeout
from packhorse.wire.rounds import Rounds

__all__ = ["EmbeddingExchange", "Plan", "Question", "Request", "Traffic"]

_Bytes = npt.NDArray[np.uint8]
_Gather = Callable[[Sequence["Request"]], Sequence[Tensor]]


class Request(NamedTuple):
    """What all ranks together want of a shard that this rank holds.

    Attributes:
        shard: number of the shard, as `EmbeddingExchange.shards` lists them.
        ids: [n] int64, counted from the first row of the shard.
        offsets: [b + 1] int64: the sums of so many rows are wanted; None: each row is.
        counts: how many rows (or sums) each rank gets.
    """

    shard: int
    ids: Tensor
    offsets: Tensor | None
    counts: tuple[int, ...]

    @property
    def n(self) -> int:
        """How many rows or sums are wanted."""
        return sum(self.counts)


@dataclass
class Traffic:
    """What a rank has sent to others, and where its time went.

    Attributes:
        ids_nbytes: bytes of messages that ask for rows.
        rows_nbytes: bytes of messages with rows.
        gradients_nbytes: bytes of messages with gradients.
        seconds: time of each phase ("route", "gather", "encode", "wire", "decode", "pool").
    """

    ids_nbytes: int = 0
    rows_nbytes: int = 0
    gradients_nbytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """All bytes sent."""
        return self.ids_nbytes + self.rows_nbytes + self.gradients_nbytes

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the time that the block takes to a phase.

        Args:
            phase: its name in `seconds`.
        """
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


class EmbeddingExchange:
    """Fetches the bags of a batch from the ranks that hold the tables.

    Args:
        tables: all tables, the same on all ranks.
        features: for each feature, the name of its table; by default a feature for each table.
        group: the process group; None is the default one.
        dtype: of the tables.
        forward: how rows travel; by default as they are.
        backward: how gradients travel; by default as they are.
        sending: distinct rows, or bags that the holder adds up.
        divide: what gradients are divided by before they are summed over the ranks. torchrec
            divides by the number of ranks; 1 gives the sum.
        timeout: as `ByteExchange`.

    Attributes:
        layout: tables, features and shards.
        held: numbers of the shards that this rank holds.
        traffic: bytes and seconds, summed over all batches.

    Raises:
        ValueError: tables, features or ranks do not fit each other, or there is no process group.

    All methods that reach other ranks raise a PeerError if one of them died, hangs or failed, and a
    CompatibilityError if one has other tables, features, dtypes or kinds of codecs.

    Example:
        >>> from packhorse.wire.embeddings import Bags, EmbeddingExchange, on_rank
        >>> def look_up(ids, table):  # on each rank; rank 0 has the table
        ...     exchange = EmbeddingExchange([on_rank("user", 1_000, 16, rank=0)])
        ...     plan = exchange.plan([Bags(ids)])
        ...     (users,) = exchange.fetch(plan, lambda asked: [table[one.ids] for one in asked])
        ...     return users
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[str] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
        forward: RowCodec | None = None,
        backward: RowCodec | None = None,
        sending: Sending = Sending.CHEAPER,
        divide: int = 1,
        timeout: timedelta | float | None = None,
    ) -> None:
        features = [table.name for table in tables] if features is None else features
        shown = {
            "tables and features": _digest(tuple(tables), tuple(features)),
            "dtype": str(dtype),
        }
        shown["codecs"] = f"{type(forward).__name__}, {type(backward).__name__}"
        self._swaps = self._connect(group, timeout, shown)
        self._rank, self._world = self._swaps.rank, self._swaps.size
        self.layout = Layout(tables, features, self._world)
        self.held = self.layout.held[self._rank]
        self.dtype = dtype
        self.forward_codec: RowCodec = forward or RawRows()
        self.backward_codec: RowCodec = backward or RawRows()
        for codec in (self.forward_codec, self.backward_codec):
            codec.attach(self.layout, self._rank)
        self.divide = divide
        self.sending = sending
        self.traffic = Traffic()
        self._choices: Callable[[], list[Choice]] = list

    def _connect(
        self,
        group: dist.ProcessGroup | None,
        timeout: timedelta | float | None,
        options: Mapping[str, str],
    ) -> _Swaps:
        return _Swaps(group, timeout, options)

    def explain(self) -> list[Choice]:
        """How each table travelled in the last batch, and what was counted; `str` says it."""
        return self._choices()

    def plan(self, batch: Sequence[Bags]) -> Plan:
        """Tells the holders which rows this rank needs for a batch; all ranks call it.

        Args:
            batch: the bags of each feature; their number may differ between ranks.

        Returns:
            What `fetch` needs.

        Raises:
            ValueError: an id is outside of its table, or offsets do not fit the ids.
            CorruptionError: a message of another rank is damaged.
        """
        with self._swaps.operation("plan of embeddings"), torch.no_grad():
            return self._plan(batch)

    def _plan(self, batch: Sequence[Bags]) -> Plan:
        with self.traffic.timed("route"):
            question = self.ask(batch)
        received = self._swap(question.messages)
        with self.traffic.timed("route"):
            return self.answer(question, received)

    def ask(self, batch: Sequence[Bags]) -> Question:
        """The first half of `plan`, for callers who carry messages themselves.

        Args:
            batch: the bags of each feature.

        Returns:
            The messages for all ranks, and what `answer` needs.

        Raises:
            ValueError: an id is outside of its table, or offsets do not fit the ids.
        """
        cpu = [bags.cpu() for bags in batch]
        route_ = route(self.layout, cpu, self._element_nbytes(), self.sending)
        messages = [self._pack(route_, rank) for rank in range(self._world)]
        self._choices = route_.choices
        self.traffic.ids_nbytes += sum(len(message) for message in messages)
        return Question(route_, cpu, messages)

    def answer(self, question: Question, received: Sequence[_Bytes]) -> Plan:
        """The second half of `plan`.

        Args:
            question: of `ask`.
            received: for each rank, its message to this one; that of this rank itself is ignored.

        Returns:
            What `fetch` needs.

        Raises:
            CorruptionError: a message is damaged.
        """
        asked = [self._unpack(received[r], question.route, r) for r in range(self._world)]
        requests = [self._request(i, asked) for i in range(len(self.held))]
        return Plan(question.route, requests, question.batch)

    def fetch(self, plan: Plan, gather: _Gather) -> list[Tensor]:
        """The bags of the planned batch; all ranks call it.

        Args:
            plan: of `plan`; it can be used once or several times.
            gather: is given the requests for the shards that this rank holds and returns
                [n, width] rows for each, with a gradient if the tables learn.

        Returns:
            For each feature, [bags, dim] of float32, or of float64 if the tables are.

        Raises:
            ValueError: `gather` returned rows of another shape or dtype.
            CorruptionError: a message of another rank is damaged.
        """
        with self._swaps.operation("fetch of embeddings"):
            with self.traffic.timed("gather"):
                rows = gather(plan.requests)
            for request, part in zip(plan.requests, rows, strict=True):
                self._check_gathered(request, part)
            # A rank without tables has no rows with a gradient, but joins the backward pass.
            anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
            got = _Fetch.apply(self, plan, anchor, *rows)  # type: ignore[no-untyped-call]
            with self.traffic.timed("pool"):
                return self.pool(plan, got)

    def _pack(self, route_: Route, rank: int) -> _Bytes:
        """The request to a rank; none to this one."""
        if rank == self._rank:
            return np.empty(0, np.uint8)
        shards = self.layout.held[rank]
        return pack_request([route_.wanted[i] for i in shards], self._rows_of(shards))

    def _unpack(self, message: _Bytes, route_: Route, rank: int) -> list[Wanted]:
        if rank == self._rank:
            return [route_.wanted[i] for i in self.held]
        return unpack_request(message, self._rows_of(self.held))

    def _rows_of(self, shards: Sequence[int]) -> list[int]:
        return [self.layout.shards[i].shape[0] for i in shards]

    def _request(self, index: int, asked: Sequence[Sequence[Wanted]]) -> Request:
        """Joins what the ranks want of one shard."""
        parts = [of_rank[index] for of_rank in asked]
        ids = torch.from_numpy(np.concatenate([part.ids for part in parts]))
        offsets = None
        if any(part.lengths is not None for part in parts):
            lengths = [
                np.ones(part.n, np.int64) if part.lengths is None else part.lengths
                for part in parts
            ]
            offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(lengths))]))
        return Request(self.held[index], ids, offsets, tuple(part.n for part in parts))

    def _check_gathered(self, request: Request, rows: Tensor) -> None:
        expected = [request.n, self.layout.shards[request.shard].shape[1]]
        if list(rows.shape) != expected or rows.dtype != self.dtype:
            table = self.layout.tables[self.layout.table_of[request.shard]].name
            raise ValueError(
                f"table {table}: {list(rows.shape)} {rows.dtype} were gathered, "
                f"not {expected} {self.dtype}"
            )

    def _element_nbytes(self) -> list[float]:
        """Of each table, both ways."""
        first: dict[int, int] = {}
        for shard, table in enumerate(self.layout.table_of):
            first.setdefault(table, shard)
        codecs = [self.forward_codec, self.backward_codec]
        return [
            sum(codec.element_nbytes(first[t], self.dtype.itemsize) for codec in codecs)
            for t in range(len(self.layout.tables))
        ]

    def pool(self, plan: Plan, got: Sequence[Tensor]) -> list[Tensor]:
        """The bags of each feature, from their rows; the end of `fetch`.

        Args:
            plan: of `plan` or `answer`.
            got: for each width, [n, width] rows, as `decode_rows` returns them.

        Returns:
            For each feature, [bags, dim] of float32, or of float64 if the tables are.
        """
        parts: list[list[tuple[int, Tensor]]] = [[] for _ in self.layout.features]
        for blocks, slots, rows in zip(self.layout.blocks, plan.route.slots, got, strict=True):
            served = [(b, f) for b in blocks for f in self.layout.features_of(b)]
            sizes = [plan.route.n_bags[feature] for _, feature in served]
            pooled = pool(rows, slots.grouping, slots.bags, slots.offsets, slots.weights, sizes)
            for (block, feature), bags in zip(served, pooled, strict=True):
                parts[feature].append((block.columns[0], bags))
        return [self._output(plan, feature, found) for feature, found in enumerate(parts)]

    def _output(self, plan: Plan, feature: int, parts: list[tuple[int, Tensor]]) -> Tensor:
        columns = [bags for _, bags in sorted(parts, key=lambda part: part[0])]
        whole = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
        if not self.layout.tables[self.layout.features[feature]].mean:
            return whole
        lengths = plan.batch[feature].starts.diff().clamp(min=1).to(whole.dtype)
        return whole / lengths[:, None]

    def _send_rows(self, plan: Plan, rows: Sequence[Tensor]) -> list[Tensor]:
        """Sends what was asked for; returns what this rank asked for, by width."""
        with self.traffic.timed("encode"):
            messages = self.encode_rows(plan, rows)
        received = self._swap(messages)
        with self.traffic.timed("decode"):
            return self.decode_rows(plan, rows, received)

    def encode_rows(self, plan: Plan, rows: Sequence[Tensor]) -> list[_Bytes]:
        """The messages with gathered rows, to all ranks.

        Args:
            plan: of `plan` or `answer`.
            rows: for each request of the plan, [n, width] gathered rows, on the CPU.

        Returns:
            For each rank, [nbytes] uint8; empty for this rank itself.
        """
        pieces = [self._rows_for(plan, rows, rank) for rank in range(self._world)]
        messages = self.forward_codec.encode(pieces)
        self.traffic.rows_nbytes += sum(len(message) for message in messages)
        return messages

    def decode_rows(
        self, plan: Plan, rows: Sequence[Tensor], received: Sequence[_Bytes]
    ) -> list[Tensor]:
        """The rows that this rank asked for, from the messages of all ranks.

        Args:
            plan: of `plan` or `answer`.
            rows: for each request of the plan, [n, width] gathered rows, on the CPU.
            received: for each rank, its message to this one; that of this rank itself is ignored.

        Returns:
            For each width, ascending, [n, width] rows in the dtype of the tables.

        Raises:
            CorruptionError: a message is damaged, or has other rows.
        """
        got = self._empty_slots(plan)
        for rank, message in enumerate(received):
            targets = self._slots_of(plan, got, self.layout.held[rank])
            if rank != self._rank:
                self.forward_codec.decode(message, targets)
                continue
            for target, part in zip(targets, self._parts(plan, rows, rank), strict=True):
                target.copy_(part)
        return got

    def _send_gradients(self, plan: Plan, grads: Sequence[Tensor]) -> list[Tensor]:
        """Sends the gradients of rows to their holders; returns those of this rank's shards."""
        with self.traffic.timed("encode"):
            messages = self.encode_gradients(plan, grads)
        received = self._swap(messages)
        with self.traffic.timed("decode"):
            return self.decode_gradients(plan, grads, received)

    def encode_gradients(self, plan: Plan, grads: Sequence[Tensor]) -> list[_Bytes]:
        """The messages with gradients of the rows that this rank got, to all ranks.

        Args:
            plan: of `plan` or `answer`.
            grads: for each width, [n, width] gradients of the rows that `decode_rows` returned.

        Returns:
            For each rank, [nbytes] uint8; empty for this rank itself.
        """
        pieces = [self._gradients_for(plan, grads, rank) for rank in range(self._world)]
        messages = self.backward_codec.encode(pieces)
        self.traffic.gradients_nbytes += sum(len(message) for message in messages)
        return messages

    def decode_gradients(
        self, plan: Plan, grads: Sequence[Tensor], received: Sequence[_Bytes]
    ) -> list[Tensor]:
        """The gradients of the rows that `gather` returned, from the messages of all ranks.

        Args:
            plan: of `plan` or `answer`.
            grads: for each width, [n, width] gradients of the rows that `decode_rows` returned.
            received: for each rank, its message to this one; that of this rank itself is ignored.

        Returns:
            For each request of the plan, [n, width] gradients in the dtype of the tables, divided
            by `divide`.

        Raises:
            CorruptionError: a message is damaged, or has other gradients.
        """
        sums = [
            torch.empty(request.n, self.layout.shards[request.shard].shape[1], dtype=self.dtype)
            for request in plan.requests
        ]
        for rank, message in enumerate(received):
            targets = self._parts(plan, sums, rank)
            if rank != self._rank:
                self.backward_codec.decode(message, targets)
                continue
            own = self._slots_of(plan, grads, self.held)
            for target, part in zip(targets, own, strict=True):
                target.copy_(part)
        if self.divide != 1:
            sums = [part.div_(self.divide) for part in sums]
        return sums

    def _rows_for(self, plan: Plan, rows: Sequence[Tensor], rank: int) -> list[Piece]:
        if rank == self._rank:
            return []
        parts = self._parts(plan, rows, rank)
        return [
            Piece(request.shard, part, plan.ids(request, rank))
            for request, part in zip(plan.requests, parts, strict=True)
        ]

    def _gradients_for(self, plan: Plan, grads: Sequence[Tensor], rank: int) -> list[Piece]:
        if rank == self._rank:
            return []
        shards = self.layout.held[rank]
        pieces = []
        for shard, part in zip(shards, self._slots_of(plan, grads, shards), strict=True):
            wanted = plan.route.wanted[shard]
            pieces.append(Piece(shard, part, wanted.ids if wanted.lengths is None else None))
        return pieces

    def _parts(self, plan: Plan, rows: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Views of the rows that a rank gets, of each shard that this rank holds."""
        parts = []
        for request, all_rows in zip(plan.requests, rows, strict=True):
            start = sum(request.counts[:rank])
            parts.append(all_rows[start : start + request.counts[rank]])
        return parts

    def _empty_slots(self, plan: Plan) -> list[Tensor]:
        return [
            torch.empty(slots.n, width, dtype=self.dtype)
            for slots, width in zip(plan.route.slots, self.layout.widths, strict=True)
        ]

    def _slots_of(self, plan: Plan, slots: Sequence[Tensor], shards: Sequence[int]) -> list[Tensor]:
        """Views of the slots of some shards."""
        views = []
        for shard in shards:
            kind = self.layout.widths.index(self.layout.shards[shard].shape[1])
            start, stop = plan.route.slots[kind].of_shard[shard]
            views.append(slots[kind][start:stop])
        return views

    def _swap(self, messages: Sequence[_Bytes]) -> list[_Bytes]:
        with self.traffic.timed("wire"):
            return self._swaps.exchange(messages)


class Question(NamedTuple):
    """What a rank asks for a batch.

    Attributes:
        route: what it needs, and how that becomes bags.
        batch: the bags of each feature, on the CPU.
        messages: for each rank, [nbytes] uint8; empty for this rank itself.
    """

    route: Route
    batch: list[Bags]
    messages: list[_Bytes]


@dataclass(frozen=True)
class Plan:
    """The rows that a batch needs: what this rank asked for, and what it was asked for.

    Attributes:
        route: what this rank asked for, and how it becomes bags.
        requests: what all ranks want of each shard that this rank holds.
        batch: the bags of each feature, on the CPU.
    """

    route: Route
    requests: list[Request]
    batch: list[Bags]

    def ids(self, request: Request, rank: int) -> npt.NDArray[np.int64] | None:
        """The ids of the rows that a rank gets of a shard.

        Args:
            request: one of `requests`.
            rank: who gets the rows.

        Returns:
            [n] int64, counted from the first row of the shard; None if a rank asked for sums.
        """
        if request.offsets is not None:
            return None
        start = sum(request.counts[:rank])
        return request.ids[start : start + request.counts[rank]].numpy()


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: EmbeddingExchange, plan: Plan, anchor: Tensor, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.plan = exchange, plan
        ctx.devices = [part.device for part in rows]
        return tuple(exchange._send_rows(plan, [part.detach().cpu() for part in rows]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.exchange._swaps.operation("gradients of embeddings"):
            sums = ctx.exchange._send_gradients(ctx.plan, grads)
        placed = [part.to(device) for part, device in zip(sums, ctx.devices, strict=True)]
        return None, None, None, *placed


class _Swaps(ByteExchange):
    """A byte exchange between ranks that have the same tables."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout: timedelta | float | None,
        options: Mapping[str, str],
    ) -> None:
        super().__init__(group, timeout=timeout)
        self._peers = Peers(group, as_timeout(timeout), {"object": "EmbeddingExchange", **options})
        self._rounds = Rounds(self._peers)

    def operation(self, what: str) -> AbstractContextManager[None]:
        """An error in the block reaches the other ranks, instead of making them wait."""
        return self._peers.operation(what)


def _digest(*described: object) -> str:
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]
