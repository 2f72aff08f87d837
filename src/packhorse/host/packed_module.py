"""What `PackedEmbedding` and `PackedEmbeddingBag` share: a module whose rows are a packed table.

The table is no parameter: it has no gradient, and no optimizer changes it. A module looks up rows
in three steps. It fetches the rows that its ids need, as a small matrix; PyTorch's own function
reads that matrix with ids that are numbers of its rows; and what this gives is bit for bit what the
function gives for the whole matrix.

When a module is trained, the small matrix is a leaf of autograd. Its gradient is kept in the module
as `gradient`, a sparse tensor with the rows of the whole matrix, until a `RowOptimizer` uses it. An
empty parameter stands for the rows in the model, so that who freezes all parameters freezes them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import Parameter

from packhorse.errors import CorruptionError
from packhorse.gpu.host_memory import MemoryKind
from packhorse.host.hot_rows import HotRows
from packhorse.host.places import Places
from packhorse.host.row_weight import RowWeight, apart
from packhorse.host.shared_table import share_table
from packhorse.host.table import PackedTable, pack_table
from packhorse.host.table_state import drop_table, holds_table, join_table, split_table
from packhorse.torch_dtypes import TORCH_DTYPES, short_name

__all__ = ["PackedModule", "memory_for"]

_WEIGHT = "weight"
_STAND_IN = "_rows"  # the name of the empty parameter
_BLOCK_NBYTES = 16 << 20  # of plain rows that are decoded at once


def memory_for(device: torch.device | str | None) -> torch.device | str:
    """What `pack_table` is to be told about rows that come out on a device."""
    place = torch.device("cpu" if device is None else device)
    return place if place.type == "cuda" else "cpu"


class PackedModule(nn.Module):
    """An embedding whose rows lie packed in memory of the host.

    Attributes:
        table: the rows.
        plain_state: whether `state_dict` has the plain matrix; otherwise it has the arrays of the
            packed table.
        hot: the rows that are on the device as well; None for none. It is used as long as it is of
            this table.
        gradient: the sparse gradient of the whole matrix, as PyTorch's embeddings have it in
            `weight.grad` with `sparse=True`; not coalesced. None if there was none. It may be set.
        unpacked_share_told: the share of rows, kept plain after changes, of which a warning told.
        name_in_model: for messages; empty if it is not known.
    """

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    plain_state: bool
    unpacked_share_told: float
    gradient: Tensor | None
    hot: HotRows | None
    name_in_model: str

    def hold(self, table: PackedTable, *, trains: bool, device: Any = None) -> None:
        """Takes a table. `device` is where rows come out."""
        self._shared = share_table(table)
        self.plain_state, self.name_in_model = False, ""
        self.unpacked_share_told = 0.0
        self.gradient = self.hot = None
        # It moves with the module, and says where rows come out.
        place = torch.empty(0, dtype=self.dtype, device=device)
        self.register_buffer("_place", place, persistent=False)
        if trains and self.dtype.is_floating_point:
            self.requires_grad_()

    def release(self) -> None:
        """Undoes `hold`."""
        for name in (
            "_shared",
            "plain_state",
            "unpacked_share_told",
            "gradient",
            "hot",
            "name_in_model",
            "_place",
        ):
            delattr(self, name)
        self._parameters.pop(_STAND_IN, None)

    @property
    def table(self) -> PackedTable:
        """The rows."""
        return self._shared.table

    @property
    def trains(self) -> bool:
        """Whether gradients are kept."""
        stand_in = self._parameters.get(_STAND_IN)
        return stand_in is not None and stand_in.requires_grad

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return TORCH_DTYPES[self.table.dtype]

    @property
    def device(self) -> torch.device:
        """Where rows come out."""
        place = self._place
        assert isinstance(place, Tensor)
        return place.device

    @property
    def weight(self) -> Tensor:
        """A tensor that has the shape, dtype and device of the matrix, and no elements: rows can be
        taken out of it, and every other operation is an error."""
        if torch.compiler.is_compiling():
            return apart(self._row_weight)()  # type: ignore[no-any-return]
        return self._row_weight()

    def _row_weight(self) -> RowWeight:
        return RowWeight(self)

    def fetch_untrained(self, ids: Tensor) -> Tensor:
        """Rows for a look-up that does not go through the module, so that no gradient can be kept.

        Raises:
            RuntimeError: it would be trained.
        """
        if self.collects:
            raise RuntimeError(
                "a look-up in the weight of a packed embedding has no gradient, and this one is"
                " trained: call the module instead, or freeze it with requires_grad_(False)"
            )
        return self.fetch(ids)

    @property
    def collects(self) -> bool:
        """Whether a look-up now would be trained."""
        return self.trains and torch.is_grad_enabled()

    def fetch(self, ids: Tensor) -> Tensor:
        """Rows by number, on the device where rows come out: the shape of `ids` and the columns.

        Raises:
            IndexError, TypeError: as `PackedTable.gather`.
        """
        device = self.place_for(ids)
        if device.type == "meta":
            return torch.empty((*ids.shape, self.embedding_dim), dtype=self.dtype, device=device)
        if self.hot is not None and self.hot.table is self.table:
            return self.hot.gather(ids).to(device)
        threads = torch.get_num_threads()
        if self.table.memory.kind is MemoryKind.PAGEABLE:
            rows: Tensor = self.table.gather(ids, threads=threads)
            return rows.to(device)
        # The device itself may gather. Ids in host memory are checked there, before they travel.
        out = torch.empty((*ids.shape, self.embedding_dim), dtype=self.dtype, device=device)
        near = ids if ids.device.type == "cpu" else ids.to(device)
        found: Tensor = self.table.gather(near, out, threads=threads)
        return found

    @property
    def _readers(self) -> torch.device | str | None:
        """What `pack_table` is to be told, so that GPUs can read new rows as they read the old."""
        is_read = self.table.memory.kind is not MemoryKind.PAGEABLE
        return None if is_read and self.device.type != "cuda" else memory_for(self.device)

    def place_for(self, ids: Tensor) -> torch.device:
        """Where rows for these ids come out: on the module's device, or on that of the ids if the
        module was never moved to one."""
        return ids.device if self.device.type == "cpu" else self.device

    def leaf(self, places: Places) -> Tensor:
        """The small matrix; if the module is trained, a leaf whose gradient the module gets."""
        rows = self.fetch(places.numbers)
        if self.collects:
            rows.requires_grad_()

            def receive(leaf: Tensor) -> None:
                self._receive(places, leaf)

            rows.register_post_accumulate_grad_hook(receive)  # type: ignore[no-untyped-call]
        return rows

    def _receive(self, places: Places, leaf: Tensor) -> None:
        """Adds the gradient of a small matrix, as PyTorch adds gradients of a parameter."""
        found, leaf.grad = leaf.grad, None
        assert found is not None
        numbers, values = places.numbers, found
        if found.is_sparse:
            numbers, values = numbers.to(found.device)[found._indices()[0]], found._values()
        shape = self.table.shape
        new = torch.sparse_coo_tensor(
            numbers[None], values, shape, device=values.device, check_invariants=False
        )
        if self.gradient is None:
            self.gradient = new
        else:
            self.gradient += new

    def update_(self, ids: Tensor, rows: Tensor) -> None:
        """Replaces rows, as `PackedTable.update_`."""
        self.table.update_(ids, rows)

    def repack_(self) -> None:
        """Packs the table anew, in the way that is best for its rows now: those that were changed
        and did not fit are packed again. The table and its copy are in memory meanwhile. Modules
        that share the rows have them, too."""
        self.table.become_(self._pack(_Rows(self.table)))
        self.unpacked_share_told = 0.0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As PyTorch does; forgets `gradient`, too."""
        super().zero_grad(set_to_none)
        self.gradient = None

    def _pack(self, source: Any) -> PackedTable:
        return pack_table(source, device=self._readers, will_change=self.trains)

    def unpacked(self) -> Tensor:
        """The whole plain matrix, in memory of the host."""
        whole = torch.empty(self.table.shape, dtype=self.dtype, device="cpu")
        for start, block in _blocks(self.table):
            whole[start : start + len(block)] = block
        return whole

    def requires_grad_(self, requires_grad: bool = True) -> PackedModule:
        """Says whether gradients are kept.

        Raises:
            RuntimeError: they are to be kept, and the rows have no floats.
        """
        if requires_grad and _STAND_IN not in self._parameters:
            place = torch.empty(0, dtype=self.dtype, device=self.device)
            self.register_parameter(_STAND_IN, Parameter(place, requires_grad=False))
        super().requires_grad_(requires_grad)
        return self

    def reset_parameters(self) -> None:
        """As PyTorch does: rows from a normal distribution, the padding row zero."""
        self.table.become_(self._pack(_new_rows(self)))
        self.unpacked_share_told = 0.0

    def _apply(self, fn: Any, recurse: bool = True) -> PackedModule:
        probe = fn(torch.empty(0, dtype=self.dtype, device="cpu"))
        if probe.dtype != self.dtype:
            raise TypeError(
                f"{type(self).__name__} holds packed rows of {short_name(self.dtype)}, and a cast"
                f" to {short_name(probe.dtype)} would change them: make another with"
                " from_pretrained(module.unpacked().to(dtype)), or move the model with"
                " .to(device) alone"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.gradient is not None:
            self.gradient = fn(self.gradient)
        return self

    def _replicate_for_data_parallel(self) -> PackedModule:
        if self.trains:
            raise RuntimeError(
                "a packed embedding cannot be trained in nn.DataParallel, whose replicas would"
                " lose its gradients: freeze it with requires_grad_(False), or use one GPU"
            )
        replica: PackedModule = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        return replica

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        name = f"{prefix}{_WEIGHT}"
        if self.plain_state:
            destination.pop(f"{prefix}{_STAND_IN}", None)
            destination[name] = self.unpacked()
            return
        _refuse_save_pretrained()
        for key, array in split_table(self.table, name).items():
            destination[key] = torch.from_numpy(array)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        name = f"{prefix}{_WEIGHT}"
        if holds_table(state_dict, name):
            arrays = {
                key: _as_array(key, value)
                for key, value in state_dict.items()
                if key.startswith(f"{name}.")
            }
            joined = join_table(arrays, name, device=self._readers)
            self._take(joined, name, error_msgs)
            drop_table(state_dict, name)
        elif name in state_dict:
            plain = state_dict.pop(name).detach()
            if tuple(plain.shape) == self.table.shape:
                plain = self._pack(plain.to(self.dtype))
            self._take(plain, name, error_msgs)
        elif strict:
            missing_keys.append(name)
        state_dict.pop(f"{prefix}{_STAND_IN}", None)
        if _STAND_IN in self._parameters:
            state_dict[f"{prefix}{_STAND_IN}"] = self._parameters[_STAND_IN]
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _take(self, given: Any, name: str, error_msgs: list[str]) -> None:
        if tuple(given.shape) != self.table.shape or (
            isinstance(given, PackedTable) and given.dtype != self.table.dtype
        ):
            error_msgs.append(
                f"size mismatch for {name}: {tuple(given.shape)} of {given.dtype} in the state,"
                f" {self.table.shape} of {self.table.dtype} in the module"
            )
            return
        self.table.become_(given)
        self.unpacked_share_told = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"hot": None}

    def __setattr__(self, name: str, value: Any) -> None:
        if name == _WEIGHT:
            raise AttributeError(
                "the weight of a packed embedding cannot be replaced: load_state_dict packs a plain"
                " matrix, and update_ replaces rows"
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{super().extra_repr()}, {self.table!r}"


def _refuse_save_pretrained() -> None:
    """Libraries save folders of plain weights. They ask for a state as everybody does, so only who
    asks tells them from `torch.save`.

    Raises:
        RuntimeError: one is asking.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "save_pretrained":
            raise RuntimeError(
                "save_pretrained would write the arrays of a packed embedding, which"
                " from_pretrained does not read: set plain_state = True on the modules that"
                " pack_embedding_ has packed, or call pack_model_(model, embeddings='host')"
            )
        frame = frame.f_back


def _as_array(key: str, value: Any) -> NDArray[Any]:
    try:
        array: NDArray[Any] = value.detach().cpu().numpy()
    except (AttributeError, TypeError) as error:  # BF16, or no tensor
        raise CorruptionError(f"packed table: {key} is no tensor of integers: {error}") from error
    return array


class _Rows:
    """A packed table as a source for packing."""

    def __init__(self, table: PackedTable) -> None:
        self._table, self.shape = table, table.shape

    def __getitem__(self, index: slice) -> Tensor:
        rows: Tensor = self._table.gather(
            torch.arange(*index.indices(len(self._table)), device="cpu")
        )
        return rows


def _blocks(table: PackedTable) -> Iterable[tuple[int, Tensor]]:
    step = max(1, _BLOCK_NBYTES // table.way.format.row_nbytes)
    rows = _Rows(table)
    for start in range(0, len(table), step):
        yield start, rows[start : start + step]


def _new_rows(module: PackedModule) -> Tensor:
    plain = torch.empty(module.table.shape, dtype=module.dtype, device="cpu")
    nn.init.normal_(plain)
    if module.padding_idx is not None:
        plain[module.padding_idx].zero_()
    return plain
