"""The least that a call has to do, whoever implements it: from shapes, without computing anything.

Bytes are those of what a phase reads and writes, each once. A convolution's products with the zeros
of its padding count as products, as they do in every count of convolutions; a bias is where a
product's sum begins, and costs nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esbench.schema import Case, Phase, Work
from impls.perturbation.layer import PerturbedLayer
from impls.perturbation.scheme import AnyScheme


@dataclass(frozen=True)
class Extent:
    """What a layer reads and writes on a case, perturbed or plain.

    Attributes:
        x_bytes: of the rows.
        y_bytes: of the output.
        positions: output positions of all rows.
        flops: of the plain products; those of bits are none.
        weight: how many weights there are.
        bias: how many biases.
        parameter_bytes: of both.

    """

    x_bytes: int
    y_bytes: int
    positions: int
    flops: int
    weight: int
    bias: int
    parameter_bytes: int

    @classmethod
    def of(cls, module: nn.Module, x: Tensor) -> "Extent":
        """Take the shapes of a layer on rows [rows, channels, *space]."""
        parameters = dict(module.named_parameters())
        shapes = {name: parameter.to("meta") for name, parameter in parameters.items()}
        y: Tensor = torch.func.functional_call(module, shapes, (x.to("meta"),))
        weight, bias = parameters["weight"], parameters.get("bias")
        positions = y.numel() // weight.shape[0]
        return cls(
            x_bytes=x.nbytes,
            y_bytes=y.nbytes,
            positions=positions,
            flops=2 * positions * weight.numel() if x.is_floating_point() else 0,
            weight=weight.numel(),
            bias=0 if bias is None else bias.numel(),
            parameter_bytes=sum(parameter.nbytes for parameter in parameters.values()),
        )

    @property
    def forward(self) -> Work:
        """The plain layer on all rows."""
        return Work(
            flops=self.flops,
            moved_bytes=self.x_bytes + self.parameter_bytes + self.y_bytes,
            output_bytes=self.y_bytes,
        )

    def gradient(self, backward_bytes: int) -> Work:
        """The gradient of the plain layer's parameters, one product with an output gradient of that size."""
        return Work(
            flops=self.flops,
            moved_bytes=self.x_bytes + backward_bytes + self.parameter_bytes,
            output_bytes=self.parameter_bytes,
        )

    def step(self, *phases: Work) -> Work:
        """Go through the phases, then add a multiple of each gradient to its parameter."""
        return Work(
            flops=sum(phase.flops for phase in phases) + 2 * (self.weight + self.bias),
            moved_bytes=sum(phase.moved_bytes for phase in phases) + 3 * self.parameter_bytes,
            output_bytes=self.y_bytes,
        )


def perturbed(scheme: AnyScheme, case: Case, module: nn.Module, x: Tensor, phase: Phase) -> Work | None:
    """Return the least work of a scheme on a layer; None where it declares no arithmetic."""
    layer = PerturbedLayer.of("", module, scheme)
    weight = layer.grouped(layer.weight.detach().to("meta"))
    declared = scheme.flops(weight.shape, case.members)
    if declared is None:
        return None
    extent = Extent.of(module, x)
    noise = layer.sample(0, 0, range(case.members), device="meta")
    biases = 0 if layer.bias is None or noise.bias is None else layer.bias.nbytes + noise.bias.nbytes
    utilities_bytes = torch.float32.itemsize * case.members * (2 if case.antithetic else 1)
    by_rows = layer.learns_from_rows
    rows, seen_bytes = (extent.positions, extent.x_bytes) if by_rows else (1, 0)
    phases: dict[Phase, Work] = {
        "sample": Work(flops=0, moved_bytes=noise.nbytes, output_bytes=noise.nbytes),
        "forward": Work(
            flops=extent.positions * declared.forward,
            moved_bytes=extent.x_bytes + scheme.read_bytes(weight, noise.weight) + biases + extent.y_bytes,
            output_bytes=extent.y_bytes,
        ),
        "update": Work(
            flops=declared.update * rows + 2 * extent.bias * case.members,
            moved_bytes=noise.nbytes + utilities_bytes + extent.parameter_bytes + seen_bytes,
            output_bytes=extent.parameter_bytes,
        ),
    }
    return phases[phase] if phase in phases else extent.step(*phases.values())
