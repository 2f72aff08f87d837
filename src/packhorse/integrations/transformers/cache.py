"""A cache of keys and values for `generate` that keeps them packed in memory of the host.

Stock offloading of transformers moves all keys and values of a layer down and up for each token.
Here only new tokens go down, and pages come up packed (packhorse.host.kv). A model gets the very
bits that it gave.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from packhorse.errors import CompatibilityError
from packhorse.host.kv import KVStore, StoreSize, WorkingMemory
from packhorse.host.kv_pages import PageRoom

__all__ = ["CacheReport", "PackedHostCache", "PackedHostLayer"]


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What a `PackedHostCache` takes.

    Attributes:
        n_packed_layers: layers whose pages are packed.
        plain_layers: the other layers by number, and why they are plain. Their bytes are not in the
            other numbers.
        size: bytes and pages of the packed layers.
        working_nbytes: where layers are unpacked to, for all of them together.
        room: pages that a layer has room for yet, at least; None if memory grows, or before the
            first full page.
    """

    n_packed_layers: int
    plain_layers: dict[int, str]
    size: StoreSize
    working_nbytes: int
    room: PageRoom | None = None

    @property
    def ratio(self) -> float:
        """How many times larger plain layers would be than what is stored of packed ones."""
        stored = self.size.host_nbytes + self.size.tail_nbytes
        return self.size.plain_nbytes / stored if stored else 1.0

    def __str__(self) -> str:
        size = self.size
        lines = [
            f"{self.n_packed_layers} packed layers: {size.host_nbytes + size.tail_nbytes} bytes for"
            f" {size.plain_nbytes} ({self.ratio:.2f} times smaller), {size.n_refused} of"
            f" {size.n_pages} pages plain, working memory {self.working_nbytes} bytes"
        ]
        if self.room is not None:
            lines.append(
                f"room for {self.room.n_slots} packed and {self.room.n_plain} plain pages more"
            )
        lines += [f"layer {i} is plain: {why}" for i, why in self.plain_layers.items()]
        return "\n".join(lines)


class PackedHostLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """The keys and values of one layer; `PackedHostCache` makes one for each.

    Args:
        memory: where it is unpacked to; the layers of a cache share one.
        page_tokens, room_tokens, threads: as for `PackedHostCache`.
    """

    def __init__(
        self,
        memory: WorkingMemory | None = None,
        *,
        page_tokens: int = 64,
        room_tokens: int | None = None,
        threads: int | None = None,
    ) -> None:
        self._memory = WorkingMemory() if memory is None else memory
        self._new_store = partial(
            KVStore, page_tokens=page_tokens, room_tokens=room_tokens, threads=threads
        )
        self.store = self._new_store()
        self._ahead: tuple[Tensor, Tensor, int] | None = None
        super().__init__()  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """For `copy.deepcopy`: the content of working memory is not copied."""
        return self.__dict__ | {"_ahead": None}

    def _read_keys(self) -> Tensor | None:
        return self.store.read(WorkingMemory())[0] if self.store.n_tokens else None

    def _read_values(self) -> Tensor | None:
        return self.store.read(WorkingMemory())[1] if self.store.n_tokens else None

    def _refuse_states(self, states: object) -> None:
        if states is not None:
            raise AttributeError("keys and values of a packed layer cannot be set; use update()")

    # The base class sets them to None.
    _DOC = "All of them, unpacked to new memory; None before the first token."
    keys = property(_read_keys, _refuse_states, doc=_DOC)
    values = property(_read_values, _refuse_states, doc=_DOC)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Notes the dtype and device of the first tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores new tokens.

        Returns:
            All keys and values: from the second call on views of working memory, which the next
            layers overwrite.

        Raises:
            MemoryError: `room_tokens` are used up. The layer is as it was.
            RuntimeError: gradients are wanted; they cannot flow through packed pages.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(
                "gradients cannot flow through a packed cache: call the model under"
                " torch.inference_mode() or torch.no_grad(), or use a DynamicCache"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        n = self.store.n_tokens
        if n == 0:
            self.store.append(key_states, value_states)
            return key_states.contiguous(), value_states.contiguous()
        n_new = key_states.shape[2]
        keys, values = self._take_ahead(n + n_new) or self.store.read(self._memory, n_new)
        self.store.append(key_states, value_states)
        keys[:, :, n:] = key_states
        values[:, :, n:] = value_states
        return keys, values

    def _take_ahead(self, n_tokens: int) -> tuple[Tensor, Tensor] | None:
        """What `prefetch` has unpacked, if it is there still and has room for so many tokens."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or not self._memory.holds(ahead[2]) or ahead[0].shape[2] < n_tokens:
            return None
        return ahead[0][:, :, :n_tokens], ahead[1][:, :, :n_tokens]

    def get_seq_length(self) -> int:
        """Tokens of each sequence."""
        return self.store.n_tokens

    def offload(self) -> None:
        """Forgets what was unpacked ahead; all tokens are in memory of the host already."""
        self._ahead = None

    def prefetch(self, n_new: int = 1) -> None:
        """Unpacks the layer before `update` asks for it.

        Args:
            n_new: tokens that `update` will probably bring.
        """
        if self._ahead is not None and self._memory.holds(self._ahead[2]):
            return  # it is there already: plain layers lie between
        if self.store.n_tokens:
            n_more = max(n_new, self.store.page_tokens)
            keys, values = self.store.read(self._memory, n_more)
            self._ahead = keys, values, self._memory.n_taken

    def reset(self) -> None:
        """Forgets all tokens; their memory is free."""
        self.store, self._ahead, self.is_initialized = self._new_store(), None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens.

        Args:
            tokens_to_remove: how many, as a negative number or 0; all, if there are not so many.

        Raises:
            ValueError: it is positive.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}; give the number of tokens to remove as a"
                " negative number"
            )
        self._ahead = None
        self.store.crop(min(-tokens_to_remove, self.store.n_tokens))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Gives each beam the tokens of another one; no page is copied."""
        self.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence; no page is copied."""
        if self.store.n_tokens:
            n_sequences = self.store.n_sequences
            self.select(torch.arange(n_sequences).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences with these numbers, or those of a mask."""
        if self.store.n_tokens:
            self.select(torch.arange(self.store.n_sequences)[torch.as_tensor(indices).cpu()])

    def select(self, sequences: Tensor, on_host: Tensor | None = None) -> None:
        """Keeps some sequences, as `KVStore.select`."""
        self._ahead = None
        self.store.select(sequences, on_host)


class PackedHostCache(Cache):
    """A cache whose keys and values stay packed in memory of the host, without loss.

    Layers with a sliding window, with shared keys and values, or without attention are those of
    transformers, and stay plain; `report` names them.

    It is for inference: a call with gradients is refused.

    If one layer refuses tokens, no layer keeps them: the cache is as it was before the model ran.
    (States of linear attention are not taken back; then `reset` the cache.)

    Args:
        config: of the model. Without one each layer is packed and keeps all tokens; a model whose
            layers share keys and values needs it.
        page_tokens: tokens of a page. The newest tokens stay plain until they fill one.
        room_tokens: tokens of all sequences of a layer that memory is allocated for at the first
            full page; further ones are refused. None to let the memory grow.
        threads: threads that pack and unpack; None for one per core, at most 8.

    Raises:
        ValueError: a number is not positive.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from packhorse.transformers import PackedHostCache
        >>> config = LlamaConfig(
        ...     hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        ...     vocab_size=100, pad_token_id=0, bos_token_id=1, eos_token_id=None
        ... )
        >>> model = LlamaForCausalLM(config).eval()
        >>> cache = PackedHostCache(config, page_tokens=16)
        >>> found = model.generate(torch.arange(3, 43)[None], past_key_values=cache, max_length=60)
        >>> cache.report().size.n_pages
        12
    """

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        page_tokens: int = 64,
        room_tokens: int | None = None,
        threads: int | None = None,
    ) -> None:
        self._memory = WorkingMemory()
        self._stream: Any = None
        self._lenders: set[int] = set()
        # What layers with a sliding window had before their last tokens: views, nothing is copied.
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._has_room = room_tokens is not None
        new_layer: Any = partial(
            PackedHostLayer,
            self._memory,
            page_tokens=page_tokens,
            room_tokens=room_tokens,
            threads=threads,
        )
        new_layer()  # refuses bad numbers now
        if config is None:
            super().__init__(layer_class_to_replicate=new_layer)
            return
        self._lenders = _lenders_of(config.get_text_config(decoder=True))
        plain = DynamicCache(config=config).layers
        super().__init__(
            layers=[
                new_layer() if type(layer) is DynamicLayer and i not in self._lenders else layer
                for i, layer in enumerate(plain)
            ]
        )

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """As transformers' caches do."""
        self._wait()
        super().crop(*args, **kwargs)

    def reset(self) -> None:
        """As transformers' caches do."""
        self._wait()
        super().reset()  # type: ignore[no-untyped-call]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """As transformers' caches do."""
        self._wait()
        on_host = beam_idx.cpu()  # the only wait for the device
        for layer in self.layers:
            if isinstance(layer, PackedHostLayer):
                layer.select(beam_idx, on_host)
            else:
                layer.reorder_cache(beam_idx)  # type: ignore[arg-type]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As transformers' caches do."""
        self._wait()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """As transformers' caches do."""
        self._wait()
        super().batch_select_indices(indices)

    def _wait(self) -> None:
        """What is launched from now on comes after what still reads pages on the side stream."""
        self._before.clear()  # sequences or lengths are about to change
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def __getstate__(self) -> dict[str, Any]:
        """For `copy.deepcopy`: each cache has a stream of its own."""
        return self.__dict__ | {"_stream": None, "_before": {}}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores new tokens of a layer, and on a GPU begins to unpack the next layer.

        Raises:
            MemoryError, RuntimeError: as `PackedHostLayer.update`. No layer has the tokens then.
        """
        n_new = key_states.shape[2]
        held = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        n_before = held.get_seq_length() if isinstance(held, DynamicLayer) else 0
        try:
            found = self._update(key_states, value_states, layer_idx, *args, **kwargs)
        except BaseException as error:
            where = f"layer {layer_idx} of the cache, tokens {n_before} to {n_before + n_new - 1}"
            error.add_note(f"{where}: no layer has them now")
            self._take_back(n_before + n_new, n_new)
            raise
        if isinstance(self.layers[layer_idx], DynamicSlidingWindowLayer):
            self._before[layer_idx] = found[0][:, :, :-n_new], found[1][:, :, :-n_new]
        return found

    def _take_back(self, n_tokens: int, n_new: int) -> None:
        """Lets the layers that have so many tokens forget the new ones."""
        before = dict(self._before)
        self._wait()
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, DynamicLayer) or layer.get_seq_length() != n_tokens:
                continue
            if i in before:
                layer.keys, layer.values = before[i]
                layer.cumulative_length -= n_new
            elif type(layer) in (PackedHostLayer, DynamicLayer):
                layer.crop(-n_new)

    def _update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not key_states.is_cuda:
            found: tuple[Tensor, Tensor] = super().update(
                key_states, value_states, layer_idx, *args, **kwargs
            )
            return found
        if self._stream is None:
            self._stream = torch.cuda.Stream(key_states.device)  # type: ignore[no-untyped-call]
            self._memory.n_buffers = 2
        current = torch.cuda.current_stream(key_states.device)
        current.wait_stream(self._stream)
        is_prompt = self.get_seq_length(layer_idx) == 0
        found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if is_prompt:  # the next layer has no tokens yet
            return found
        # The next layer goes to the buffer of the layer before, whose attention is queued already.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._prefetch_after(layer_idx, key_states.shape[2])
        return found

    def _prefetch_after(self, layer_idx: int, n_new: int) -> None:
        """Unpacks the next packed layer, for as many new tokens."""
        n = len(self.layers)
        for i in (*range(layer_idx + 1, n), *range(layer_idx + 1)):
            layer = self.layers[i]
            if isinstance(layer, PackedHostLayer):
                try:
                    layer.prefetch(n_new)
                except BaseException as error:
                    error.add_note(f"layer {i} of the cache was unpacked ahead")
                    raise
                return

    def report(self) -> CacheReport:
        """What the cache takes, and which layers are plain."""
        packed = [layer for layer in self.layers if isinstance(layer, PackedHostLayer)]
        sizes = [layer.store.size for layer in packed]
        plain = {
            i: self._why_plain(i)
            for i, layer in enumerate(self.layers)
            if not isinstance(layer, PackedHostLayer)
        }
        total = StoreSize(*map(sum, zip(*sizes, strict=True))) if sizes else StoreSize()
        rooms = [layer.store.room for layer in packed] if self._has_room else []
        left = [room for room in rooms if room is not None]
        room = PageRoom(*map(min, zip(*left, strict=True))) if left else None
        return CacheReport(len(packed), plain, total, self._memory.nbytes, room)

    def _why_plain(self, layer_idx: int) -> str:
        layer = self.layers[layer_idx]
        if layer_idx in self._lenders:
            return "later layers use its keys and values, too"
        if getattr(layer, "is_sliding", False):
            return "it keeps a sliding window of tokens"
        return f"it is a {type(layer).__name__} of transformers"


def _lenders_of(config: Any) -> set[int]:
    """The layers whose keys and values later layers read.

    Raises:
        CompatibilityError: the model has such layers, and this version of transformers does not say
            which.
    """
    for name, word in (("kv_sharing_modes", "store"), ("kv_sharing_roles", "producer")):
        roles = getattr(config, name, None)
        if roles is not None:
            return {i for i, role in enumerate(roles) if role == word}
    if getattr(config, "num_kv_shared_layers", 0):
        raise CompatibilityError(
            f"{type(config).__name__} says that layers share keys and values, but not which, so"
            " they cannot be packed: use transformers' DynamicCache, or another version of it"
        )
    return set()
