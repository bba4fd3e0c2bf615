"""Where a run is taken."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import esbench
from esbench.measure.diagnosis import diagnosis
from esbench.measure.environment import (
    DeviceError,
    commit,
    cpu_name,
    environment,
    git,
    package_version,
    resolve_device,
)

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


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
    assert here.commit == git("rev-parse", "HEAD")
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


def test_the_doctor_gives_a_reason_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each subject once, each with words, on a machine that has neither git nor a GPU."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    findings = {finding.subject: finding for finding in diagnosis()}
    assert len(findings) == len(diagnosis())
    assert all(finding.why for finding in findings.values())
    assert findings["CPU timing"].able
    assert findings["memory of a call on the CPU"].able
    assert not findings["commit of a run"].able
    assert not findings["GPU timing and memory"].able
    assert not findings["GPU utilisation"].able


def test_more_threads_than_cpus_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variable that sets it right."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10**6)
    (finding,) = (finding for finding in diagnosis() if finding.subject == "threads")
    assert not finding.able
    assert "OMP_NUM_THREADS=" in finding.why


def test_an_unreadable_processor_still_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The architecture, if need be."""

    def unreadable(*_: object, **__: object) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert cpu_name()
