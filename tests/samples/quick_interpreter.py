"""Makes Triton's interpreter replace the functions of its language once for each launch.

It does so again at each call of one function of a kernel by another, which changes nothing and took
a quarter of the time.
"""

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["replace_once_a_launch"]


def replace_once_a_launch() -> None:
    """Changes the interpreter, if it has been imported and is one that is known."""
    module: Any = sys.modules.get("triton.runtime.interpreter")
    if not hasattr(module, "_LangPatchScope") or hasattr(module, "packhorse_done"):
        return
    patch, launch = module._patch_lang, module.GridExecutor.__call__
    languages = (module.tl, module.tl.core)
    replaced: set[tuple[bool, ...]] | None = None  # None outside of launches

    def patch_once(fn: Callable[..., Any]) -> Any:
        if replaced is None:
            return patch(fn)
        seen = set(map(id, fn.__globals__.values()))
        which = tuple(id(language) in seen for language in languages)
        if which in replaced:
            return module._LangPatchScope()
        replaced.add(which)
        return patch(fn)

    def launch_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal replaced
        replaced = set()
        try:
            return launch(self, *args, **kwargs)
        finally:
            replaced = None

    module._patch_lang, module.GridExecutor.__call__ = patch_once, launch_once
    module.packhorse_done = True
