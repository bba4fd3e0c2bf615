"""The command `report`: git ignores its default output, and it publishes only committed runs."""

from pathlib import Path

import pytest

from tests.cli.cli_runner import run
from tests.gate.gate_repository import commit, git, repository
from tests.report import ranking_cases, report_cases

ROOT = Path(__file__).parents[2]
CSV = ("--format", "csv")
"""Without plots, which take seconds."""


def test_git_status_stays_clean_until_a_report_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """New runs and reports are ignored; --publish writes reports/ from committed runs only.

    An unreadable line is named, and the report is still written.
    """
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8")
    top = repository(tmp_path / "clone", {".gitignore": ignored})
    monkeypatch.chdir(top)
    report_cases.store(top, ranking_cases.run())
    assert run("report", *CSV) == 0
    assert list((top / "build/reports").rglob("*.csv"))
    assert git(top, "status", "--porcelain") == ""

    assert run("report", *CSV, "--publish") == 2
    (file,) = (top / "results").rglob("*.jsonl")
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"results also holds {file.relative_to(top / 'results')}: add and commit them" in message
    assert not (top / "reports").exists()
    assert run("report", "--publish", "--out", "elsewhere") == 2
    assert "leave out --out elsewhere" in capsys.readouterr().err

    git(top, "add", "--force", str(file))
    commit(top, {})
    assert run("report", *CSV, "--publish") == 0
    assert git(top, "status", "--porcelain") == "?? reports/"
    published, local = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (top / "reports", top / "build/reports")
    )
    assert published == local  # the same runs make the same bytes
    assert published

    file.write_bytes(file.read_bytes() + b'{"record":"measurement","varia')
    capsys.readouterr()
    assert run("report", *CSV) == 1
    captured = capsys.readouterr()
    assert f"{file}:{len(file.read_bytes().splitlines())}" in str(
        top / captured.err.removeprefix("esbench: ")
    )
    assert ".csv" in captured.out
