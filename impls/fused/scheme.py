"""A scheme that a kernel accelerates: the kernel computes, all else is the wrapped scheme's own."""

import importlib.util
import os
from abc import abstractmethod
from typing import TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from impls.noise import Noise, NoiseStream, PhiloxStream
from impls.operators import AbstractOperator, multiplies_rows
from impls.scheme import AbstractScheme, Flops

N = TypeVar("N", bound=Noise)

NARROW = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""Types no wider than the normals that kernels draw."""

FLOATING = NARROW | {torch.float64}
"""Types that matrix units multiply."""

LEAST_CAPABILITY = (8, 0)
"""Of a GPU: what the kernels' instructions need."""


class AbstractFused(AbstractScheme[N]):
    """A scheme of which kernels compute the forward, the update or both, in Triton.

    Noise, slow truth and quality are those of :attr:`plain`, the scheme that it wraps. A layer whose product
    is none of matrices, a device that has no such kernel and a type that it cannot compute in are refused
    with the reason: nothing falls back to the plain scheme.
    """

    @property
    @abstractmethod
    def plain(self) -> AbstractScheme[N]:
        """The scheme that is accelerated."""

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
            or _without_kernels(weight.device)
            or _without_type(weight.dtype, weight.device, self.dtypes)
            or ("" if multiplies_rows(module) else _NO_MATRIX)
        )

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> N:
        if self.stream == "philox" and not isinstance(stream, PhiloxStream):
            message = (
                f"{self} draws its noise inside of a kernel, by the counters of the stream philox: another "
                "stream has other numbers. Leave the stream out, or ask for philox"
            )
            raise ValueError(message)
        return self.plain.sample(weight, stream)

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: N, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        rows = op.rows(x, weight)
        if rows is None:
            message = f"{self}: {_NO_MATRIX}"
            raise ValueError(message)
        shape = (*x.shape[:3], weight.shape[1], *x.shape[4:])
        y = torch.empty(shape, device=x.device, dtype=x.dtype)
        out = op.rows(y, weight)
        assert out is not None  # noqa: S101  what serves an input serves its output
        self.launch(rows, weight[0].flatten(1), noise, sigma, out)
        return y

    @override
    def perturbations(self, noise: N) -> Tensor:
        return self.plain.perturbations(noise)

    @override
    def prepare(self, noise: N, weight: Tensor, sigma: float) -> N:
        return self.plain.prepare(noise, weight, sigma)

    @override
    def seen(self, weight: Tensor, change: Tensor) -> Tensor:
        return self.plain.seen(weight, change)

    @override
    def directions(self, noise: N) -> Tensor:
        return self.plain.directions(noise)

    @property
    @override
    def contrasts(self) -> bool:
        return self.plain.contrasts

    @property
    @override
    def boundary(self) -> int:
        return self.plain.boundary

    @property
    @override
    def mirrors(self) -> bool:
        return self.plain.mirrors

    @override
    def kappa(self, weight: torch.Size, members: int) -> float | None:
        return self.plain.kappa(weight, members)

    @override
    def kappa_of(self, weight: Tensor, members: int) -> float | None:
        return self.plain.kappa_of(weight, members)

    @override
    def deviation(self, weight: Tensor, sigma: float) -> Tensor | float:
        return self.plain.deviation(weight, sigma)

    @override
    def kept(self, weight: torch.Size) -> float:
        return self.plain.kept(weight)

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops | None:
        return self.plain.flops(weight, members)

    @override
    def read_bytes(self, weight: Tensor, noise: N) -> int:
        return self.plain.read_bytes(weight, noise)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _without_kernels(device: torch.device) -> str:
    """Return why kernels cannot run on this device, if they cannot."""
    if importlib.util.find_spec("triton") is None:
        return "its kernel needs triton, which is not installed"
    if device.type == "meta" or (device.type == "cpu" and is_interpreted()):
        return ""
    if device.type != "cuda":
        return f"its kernel needs a CUDA device, the layer is on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        have, need = (".".join(map(str, one)) for one in (capability, LEAST_CAPABILITY))
        return f"its kernel needs a GPU of capability {need} or more, this one has {have}"
    return ""


def _without_type(dtype: torch.dtype, device: torch.device, known: frozenset[torch.dtype]) -> str:
    """Return why kernels cannot compute in this type, if they cannot."""
    if dtype not in known:
        return f"its kernel does not compute in {str(dtype).removeprefix('torch.')}"
    if dtype is torch.bfloat16 and device.type == "cpu":
        return "Triton's interpreter does not multiply matrices of bfloat16"
    return ""


_NO_MATRIX = (
    "its kernel multiplies matrices, which this layer's product is not: a convolution of more than one tap "
    "would have to write out its input once for each tap"
)
