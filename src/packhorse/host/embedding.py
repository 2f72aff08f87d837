"""`PackedEmbedding` and `PackedEmbeddingBag`: PyTorch's modules with rows that stay packed in
memory of the host.

They compute what `torch.nn.Embedding` and `torch.nn.EmbeddingBag` compute, bit for bit. A module of
a subclass, such as one that scales what it looks up, gets a class that derives from both: its own
`forward` stays, and the look-up in it is ours.
"""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F

from packhorse.codecs.table_plan import TableWay
from packhorse.host.packed_module import PackedModule, memory_for
from packhorse.host.places import Places, require_integers
from packhorse.host.row_weight import apart
from packhorse.host.table import PackedTable, pack_table

__all__ = ["PackedEmbedding", "PackedEmbeddingBag", "pack_embedding_", "unpack_embedding_"]

# Bags read the small matrix again. Where it is far larger than the caches, to find the distinct ids
# takes less time than to fetch some rows twice.
_DISTINCT_NBYTES = 16 << 20
_DISTINCT_IDS_ON_GPU = 1024  # rows that cross a link are worth more than a sort


class PackedEmbedding(PackedModule, nn.Embedding):  # type: ignore[override]
    """`torch.nn.Embedding` with packed rows.

    Args:
        num_embeddings: rows.
        embedding_dim: columns.
        padding_idx: as PyTorch's.
        max_norm: must be None, because it changes rows when they are read.
        norm_type: of max_norm; unused.
        scale_grad_by_freq: must be False, as in PyTorch with sparse gradients.
        sparse: ignored: gradients are sparse always.
        _weight: rows to begin with: anything that `pack_table` takes, or a packed table, which is
            used as it is; None for random rows, those that PyTorch would make.
        _freeze: whether gradients are not kept.
        device: where rows come out: by default where given rows are, and random ones on PyTorch's
            default device. If it is a GPU, the packed rows lie in memory that it reads.
        dtype: of random rows.

    Raises:
        ValueError: an option cannot be had, or the rows have another shape.

    Example:
        >>> import torch
        >>> from packhorse.host import PackedEmbedding
        >>> weight = torch.randn(1000, 384).bfloat16()
        >>> embedding = PackedEmbedding.from_pretrained(weight)
        >>> ids = torch.tensor([[7, 7], [999, 0]])
        >>> torch.equal(embedding(ids), torch.nn.functional.embedding(ids, weight))
        True
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Any = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        plain = nn.Embedding(
            *(num_embeddings, embedding_dim, padding_idx, max_norm, norm_type),
            *(scale_grad_by_freq, sparse),
            **_how_to_make(_weight, dtype),
        )
        _take_options(self, plain)
        place = _place_of(_weight, device)
        self.hold(
            _table_for(plain, _weight, place, trains=not _freeze), trains=not _freeze, device=place
        )

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Any,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        device: Any = None,
    ) -> PackedEmbedding:
        """A module with given rows.

        Args:
            embeddings: anything that `pack_table` takes; or a packed table, which is used as it is.
            freeze: whether gradients are not kept.
            padding_idx: as for the class.
            max_norm: as for the class.
            norm_type: as for the class.
            scale_grad_by_freq: as for the class.
            sparse: as for the class.
            device: as for the class.

        Raises:
            TypeError: as `pack_table`.
            ValueError: as the class.
        """
        place = _place_of(embeddings, device)
        rows = _as_table(embeddings, place, trains=not freeze)
        return cls(
            *(*rows.shape, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse),
            _weight=rows,
            _freeze=freeze,
            device=place,
        )

    def forward(self, input: Tensor) -> Tensor:
        """As `torch.nn.Embedding`.

        Args:
            input: integers of any shape, on any device.

        Returns:
            Rows: the shape of `input` and the columns.

        Raises:
            IndexError: there is no such row.
            TypeError: `input` has no integers.
        """
        if torch.compiler.is_compiling():
            return apart(self._look_up)(input)  # type: ignore[no-any-return]
        return self._look_up(input)

    def _look_up(self, input: Tensor) -> Tensor:
        require_integers(input)
        is_far = self.place_for(input).type != "cpu" and input.numel() > _DISTINCT_IDS_ON_GPU
        if not self.collects and not is_far:
            return self.fetch(input)
        places = Places(input, self.padding_idx if self.collects else None, distinct=is_far)
        rows = self.leaf(places)
        return F.embedding(
            places.places.to(rows.device), rows, places.padding, sparse=self.collects
        )


class PackedEmbeddingBag(PackedModule, nn.EmbeddingBag):  # type: ignore[override]
    """`torch.nn.EmbeddingBag` with packed rows.

    Args:
        num_embeddings: rows.
        embedding_dim: columns.
        max_norm: as for `PackedEmbedding`.
        norm_type: as for `PackedEmbedding`.
        scale_grad_by_freq: as for `PackedEmbedding`.
        mode: "sum", "mean" or "max".
        sparse: as for `PackedEmbedding`.
        _weight: as for `PackedEmbedding`.
        include_last_offset: as PyTorch's.
        padding_idx: as PyTorch's.
        device: as for `PackedEmbedding`.
        dtype: as for `PackedEmbedding`.

    Raises:
        ValueError: as `PackedEmbedding`.

    Example:
        >>> import torch
        >>> from packhorse.host import PackedEmbeddingBag
        >>> bag = PackedEmbeddingBag(1000, 64, mode="sum")
        >>> bag(torch.tensor([1, 2, 4, 5]), torch.tensor([0, 3])).shape
        torch.Size([2, 64])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Any = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        plain = nn.EmbeddingBag(
            *(num_embeddings, embedding_dim, max_norm, norm_type, scale_grad_by_freq, mode),
            sparse=sparse,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
            **_how_to_make(_weight, dtype),
        )
        _take_options(self, plain)
        place = _place_of(_weight, device)
        self.hold(_table_for(plain, _weight, place, trains=True), trains=True, device=place)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Any,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        device: Any = None,
    ) -> PackedEmbeddingBag:
        """A module with given rows; arguments as for `PackedEmbedding.from_pretrained` and for the
        class."""
        place = _place_of(embeddings, device)
        rows = _as_table(embeddings, place, trains=not freeze)
        module = cls(
            *(*rows.shape, max_norm, norm_type, scale_grad_by_freq, mode, sparse, rows),
            *(include_last_offset, padding_idx, place),
        )
        module.requires_grad_(not freeze)
        return module

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """As `torch.nn.EmbeddingBag`.

        Args:
            input: integers: (n_bags, n), or (n,) with offsets; on any device.
            offsets: integers, (n_bags,): where each bag begins; with `include_last_offset` the end
                of the last one, too.
            per_sample_weights: of the shape of `input`, for mode "sum".

        Returns:
            (n_bags, columns).

        Raises:
            IndexError: there is no such row.
            TypeError: `input` or `offsets` has no integers.
            RuntimeError, ValueError: as PyTorch.
        """
        if torch.compiler.is_compiling():
            look_up = apart(self._look_up)
            return look_up(input, offsets, per_sample_weights)  # type: ignore[no-any-return]
        return self._look_up(input, offsets, per_sample_weights)

    def _look_up(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> Tensor:
        require_integers(input)
        if offsets is not None:
            require_integers(offsets, "offsets")
        device = self.place_for(input)
        if per_sample_weights is None and self._adds_up(device):
            sums = self._sum(input, offsets)
            if sums is not None:
                return sums
        nbytes = input.numel() * self.table.way.format.row_nbytes
        distinct = nbytes > _DISTINCT_NBYTES
        if device.type != "cpu":
            distinct = input.numel() > _DISTINCT_IDS_ON_GPU
        places = Places(input, self.padding_idx, distinct=distinct)
        rows = self.leaf(places)
        return F.embedding_bag(
            places.places.to(device),
            rows,
            None if offsets is None else offsets.to(device, torch.int64),
            mode=self.mode,
            sparse=self.collects and self.mode != "max",
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=places.padding,
        )

    def _adds_up(self, device: torch.device) -> bool:
        """Whether the core can add up rows as it unpacks them, with PyTorch's results."""
        return (
            device.type == "cpu"
            and not self.collects
            and self.mode in ("sum", "mean")
            and self.padding_idx is None
            and self.table.sums_bags
            and (self.dtype == torch.float32 or _rounds_half_up())
        )

    def _sum(self, input: Tensor, offsets: Tensor | None) -> Tensor | None:
        """Bags of ids on the CPU; None if the arguments are not as they should be, so that PyTorch
        says what is wrong."""
        if input.dim() == 2 and offsets is None and input.numel():
            n_bags, n = input.shape
            starts = torch.arange(n_bags + 1) * n
        elif input.dim() == 1 and offsets is not None and offsets.dim() == 1 and len(offsets):
            starts = offsets.cpu().long()
            if not self.include_last_offset:
                starts = F.pad(starts, (0, 1), value=len(input))
        else:
            return None
        ids = input.reshape(-1).long().contiguous().numpy()
        try:
            sums = torch.from_numpy(self.table.sum_bags(ids, starts.numpy())).view(self.dtype)
        except ValueError:  # of the starts
            return None
        if self.mode == "mean":
            sums /= starts.diff().clamp_(min=1).to(self.dtype)[:, None]
        return sums


@cache
def _rounds_half_up() -> bool:
    """Whether PyTorch rounds sums of BF16 as FBGEMM does, of which not every build has it."""
    rows = torch.tensor([[1.0], [2.0**-8]], dtype=torch.bfloat16)
    found = F.embedding_bag(torch.tensor([[0, 1]]), rows, mode="sum")
    return bool(found[0, 0] == 1 + 2.0**-7)


def pack_embedding_(
    module: nn.Embedding | nn.EmbeddingBag,
    *others: nn.Embedding | nn.EmbeddingBag,
    way: TableWay | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Packs the rows of an embedding in place. The module stays the same object; its class becomes
    `PackedEmbedding` or `PackedEmbeddingBag`, or for a module of a subclass one that derives from
    both.

    Rows of a module that is in training mode, and whose weight has gradients, are packed so that
    they can change: see `will_change` of `pack_table`.

    Args:
        module: the embedding.
        others: embeddings that share its weight; they will share the packed rows. Modules that are
            not named keep the plain weight.
        way: as for `pack_table`.
        device: where rows come out; None for the device of the weight.

    Raises:
        TypeError: a module is no embedding, or is packed already.
        ValueError: it has an option that cannot be had, or has another weight than the first.
    """
    modules = (module, *others)
    for each in modules:
        _require_plain(each)
        if each.weight is not module.weight:
            raise ValueError("the modules do not share one weight; pack them one by one")
    weight = module.weight
    place = weight.device if device is None else torch.device(device)
    readable = None if device is None and place.type == "cpu" else memory_for(place)
    will_change = module.training and weight.requires_grad
    table = pack_table(weight.detach(), way=way, device=readable, will_change=will_change)
    for each in modules:
        del each._parameters["weight"]
        kind = type(each)
        base = next(ours for ours, plain in _PLAIN.items() if isinstance(each, plain))
        _change_class(each, base if kind in _PLAIN.values() else _joined(kind, base))
        assert isinstance(each, PackedModule)
        each.hold(table, trains=weight.requires_grad, device=place)


def _require_plain(module: nn.Module) -> None:
    if isinstance(module, PackedModule) or not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        what = type(module).__name__
        raise TypeError(f"{what} is not a torch.nn.Embedding or EmbeddingBag with a plain weight")
    _check_options(module)


def unpack_embedding_(module: nn.Module, weight: Parameter | None = None) -> None:
    """Undoes `pack_embedding_`, bit for bit; the weight lies where rows came out.

    Args:
        module: a module that has packed rows.
        weight: the plain weight, if it is there already; None to unpack it.

    Raises:
        TypeError: the module has no packed rows, or is of a class that has them always.
    """
    if not isinstance(module, PackedModule):
        raise TypeError(f"{type(module).__name__} has no packed rows")
    kind = type(module)
    if kind not in _PLAIN and kind.__bases__[0] in _PLAIN:
        raise TypeError(
            f"{kind.__name__} derives from {kind.__bases__[0].__name__}, so its rows stay packed:"
            " unpacked() gives the plain matrix"
        )
    if weight is None:
        weight = Parameter(module.unpacked().to(module.device), requires_grad=module.trains)
    module.release()
    _change_class(module, _PLAIN[kind] if kind in _PLAIN else kind.__bases__[0])
    module.register_parameter("weight", weight)


_PLAIN: dict[type, type] = {
    PackedEmbedding: nn.Embedding,
    PackedEmbeddingBag: nn.EmbeddingBag,
}


def _change_class(module: nn.Module, new: type) -> None:
    """Hooks of accelerate keep the method of the old class in the module; it is replaced, too."""
    before = type(module).forward
    module.__class__ = new
    for name in ("forward", "_old_forward"):
        if getattr(vars(module).get(name), "__func__", None) is before:
            setattr(module, name, MethodType(type(module).forward, module))


def _joined(plain: type, base: type) -> type:
    """A class that looks up rows as ours, and does everything else as another."""
    members = {"__module__": __name__, "__reduce_ex__": _reduce_joined}
    return type(f"Packed{plain.__name__}", (plain, base), members)


def _reduce_joined(module: PackedModule, protocol: Any) -> Any:
    """The pickle of a module whose class no module of Python has."""
    return _empty_joined, type(module).__bases__, module.__getstate__()


def _empty_joined(plain: type, base: type) -> Any:
    joined: Any = _joined(plain, base)
    return joined.__new__(joined)


def _how_to_make(weight: Any, dtype: torch.dtype | None) -> dict[str, Any]:
    """How PyTorch makes a module whose weight is used, or whose options alone are."""
    return {"device": "cpu" if weight is None else "meta", "dtype": dtype}


def _place_of(weight: Any, device: Any) -> torch.device:
    """Where rows come out, as with PyTorch's modules: random rows on its default device, given ones
    where they are."""
    if device is not None:
        return torch.device(device)
    if weight is None:
        return torch.get_default_device()
    return weight.device if isinstance(weight, Tensor) else torch.device("cpu")


def _take_options(module: nn.Module, plain: nn.Embedding | nn.EmbeddingBag) -> None:
    _check_options(plain)
    for name in type(plain).__constants__:
        setattr(module, name, getattr(plain, name))


def _check_options(module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.max_norm is not None:
        raise ValueError(
            "max_norm changes rows when they are read, and packed rows are only read: leave it out"
        )
    if module.scale_grad_by_freq:
        raise ValueError(
            "scale_grad_by_freq is not for sparse gradients, which packed rows have: leave it out"
        )


def _as_table(source: Any, device: Any, *, trains: bool) -> PackedTable:
    if isinstance(source, PackedTable):
        return source
    return pack_table(source, device=memory_for(device), will_change=trains)


def _table_for(
    plain: nn.Embedding | nn.EmbeddingBag, weight: Any, device: Any, *, trains: bool
) -> PackedTable:
    source = plain.weight.detach() if weight is None else weight
    table = _as_table(source, device, trains=trains)
    expected = (plain.num_embeddings, plain.embedding_dim)
    if table.shape != expected:
        raise ValueError(f"the rows have shape {table.shape}; it must be {expected}")
    return table
