"""Makes Triton's interpreter leave out what changes no result, and took most of its time.

- It replaces the functions of its language once for each launch, not again at each call of one
  function of a kernel by another.
- It computes each sum, difference and product of integers once, not again in 64 bits for a check
  of overflows whose outcome it drops, unless it debugs.
- It looks up NumPy's dtype of each of its own types once.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

__all__ = ["make_interpreter_quick"]


def make_interpreter_quick() -> None:
    """Changes the interpreter, if it has been imported and is one that is known."""
    module: Any = sys.modules.get("triton.runtime.interpreter")
    if not hasattr(module, "_LangPatchScope") or hasattr(module, "packhorse_done"):
        return
    builder = module.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    _remember_dtypes(module)
    _replace_once_a_launch(module)
    module.packhorse_done = True


def _remember_dtypes(module: Any) -> None:
    ask, plain = module._get_np_dtype, module.tl.dtype
    remembered = cache(ask)

    def dtype_of(of: Any) -> Any:
        of = of.element_ty if isinstance(of, module.tl.block_type) else of
        return remembered(of) if type(of) is plain else ask(of)  # types of pointers have no hash

    module._get_np_dtype = dtype_of


def _replace_once_a_launch(module: Any) -> None:
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
