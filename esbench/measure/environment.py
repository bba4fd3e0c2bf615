"""Where and with what a run is taken: what stands in the header of every run."""

import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import msgspec
import psutil
import torch

import esbench
from esbench.errors import UserError
from esbench.measure.nvml import Nvml, NvmlError
from esbench.records import Environment

GIT_TIMEOUT_S = 10.0
GENERATED = (":(exclude)results", ":(exclude)reports")
"""What runs themselves write does not make a tree dirty."""


class DeviceError(UserError):
    """The device that was asked for is not there; the message says what to do."""


def resolve_device(name: str) -> Literal["cpu", "cuda"]:
    """Return the device for ``auto`` (CUDA where torch has it), ``cpu`` or ``cuda``.

    Raises:
        DeviceError: CUDA is asked for where torch has none, or the name is another.

    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return "cpu"
    if name != "cuda":
        message = f"no device {name!r}; there are: auto, cpu, cuda"
        raise DeviceError(message)
    if missing := no_cuda():
        message = f"--device cuda: {missing}; use --device cpu, or see `esbench doctor`"
        raise DeviceError(message)
    return "cuda"


def no_cuda() -> str:
    """Return why torch cannot use a CUDA device, or nothing if it can."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return (
        f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and finds no usable GPU or driver"
    )


def environment(device: str) -> Environment:
    """Describe this machine; ``None`` stands wherever it cannot say. Never fails."""
    cpu = cpu_name()
    head = commit()
    machine = Environment(
        device="cpu",
        device_name=cpu,
        cpu=cpu,
        threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
        platform=platform.platform(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=package_version("triton"),
        esbench=esbench.__version__,
        matmul_precision=torch.get_float32_matmul_precision(),
        commit=head,
        dirty=_dirty() if head else None,
    )
    if device != "cuda":
        return machine
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return msgspec.structs.replace(
        machine,
        device="cuda",
        device_name=gpu.name,
        device_memory_bytes=gpu.total_memory,
        cuda=torch.version.cuda,
        driver=_driver(),
    )


def cpu_name() -> str:
    """Return the processor's name as the system knows it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, [*names, platform.processor(), platform.machine()]), "unknown")


def package_version(name: str) -> str | None:
    """Return the version of an installed package without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def git(*arguments: str) -> str | None:
    """Return what git says about the tree that holds this package, None if it says nothing."""
    program = shutil.which("git")
    if program is None:
        return None
    command = [program, "-C", str(Path(esbench.__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)  # noqa: S603  # fixed words only
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> str | None:
    """Return the commit of this package, None where the package itself is not under version control.

    Installed into an environment inside somebody's repository, it is not: that repository's
    commit says nothing about the code that was measured.
    """
    tracked = git("ls-files", "--error-unmatch", "__init__.py")
    return git("rev-parse", "HEAD") if tracked else None


def _dirty() -> bool | None:
    top = git("rev-parse", "--show-toplevel")
    status = git("-C", top, "status", "--porcelain", "--", ".", *GENERATED) if top else None
    return None if status is None else bool(status)


def _driver() -> str | None:
    try:
        with Nvml() as nvml:
            return nvml.driver()
    except NvmlError:
        return None
