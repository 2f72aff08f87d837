"""The packed ways to run each collective on tensors of a GPU: encoded, sent and decoded there.

Frames are encoded on the host only, so elements travel here in a code of their own, of four bits
for each exponent (`kernels/exponents.py`): 16 bits become 12, and 32 become 28. An operation waits
for the GPU twice: to learn how long its messages are, and to read what the other ranks state.

The functions here trust their arguments, as those of `ways` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from types import ModuleType
from typing import NamedTuple

from packhorse.errors import CorruptionError
from packhorse.torch_dtypes import short_name
from packhorse.wire import torch_ways
from packhorse.wire.backend import torch
from packhorse.wire.carrier import Effort
from packhorse.wire.peers import Peers
from packhorse.wire.selector import Arm
from packhorse.wire.statement import (
    ROOT_WORDS,
    Statement,
    check_sizes,
    described,
    exchange_statements,
)
from packhorse.wire.sums import OPERATIONS, REDUCTION_WORDS, reduce_into

__all__ = ["DeviceWays", "is_on_device", "why_not"]


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor travels by the ways of this module, and not by those of the host."""
    return tensor.device.type != "cpu"


def why_not(tensor: torch.Tensor) -> str | None:
    """Why a tensor on a device cannot be packed there; None if it can be."""
    try:
        from packhorse.kernels import exponents
        from packhorse.kernels.launch import runs_on
    except ImportError:
        return "packing on a device needs Triton; install it with: pip install triton"
    if not runs_on(tensor.device):
        return f"packing on a device needs an NVIDIA GPU, and the tensors are on {tensor.device}"
    if not exponents.can_pack(tensor.dtype):
        name = short_name(tensor.dtype)
        return f"on a device BF16 and F32 are packed, and the tensors are {name}"
    return None


class _Message(NamedTuple):
    """What travels instead of some elements.

    Attributes:
        data: uint8; in whole units of 16 bytes if it is packed.
        n_escapes: of a packed message; -1 for the bytes of the elements themselves.
    """

    data: torch.Tensor
    n_escapes: int


class DeviceWays:
    """Runs collectives packed on a device.

    Args:
        peers: the other ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_nbytes: Sequence[int],
        input_nbytes: Sequence[int],
    ) -> Effort:
        """`all_to_all_single`; the lengths of the parts are in bytes."""
        rank = self._peers.rank
        sent, received = _cut(input, input_nbytes), _cut(output, output_nbytes)
        received[rank].copy_(sent[rank])
        return self._deliver("a2a", sent, received)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Effort:
        """`all_gather_into_tensor`."""
        mine = input.view(-1)
        parts = _cut(output, [input.nbytes] * self._peers.size)
        parts[self._peers.rank].copy_(mine)
        return self._gather("ag", mine, parts)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Effort:
        """`broadcast`; the root is a rank of the group."""
        flat, is_root = tensor.view(-1), self._peers.rank == root
        messages = _pack([flat] if is_root else [])
        mine = messages[0] if is_root else None
        stated = self._state(
            "bc", flat, [mine] * self._peers.size, [flat.nbytes] * self._peers.size,
            flat.nbytes, argument=root, words=ROOT_WORDS,
        )  # fmt: skip
        nbytes, n_escapes = self._announced(stated, root, flat)
        data = flat.new_empty(nbytes, dtype=torch.uint8) if mine is None else mine.data
        self._run(torch_ways.broadcast, data, root)
        if not is_root:
            _unpack(_Message(data, n_escapes), flat)
        return _effort([flat] if is_root else [], messages, [] if is_root else [flat])

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, name: str) -> Effort:
        """`reduce_scatter_tensor`."""
        parts = _cut(input, [output.nbytes] * self._peers.size)
        return self._reduce("rs", parts, output.view(-1), name)

    def all_reduce(self, tensor: torch.Tensor, name: str) -> Effort:
        """`all_reduce`: each rank reduces a part, and sends it to all others."""
        size, n = self._peers.size, tensor.numel()
        ends = [n * i // size for i in range(size + 1)]
        flat = tensor.view(-1)
        parts = [flat[start:end] for start, end in pairwise(ends)]
        mine = parts[self._peers.rank]
        effort = self._reduce("ar", parts, mine, name)
        return effort.plus(self._gather("ar2", mine, parts))

    def _reduce(
        self, what: str, parts: list[torch.Tensor], result: torch.Tensor, name: str
    ) -> Effort:
        """Sends a part to each rank, and reduces those that come with this rank's own. The result
        may be this rank's part."""
        rank = self._peers.rank
        received = [torch.empty_like(result) for _ in parts]
        received[rank].copy_(parts[rank])
        effort = self._deliver(
            what, parts, received, argument=OPERATIONS.index(name), words=REDUCTION_WORDS,
            common=sum(part.nbytes for part in parts),
        )  # fmt: skip
        reduce_into(result, received, name)
        return effort

    def _deliver(
        self,
        what: str,
        sent: list[torch.Tensor],
        received: list[torch.Tensor],
        *,
        argument: int = 0,
        words: Sequence[str] = (),
        common: int = 0,
    ) -> Effort:
        """Sends a part to each other rank, and fills those that come."""
        rank, size = self._peers.rank, self._peers.size
        sent = [part[:0] if i == rank else part for i, part in enumerate(sent)]
        received = [part[:0] if i == rank else part for i, part in enumerate(received)]
        messages = _pack(sent)
        stated = self._state(
            what, received[0], messages, [part.nbytes for part in sent], common, argument=argument,
            words=words,
        )  # fmt: skip
        check_sizes(self._peers, stated, [part.nbytes for part in received])
        announced = [self._announced(stated, i, received[i]) for i in range(size)]
        lengths = [nbytes for nbytes, _ in announced]
        output = received[0].new_empty(sum(lengths), dtype=torch.uint8)
        input = torch.cat([message.data for message in messages])
        self._run(
            torch_ways.all_to_all, output, input, lengths,
            [message.data.numel() for message in messages],
        )  # fmt: skip
        for part, data, (_, n_escapes) in zip(
            received, _cut(output, lengths), announced, strict=True
        ):
            _unpack(_Message(data, n_escapes), part)
        return _effort(sent, messages, received)

    def _gather(self, what: str, mine: torch.Tensor, parts: list[torch.Tensor]) -> Effort:
        """Sends this rank's part to all others, and fills theirs."""
        rank, size = self._peers.rank, self._peers.size
        messages = _pack([mine])
        stated = self._state(
            what, mine, messages * size, [mine.nbytes] * size, sum(part.nbytes for part in parts)
        )
        check_sizes(self._peers, stated, [part.nbytes for part in parts])
        announced = [self._announced(stated, i, parts[i]) for i in range(size)]
        # The backends gather parts of one length.
        length = max(nbytes for nbytes, _ in announced)
        input = mine.new_empty(length, dtype=torch.uint8)
        input[: messages[0].data.numel()] = messages[0].data
        output = mine.new_empty(size * length, dtype=torch.uint8)
        self._run(torch_ways.all_gather, output, input)
        others = [i for i in range(size) if i != rank]
        for i in others:
            nbytes, n_escapes = announced[i]
            _unpack(_Message(output[i * length :][:nbytes], n_escapes), parts[i])
        return _effort([mine], messages, [parts[i] for i in others])

    def _state(
        self,
        what: str,
        like: torch.Tensor,
        messages: Sequence[_Message | None],
        nbytes: Sequence[int],
        common: int,
        *,
        argument: int = 0,
        words: Sequence[str] = (),
    ) -> list[Statement]:
        """States the message for each rank to it, and reads what all state to this one."""
        text = described(what, like.dtype)
        mine = [
            Statement(
                self._peers.number & 0xFFFFFFFF, text, argument, Arm.PACKED, size, common,
                escapes=0 if message is None else message.n_escapes + 1,
            )
            for message, size in zip(messages, nbytes, strict=True)
        ]  # fmt: skip
        return exchange_statements(self._peers, mine, words, device=like.device)

    def _announced(
        self, stated: Sequence[Statement], rank: int, part: torch.Tensor
    ) -> tuple[int, int]:
        """The bytes of the message of a rank, and its escapes."""
        n_escapes = stated[rank].escapes - 1
        if n_escapes < 0 or not part.numel():
            return part.nbytes, -1
        nbytes = _exponents().message_nbytes(part.numel(), part.dtype, n_escapes)
        if nbytes is None:
            room = _exponents().sections_of(part.numel(), part.dtype).room
            raise CorruptionError(
                f"rank {rank} announces {n_escapes} escapes for {part.numel()} elements to rank "
                f"{self._peers.rank}; there is room for {room}"
            )
        return nbytes, n_escapes

    def _run(self, collective: object, tensor: torch.Tensor, *args: object) -> None:
        work = self._peers.begin(collective, tensor, *args)  # type: ignore[arg-type]
        self._peers.wait_on_device(work)


def _exponents() -> ModuleType:
    from packhorse.kernels import exponents

    return exponents


def _pack(parts: Sequence[torch.Tensor]) -> list[_Message]:
    """The messages of some parts, all of which are encoded before the host waits for the device."""
    kernels = _exponents()
    memory = [
        part.new_empty(kernels.sections_of(part.numel(), part.dtype).capacity, dtype=torch.uint8)
        for part in parts
    ]
    totals = [kernels.encode_exponents(*pair) for pair in zip(parts, memory, strict=True)]
    n_escapes: list[int] = torch.stack(totals).tolist() if totals else []
    return [_message(*found) for found in zip(parts, memory, n_escapes, strict=True)]


def _message(part: torch.Tensor, memory: torch.Tensor, n_escapes: int) -> _Message:
    nbytes = _exponents().message_nbytes(part.numel(), part.dtype, n_escapes)
    if nbytes is None or nbytes >= part.nbytes:
        return _Message(part.view(torch.uint8) if part.numel() else memory, -1)
    return _Message(memory[:nbytes], n_escapes)


def _unpack(message: _Message, part: torch.Tensor) -> None:
    if not part.numel():
        return
    if message.n_escapes < 0:
        part.view(torch.uint8).copy_(message.data)
        return
    data = message.data
    if data.data_ptr() % _exponents().ALIGNMENT:  # behind a message of plain bytes
        data = data.clone()
    _exponents().decode_exponents(data, message.n_escapes, part)


def _effort(
    sent: Sequence[torch.Tensor], messages: Sequence[_Message], received: Sequence[torch.Tensor]
) -> Effort:
    return Effort(
        nbytes=sum(part.nbytes for part in sent),
        encoded_nbytes=sum(message.data.numel() for message in messages),
        decoded_nbytes=sum(part.nbytes for part in received),
    )


def _cut(tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Consecutive parts of a contiguous tensor; the lengths are in bytes."""
    flat = tensor.view(-1)
    ends = [0, *accumulate(length // tensor.itemsize for length in lengths)]
    return [flat[start:end] for start, end in pairwise(ends)]
