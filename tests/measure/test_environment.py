"""Where a run is taken."""

import inspect
import platform
import shutil
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import psutil
import pytest
import torch

import esbench
from esbench import git as git_module
from esbench.git import TOLD, GitError, code_hash, git
from esbench.measure import environment as module
from esbench.measure.environment import (
    DeviceError,
    commit,
    cpu_name,
    device_uuid,
    differences,
    environment,
    package_version,
    resolve_device,
    source_hashes,
)
from esbench.registry import Entry
from esbench.schema import Environment, Variant
from tests.fake_nvml import UUID, answering, install, processes, refusing
from tests.fresh_process import new_process

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture(autouse=True)
def _new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Know nothing of the GPU from another test."""
    monkeypatch.delenv(TOLD, raising=False)
    with new_process(tmp_path, monkeypatch):
        yield


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a repository that holds a package esbench, one commit old, and return its folder."""
    package = tmp_path / "esbench"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.setattr(esbench, "__file__", str(package / "__init__.py"))
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "esbench"], [*identity, "commit", "-qm", "First"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)  # noqa: S607  # wherever git is
    return tmp_path


def test_the_environment_of_a_cpu_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions and sizes are there, and no field of a GPU; what the system does not report is None."""
    here = environment("cpu")
    assert here.device == "cpu"
    assert here.device_name == here.cpu != ""
    assert (here.torch, here.python) == (torch.__version__, platform.python_version())
    assert here.threads == torch.get_num_threads()
    assert here.memory_bytes > 2**20
    assert (here.cuda, here.driver, here.device_memory_bytes) == (None, None, None)
    assert (here.uuid, here.foreign, here.idle_w) == (None, (), None)
    assert (here.load or 0.0) >= 0
    monkeypatch.setattr(psutil, "getloadavg", Mock(side_effect=OSError))
    assert environment("cpu").load is None
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert environment("cpu").matmul_precision == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert package_version("esbench-no-such-package") is None
    assert package_version("torch") is not None
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError))
    assert cpu_name()  # the architecture at least


def test_the_environment_of_a_gpu_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML tells the clock policy, idle power and other processes; where it refuses, torch's fields stay."""
    listed = [processes(7), processes(7, 8)]
    with monkeypatch.context() as patch:
        install(
            patch,
            nvmlDeviceGetComputeRunningProcesses=lambda _: listed.pop(0) if listed else processes(7, 8),
            nvmlDeviceGetPowerUsage=answering(75_000),
        )
        here = environment("cuda")
        assert device_uuid("cuda") == UUID
    assert (here.device, here.device_name, here.device_memory_bytes) == ("cuda", "Fake GPU", 2**37)
    assert (here.uuid, here.driver, here.idle_w) == (UUID, "580.1", 75.0)
    assert here.clocks == "up to 1980 MHz, application clock 1980 MHz, auto boost on"
    assert here.foreign == ("python3 (pid 7)",)
    for function in ("nvmlInit", "nvmlDeviceGetHandleByUUID"):
        with monkeypatch.context() as patch:
            install(patch, **{function: refusing})
            here = environment("cuda")
        assert (here.device_name, here.uuid) == ("Fake GPU", UUID)
        assert (here.driver, here.clocks, here.idle_w) == (None, None, None)
    install(monkeypatch, nvmlSystemGetDriverVersion=refusing, nvmlDeviceGetPowerUsage=answering(2**32 - 1))
    here = environment("cuda")
    assert (here.driver, here.idle_w) == (None, None)
    assert here.clocks


def test_a_cpu_has_no_uuid_and_a_gpu_that_fails_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """The uuid is the key of the GPU's lock."""
    assert device_uuid("cpu") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_uuid("cuda") is None


def test_the_cpu_clock_is_set_by_its_governor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None where the system does not say, or nothing readable."""
    rule = tmp_path / "scaling_governor"
    monkeypatch.setattr(module, "GOVERNOR", rule)
    assert environment("cpu").clocks is None
    for content, clocks in ((b"performance\n", "governor performance"), (b"", None), (b"\xff", None)):
        rule.write_bytes(content)
        assert environment("cpu").clocks == clocks


def environment_of(**changed: Any) -> Environment:
    """Return an environment of some machine, but for what is given."""
    here = Environment(
        device="cuda",
        device_name="Fake GPU",
        cpu="Fake CPU",
        threads=1,
        memory_bytes=2**30,
        platform="p",
        python="3.11",
        torch="2.13",
        esbench="0",
        commit="abc",
        dirty=False,
    )
    return msgspec.structs.replace(here, **changed)


def test_differences_between_two_environments() -> None:
    """Each field with both values; load, other processes and idle power may differ."""
    other = environment_of(commit="def", torch="2.11", dirty=True, uuid=UUID, memory_bytes=2**31)
    assert differences(environment_of(), other) == [
        "memory bytes 1073741824 vs 2147483648",
        "torch 2.13 vs 2.11",
        "commit abc vs def",
        "dirty no vs yes",
        f"uuid unknown vs {UUID}",
    ]
    busy = environment_of(load=9.0, foreign=("x (pid 1)",), idle_w=80.0)
    assert differences(environment_of(), busy) == []
    assert differences(environment("cpu"), environment("cpu")) == []


class Written:
    """A scheme with a source."""


def entry(name: str, scheme: object) -> Entry:
    """Return a registered variant."""
    return Entry(variant=Variant(scheme=name), scheme=scheme, source="", package="tests")


def test_the_code_of_a_variant_is_the_hash_of_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a package that of all its files, tables of tuned kernels included; none without a file."""
    typed: dict[str, Any] = {"__name__": "typed_in"}
    exec("class Typed: pass", typed)  # noqa: S102  # a class without a file, as in a shell
    found = source_hashes(
        [entry("A", Written()), entry("B", Written()), entry("C", typed["Typed"]()), entry("D", 1)]
    )
    digest = sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    assert found.keys() == {"A", "B", "esbench", "tests"}
    assert found["A"] == found["B"] == digest
    assert found["tests"] != digest
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(esbench, "__file__", str(tmp_path / "__init__.py"))
    before = source_hashes([])["esbench"]
    (tmp_path / "gpu.json").write_text("{}")
    assert source_hashes([])["esbench"] != before
    monkeypatch.setattr(inspect, "getfile", lambda _: "no/such/file.py")
    assert "A" not in source_hashes([entry("A", Written())])


@needs_git
def test_the_commit_of_a_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit outside of generated folders makes it dirty; a package that is not tracked has no commit."""
    head = git(checkout, "rev-parse", "HEAD")
    assert len(head) == 40
    (checkout / "results").mkdir()
    (checkout / "results" / "run.jsonl").write_text("{}", encoding="utf-8")
    here = environment("cpu")
    assert (here.commit, here.dirty) == (head, False)
    monkeypatch.setenv(TOLD, f"{'0' * 40}:{'0' * 64}")  # git is believed before the variable
    assert environment("cpu").commit == head
    monkeypatch.delenv(TOLD)
    (checkout / "esbench" / "__init__.py").write_text("x = 1\n", encoding="utf-8")
    assert environment("cpu").dirty is True
    git(checkout, "rm", "-q", "-f", "--cached", "-r", "esbench")
    assert commit() is None
    assert environment("cpu").dirty is None


@needs_git
def test_the_commit_of_a_work_tree_without_its_repository_is_told(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds if the code is that of the commit; changed code is dirty, and other files do not count."""
    (checkout / "esbench" / "tuned.json").write_text("{}", encoding="utf-8")
    told = f"{git(checkout, 'rev-parse', 'HEAD')}:{code_hash(checkout)}"
    shutil.rmtree(checkout / ".git")
    assert environment("cpu").commit is None
    monkeypatch.setenv(TOLD, told)
    (checkout / "results").mkdir()
    (checkout / "results" / "run.json").write_text("{}", encoding="utf-8")
    here = environment("cpu")
    assert (here.commit, here.dirty) == (told[:40], False)
    (checkout / "esbench" / "tuned.json").write_text("{} ", encoding="utf-8")
    here = environment("cpu")
    assert (here.commit, here.dirty) == (told[:40], True)


def test_a_commit_that_cannot_be_checked_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without git, a commit needs the hash of its code beside it."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert environment("cpu").commit is None
    for told in ("", "main", "0" * 40, f"{'0' * 40}:", f"{'0' * 40}:{'x' * 64}"):
        monkeypatch.setenv(TOLD, told)
        here = environment("cpu")
        assert (here.commit, here.dirty) == (None, None), told


@needs_git
def test_a_clean_work_tree_tells_its_commit(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that holds changes tells none."""
    monkeypatch.setattr(git_module, "__file__", str(checkout / "esbench" / "git.py"))
    git_module.main()
    assert capsys.readouterr().out == f"{git(checkout, 'rev-parse', 'HEAD')}:{code_hash(checkout)}\n"
    (checkout / "esbench" / "new.py").touch()
    with pytest.raises(GitError, match="not committed"):
        git_module.main()


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` is CUDA where torch has it; CUDA where there is none is an error, never silently the CPU."""
    for available, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=available: found)
        assert (resolve_device("auto"), resolve_device("cpu")) == (device, "cpu")
    for built, words in (
        (None, "is built without CUDA"),
        ("13.0", "built for CUDA 13.0 and finds no usable GPU"),
    ):
        monkeypatch.setattr(torch.version, "cuda", built)
        with pytest.raises(DeviceError, match=words) as error:
            resolve_device("cuda")
        assert "--device cpu" in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(DeviceError, match="no device 'tpu'; there are: auto, cpu, cuda"):
        resolve_device("tpu")
