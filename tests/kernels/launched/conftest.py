"""Makes Triton's interpreter faster without changing its results."""

from collections.abc import Iterator
from typing import Any

import pytest
from triton.runtime import interpreter


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> Iterator[None]:
    """Patch Triton's language once for each launch and module, not at each call of a function in a kernel.

    A launch patches ``triton.language`` and restores it. Functions of Triton's own modules use
    ``triton.language.core``, which stays as it was patched by the first call.
    """
    patch_language, patched = interpreter._patch_lang, set[str]()  # noqa: SLF001  Triton has no public way

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            patch_language(self.fn)
        return self.rewrite()(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield
