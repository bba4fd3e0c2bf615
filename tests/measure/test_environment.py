"""The description of the machine that a run was measured on."""

import inspect
import platform
import shutil
import subprocess
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
from esbench.errors import UserError
from esbench.git import VARIABLE, GitError, code_hash, git
from esbench.measure import environment as module
from esbench.measure.environment import (
    commit,
    cpu_name,
    device_uuid,
    differences,
    environment,
    resolve_device,
    source_hashes,
)
from esbench.registry import Entry
from esbench.schema import Variant
from tests import synthetic
from tests.fake_nvml import UUID, answering, install, processes, refusing

pytestmark = pytest.mark.usefixtures("new_process")


def test_the_environment_of_a_cpu_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions and sizes are set, GPU fields and fields that the system does not report are None."""
    here = environment("cpu")
    assert (here.device, here.device_name) == ("cpu", here.cpu)
    assert here.cpu
    assert (here.torch, here.python) == (torch.__version__, platform.python_version())
    assert here.threads == torch.get_num_threads()
    assert here.memory_bytes > 2**20
    assert (here.cuda, here.driver, here.uuid, here.foreign, here.idle_w) == (None, None, None, (), None)
    assert differences(here, environment("cpu"), {}, {}) == []
    monkeypatch.setattr(psutil, "getloadavg", Mock(side_effect=OSError))
    assert environment("cpu").load is None
    rule = tmp_path / "scaling_governor"
    monkeypatch.setattr(module, "GOVERNOR", rule)
    assert environment("cpu").clocks is None
    for content, clocks in ((b"performance\n", "governor performance"), (b"\xff", None)):
        rule.write_bytes(content)
        assert environment("cpu").clocks == clocks
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError))
    assert cpu_name()  # at least the architecture
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_uuid("cuda") is None  # the lock's key for a GPU


def test_the_environment_of_a_gpu_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML adds clock policy, idle power and other processes; if it refuses, torch's fields remain."""
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
    with monkeypatch.context() as patch:
        install(patch, nvmlInit=refusing)
        here = environment("cuda")
    assert (here.device_name, here.uuid, here.clocks) == ("Fake GPU", UUID, None)
    install(monkeypatch, nvmlSystemGetDriverVersion=refusing, nvmlDeviceGetPowerUsage=answering(2**32 - 1))
    here = environment("cuda")
    assert (here.driver, here.idle_w) == (None, None)
    assert here.clocks


def test_differences_between_two_environments() -> None:
    """Each difference has both values; load, other processes and idle power are not compared."""
    here = synthetic.environment()
    there = msgspec.structs.replace(here, commit="def", dirty=True, uuid=UUID, memory_bytes=2**31)
    assert differences(here, there, {}, {}) == [
        f"memory bytes {here.memory_bytes} vs 2147483648",
        f"commit {here.commit} vs def",
        "dirty no vs yes",
        f"uuid unknown vs {UUID}",
    ]
    busy = msgspec.structs.replace(here, load=9.0, foreign=("x (pid 1)",), idle_w=80.0)
    assert differences(here, busy, {"a": "1"}, {"a": "1"}) == []


class Written:
    """A scheme that has a source file."""


def entry(name: str, scheme: object) -> Entry:
    """Return a registered variant."""
    return Entry(variant=Variant(scheme=name), scheme=scheme, source="", package="tests")


def test_the_code_of_a_variant_is_the_hash_of_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A package hashes all its files, with tables of tuned kernels; without a file there is no hash."""
    typed: dict[str, Any] = {"__name__": "typed_in"}
    exec("class Typed: pass", typed)  # noqa: S102  # a class without a file, as in a shell
    hashes = source_hashes(
        [entry("A", Written()), entry("B", Written()), entry("C", typed["Typed"]()), entry("D", 1)]
    )
    digest = sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    assert hashes.keys() == {"A", "B", "esbench", "tests"}
    assert hashes["A"] == hashes["B"] == digest
    assert hashes["tests"] != digest
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(esbench, "__file__", str(tmp_path / "__init__.py"))
    before = source_hashes([])["esbench"]
    (tmp_path / "gpu.json").write_text("{}")
    assert source_hashes([])["esbench"] != before
    monkeypatch.setattr(inspect, "getfile", lambda _: "no/such/file.py")
    assert "A" not in source_hashes([entry("A", Written())])


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_of_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An edit outside generated folders makes a checkout dirty; an untracked package has no commit.

    A work tree without its repository gets its commit from an environment variable, which is used only if the
    hash of the code matches.
    """
    package = tmp_path / "esbench"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tuned.json").write_text("{}")
    monkeypatch.setattr(esbench, "__file__", str(package / "__init__.py"))
    monkeypatch.setattr(git_module, "__file__", str(package / "git.py"))
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "esbench"], [*identity, "commit", "-qm", "First"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)  # noqa: S607  # wherever git is

    def commit_and_dirty() -> tuple[str | None, bool | None]:
        here = environment("cpu")
        return here.commit, here.dirty

    head = git(tmp_path, "rev-parse", "HEAD")
    assert len(head) == 40
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "run.jsonl").write_text("{}")
    (tmp_path / "my_plugin.py").write_text("x = 1\n")
    assert commit_and_dirty() == (head, False)
    (package / "new.py").touch()
    assert commit_and_dirty() == (head, True)
    (package / "new.py").unlink()
    git_module.main()  # print the commit of a clean work tree
    value = capsys.readouterr().out.strip()
    assert value == f"{head}:{code_hash(tmp_path)}"
    monkeypatch.setenv(VARIABLE, f"{'0' * 40}:{'0' * 64}")  # git takes precedence over the variable
    assert commit_and_dirty() == (head, False)
    (package / "__init__.py").write_text("x = 1\n")
    assert commit_and_dirty() == (head, True)
    with pytest.raises(GitError, match="has uncommitted changes"):
        git_module.main()
    monkeypatch.delenv(VARIABLE)
    git(tmp_path, "rm", "-q", "-f", "--cached", "-r", "esbench")
    assert (commit(), commit_and_dirty()) == (None, (None, None))

    (package / "__init__.py").write_text("")
    shutil.rmtree(tmp_path / ".git")
    assert commit_and_dirty() == (None, None)
    monkeypatch.setenv(VARIABLE, value)
    assert commit_and_dirty() == (head, False)
    (package / "tuned.json").write_text("{} ")
    assert commit_and_dirty() == (head, True)


def test_a_commit_that_cannot_be_checked_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without git, a commit needs the hash of its code beside it."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert environment("cpu").commit is None
    for value in ("", "main", "0" * 40, f"{'0' * 40}:", f"{'0' * 40}:{'x' * 64}"):
        monkeypatch.setenv(VARIABLE, value)
        here = environment("cpu")
        assert (here.commit, here.dirty) == (None, None), value


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` is CUDA if torch has it; requesting CUDA without a GPU is an error, never silently the CPU."""
    for available, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda value=available: value)
        assert (resolve_device("auto"), resolve_device("cpu")) == (device, "cpu")
    for built, words in (
        (None, "is built without CUDA"),
        ("13.0", "built for CUDA 13.0 and finds no usable GPU"),
    ):
        monkeypatch.setattr(torch.version, "cuda", built)
        with pytest.raises(UserError, match=words) as error:
            resolve_device("cuda")
        assert "--device cpu" in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="no device 'tpu'; available: auto, cpu, cuda"):
        resolve_device("tpu")
