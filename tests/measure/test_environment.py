"""Where a run is taken."""

import inspect
import platform
import shutil
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

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


def test_the_environment_of_a_cpu_run_says_what_the_machine_knows() -> None:
    """Versions and sizes are there, and nothing about a GPU that the run does not use."""
    here = environment("cpu")
    assert here.device == "cpu"
    assert here.device_name == here.cpu != ""
    assert here.torch == torch.__version__
    assert here.python == platform.python_version()
    assert here.threads == torch.get_num_threads()
    assert here.memory_bytes > 2**20
    assert (here.cuda, here.driver, here.device_memory_bytes) == (None, None, None)
    assert (here.uuid, here.foreign, here.idle_w) == (None, (), None)
    assert here.load is not None
    assert here.load >= 0


def test_the_environment_of_a_gpu_run_says_what_nvml_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which GPU, who sets its clock, what it draws idle, and who else is on it."""
    listed = [processes(7), processes(7, 8)]
    install(
        monkeypatch,
        nvmlDeviceGetComputeRunningProcesses=lambda _: listed.pop(0) if listed else processes(7, 8),
        nvmlDeviceGetPowerUsage=answering(75_000),
    )
    here = environment("cuda")
    assert (here.device, here.device_name, here.device_memory_bytes) == ("cuda", "Fake GPU", 2**37)
    assert (here.uuid, here.driver, here.idle_w) == (UUID, "580.1", 75.0)
    assert here.clocks == "up to 1980 MHz, application clock 1980 MHz, auto boost on"
    assert here.foreign == ("python3 (pid 7)",)


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_a_gpu_without_nvml_says_what_torch_knows(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """And nothing is raised."""
    install(monkeypatch, **{function: refusing})
    here = environment("cuda")
    assert (here.device_name, here.uuid) == ("Fake GPU", UUID)
    assert (here.driver, here.clocks, here.idle_w, here.foreign) == (None, None, None, ())


def test_a_gpu_that_refuses_one_question_answers_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """None stands for that one."""
    install(monkeypatch, nvmlSystemGetDriverVersion=refusing, nvmlDeviceGetPowerUsage=answering(2**32 - 1))
    here = environment("cuda")
    assert (here.driver, here.idle_w) == (None, None)
    assert here.clocks


def test_a_cpu_has_no_uuid_and_a_gpu_that_fails_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what the GPU's lock is called by."""
    assert device_uuid("cpu") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_uuid("cuda") is None
    install(monkeypatch)
    assert device_uuid("cuda") == UUID


def test_who_sets_the_cpu_clock_is_its_governor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None where the system does not say, or says nothing readable."""
    rule = tmp_path / "scaling_governor"
    monkeypatch.setattr(module, "GOVERNOR", rule)
    assert environment("cpu").clocks is None
    rule.write_bytes(b"performance\n")
    assert environment("cpu").clocks == "governor performance"
    for nonsense in (b"", b"\xff"):
        rule.write_bytes(nonsense)
        assert environment("cpu").clocks is None


def test_a_system_without_a_load_average_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no error."""

    def unknown() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr(psutil, "getloadavg", unknown)
    assert environment("cpu").load is None


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


def test_what_differs_between_two_environments_is_told_in_words() -> None:
    """Each field, with what it is here and there."""
    other = environment_of(commit="def", torch="2.11", dirty=True, uuid=UUID, memory_bytes=2**31)
    assert differences(environment_of(), other) == [
        "memory bytes 1073741824 vs 2147483648",
        "torch 2.13 vs 2.11",
        "commit abc vs def",
        "dirty no vs yes",
        f"uuid unknown vs {UUID}",
    ]


def test_what_changes_by_the_minute_is_no_difference() -> None:
    """Load, other processes and idle power."""
    busy = environment_of(load=9.0, foreign=("x (pid 1)",), idle_w=80.0)
    assert differences(environment_of(), busy) == []
    assert differences(environment("cpu"), environment("cpu")) == []


class Written:
    """A scheme with a source."""


def entry(name: str, scheme: object) -> Entry:
    """Return a registered variant."""
    return Entry(variant=Variant(scheme=name), scheme=scheme, source="", package="tests")


def test_the_code_of_a_variant_is_the_hash_of_its_file() -> None:
    """Twelve digits for each variant that has one, and for each package that of all its files."""
    typed: dict[str, Any] = {"__name__": "typed_in"}
    exec("class Typed: pass", typed)  # noqa: S102  # a class without a file, as in a shell
    found = source_hashes(
        [entry("A", Written()), entry("B", Written()), entry("C", typed["Typed"]()), entry("D", 1)]
    )
    digest = sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    assert found.keys() == {"A", "B", "esbench", "tests"}
    assert found["A"] == found["B"] == digest
    assert found["tests"] != digest


def test_a_package_is_another_where_a_table_of_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What kernels were tuned to is part of how they compute."""
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(esbench, "__file__", str(tmp_path / "__init__.py"))
    before = source_hashes([])["esbench"]
    (tmp_path / "gpu.json").write_text("{}")
    assert source_hashes([])["esbench"] != before


def test_code_whose_file_is_gone_has_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left out."""
    monkeypatch.setattr(inspect, "getfile", lambda _: "no/such/file.py")
    assert "A" not in source_hashes([entry("A", Written())])


def test_float32_precision_is_the_one_that_torch_is_set_to() -> None:
    """TF32 makes another figure of the same call."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert environment("cpu").matmul_precision == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_missing_package_has_no_version() -> None:
    """None, not a word that could be taken for one."""
    assert package_version("esbench-no-such-package") is None
    assert package_version("torch") is not None


@needs_git
def test_a_clean_checkout_gives_its_commit(checkout: Path) -> None:
    """The whole hash; what runs write into results/ and reports/ leaves it clean."""
    (checkout / "results").mkdir()
    (checkout / "results" / "run.jsonl").write_text("{}", encoding="utf-8")
    here = environment("cpu")
    assert here.commit == git(checkout, "rev-parse", "HEAD")
    assert len(here.commit or "") == 40
    assert here.dirty is False


@needs_git
def test_changed_code_is_dirty(checkout: Path) -> None:
    """An edit anywhere but in generated folders."""
    (checkout / "esbench" / "__init__.py").write_text("x = 1\n", encoding="utf-8")
    assert environment("cpu").dirty is True


@needs_git
def test_a_package_that_is_not_in_the_repository_around_it_has_no_commit(checkout: Path) -> None:
    """Installed into an environment inside a checkout, it is somebody else's commit."""
    subprocess.run(["git", "-C", str(checkout), "rm", "-q", "--cached", "-r", "esbench"], check=True)  # noqa: S607  # wherever git is
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


@pytest.mark.parametrize("told", ["", "main", "0" * 40, f"{'0' * 40}:", f"{'0' * 40}:{'x' * 64}"])
def test_a_commit_that_cannot_be_checked_is_unknown(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    """A commit alone is a claim that nothing stands for."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setenv(TOLD, told)
    here = environment("cpu")
    assert (here.commit, here.dirty) == (None, None)


@needs_git
def test_git_is_believed_before_what_is_told(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that was left set does not hide the commit of a repository."""
    monkeypatch.setenv(TOLD, f"{'0' * 40}:{'0' * 64}")
    here = environment("cpu")
    assert (here.commit, here.dirty) == (git(checkout, "rev-parse", "HEAD"), False)


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


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no error."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert environment("cpu").commit is None


@pytest.mark.parametrize(("available", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_cuda_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, available: bool, device: str
) -> None:
    """As torch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert resolve_device("auto") == device
    assert resolve_device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("built", "words"),
    [(None, "is built without CUDA"), ("13.0", "built for CUDA 13.0 and finds no usable GPU")],
)
def test_cuda_where_there_is_none_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, built: str | None, words: str
) -> None:
    """One line: why not, and the way out; never the CPU in silence."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    with pytest.raises(DeviceError, match=words) as error:
        resolve_device("cuda")
    assert "--device cpu" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_device_lists_those_there_are() -> None:
    """All three."""
    with pytest.raises(DeviceError, match="no device 'tpu'; there are: auto, cpu, cuda"):
        resolve_device("tpu")


def test_an_unreadable_processor_still_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The architecture, if need be."""

    def unreadable(*_: object, **__: object) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert cpu_name()
