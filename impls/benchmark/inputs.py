"""Inputs of a case: its dtype, its plain layer, and buffers of rows that calls read in turn."""

import itertools
import secrets
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Generator, Tensor, nn

from esbench.errors import UserError
from esbench.schema import Case
from esbench.workload import UnavailableError
from impls.binary import bits
from impls.binary.layers import BinarizedConv2d, BinarizedLinear
from impls.training.networks import NETWORKS, shape_of, trained

T = TypeVar("T")

PACKED = ("BinarizedLinear", "BinarizedConv2d")
"""Operators on packed bits."""

TURNS = 2
"""Number of buffers that calls read in turn, so that no call can reuse the result of the one before."""

LEARNING_RATE = 1e-6
"""Small, so that thousands of timed steps hardly change the weights."""

TRAINED_STEPS = 50
"""Steps of backpropagation after which most digits are classified, and the gradient has not vanished."""

TFLOAT32 = "tfloat32"
TFLOAT32_EPS = 2.0**-10
"""Machine epsilon of TF32: products of float32 tensors that keep ten bits of the fraction."""


def dtype_of(case: Case) -> torch.dtype:
    """Return the torch dtype of the case's tensors: float32 for ``tfloat32``."""
    dtype: torch.dtype = torch.float32 if case.dtype == TFLOAT32 else getattr(torch, case.dtype)
    return dtype


def eps_of(case: Case) -> float:
    """Return the machine epsilon of the case's matrix products."""
    return TFLOAT32_EPS if case.dtype == TFLOAT32 else torch.finfo(dtype_of(case)).eps


def layer(case: Case, device: str, seed: int) -> nn.Module:
    """Return the case's plain layer with seeded weights N(0, 1 / fan in), or its trained network.

    Weights are drawn on the device, and are the same for every variant on that device.

    Raises:
        UnavailableError: the operator is unknown, or the network's data is not installed.
    """
    if is_network(case):
        try:
            return trained(case.operator, seed, TRAINED_STEPS).to(device, dtype_of(case))
        except UserError as error:
            raise UnavailableError(str(error)) from error
    factory: dict[str, Any] = {"device": torch.device(device), "dtype": dtype_of(case)}
    module: nn.Module
    if case.operator == "Linear":
        module = nn.utils.skip_init(nn.Linear, case.in_channels, case.out_channels, case.bias, **factory)
    elif case.operator == "Conv2d":
        module = nn.utils.skip_init(
            nn.Conv2d,
            case.in_channels,
            case.out_channels,
            case.kernel_size,
            stride=case.stride,
            padding=case.padding,
            dilation=case.dilation,
            groups=case.groups,
            bias=case.bias,
            padding_mode=case.padding_mode,
            **factory,
        )
    elif is_packed(case):
        module = _binarized_layer(case, factory)
    else:
        known = ["Linear", "Conv2d", *PACKED, *NETWORKS]
        raise UnavailableError(f"no operator {case.operator!r} here; available: {', '.join(known)}")
    generator = Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            # Logits are N(0, 1) at any width.
            fan_in = 1 if is_packed(case) else max(1, parameter[0].numel())
            values = torch.randn(parameter.shape, device=device, generator=generator) / fan_in**0.5
            parameter.copy_(values)
    return module


def _binarized_layer(case: Case, factory: dict[str, Any]) -> nn.Module:
    """Return a binarized layer with real outputs.

    Raises:
        UnavailableError: binarized layers do not support the case.
    """
    options: dict[str, Any] = {"bias": case.bias, "outputs": "real", **factory}
    if case.operator == PACKED[0]:
        return BinarizedLinear(case.in_channels, case.out_channels, **options)
    if (
        case.groups != 1
        or case.dilation != 1
        or case.padding_mode != "zeros"
        or isinstance(case.padding, str)
    ):
        raise UnavailableError(
            "binarized convolutions need groups=1, dilation=1, padding_mode='zeros' and a number as padding"
        )
    sizes: dict[str, Any] = {"stride": case.stride, "padding": case.padding}
    kernel: Any = case.kernel_size
    return BinarizedConv2d(case.in_channels, case.out_channels, kernel, **sizes, **options)


def is_packed(case: Case) -> bool:
    """Return whether rows of the case are packed bits."""
    return case.operator in PACKED


def is_network(case: Case) -> bool:
    """Return whether the case is a network rather than a layer."""
    return case.operator in NETWORKS


def features(case: Case) -> tuple[int, ...]:
    """Return the shape of one input row."""
    if is_network(case):
        return shape_of(case.operator)
    if is_packed(case):
        return (*case.input_size, bits.word_count(case.in_channels))
    return (case.in_channels, *case.input_size)


def normal(*shape: int, device: str, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    """Return seeded tensors N(0, 1), one per turn; zeros would be multiplied faster on a GPU."""
    generator = Generator(device)
    return tuple(
        torch.randn(*shape, device=device, dtype=dtype, generator=generator.manual_seed(seed + turn))
        for turn in range(TURNS)
    )


def random_bits(*shape: int, device: str, seed: int) -> tuple[Tensor, ...]:
    """Return packed fair bits [*shape, words], one tensor per turn."""
    generator = Generator(device)
    return tuple(
        bits.pack(torch.rand(*shape, device=device, generator=generator.manual_seed(seed + turn)) < 0.5)  # noqa: PLR2004  fair
        for turn in range(TURNS)
    )


def refill(case: Case, tensors: Iterable[Tensor]) -> None:
    """Write new values into rows of a case, in place, from random seeds."""
    for tensor in tensors:
        seed = secrets.randbits(62)
        if is_packed(case):
            shape = (*tensor.shape[:-1], case.in_channels)
            tensor.copy_(random_bits(*shape, device=str(tensor.device), seed=seed)[0])
        else:
            tensor.normal_(generator=Generator(tensor.device).manual_seed(seed))


def rows(case: Case, device: str, seed: int) -> tuple[Tensor, ...]:
    """Return rows [rows, channels, *space] or words [rows, *space, words], one tensor per turn."""
    if is_packed(case):
        return random_bits(case.rows, *case.input_size, case.in_channels, device=device, seed=seed + 1)
    return normal(case.rows, *features(case), device=device, dtype=dtype_of(case), seed=seed + 1)


class RotatingBuffers(Generic[T]):
    """Buffers that consecutive calls read in turn, so that no call can reuse a result.

    They stay in place: a captured graph reads them again.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self.items = tuple(items)
        self.restart()

    def restart(self) -> None:
        """Begin with the first item again."""
        self._cycle = itertools.cycle(self.items)

    def take(self) -> T:
        """Return the next item."""
        return next(self._cycle)
