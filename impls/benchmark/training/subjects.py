"""The networks that sparse steps train, plain: their weights are what every variant starts from."""

import torch
from torch import Generator, Tensor, nn

from esbench.registry import REGISTRY, UnavailableError
from esbench.schema import Case
from impls.benchmark import inputs

MLP, CNN = OPERATORS = REGISTRY.reserve("SparseMLP", "SparseCNN")
DEPTH = 4
"""Linear layers of the MLP, all of one width."""
CLASSES = 10


def network(case: Case, device: str, seed: int) -> nn.Sequential:
    """Make the case's network with seeded weights N(0, 2 / fan in) and biases N(0, 0.01).

    ``SparseMLP``: four linear layers of ``in_channels``, with ReLU. ``SparseCNN``: convolutions of 3 x 3 to
    ``out_channels`` three times, the second with stride 2, a mean over space, and a linear layer.

    Raises:
        UnavailableError: the MLP's channels differ.

    """
    width, dtype = case.out_channels, inputs.dtype_of(case)
    layers: list[nn.Module] = []

    def linear(out: int) -> nn.Module:
        return nn.utils.skip_init(nn.Linear, width, out, dtype=dtype)

    if case.operator == MLP:
        if case.in_channels != width:
            message = f"all layers of {MLP} have one width, not {case.in_channels} and {width}"
            raise UnavailableError(message)
        for _ in range(DEPTH):
            layers += [linear(width), nn.ReLU()]
        layers.pop()
    else:
        for number, channels in enumerate((case.in_channels, width, width)):
            stride = 2 if number == 1 else 1
            made = {"stride": stride, "padding": 1, "dtype": dtype}
            layers += [nn.utils.skip_init(nn.Conv2d, channels, width, 3, **made), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear(CLASSES)]
    model, generator = nn.Sequential(*layers), Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = (2 / parameter[0].numel()) ** 0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model.to(device)


def rows(case: Case, device: str, seed: int) -> tuple[Tensor, ...]:
    """Make rows for each turn: [rows, channels, *space]."""
    shape = (case.rows, case.in_channels, *case.input_size)
    return inputs.normal(*shape, device=device, dtype=inputs.dtype_of(case), seed=seed + 1)
