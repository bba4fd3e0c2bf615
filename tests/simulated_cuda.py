"""A CUDA device simulated on the CPU: tensors with real values that refuse to be mixed with CPU tensors.

FakeTensorMode computes shapes only, so a check that reads values cannot run under it. Here each operation
runs on the CPU, and tensors of the simulated device report that they are on ``cuda:0``.

Two limits: the device must be named with its index, and torch's C++ code takes the tensors to be on ``meta``.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

CUDA = torch.device("cuda", 0)

ACROSS_DEVICES = {
    torch.ops.aten._to_copy.default,  # noqa: SLF001  torch's own name for it
    torch.ops.aten.copy_.default,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}
"""What CUDA takes tensors of both devices for: copies, and indices on the CPU."""


class SimulatedTensor(Tensor):
    """A tensor on the simulated device; ``on_cpu`` is the CPU tensor that holds its values."""

    device = CUDA
    is_meta = False
    is_cuda = True
    on_cpu: Tensor

    @staticmethod
    def __new__(cls: type["SimulatedTensor"], values: Tensor) -> "SimulatedTensor":  # noqa: PYI034  not typed by torch
        """Wrap a CPU tensor."""
        made = Tensor._make_wrapper_subclass(  # noqa: SLF001  what torch offers for it
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device("meta"),
        )
        made.on_cpu = values
        return made

    @override
    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    @override
    def tolist(self) -> Any:
        return self.on_cpu.tolist()

    @override
    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_without_lists(index))

    @override
    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_without_lists(index), value)

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = SimulatedTensor(self.on_cpu.detach().clone())
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to:
            if isinstance(other := args[1], Tensor):
                args = (args[0], other.device, other.dtype, *args[2:])
            if any(str(value) == "meta" for value in (*args[1:], *kwargs.values())):
                one = args[0]
                return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
        if func is torch.where and isinstance(args[2], float):
            args = (*args[:2], args[1].new_full((), args[2]))
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # by torch

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch types a function
        return _computed(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Simulates what is created on ``cuda:0``."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


@contextlib.contextmanager
def simulated_cuda(is_capturing: Callable[[], bool] = bool) -> Iterator[None]:
    """Let ``cuda:0`` be the simulated device inside of the context; it says whether a graph is captured."""
    generator = torch.Generator
    with contextlib.ExitStack() as stack:
        for module in ("impls.noise", "impls.inputs", "esbench.measure.audit"):
            stack.enter_context(mock.patch(f"{module}.Generator", side_effect=lambda *_: generator()))
        stack.enter_context(mock.patch("torch.cuda._lazy_init"))
        stack.enter_context(mock.patch("torch.cuda.is_current_stream_capturing", is_capturing))
        # A parameter whose data is set keeps its old values here, so conversions make new parameters.
        replaces = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, replaces)
        stack.enter_context(_Factories())  # type: ignore[no-untyped-call]  # by torch
        yield


def _without_lists(index: Any) -> Any:
    """Turn the lists of an index into tensors of the device; torch itself would create them on ``meta``."""
    if isinstance(index, tuple):
        return tuple(map(_without_lists, index))
    return torch.tensor(index).to(CUDA) if isinstance(index, list) else index


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the CPU.

    Raises:
        RuntimeError: its tensors are on different devices.

    """
    tensors = [leaf for leaf in tree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    simulated = [tensor for tensor in tensors if isinstance(tensor, SimulatedTensor)]
    others = [tensor for tensor in tensors if not isinstance(tensor, SimulatedTensor) and tensor.dim()]
    if simulated and others and func not in ACROSS_DEVICES:
        message = f"{func}: expected all tensors to be on the same device, found cuda:0 and cpu"
        raise RuntimeError(message)
    asked = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
    copies = func is torch.ops.aten._to_copy.default  # noqa: SLF001  torch's own name for it
    # Where torch makes one tensor from another, it asks for meta in place of the simulated device.
    is_asked = asked == "cuda" or (asked == "meta" and (bool(simulated) or copies))
    if is_asked:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = func(*tree.tree_map(_on_cpu, args), **tree.tree_map(_on_cpu, kwargs))
    is_simulated = is_asked or (bool(simulated) and asked is None)
    if func is torch.ops.aten.copy_.default:
        is_simulated = isinstance(args[0], SimulatedTensor)
    known = {id(tensor.on_cpu): tensor for tensor in simulated}

    def wrapped(value: Any) -> Any:
        if not (is_simulated and isinstance(value, Tensor)):
            return value
        return known[id(value)] if id(value) in known else SimulatedTensor(value)

    return tree.tree_map(wrapped, result)


def _on_cpu(value: Any) -> Any:
    return value.on_cpu if isinstance(value, SimulatedTensor) else value
