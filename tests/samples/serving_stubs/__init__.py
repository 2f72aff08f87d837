"""Small stand-ins for vLLM and SGLang: the classes and functions that Packhorse uses, with the
signatures of the real ones. tests/servers compares them with the real vLLM.

They are in `sys.modules` only inside of `installed`, because other libraries ask whether vLLM is
there.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["installed"]


@contextmanager
def installed(server: str) -> Iterator[Any]:
    """Makes the stand-ins of "vllm" or "sglang" importable, and forgets them afterwards.

    Yields the module with the stand-ins, made anew, so that its tables are those of the server.
    """
    name = f"{__name__}.{server}_stubs"
    sys.modules.pop(name, None)
    stubs: Any = import_module(name)
    ours = f"packhorse.integrations.{server}"
    before = {key: sys.modules.pop(key) for key in [*sys.modules] if _is_in(key, server, ours)}
    for path, names in stubs.MODULES.items():
        module = ModuleType(path)
        module.__dict__.update({each: getattr(stubs, each) for each in names})
        module.__dict__.setdefault("__path__", [])
        sys.modules[path] = module
    try:
        yield stubs
    finally:
        for key in [key for key in sys.modules if _is_in(key, server, ours)]:
            del sys.modules[key]
        sys.modules.update(before)


def _is_in(name: str, *packages: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in packages)
