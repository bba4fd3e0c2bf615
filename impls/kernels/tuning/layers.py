"""Inputs of the products that are tuned: rows, a weight, room for the result, and noise of members."""

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from impls.kernels.tuning.tunable import Task


class Layer(NamedTuple):
    """A layer whose members have one row each.

    Attributes:
        x: [1, rows, 1, inputs].
        weight: [outputs, inputs].
        y: [1, rows, 1, outputs], not written yet.
        generator: of all else that a kernel takes.

    """

    x: Tensor
    weight: Tensor
    y: Tensor
    generator: Generator

    @classmethod
    def of(cls, task: Task, device: torch.device) -> "Layer":
        """Draw rows and a weight for a task whose sizes begin with rows, outputs and inputs."""
        rows, outputs, inputs, *_ = task.sizes
        generator = Generator(device).manual_seed(0)
        x = torch.randn(1, rows, 1, inputs, generator=generator, device=device, dtype=task.dtype)
        weight = torch.randn(outputs, inputs, generator=generator, device=device, dtype=task.dtype)
        return cls(x, weight, x.new_empty(1, rows, 1, outputs), generator)

    def normal(self, *shape: int) -> Tensor:
        """Draw normals of the layer's type."""
        return torch.randn(*shape, device=self.x.device, dtype=self.x.dtype, generator=self.generator)

    def below(self, end: int, *shape: int) -> Tensor:
        """Draw indices from 0 on, int64."""
        return torch.randint(end, shape, device=self.x.device, generator=self.generator)

    def signs(self, *shape: int) -> Tensor:
        """Draw signs, int8."""
        return (2 * self.below(2, *shape) - 1).to(torch.int8)
