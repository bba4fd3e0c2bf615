"""Base classes of schemes whose forward or update is a Triton kernel."""

import importlib.util
import os
from abc import abstractmethod
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from impls.kernels.gemm import DOT_DTYPES
from impls.perturbation.noise import Noise
from impls.perturbation.operators import AbstractOperator, no_rows_reason
from impls.perturbation.scheme import AbstractRowScheme, AbstractWrapper, AnyScheme

N = TypeVar("N", bound=Noise)

NARROW = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""Dtypes no wider than the normals that kernels draw."""

MIN_CAPABILITY = (8, 0)
"""Compute capability of a GPU that has the kernels' instructions."""


class AbstractFused(AbstractWrapper[N]):
    """A scheme whose forward, update or both are Triton kernels; everything else is the wrapped scheme's.

    A layer that is not a matrix product, a device without Triton kernels and an unsupported dtype are refused
    with the reason. There is no fallback to the wrapped scheme.
    """

    PLAIN: ClassVar[type[AnyScheme]]
    """The class of the wrapped scheme, which has options of the same names."""

    def __post_init__(self) -> None:
        """Check the options, as the wrapped scheme does."""
        _ = self.plain

    @cached_property
    @override
    def plain(self) -> Any:  # an instance of PLAIN
        return self.PLAIN(**vars(self))

    @abstractmethod
    def launch(self, x: Tensor, weight: Tensor, noise: N, sigma: float | Tensor, y: Tensor) -> None:
        """Multiply each member's rows by its perturbed weight and write the result into y.

        Args:
            x: [r, m, p, i], any strides.
            weight: W, [o, i].
            noise: noise of the members in x.
            sigma: a number, or a tensor of one signed value for each repeat.
            y: [r, m, p, o], any strides; all of it is written.
        """

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Dtypes that the kernels compute in."""
        return DOT_DTYPES

    @override
    def why_unsupported(self, module: nn.Module) -> str:
        weight = next(module.parameters())
        reason = (
            self.plain.why_unsupported(module)
            or no_kernels_reason(weight.device)
            or no_dtype_reason(weight.dtype, weight.device, self.dtypes)
        )
        if not reason and (no_rows := no_rows_reason(module)):
            reason = f"its kernel multiplies rows by a matrix: {no_rows}"
        return reason

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: N, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                f"{self}: the kernel needs inputs in the weight's dtype and does not support autocast: call "
                "the population outside torch.autocast, or convert the model to the dtype of autocast"
            )
        rows = op.rows(x, weight)
        assert rows is not None  # noqa: S101  a layer without rows is refused before
        y = op.empty_output(x, weight)
        out = op.rows(y, weight)
        assert out is not None  # noqa: S101  an output is laid out like its input
        self.launch(rows, weight[0].flatten(1), noise, sigma, out)
        return y

    @override
    def weighted_sum(self, noise: N, utilities: Tensor) -> Tensor:
        return self.plain.weighted_sum(noise, utilities)


class AbstractFusedRows(AbstractFused[N], AbstractRowScheme[N]):
    """A fused scheme whose update may read the inputs of the forward, as the wrapped scheme's does."""

    @override
    def node_gradient(
        self, op: AbstractOperator, weight: Tensor, noise: N, utilities: Tensor, x: Tensor
    ) -> Tensor:
        return self.plain.node_gradient(op, weight, noise, utilities, x)


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def no_kernels_reason(device: torch.device) -> str:
    """Return why kernels cannot run on this device, or an empty string."""
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        # Before triton: installing it would not help.
        have, need = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
        return f"its kernel needs a GPU of capability {need} or more, this one has {have}"
    if importlib.util.find_spec("triton") is None:
        return "its kernel needs triton, which is not installed"
    if device.type in {"cuda", "meta"} or (device.type == "cpu" and is_interpreted()):
        return ""
    return f"its kernel needs a CUDA device, the layer is on {device.type}"


def no_dtype_reason(dtype: torch.dtype, device: torch.device, supported: frozenset[torch.dtype]) -> str:
    """Return why kernels cannot compute in this dtype, or an empty string."""
    if dtype not in supported:
        return f"its kernel does not compute in {str(dtype).removeprefix('torch.')}"
    if dtype is torch.bfloat16 and device.type == "cpu":
        return "Triton's interpreter does not compute in bfloat16"
    return ""
