"""Makes Triton's interpreter leave out what changes no result, and took most of its time.

- It replaces the functions of its language once for each launch, not again at each call of one
  function of a kernel by another.
- It computes each sum, difference and product of integers once, not again in 64 bits for a check
  of overflows whose outcome it drops, unless it debugs.
- It looks up NumPy's dtype of each of its own types once, and makes what it knows of a shape once.
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
    _remember_shapes(module.tl.core)
    _replace_once_a_launch(module)
    module.packhorse_done = True


def _remember_dtypes(module: Any) -> None:
    ask, plain = module._get_np_dtype, module.tl.dtype
    remembered = cache(ask)

    def dtype_of(of: Any) -> Any:
        of = of.element_ty if isinstance(of, module.tl.block_type) else of
        return remembered(of) if type(of) is plain else ask(of)  # types of pointers have no hash

    module._get_np_dtype = dtype_of


def _remember_shapes(core: Any) -> None:
    """Each value and its type made tuples of the sizes anew, and types of these tuples."""

    @cache
    def known(sizes: tuple[int, ...]) -> tuple[Any, int, Any, Any]:
        """The shape of a type with its numel, and of a value with its own."""
        plain, numel = core.tuple(sizes), core.validate_block_shape(sizes) if sizes else 1
        plain.sizes = sizes
        return plain, numel, core.tuple([core.constexpr(n) for n in sizes]), core.constexpr(numel)

    def sizes_of(shape: Any) -> tuple[int, ...]:
        found = vars(shape).get("sizes") if isinstance(shape, core.tuple) else None
        return found or tuple(core._unwrap_shape(shape))

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, _, _ = known(sizes_of(shape))
        if not self.shape:
            raise TypeError("0d block_type is forbidden")

    def init_value(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, _, self.shape, self.numel = known(sizes_of(type.shape) if type.is_block() else ())

    core.block_type.__init__, core.tensor.__init__ = init_type, init_value
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")


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
