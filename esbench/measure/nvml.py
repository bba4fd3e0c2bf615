"""Everything that is asked of NVML, behind one class.

NVML may be missing, refuse, or answer nonsense (containers, MIG slices, other people's drivers).
Each of these is an :class:`NvmlError` with one line that says which; nothing else leaves this module.
"""

import contextlib
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Self

import torch

FULL_PERCENT = 100


class NvmlError(Exception):
    """NVML cannot say; the message is the reason."""


class Nvml:
    """One GPU as NVML sees it, found by the UUID that torch gives, not by its index.

    ``CUDA_VISIBLE_DEVICES`` renumbers torch's devices and not NVML's. Use it as a context manager.
    ``bindings`` stands for the module ``pynvml`` in tests.
    """

    def __init__(self, uuid: str | None = None, bindings: ModuleType | None = None) -> None:
        """Load the library and find the device.

        Raises:
            NvmlError: there is no NVML here, or it does not know the device.

        """
        self._nvml = bindings or _bindings()
        self._ask("start", self._nvml.nvmlInit)
        try:
            name = f"GPU-{uuid or current_uuid()}"
            self._handle = self._ask("find the GPU", lambda: self._nvml.nvmlDeviceGetHandleByUUID(name))
        except NvmlError:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the library."""
        self.close()

    def close(self) -> None:
        """Release the library; a failure to do so matters to nobody."""
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()

    def driver(self) -> str:
        """Return the driver's version.

        Raises:
            NvmlError: NVML refuses.

        """
        version = self._ask("read the driver's version", self._nvml.nvmlSystemGetDriverVersion)
        return version.decode() if isinstance(version, bytes) else str(version)

    def utilization_percent(self) -> float:
        """Return the share of the last sample period, 1/6 s to 1 s, with a kernel running.

        Raises:
            NvmlError: NVML refuses, or says something that is no percentage.

        """
        rates = self._ask(
            "read the utilisation", lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        )
        percent = getattr(rates, "gpu", None)
        if not isinstance(percent, int | float) or not 0 <= percent <= FULL_PERCENT:
            message = f"NVML answers {percent!r} when asked for a utilisation in percent"
            raise NvmlError(message)
        return float(percent)

    @staticmethod
    def _ask(what: str, question: Callable[[], Any]) -> Any:  # noqa: ANN401  # pynvml has no types
        try:
            return question()
        except Exception as error:
            message = f"NVML cannot {what}: {error or type(error).__name__}"
            raise NvmlError(message) from error


def current_uuid() -> str:
    """Return the UUID of torch's current CUDA device.

    Raises:
        NvmlError: torch has no CUDA device.

    """
    if not torch.cuda.is_available():
        message = "torch sees no CUDA device"
        raise NvmlError(message)
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _bindings() -> ModuleType:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        message = "the package nvidia-ml-py is not installed"
        raise NvmlError(message) from error
