"""CUDA tensors on a machine without a GPU: values lie on the host, and torch's rules for devices hold.

Inside of :func:`fake_cuda` tensors can be made on the device ``cuda``. Operators compute their values on the CPU
and raise or note what matters on a GPU:

* Tensors of two devices in one operator raise :class:`DeviceMixError`, except for CPU tensors of no dimension
  where torch reads them as numbers. So does a generator of another device than the tensor that it fills, and a
  Triton kernel that is given a CPU tensor.
* What makes the host wait for the device is noted in :attr:`FakeCuda.waits`: reading a value (``.item()``,
  ``.tolist()``, ``torch.equal``, ``if tensor:``), a result whose shape depends on values (``nonzero``, boolean
  indices), a copy from one device to the other, and ``synchronize``. None of it can be captured in a CUDA graph.
* Seeding a generator, and drawing from one that is not the default, cannot be captured either:
  :attr:`FakeCuda.draws`.

torch's own ``FakeTensorMode`` knows the mixed devices only. Its tensors have no values, so code that checks
results cannot run on them; and in a build of torch without CUDA it can neither move tensors to ``cuda``, nor
index them, nor run a backward pass.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Anything = Any  # arguments and results of torch's functions

aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

COPIES = (aten.copy_, aten._to_copy)
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
EMPTY = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
PRODUCTS = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot, aten.convolution)
"""What CUDA has for floating point only."""
HIDDEN_WAITS = (aten.multinomial, aten._linalg_check_errors)
"""Operators that read a value inside of their CUDA implementation."""
WAITING_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
READ_BY_PYTHON = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
BUILT_ON_HOST = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}


class DeviceMixError(RuntimeError):
    """Tensors, or a tensor and a generator, of two devices met in one call."""


class CaptureError(RuntimeError):
    """What was called cannot be captured in a CUDA graph."""


class CudaTensor(Tensor):
    """A tensor whose ``device`` is ``cuda:0`` and whose memory is the host's."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor) -> "CudaTensor":
        return torch.Tensor._make_subclass(cls, values)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        message = f"{func} was called on a fake CUDA tensor outside of fake_cuda()"
        raise RuntimeError(message)

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"CudaTensor({[*self.shape]}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied.__dict__.update(self.__dict__)
        return memo.setdefault(id(self), copied)


class FakeCuda(TorchDispatchMode):
    """A device that notes what its host waits for; made by :func:`fake_cuda`.

    Attributes:
        waits: what the host waited for since the last :meth:`clear`.
        draws: how generators were used that a graph does not know.
        launches: names of the Triton kernels that were launched. They compute nothing.

    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.draws: list[str] = []
        self.launches: list[str] = []
        self._asked = CPU  # where the tensors are that the present call of Python makes
        self._tape: list[tuple[Callable[..., Anything], Anything, Anything, Anything]] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and looking for that takes time at every operator

    def clear(self) -> None:
        """Forget what was noted."""
        for notes in (self.waits, self.draws, self.launches):
            notes.clear()

    @property
    def is_capturing(self) -> bool:
        return self._tape is not None

    def wait(self, what: str) -> None:
        """Note that the host waits."""
        self.waits.append(what)
        self._refuse(what)

    def draw(self, what: str) -> None:
        """Note the use of a generator."""
        self.draws.append(what)
        self._refuse(what)

    def _refuse(self, what: str) -> None:
        if self.is_capturing:
            message = f"operation not permitted when stream is capturing: {what}"
            raise CaptureError(message)

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """Record the operators of a call; return what runs them again, on the same memory.

        Raises:
            CaptureError: the host waits inside, or a generator is used.

        """
        self._tape = tape = []
        try:
            result = call()
        finally:
            self._tape = None

        def replay() -> object:
            with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableTorchDispatch():
                for func, args, kwargs, outputs in tape:
                    again = func(*args, **kwargs)
                    for old, new in zip(_tensors([outputs]), _tensors([again]), strict=True):
                        if old.layout is torch.strided and old.data_ptr() != new.data_ptr():
                            old.copy_(new)
            return result

        return replay

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run one operator on the host's memory, and let its results be where a GPU would have them."""
        kwargs = dict(kwargs or {})
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        on_cuda = any(isinstance(one, CudaTensor) for one in tensors)
        device = kwargs.get("device")
        if device is None:
            goes_to_cuda = on_cuda
        else:
            # Inside of torch the device of these tensors is the CPU: then the call from Python decides.
            goes_to_cuda = device.type == "cuda" or (device.type == "cpu" and self._asked.type == "cuda")
            kwargs["device"] = CPU if device.type == "cuda" else device
        self._check(func, args, kwargs, tensors, goes_to_cuda=goes_to_cuda, on_cuda=on_cuda)
        with torch._C._DisableTorchDispatch():
            outputs = func(*args, **kwargs)
            if goes_to_cuda and func.overloadpacket in EMPTY:
                outputs.zero_()  # what a kernel that never ran leaves here is the same every time
        if goes_to_cuda:
            outputs = _on_cuda(outputs)
        if self._tape is not None and goes_to_cuda:
            is_empty = func.overloadpacket in EMPTY
            self._tape.append((aten.zero_, (outputs,), {}, outputs) if is_empty else (func, args, kwargs, outputs))
        return outputs

    def check_generator(self, name: str, device: torch.device) -> None:
        """Hold the generator of a call to the device of its tensor."""
        if device.type != self._asked.type:
            message = f"{name} on {self._asked.type} with a generator on {device.type}"
            raise DeviceMixError(message)
        if device.type == "cuda":
            self.draw(f"{name} with a generator of its own")

    def _check(self, func, args, kwargs, tensors, *, goes_to_cuda: bool, on_cuda: bool) -> None:
        """Hold an operator to the rules of devices, and note what it waits for."""
        packet, name = func.overloadpacket, str(func).removeprefix("aten.")
        host = [one for one in tensors if not isinstance(one, CudaTensor) and not one.is_meta]
        if packet in COPIES:
            if host if goes_to_cuda else on_cuda:
                self.wait(f"{name} from {'cpu to cuda' if goes_to_cuda else 'cuda to cpu'}")
        elif on_cuda and host:
            if packet in INDEXED and isinstance(args[0], CudaTensor) and not any(one is host for one in args[2:3]):
                self.wait(f"{name} by an index on the cpu")
            elif any(one.dim() for one in host) or not (torch.Tag.pointwise in func.tags or packet in INDEXED):
                places = ", ".join(f"{one.device.type}{[*one.shape]}" for one in tensors)
                message = f"{name}: expected all tensors to be on the same device, got {places}"
                raise DeviceMixError(message)
        if not on_cuda:
            return
        if packet in PRODUCTS and not args[0].is_floating_point():
            message = f"{name} is not implemented for {args[0].dtype} on CUDA"
            raise NotImplementedError(message)
        if packet in INDEXED:
            masked = any(one is not None and one.dtype in {torch.bool, torch.uint8} for one in args[1])
            # A single value is written wherever the mask is on; all else asks how many places there are.
            if masked and (packet is aten.index or args[2].numel() != 1):
                self.wait(f"{name} by a mask")
        elif any(tag in func.tags for tag in WAITING_TAGS) or packet in HIDDEN_WAITS:
            self.wait(name)


class _Calls(TorchFunctionMode):
    """Calls as Python makes them: the device that was asked for, and values that leave torch."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func, types, args=(), kwargs=None):
        cuda, kwargs = self._cuda, dict(kwargs or {})
        if getattr(func, "__name__", "") in {"__get__", "__set__"}:
            return func(*args, **kwargs)
        on_cuda = any(isinstance(one, CudaTensor) for one in (*_tensors(args), *_tensors(kwargs.values())))
        if func in {Tensor.to, Tensor.cpu, Tensor.cuda}:
            return self._moved(func, *args, **kwargs)
        if func in READ_BY_PYTHON and on_cuda:
            cuda.wait(func.__name__)
            with torch._C._DisableTorchDispatch():
                return func(args[0].detach(), *args[1:], **kwargs)
        if func is Tensor.__setitem__ and on_cuda and isinstance(args[2], bool | int | float):
            args = (*args[:2], CudaTensor(torch.tensor(args[2], dtype=args[0].dtype)))  # as a kernel's argument
        asked = kwargs.get("device")
        if asked is not None:
            asked = torch.device(asked)
            kwargs["device"] = CPU if asked.type == "cuda" else asked
        before, cuda._asked = cuda._asked, asked or (CUDA if on_cuda else CPU)
        if (generator := kwargs.get("generator")) is not None:
            cuda.check_generator(func.__name__, generator.device)
        try:
            result = func(*args, **kwargs)
            if func in BUILT_ON_HOST and cuda._asked.type == "cuda" and type(result) is Tensor:
                cuda.wait(f"{func.__name__} from cpu to cuda")
                result = CudaTensor(result)
        finally:
            cuda._asked = before
        return result

    def _moved(self, func, tensor: Tensor, *args, **kwargs):
        """Do what ``to``, ``cpu`` and ``cuda`` do, which torch would leave out where it takes both for the host."""
        if func is Tensor.to and args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        if func is Tensor.to:
            copy = kwargs.pop("copy", False)
            device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        else:
            copy, dtype, layout = False, None, None
            device = CPU if func is Tensor.cpu else CUDA
        device = device or tensor.device
        crosses = device.type != tensor.device.type
        cuda = self._cuda
        before, cuda._asked = cuda._asked, device
        inner = {"memory_format": layout} if layout is not None else {}
        try:
            if device.type not in {"cpu", "cuda"} or tensor.is_meta:
                return Tensor.to(tensor, device=device, dtype=dtype, copy=copy, **inner)
            return Tensor.to(tensor, device=CPU, dtype=dtype or tensor.dtype, copy=copy or crosses, **inner)
        finally:
            cuda._asked = before


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors among values and inside of lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _on_cuda(value: Anything) -> Anything:
    """Take the tensors of a result for the device's."""
    if isinstance(value, list | tuple):
        return type(value)(map(_on_cuda, value))
    return CudaTensor(value) if type(value) is Tensor else value


def _generators(cuda: FakeCuda) -> type[torch.Generator]:
    """Return a class of generators that may be of the device."""

    class Generator(torch.Generator):
        def __new__(cls, device: torch.device | str = "cpu"):
            return super().__new__(cls, "cpu")

        def __init__(self, device: torch.device | str = "cpu") -> None:
            self._place = torch.device(device)

        device = property(lambda self: self._place)

        def manual_seed(self, seed: int) -> torch.Generator:
            if self._place.type == "cuda":
                cuda.draw("a generator is seeded")
            super().manual_seed(seed)
            return self

    return Generator


def _patches(cuda: FakeCuda) -> dict[str, object]:
    """Return what stands in for functions of ``torch.cuda``."""
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: cuda.wait("Stream.synchronize"))
    properties = SimpleNamespace(name="NVIDIA H200", L2_cache_size=50 * 2**20, multi_processor_count=132)

    def zero(*_args: object, **_kwargs: object) -> int:
        return 0

    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties,
        "device_of": lambda _: contextlib.nullcontext(),
        "device": lambda _: contextlib.nullcontext(),
        "stream": lambda _: contextlib.nullcontext(),
        "Stream": lambda *_, **__: stream,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "synchronize": lambda *_: cuda.wait("synchronize"),
        "is_current_stream_capturing": lambda: cuda.is_capturing,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": zero,
        "manual_seed_all": zero,
        "empty_cache": zero,
        "reset_peak_memory_stats": zero,
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "max_memory_reserved"), zero),
        "memory_stats": lambda *_: {},
        "mem_get_info": lambda *_: (2**36, 2**36),
    }


def _launch(cuda: FakeCuda) -> Callable[..., None]:
    """Return what stands in for the launch of a Triton kernel."""

    def run(kernel: Anything, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        name = kernel.fn.__name__
        for one in (*_tensors(args), *_tensors(kwargs.values())):
            if not isinstance(one, CudaTensor):
                message = f"kernel {name} was given a tensor on {one.device}"
                raise DeviceMixError(message)
        cuda.launches.append(name)

    return run


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Have a GPU inside. Modules that imported ``Generator`` from torch before are given one that knows it.

    ``torch.compile`` leaves functions as they are: what is checked is the code that it would compile.
    """
    cuda = FakeCuda()
    generator, real = _generators(cuda), torch.Generator
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        for name, value in _patches(cuda).items():
            patch.setattr(torch.cuda, name, value)
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in {"torch", "impls", "esbench", "tests"} and vars(module).get("Generator") is real:
                patch.setattr(module, "Generator", generator)
        patch.setattr(torch, "compile", lambda function=None, **_: function)
        engine = torch.autograd.graph._engine_run_backward

        def backward(*args: object, **kwargs: object) -> Anything:
            with calls:  # what hooks call is looked at as well
                return engine(*args, **kwargs)

        patch.setattr(torch.autograd, "_engine_run_backward", backward)
        if importlib.util.find_spec("triton"):
            patch.setattr("triton.runtime.jit.JITFunction.run", _launch(cuda))
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        calls = _Calls(cuda)
        try:
            with calls, cuda:
                yield cuda
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
