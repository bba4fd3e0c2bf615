"""Triton where it is installed, and otherwise a stand-in with which kernels can be defined but not launched.

The files of kernels import ``tl`` and ``triton`` from here, because each also defines the scheme that
launches the kernel. Without triton the scheme can then be imported, and is refused with the reason.
"""

import importlib.util
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING or importlib.util.find_spec("triton"):
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
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
            raise ImportError("this kernel needs triton: install it with `pip install triton` (Linux only)")

    triton = tl = Missing()
    TensorDescriptor = Missing  # a class, for annotations

__all__ = ["TensorDescriptor", "tl", "triton"]
