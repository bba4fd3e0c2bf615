"""Makes Triton's interpreter faster without changing its results."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from triton.language import core, semantic
from triton.runtime import interpreter


def cached(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` once for each key of its arguments."""
    results: dict[Any, Any] = {}

    def call(*arguments: Any) -> Any:
        of_arguments = key(*arguments)
        if of_arguments not in results:
            results[of_arguments] = function(*arguments)
        return results[of_arguments]

    return call


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> Iterator[None]:
    """Do once what Triton's interpreter repeats at each operation; this halves its time.

    * Patch the language once for each launch and module, not at each call of a function in a kernel. A launch
      patches ``triton.language`` and restores it. Functions of Triton's own modules use
      ``triton.language.core``, which stays as it was patched by the first call.
    * Make the type of a tile, its shape and NumPy's dtype for it once.
    * Broadcast only tiles whose shapes differ.
    * Skip the check for overflow, whose result the interpreter ignores.
    """
    patch_language, patched = interpreter._patch_lang, set[str]()  # noqa: SLF001  Triton has no public way

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            patch_language(self.fn)
        return self.rewrite()(*arguments, **options)

    def tile_shape(sizes: Any) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    shape_of = cached(tile_shape, tuple)

    def init_tile(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  triton's name
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(type.shape if type.is_block() else ())

    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_if_needed(self: Any, left: Any, right: Any) -> Any:
        same = left.type.is_block() and right.type.is_block() and left.type.shape == right.type.shape
        return (left, right) if same else broadcast(self, left, right)

    numpy_dtype = cached(interpreter._get_np_dtype, lambda dtype: dtype.scalar.name)  # noqa: SLF001  as above
    tile_type = cached(core.block_type.with_element_ty, lambda tile, dtype: (tile.name, dtype.name))
    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        patch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
        patch.setattr(core.tensor, "__init__", init_tile)
        patch.setattr(semantic.TritonSemantic, "broadcast_impl_value", broadcast_if_needed)
        patch.setattr(core.block_type, "with_element_ty", tile_type)
        patch.setattr(core.block_type, "to_ir", lambda tile, _: tile)
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        yield
