"""The study of the harness itself as a file and as a page."""

import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from esbench.errors import UserError
from esbench.report.accuracy import accuracy_page, render_accuracy
from esbench.studies.timer_accuracy import newest_studies, read_study, write_study
from tests.accuracy_cases import WHOLE, study_of


def test_a_study_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """In the folder of its device, all of it, and nothing beside it."""
    path = write_study(WHOLE, tmp_path)
    assert read_study(path) == WHOLE
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.*")] == [
        "some-cpu/accuracy/study-0.json"
    ]


def test_an_interrupt_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither under the study's name nor under another."""
    monkeypatch.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_study(WHOLE, tmp_path)
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace(b'"seed"', b'"sead"'), "sead"),
        (lambda text: text.replace(b"10000.0", b"0.0"), "readings"),
        (lambda text: text.replace(b'"schema":1', b'"schema":9'), "schema 9"),
        (lambda text: text[:100], "not a study"),
    ],
    ids=["unknown field", "zero time", "another version", "half a file"],
)
def test_what_cannot_be_a_study_is_refused_in_one_line(
    tmp_path: Path, change: Callable[[bytes], bytes], words: str
) -> None:
    """With the file and the field."""
    path = write_study(WHOLE, tmp_path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=words) as error:
        newest_studies(tmp_path)
    assert path.name in str(error.value)
    assert "\n" not in str(error.value)


def test_the_newest_study_of_each_device_is_shown(tmp_path: Path) -> None:
    """An older one stays in its file."""
    for number in (2, 1):
        write_study(study_of(number=number), tmp_path)
    write_study(study_of(number=0, device_name="Another"), tmp_path)
    assert [found.study_id for found in newest_studies(tmp_path)] == ["study-0", "study-2"]


def test_the_same_studies_give_the_same_page(tmp_path: Path) -> None:
    """Byte for byte, with every table, where it was taken and what was missing."""
    write_study(WHOLE, tmp_path)
    pages = [render_accuracy(tmp_path, tmp_path / out)[0] for out in ("a", "b")]
    first, second = (page.read_bytes() for page in pages)
    assert first == second
    text = first.decode()
    for words in (
        "## Some CPU",
        "load average 0.500 before and 1.50 after",
        "a \\| b",
        "no GPU",
        "2 threads",
    ):
        assert words in text
    assert text.count("### ") == 6


def test_words_of_a_foreign_study_are_not_live() -> None:
    """A link in the name of a device stays a name."""
    assert "## \\[a\\](b)\n" in accuracy_page([study_of(device_name="[a](b)")], [])


def test_without_a_study_there_is_no_page(tmp_path: Path) -> None:
    """Nothing is written."""
    assert render_accuracy(tmp_path, tmp_path / "out") == []
    assert not (tmp_path / "out").exists()
