"""The entry points by which servers of models find Packhorse.

vLLM and SGLang call every function that is registered for them, in each of their processes and also
if nobody asked for packed weights. So these functions only register the method "packhorse". If the
server is one of another version, they register a method that refuses to load a model and says why.
"""

from importlib import import_module

__all__ = ["register_sglang", "register_vllm"]


def register_vllm() -> None:
    """Registers the quantization method "packhorse" with vLLM; the group is
    `vllm.general_plugins`."""
    import_module("packhorse.integrations.vllm.registration").register()


def register_sglang() -> None:
    """Registers the quantization method "packhorse" with SGLang; the group is
    `sglang.srt.plugins`."""
    import_module("packhorse.integrations.sglang.registration").register()
