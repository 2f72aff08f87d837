"""Packhorse for Hugging Face transformers: models whose weights stay packed, and snapshots.

`from_pretrained(..., quantization_config=PackhorseConfig())` keeps a model's weights packed in
memory, and `load_packed_model` loads folders of `packhorse pack` (docs/device.md).
`Trainer(callbacks=[PackhorseCallback("runs/7")])` takes snapshots instead of checkpoint folders
(docs/training.md).
"""

from packhorse.integrations.transformers import (
    PackhorseCallback,
    PackhorseConfig,
    load_packed_model,
    restore_checkpoint,
)

__all__ = ["PackhorseCallback", "PackhorseConfig", "load_packed_model", "restore_checkpoint"]
