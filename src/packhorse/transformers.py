"""Packhorse for Hugging Face transformers: weights that stay packed, snapshots, and packed caches.

`from_pretrained(..., quantization_config=PackhorseConfig())` keeps a model's weights packed in
memory, and `load_packed_model` loads folders that `packhorse pack` wrote (docs/device.md).
`Trainer(callbacks=[PackhorseCallback("runs/7")])` takes snapshots instead of writing checkpoint
folders (docs/training.md). `generate(past_key_values=PackedHostCache(model.config))` keeps keys and
values packed in memory of the host (docs/host.md).
"""

from packhorse.integrations.transformers import (
    CacheReport,
    PackedHostCache,
    PackhorseCallback,
    PackhorseConfig,
    load_packed_model,
    restore_checkpoint,
)

__all__ = [
    "CacheReport",
    "PackedHostCache",
    "PackhorseCallback",
    "PackhorseConfig",
    "load_packed_model",
    "restore_checkpoint",
]
