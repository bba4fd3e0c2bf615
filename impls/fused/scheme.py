"""A scheme that a kernel accelerates: the kernel computes, all else is the wrapped scheme's own."""

import importlib.util
import os
from abc import abstractmethod
from typing import TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from impls.perturbation.noise import Noise
from impls.perturbation.operators import AbstractOperator, without_rows
from impls.perturbation.scheme import AbstractRowScheme, AbstractWrapper

N = TypeVar("N", bound=Noise)

NARROW = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""Types no wider than the normals that kernels draw."""

FLOATING = NARROW | {torch.float64}
"""Types that matrix units multiply."""

LEAST_CAPABILITY = (8, 0)
"""Of a GPU: what the kernels' instructions need."""


class AbstractFused(AbstractWrapper[N]):
    """A scheme of which kernels compute the forward, the update or both, in Triton.

    A layer whose product is none of matrices, a device that has no such kernel and a type that it cannot
    compute in are refused with the reason: nothing falls back to the plain scheme.
    """

    @abstractmethod
    def launch(self, x: Tensor, weight: Tensor, noise: N, sigma: float | Tensor, y: Tensor) -> None:
        """Multiply each member's rows by its own weight, into y.

        Args:
            x: [r, m, p, i], any strides.
            weight: W, [o, i].
            noise: of the members in x.
            sigma: a number, or a tensor of one signed value for each repeat.
            y: [r, m, p, o], any strides; all of it is written.

        """

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Types that the kernels compute in."""
        return FLOATING

    @override
    def supports(self, module: nn.Module) -> str:
        weight = module.weight
        assert isinstance(weight, Tensor)  # noqa: S101  every layer that is perturbed has one
        return (
            self.plain.supports(module)
            or without_kernels(weight.device)
            or without_type(weight.dtype, weight.device, self.dtypes)
            or (
                f"its kernel multiplies rows by a matrix: {reason}"
                if (reason := without_rows(module))
                else ""
            )
        )

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: N, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            message = (
                f"{self}: a kernel takes rows of its weight's type and knows no autocast: leave it for this "
                "population, or convert the model"
            )
            raise ValueError(message)
        rows = op.rows(x, weight)
        assert rows is not None  # noqa: S101  a layer without rows is refused before
        shape = (*x.shape[:3], weight.shape[1], *x.shape[4:])
        y = torch.empty(shape, device=x.device, dtype=x.dtype)
        out = op.rows(y, weight)
        assert out is not None  # noqa: S101  what serves an input serves its output
        self.launch(rows, weight[0].flatten(1), noise, sigma, out)
        return y


class AbstractFusedRows(AbstractFused[N], AbstractRowScheme[N]):
    """One that can learn from the rows its layers saw: their credit is the wrapped scheme's own."""

    @property
    @abstractmethod
    @override
    def plain(self) -> AbstractRowScheme[N]:
        """The scheme that is accelerated."""

    @override
    def node_gradient(
        self, op: AbstractOperator, weight: Tensor, noise: N, utilities: Tensor, x: Tensor
    ) -> Tensor:
        return self.plain.node_gradient(op, weight, noise, utilities, x)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def without_kernels(device: torch.device) -> str:
    """Return why kernels cannot run on this device, if they cannot."""
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        # Before triton: installing it would not help.
        have, need = (".".join(map(str, one)) for one in (capability, LEAST_CAPABILITY))
        return f"its kernel needs a GPU of capability {need} or more, this one has {have}"
    if importlib.util.find_spec("triton") is None:
        return "its kernel needs triton, which is not installed"
    if device.type in {"cuda", "meta"} or (device.type == "cpu" and is_interpreted()):
        return ""
    return f"its kernel needs a CUDA device, the layer is on {device.type}"


def without_type(dtype: torch.dtype, device: torch.device, known: frozenset[torch.dtype]) -> str:
    """Return why kernels cannot compute in this type, if they cannot."""
    if dtype not in known:
        return f"its kernel does not compute in {str(dtype).removeprefix('torch.')}"
    if dtype is torch.bfloat16 and device.type == "cpu":
        return "Triton's interpreter does not compute in bfloat16"
    return ""
