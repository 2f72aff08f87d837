"""A loader for SGLang: updates come as one tensor of bytes through `update_weights_from_tensor`.

    sglang ... --custom-weight-loader packhorse.integrations.weight_updates.sglang.load_update

    update = sender.pack()
    engine.update_weights_from_tensor(
        [as_named_tensor(update)],
        load_format="packhorse.integrations.weight_updates.sglang.load_update",
    )

The first update must be an anchor. SGLang's loaders write what they are given and leave other
weights alone, so only tensors with changes are loaded. The mirror is an attribute of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from packhorse.integrations.weight_updates.mirror import Mirror
from packhorse.late_import import import_late
from packhorse.wire.updates import Update

__all__ = ["LOAD_FORMAT", "as_named_tensor", "load_update"]

LOAD_FORMAT = "packhorse.integrations.weight_updates.sglang.load_update"
_NAME = "packhorse.update"
_MIRROR = "_packhorse_mirror"
_IS_LOADED = "_packhorse_is_loaded"


def as_named_tensor(update: Update) -> tuple[str, Any]:
    """An update as a name and a tensor, for `update_weights_from_tensor`."""
    torch = import_late("torch")
    return _NAME, torch.frombuffer(bytearray(update.buffer()), dtype=torch.uint8)


def load_update(model: Any, named_tensors: Iterable[tuple[str, Any]]) -> None:
    """Applies an update to the mirror of a model, and loads what it changed into the model.

    Args:
        model: SGLang's model.
        named_tensors: one or more tensors from `as_named_tensor`, on any device, in the order of
            their versions.

    Raises:
        ValueError: there is another tensor among them.
        PackhorseError: as `DeltaReceiver.stage`. The model is as it was.
    """
    pairs = list(named_tensors)
    others = [name for name, _ in pairs if name != _NAME]
    if others or not pairs:
        raise ValueError(f"a tensor named {_NAME!r} is needed, not {others[:1]}")
    mirror = getattr(model, _MIRROR, None)
    if mirror is None:
        mirror = Mirror()
        setattr(model, _MIRROR, mirror)
    staged = mirror.receiver.stage([tensor.detach().cpu().numpy() for _, tensor in pairs])
    changed = mirror.commit(staged)
    names = changed if getattr(model, _IS_LOADED, False) else None
    setattr(model, _IS_LOADED, False)  # until the loader is through; otherwise the next loads all
    model.load_weights(mirror.tensors(names))
    setattr(model, _IS_LOADED, True)
