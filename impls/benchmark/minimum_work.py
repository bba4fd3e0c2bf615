"""The minimum work of a phase for any implementation: flops and bytes, computed from shapes.

Every byte that a phase reads or writes counts once. Products with the zeros of a convolution's padding count
as products, as is usual; adding a bias is free, since it can be the initial value of a sum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esbench.schema import Case, Phase, Work
from impls.perturbation.layer import PerturbedLayer
from impls.perturbation.scheme import AnyScheme


@dataclass(frozen=True)
class Extent:
    """Sizes of a layer and of its rows, perturbed or plain.

    Attributes:
        x_bytes: size of the rows.
        y_bytes: size of the outputs.
        positions: output positions of all rows.
        flops: flops of the plain products; 0 for packed bits.
        weight: number of weights.
        bias: number of biases.
        parameter_bytes: size of weights and biases.
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
        """Measure a layer and rows [rows, channels, *space]."""
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
        """Work of the plain layer on all rows."""
        return Work(
            flops=self.flops,
            moved_bytes=self.x_bytes + self.parameter_bytes + self.y_bytes,
            output_bytes=self.y_bytes,
        )

    def gradient(self, y_gradient_bytes: int) -> Work:
        """Return the work of the parameters' gradients, from a gradient of the outputs of this size."""
        return Work(
            flops=self.flops,
            moved_bytes=self.x_bytes + y_gradient_bytes + self.parameter_bytes,
            output_bytes=self.parameter_bytes,
        )

    def step(self, *phases: Work) -> Work:
        """Return the work of phases and of an SGD update of the parameters."""
        return Work(
            flops=sum(phase.flops for phase in phases) + 2 * (self.weight + self.bias),
            moved_bytes=sum(phase.moved_bytes for phase in phases) + 3 * self.parameter_bytes,
            output_bytes=self.y_bytes,
        )


def perturbed(scheme: AnyScheme, case: Case, module: nn.Module, x: Tensor, phase: Phase) -> Work | None:
    """Return the minimum work of a phase of a scheme on a layer; None if the scheme declares no flops."""
    layer = PerturbedLayer.of("", module, scheme)
    weight = layer.split_groups(layer.weight.detach().to("meta"))
    declared = scheme.flops(weight.shape, case.members)
    if declared is None:
        return None
    extent = Extent.of(module, x)
    noise = layer.sample(0, 0, range(case.members), device="meta")
    bias_bytes = 0
    if layer.bias is not None and noise.bias is not None:
        bias_bytes = layer.bias.nbytes + noise.bias.nbytes
    utilities_bytes = torch.float32.itemsize * case.members * (2 if case.antithetic else 1)
    update_flops, row_bytes = declared.update, 0
    if layer.learns_from_rows:  # the update reads all rows, and its flops are per output position
        update_flops, row_bytes = declared.update * extent.positions, extent.x_bytes
    phases: dict[Phase, Work] = {
        "sample": Work(flops=0, moved_bytes=noise.nbytes, output_bytes=noise.nbytes),
        "forward": Work(
            flops=extent.positions * declared.forward,
            moved_bytes=extent.x_bytes
            + scheme.read_bytes(weight, noise.weight)
            + bias_bytes
            + extent.y_bytes,
            output_bytes=extent.y_bytes,
        ),
        "update": Work(
            flops=update_flops + 2 * extent.bias * case.members,
            moved_bytes=noise.nbytes + utilities_bytes + extent.parameter_bytes + row_bytes,
            output_bytes=extent.parameter_bytes,
        ),
    }
    return phases[phase] if phase in phases else extent.step(*phases.values())
