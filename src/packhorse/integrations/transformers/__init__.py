"""Packhorse for Hugging Face transformers: weights that stay packed, snapshots, and packed caches.

Users import it as `packhorse.transformers`.
"""

from packhorse.errors import MissingBackendError

try:
    from packhorse.integrations.transformers.cache import CacheReport, PackedHostCache
    from packhorse.integrations.transformers.callback import PackhorseCallback
    from packhorse.integrations.transformers.checkpoint_folder import restore_checkpoint
    from packhorse.integrations.transformers.loader import load_packed_model
    from packhorse.integrations.transformers.quantizer import PackhorseConfig
except ModuleNotFoundError as error:
    raise MissingBackendError(
        f"packhorse.transformers needs {error.name}; install it with: "
        "pip install 'packhorse[transformers]'"
    ) from error

__all__ = [
    "CacheReport",
    "PackedHostCache",
    "PackhorseCallback",
    "PackhorseConfig",
    "load_packed_model",
    "restore_checkpoint",
]
