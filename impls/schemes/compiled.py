"""Any scheme compiled by torch.compile, for comparison with the eager scheme and with fused kernels."""

import functools
import importlib.util
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import REGISTRY, UnknownNameError, variant
from esbench.text import suggest
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.noise import STREAMS, Noise, NoiseStream
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.scheme import AbstractScheme, AbstractWrapper, AnyScheme, TensorRef

PROGRAMS = 256
"""Number of compiled programs in the cache; the least recently used one is dropped first."""

MIN_CAPABILITY = (7, 0)
"""The lowest compute capability that torch's compiler generates code for."""


@variant(
    of=(
        "SparsePerturbed(k=1)",
        "LowRank(rank=1)",
        "LowRankSign",
        "Permuted",
        "Permuted(in_sparsity=0.1)",
        "Flipped(side=both)",
        "Hadamard",
        "DropoutMask",
    ),
    source="torch.compile on the unchanged scheme",
    on_request=True,  # each shape takes seconds to compile, and a correctness check has many
)
@dataclass(frozen=True)
class Compiled(AbstractWrapper[Noise]):
    """A registered variant, given by its name, whose forward and update torch.compile compiles.

    A program is specialized to shapes, dtypes, sigma and the range of members. The first call with new ones
    compiles, which takes seconds. Code that cannot be compiled as a whole raises an error; nothing runs
    eagerly.

    Memory    that of the wrapped scheme, plus the compiler's temporaries.
    Work      that of the wrapped scheme, with element-wise passes fused by the compiler.
    Quality   that of the wrapped scheme.
    """

    of: str

    def __post_init__(self) -> None:
        """Check that ``of`` is a string; the variant is looked up at its first use."""
        if not isinstance(self.of, str) or not self.of:
            raise ValueError(f"Compiled needs the name of a variant, as in of='Hadamard', got of={self.of!r}")

    @property
    @override
    def plain(self) -> AbstractScheme[Any]:
        entry = REGISTRY.entries.get(self.of)
        if entry is None:
            listing = "esbench list --variants '*'"
            raise UnknownNameError(
                f"{self}: no variant {self.of!r}; {suggest(self.of, [*REGISTRY.entries], listing)}"
            )
        if not isinstance(entry.scheme, AbstractScheme):
            raise UnsupportedError(
                f"{self}: {self.of} is a plain layer, not a scheme: use a scheme, such as 'Hadamard'"
            )
        return entry.scheme

    @property
    @override
    def stream(self) -> str:
        return self.plain.stream

    @override
    def why_unsupported(self, module: nn.Module) -> str:
        plain, weight = self.plain, next(module.parameters())
        if isinstance(plain, AbstractWrapper):
            return f"{plain} is itself another implementation of a scheme"
        if plain.draws_binary_weights:
            return f"{plain} multiplies packed bits, which torch.compile does not support"
        if plain.learns_from_rows:
            return "its update differentiates rows by backpropagation, which does not compile to one program"
        if reason := plain.why_unsupported(module) or missing_compiler_reason(weight.device):
            return reason
        if _draws_in_forward(plain, weight):
            return "its noise is drawn in the forward: a program would repeat the noise of one step"
        return ""

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: Noise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        # A tensor is an argument of the program, a number is a constant in it.
        sigma_key = sigma.shape if isinstance(sigma, Tensor) else sigma
        key = (op, sigma_key, *_tensor_key(weight), *_tensor_key(x), *_noise_key(noise))
        result: Tensor = program(self, "forward", key)(op, weight, noise, x, sigma)
        return result

    @override
    def weighted_sum(self, noise: Noise, utilities: Tensor) -> Tensor:
        key = (*_tensor_key(utilities), *_noise_key(noise))
        result: Tensor = program(self, "weighted_sum", key)(noise, utilities)
        return result


@functools.lru_cache(maxsize=PROGRAMS)
def program(
    scheme: Compiled,
    method: Literal["forward", "weighted_sum"],
    key: Hashable,  # noqa: ARG001  it distinguishes programs in the cache
) -> Callable[..., Any]:
    """Return the compiled program of a scheme's method for the shapes, dtypes and numbers in ``key``.

    The compiler refuses to compile a code object more than a few times, and schemes of one class share their
    code objects. So each program gets a copy of the code object.
    """
    wrapped = getattr(scheme.plain, method)

    def call(*arguments: object) -> object:
        return wrapped(*arguments)

    copied = FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
    return torch.compile(copied, fullgraph=True, dynamic=False)


def _noise_key(noise: Noise) -> Iterator[Hashable]:
    """Yield the properties of noise that a program is specialized to: its numbers, shapes and dtypes."""
    for value in vars(noise).values():
        content = value.tensor if isinstance(value, TensorRef) else value
        yield from _tensor_key(content) if isinstance(content, Tensor) else (content,)


def _tensor_key(values: Tensor) -> tuple[Hashable, ...]:
    return values.shape, values.stride(), values.dtype, values.device


def missing_compiler_reason(device: torch.device) -> str:
    """Return why torch.compile does not work on this device, or ``""`` if it does."""
    # Loading the compiler takes a second, so other schemes do not import it.
    from torch._dynamo import eval_frame  # noqa: PLC0415  see above
    from torch._inductor import cpp_builder  # noqa: PLC0415  see above

    if not eval_frame.is_dynamo_supported():
        return "torch.compile does not support this version of Python"
    if device.type == "cpu":
        try:
            cpp_builder.get_cpp_compiler()
        except RuntimeError as error:
            return f"torch.compile needs a C++ compiler on a CPU: {error}"
    elif device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "torch.compile needs triton on a GPU, which is not installed"
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            have, need = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
            return f"torch.compile needs a GPU of capability {need} or more, this one has {have}"
    elif device.type != "meta":
        return f"torch.compile is used on a CPU or a CUDA device only, the layer is on {device.type}"
    return ""


def _draws_in_forward(plain: AnyScheme, weight: Tensor) -> bool:
    """Return whether the scheme's noise is a stream, which its forward draws from."""
    weight = weight.detach().to("meta").unflatten(0, (1, -1))
    stream = STREAMS[plain.stream](
        seed=0, step=0, layer="", members=range(1), device=weight.device, dtype=weight.dtype
    )
    noise = plain.sample(weight, stream)
    return any(isinstance(value, NoiseStream) for value in vars(noise).values())
