"""Triton where it is installed, and otherwise a stand-in with which kernels can be defined but not launched.

A file defines a kernel and the scheme that launches it. A scheme must be importable even where triton is
missing, so that it is refused with this reason: these files import ``tl`` and ``triton`` from here.
"""

import importlib.util
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING or importlib.util.find_spec("triton"):
    import triton
    import triton.language as tl
else:

    class Missing:
        """Replaces triton, its decorators and the decorated kernels."""

        def __call__(self, *_: Any, **__: Any) -> Self:  # noqa: ANN401  Triton's functions have no type
            """Return itself, as a decorated kernel."""
            return self

        def __getattr__(self, name: str) -> Self:
            """Return itself, as ``tl.constexpr``."""
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __getitem__(self, grid: object) -> Self:
            """Refuse to launch.

            Raises:
                ImportError: always.

            """
            message = "this kernel needs triton, which is not installed"
            raise ImportError(message)

    triton = tl = Missing()

__all__ = ["tl", "triton"]
