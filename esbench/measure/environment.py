"""The machine and the software of a run, as stored in its header."""

import contextlib
import hashlib
import importlib.metadata
import inspect
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
import torch

import esbench
from esbench import git
from esbench.errors import UserError
from esbench.measure.gpu_monitor import foreign_processes, idle_power_w
from esbench.measure.nvml import Nvml, NvmlError, current_uuid
from esbench.registry import Entry
from esbench.schema import Environment

GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
VOLATILE = {"load", "foreign", "idle_w"}
"""Fields of an Environment that vary between runs on one machine."""
SOURCES = ("*.py", "*.json")
"""The files of a package that are hashed: code, and tables of tuned tile sizes."""
HASH_DIGITS = 12
"""The length of a stored hash."""


def resolve_device(name: str) -> Literal["cpu", "cuda"]:
    """Return the device for ``auto`` (CUDA where torch has it), ``cpu`` or ``cuda``.

    Raises:
        UserError: CUDA is not available, or the name is unknown.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return "cpu"
    if name != "cuda":
        raise UserError(f"no device {name!r}; available: auto, cpu, cuda")
    if missing := cuda_problem():
        raise UserError(f"--device cuda: {missing}; use --device cpu, or see `esbench doctor`")
    return "cuda"


def cuda_problem() -> str:
    """Return why torch cannot use a CUDA device, or an empty string if it can."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return (
        f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and finds no usable GPU or driver"
    )


def environment(device: str) -> Environment:
    """Return the description of this machine; a field is None if it is unknown. Never fails.

    On CUDA the idle power is read for a second, during which nothing else should use the GPU.
    """
    cpu = cpu_name()
    git_commit, cpu_governor = commit(), governor()
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
        commit=git_commit,
        dirty=git.is_dirty(Path(esbench.__file__).parent) if git_commit else None,
        clocks=f"governor {cpu_governor}" if cpu_governor else None,
        load=_load(),
    )
    if device != "cuda":
        return machine
    # Called before torch creates a CUDA context, which adds this process to NVML's list.
    foreign = foreign_processes()
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return msgspec.structs.replace(
        machine,
        device="cuda",
        device_name=gpu.name,
        device_memory_bytes=gpu.total_memory,
        cuda=torch.version.cuda,
        uuid=device_uuid(device),
        foreign=foreign,
        **_nvml_fields(),
    )


def device_uuid(device: str) -> str | None:
    """Return the current GPU's UUID, None for a CPU. Never fails, and creates no CUDA context."""
    try:
        return current_uuid() if device == "cuda" else None
    except NvmlError:
        return None


def differences(
    before: Environment, now: Environment, code_before: Mapping[str, str], code_now: Mapping[str, str]
) -> list[str]:
    """Return a text for each field of the environment, except for the VOLATILE ones, and code that differs.

    What was interrupted is resumed only without such differences. The code is that of :func:`source_hashes`.
    """
    names = [name for name in Environment.__struct_fields__ if name not in VOLATILE]
    pairs = [(name, getattr(before, name), getattr(now, name)) for name in names]
    changes = [f"{name.replace('_', ' ')} {_format(a)} vs {_format(b)}" for name, a, b in pairs if a != b]
    return changes + [
        f"the code of {name}" for name, code in code_before.items() if code != code_now.get(name)
    ]


def _format(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def source_hashes(entries: Iterable[Entry]) -> dict[str, str]:
    """Return short SHA-256 hashes of the source code of the variants, their packages and the harness.

    The hash of a variant is the hash of the file that defines its scheme. The hash of a package is that of
    all its files, because a scheme may import any of them. A scheme without a file is left out.
    """
    hashes = {}
    packages = {"esbench": Path(esbench.__file__)}
    for entry in entries:
        # inspect raises a TypeError for a built-in class and an OSError if there is no file.
        with contextlib.suppress(TypeError, OSError):
            file = Path(inspect.getfile(type(entry.scheme)))
            hashes[entry.variant.name] = _hash([file])
            root = getattr(sys.modules.get(entry.package), "__file__", None)
            packages[entry.package] = Path(root) if root else file
    for name, file in packages.items():
        is_package = file.name == "__init__.py"
        files = [path for glob in SOURCES for path in file.parent.rglob(glob)] if is_package else [file]
        hashes[name] = _hash(sorted(files))
    return hashes


def _hash(files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(file.read_bytes())
    return total.hexdigest()[:HASH_DIGITS]


def governor() -> str | None:
    """Return the CPU frequency governor of Linux, such as ``performance``, None if it is unknown."""
    try:
        return GOVERNOR.read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def cpu_name() -> str:
    """Return the processor's name, or its architecture if the system does not report the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, [*names, platform.processor(), platform.machine()]), "unknown")


def package_version(name: str) -> str | None:
    """Return the version of a package without importing it, None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the git commit of esbench's source, None if it is not in a git checkout."""
    return git.commit(Path(esbench.__file__).parent)


def _load() -> float | None:
    try:
        return psutil.getloadavg()[0]
    except OSError:
        return None


def _nvml_fields() -> dict[str, Any]:
    """Return the fields of an Environment that NVML reports; None for a reading that NVML refuses."""
    readers: dict[str, Callable[[Nvml], object]] = {
        "driver": Nvml.driver,
        "clocks": Nvml.clock_policy,
        "idle_w": idle_power_w,
    }
    fields: dict[str, Any] = dict.fromkeys(readers)
    with contextlib.suppress(NvmlError), Nvml() as nvml:
        for name, read in readers.items():
            with contextlib.suppress(NvmlError):
                fields[name] = read(nvml)
    return fields
