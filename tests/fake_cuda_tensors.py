"""CUDA tensors on a machine without a GPU: values are on the host, but torch's device rules are enforced.

Inside :func:`fake_cuda`, tensors can be created on the device ``cuda``. Operators compute on the CPU, and
raise an error or record the operation, as described here:

* Tensors of two devices in one operator raise :class:`DeviceMixError`, except for zero-dimensional CPU
  tensors that torch reads as numbers. So do a generator and a tensor of different devices, a CPU tensor given
  to a Triton kernel, and a CPU tensor assigned to ``grad``.

* Operations for which the host waits are recorded in :attr:`FakeDevice.waits`: reading a value (``item``,
  ``tolist``, ``torch.equal``, ``if tensor:``), a shape that depends on values (``nonzero``, boolean indices),
  a copy between host and device, ``synchronize``, and linear algebra that checks its result on the host. None
  of these can be captured in a CUDA graph.

* Seeding a generator and drawing from a generator other than the default cannot be captured either: both are
  recorded in :attr:`FakeDevice.draws`.

torch's ``FakeTensorMode`` finds only mixed devices, and its tensors have no values to check.
"""

# ruff: noqa: SLF001  torch offers these parts of tensor subclasses and modes under private names only

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

COPIES = (aten.copy_, aten._to_copy)
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
EMPTY = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
FLOATING_ONLY = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot, aten.convolution)
"""Products that CUDA does not implement for integers."""
FILLS = (aten.fill, aten.fill_, aten.masked_fill, aten.masked_fill_, aten.index_fill, aten.index_fill_)
"""Operators besides pointwise ones that read a CPU tensor without dimensions as a number."""
HIDDEN_WAITS = (
    *(aten.multinomial, aten.histc, aten.linspace, aten.logspace),
    *(aten._linalg_check_errors, aten._linalg_svd, aten._linalg_eigh, aten.linalg_eig, aten.linalg_pinv),
)
"""Operators that read a value on the host inside their CUDA implementation."""
WAITING_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}
READ_BY_PYTHON = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__format__}
CREATED_ON_HOST = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
SET_GRAD = getattr(Tensor, "grad").__set__  # noqa: B009  mypy has the type of an instance's attribute
MASKS = {torch.bool, torch.uint8}


class DeviceMixError(RuntimeError):
    """Tensors, or a tensor and a generator, of two devices were used in one call."""


class CaptureError(RuntimeError):
    """A call cannot be captured in a CUDA graph."""


class CudaTensor(Tensor):
    """A tensor whose ``device`` is ``cuda:0`` and whose memory is the host's; C++ code sees a CPU tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # it takes the same
    device = CUDA
    is_cuda = True
    is_cpu = False

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch types a function
        raise RuntimeError(f"{func} was called on a fake CUDA tensor outside of fake_cuda()")

    @override
    def get_device(self) -> int:
        return 0

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied.__dict__.update(self.__dict__)  # keeps whether it is a parameter
        return memo.setdefault(id(self), copied)


class Operator(NamedTuple):
    """The device rules for one of torch's operators."""

    name: str
    copies: bool
    indexes: bool
    is_empty: bool
    takes_numbers: bool
    needs_floats: bool
    waits: bool
    is_special: bool
    """Whether it is checked even if all its tensors are on the device."""
    writes: tuple[int | str, ...]
    """Positions or names of the arguments that the operator writes."""

    @classmethod
    @functools.cache
    def of(cls, func: Any) -> "Operator":
        """Return the rules for an operator."""
        packet = func.overloadpacket
        # Whether indexing waits depends on the dtype of the index.
        waits = packet in HIDDEN_WAITS or (
            packet not in INDEXING and any(tag in func.tags for tag in WAITING_TAGS)
        )
        return cls(
            name=str(func).removeprefix("aten."),
            copies=packet in COPIES,
            indexes=packet in INDEXING,
            is_empty=packet in EMPTY,
            takes_numbers=torch.Tag.pointwise in func.tags or packet in FILLS,
            needs_floats=packet in FLOATING_ONLY,
            waits=waits,
            is_special=waits or packet in INDEXING or packet in FLOATING_ONLY,
            writes=tuple(
                argument.name if argument.kwarg_only else index
                for index, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ),
        )


Tape = list[tuple[Callable[..., Any], Any, Any, Any]]
"""Operators in the order in which they ran, with their arguments and results."""


class FakeDevice(TorchDispatchMode):
    """A device that records when its host waits, and captures calls; made by :func:`fake_cuda`.

    Attributes:
        waits: the operations for which the host waited since the last :meth:`clear`.
        draws: uses of generators that a graph cannot replay.
        launches: names of the Triton kernels that were launched. They compute nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor is this
        self.waits: list[str] = []
        self.draws: list[str] = []
        self.launches: list[str] = []
        self.target = CPU
        """The device of the tensors that the current call from Python creates."""
        self._tape: Tape | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's default, True, costs some microseconds per operator

    def clear(self) -> None:
        """Clear the records."""
        for records in (self.waits, self.draws, self.launches):
            records.clear()

    @property
    def is_capturing(self) -> bool:
        """Return whether operators are being captured."""
        return self._tape is not None

    def wait(self, operation: str) -> None:
        """Record that the host waits."""
        self.waits.append(operation)
        self._refuse(operation)

    def draw(self, operation: str) -> None:
        """Record the use of a generator."""
        self.draws.append(operation)
        self._refuse(operation)

    def _refuse(self, operation: str) -> None:
        if self.is_capturing:
            raise CaptureError(f"operation not permitted when stream is capturing: {operation}")

    def check_generator(self, name: str, device: torch.device) -> None:
        """Compare the device of a call's generator with that of its tensor.

        Raises:
            DeviceMixError: they differ.
        """
        if device.type != self.target.type:
            raise DeviceMixError(f"{name} on {self.target.type} with a generator on {device.type}")
        if device.type == "cuda":
            self.draw(f"{name} with its own generator")

    def capture(
        self, call: Callable[[], object], turns: int, *, is_warm: bool = False
    ) -> Sequence[Callable[[], object]]:
        """Run ``turns`` warm-up calls, then capture ``turns`` calls; a replay repeats operators in place.

        Raises:
            CaptureError: the host waits in a call, or a generator is used.
        """
        for _ in range(0 if is_warm else turns):
            call()
        return [self._capture_once(call) for _ in range(turns)]

    def _capture_once(self, call: Callable[[], object]) -> Callable[[], object]:
        tape: Tape = []
        self._tape = tape
        try:
            result = call()
        finally:
            self._tape = None

        def replay() -> object:
            with (
                torch._C._AutoDispatchBelowAutograd(),
                torch._C._DisableTorchDispatch(),
                torch._C.DisableTorchFunction(),
            ):
                for func, args, kwargs, outputs in tape:
                    new_outputs = func(*args, **kwargs)
                    for old, new in zip(_tensors([outputs]), _tensors([new_outputs]), strict=True):
                        # An operator in place has written its result already.
                        if old.layout is torch.strided and old.data_ptr() != new.data_ptr():
                            old.copy_(new)
            return result

        return replay

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on the host's memory; its results are on the device where a GPU has them."""
        rules, kwargs = Operator.of(func), dict(kwargs)
        on_cuda, on_host = _places(args)
        if kwargs:
            kwargs_on_cuda, kwargs_on_host = _places(kwargs.values())
            on_cuda, on_host = on_cuda or kwargs_on_cuda, on_host or kwargs_on_host
        device = kwargs.get("device")
        if func is aten.copy_.default:
            goes_to_cuda = isinstance(args[0], CudaTensor)
        elif device is None:
            goes_to_cuda = on_cuda
        else:
            # torch's C++ code requests the CPU when it means the device of these tensors.
            goes_to_cuda = device.type == "cuda" or (device.type == "cpu" and self.target.type == "cuda")
            kwargs["device"] = CPU if device.type == "cuda" else device
        if rules.copies:
            if on_host if goes_to_cuda else on_cuda:
                self.wait(f"{rules.name} from {'cpu to cuda' if goes_to_cuda else 'cuda to cpu'}")
        elif on_cuda and (on_host or rules.is_special):
            self._check(rules, args, kwargs)
        with torch._C._DisableTorchDispatch():
            outputs = func(*args, **kwargs)
            if goes_to_cuda and rules.is_empty:
                outputs.zero_()  # no kernel computes them, so make the values deterministic
        if goes_to_cuda:
            outputs = _on_cuda(outputs)
            if self._tape is not None:
                self._tape.append(
                    (aten.zero_, (outputs,), {}, outputs) if rules.is_empty else (func, args, kwargs, outputs)
                )
        return outputs

    def _check(self, rules: Operator, args: Any, kwargs: Any) -> None:
        """Apply the device rules to an operator with at least one CUDA tensor among its arguments.

        Raises:
            DeviceMixError: its tensors are on two devices.
            NotImplementedError: CUDA has no such product.
        """
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        host = [tensor for tensor in tensors if _is_host(tensor)]
        if rules.indexes and isinstance(args[0], CudaTensor):
            indices = [tensor for tensor in args[1] if tensor is not None]
            if any(not isinstance(tensor, CudaTensor) for tensor in indices):
                self.wait(f"{rules.name} by an index on the cpu")
            # A single value is written wherever a mask is True; otherwise the host counts the places.
            writes_one_value = len(args) > 2 and args[2].numel() == 1
            if any(tensor.dtype in MASKS for tensor in indices) and not writes_one_value:
                self.wait(f"{rules.name} by a mask")
            host = [
                tensor for tensor in host if not any(tensor is index for index in indices) and tensor.dim()
            ]
        elif rules.takes_numbers:
            written = [kwargs.get(at) if isinstance(at, str) else args[at] for at in rules.writes]
            host = [tensor for tensor in host if tensor.dim() or any(tensor is target for target in written)]
        if host:
            places = ", ".join(f"{tensor.device.type}{[*tensor.shape]}" for tensor in tensors)
            raise DeviceMixError(f"{rules.name}: expected all tensors to be on the same device, got {places}")
        if rules.needs_floats and not args[0].is_floating_point():
            raise NotImplementedError(f"{rules.name} is not implemented for {args[0].dtype} on CUDA")
        if rules.waits:
            self.wait(rules.name)


class _Calls(TorchFunctionMode):
    """A mode that tracks the device requested by Python calls, and values that are read from tensors."""

    def __init__(self, cuda: FakeDevice) -> None:
        super().__init__()
        self._cuda = cuda

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MOVES:
            return self._move(func, *args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args)
        if name == "__set__":
            return self._assign(func, *args)
        on_cuda, _ = _places(args)
        if kwargs:
            on_cuda = on_cuda or _places(kwargs.values())[0]
        target = CUDA if on_cuda else CPU
        if kwargs and kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
            kwargs = {**kwargs, "device": CPU if target.type == "cuda" else target}
        before, self._cuda.target = self._cuda.target, target
        try:
            return self._call_function(func, name, args, kwargs or {}, on_cuda=on_cuda)
        finally:
            self._cuda.target = before

    def _assign(self, func: Any, tensor: Tensor, value: object) -> Any:
        """Set an attribute of a tensor; a gradient must be on its device."""
        if func == SET_GRAD and isinstance(value, Tensor) and value.device.type != tensor.device.type:
            raise DeviceMixError(
                f"a gradient on {value.device.type} is assigned to a tensor on {tensor.device.type}"
            )
        return func(tensor, value)

    def _call_function(self, func: Any, name: str, args: Any, kwargs: Any, *, on_cuda: bool) -> Any:
        """Call a function that creates tensors on the requested device."""
        if on_cuda and func in READ_BY_PYTHON:
            self._cuda.wait(name)
            with torch._C._DisableTorchDispatch():
                return func(args[0].detach(), *args[1:], **kwargs)
        if func is Tensor.__setitem__ and on_cuda and isinstance(args[2], bool | int | float):
            # On a GPU the number is passed as a kernel argument, without a copy.
            args = (*args[:2], _on_cuda(torch.tensor(args[2], dtype=args[0].dtype)))
        if (generator := kwargs.get("generator")) is not None:
            self._cuda.check_generator(name, generator.device)
        result = func(*args, **kwargs)
        if func in CREATED_ON_HOST and self._cuda.target.type == "cuda" and type(result) is Tensor:
            self._cuda.wait(f"{name} from cpu to cuda")
            result = _on_cuda(result.clone())
        return result

    def _move(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Emulate ``to``, ``cpu`` and ``cuda``; for torch's C++ code both devices are the CPU."""
        copy, dtype, layout = kwargs.pop("copy", False), None, None
        device = CPU if func is Tensor.cpu else CUDA
        if func is Tensor.to:
            if args and isinstance(args[0], Tensor):
                args = (args[0].device, args[0].dtype, *args[1:])
            device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
            device = device or tensor.device
        crosses = device.type != tensor.device.type
        before, self._cuda.target = self._cuda.target, device
        try:
            return tensor.to(
                CPU if device.type == "cuda" else device,
                dtype or tensor.dtype,
                copy=copy or crosses,
                memory_format=torch.preserve_format if layout is None else layout,
            )
        finally:
            self._cuda.target = before


def _is_host(tensor: Tensor) -> bool:
    """Return whether a tensor is on the CPU."""
    return not isinstance(tensor, CudaTensor) and not tensor.is_meta


def _places(values: Iterable[object]) -> tuple[bool, bool]:
    """Return whether values, or lists among them, contain a CUDA tensor, and a tensor of the CPU."""
    on_cuda = on_host = False
    for value in values:
        if type(value) is CudaTensor:
            on_cuda = True
        elif isinstance(value, list | tuple):
            for found in _tensors(value):
                on_cuda |= type(found) is CudaTensor
                on_host |= _is_host(found)
        elif isinstance(value, Tensor):
            on_host |= not value.is_meta
    return on_cuda, on_host


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors among values, in lists of them and in Triton's descriptors."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif type(value).__name__ == "TensorDescriptor":
            yield from _tensors([vars(value)["base"]])


def _on_cuda(value: Any) -> Any:
    """Return the tensors of a result on the device; they share the memory of those on the CPU."""
    if isinstance(value, list | tuple):
        return type(value)(map(_on_cuda, value))
    return Tensor._make_subclass(CudaTensor, value) if type(value) is Tensor else value


def _generators(cuda: FakeDevice) -> type[torch.Generator]:
    """Return a class of generators that can be on the device."""

    class Generator(torch.Generator):
        device = CPU

        def __new__(cls, device: torch.device | str = "cpu") -> "Generator":  # noqa: ARG004, PYI034  __init__ takes it
            return super().__new__(cls, "cpu")  # type: ignore[call-arg]  # torch's stub lacks it

        def __init__(self, device: torch.device | str = "cpu") -> None:
            self.device = torch.device(device)

        @override
        def manual_seed(self, seed: int) -> torch.Generator:
            if self.device.type == "cuda":
                cuda.draw("a generator is seeded")
            super().manual_seed(seed)
            return self

    return Generator


def _replacements(cuda: FakeDevice) -> dict[str, object]:
    """Return replacements for functions of ``torch.cuda``."""
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: cuda.wait("Stream.synchronize"))
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, L2_cache_size=50 * 2**20, multi_processor_count=132
    )

    def nothing(*_: object, **__: object) -> int:
        return 0

    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties,
        **dict.fromkeys(("device_of", "device", "stream"), lambda _: contextlib.nullcontext()),
        **dict.fromkeys(("Stream", "current_stream", "default_stream"), lambda *_, **__: stream),
        "synchronize": lambda *_: cuda.wait("synchronize"),
        "is_current_stream_capturing": lambda: cuda.is_capturing,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        **dict.fromkeys(("set_rng_state", "manual_seed_all", "empty_cache"), nothing),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "max_memory_reserved"), nothing),
        "reset_peak_memory_stats": nothing,
        "memory_stats": lambda *_: {},
        "mem_get_info": lambda *_: (2**36, 2**36),
    }


def _fake_launch(cuda: FakeDevice) -> Callable[..., None]:
    """Return a replacement for the launch of a Triton kernel."""

    def run(kernel: Any, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:  # noqa: ARG001  triton names them
        name = kernel.fn.__name__
        for tensor in (*_tensors(args), *_tensors(kwargs.values())):
            if not isinstance(tensor, CudaTensor):
                raise DeviceMixError(f"the kernel {name} was given a tensor on {tensor.device}")
        cuda.launches.append(name)

    return run


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeDevice]:
    """Simulate a GPU inside the context.

    Modules that imported torch's ``Generator`` get one that can be on the device. ``torch.compile`` returns
    the function itself, so that the code which it would compile is checked.
    """
    cuda = FakeDevice()
    calls, generator, real = _Calls(cuda), _generators(cuda), torch.Generator
    engine = torch.autograd.graph._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        with calls:  # the mode is off here, but hooks call torch as well
            return engine(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        for name, value in _replacements(cuda).items():
            patch.setattr(torch.cuda, name, value)
        for name, module in list(sys.modules.items()):
            ours = name.partition(".")[0] in {"torch", "impls", "esbench", "tests"}
            if ours and vars(module).get("Generator") is real:
                patch.setattr(module, "Generator", generator)
        patch.setattr(
            torch.backends.cuda, "is_built", lambda: True
        )  # otherwise optimizers do not check for a capture
        patch.setattr(torch, "compile", lambda function=None, **_: function)
        patch.setattr(torch.autograd, "_engine_run_backward", backward)
        if importlib.util.find_spec("triton"):
            patch.setattr("triton.runtime.jit.JITFunction.run", _fake_launch(cuda))
        # A moved module keeps its parameters, whose class changes.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.enter_context(calls)
        stack.enter_context(cuda)
        yield cuda
