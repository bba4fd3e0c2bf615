"""Pictures held to images that somebody looked at; `python -m tests.test_picture_images` draws them again."""

from importlib.metadata import version
from pathlib import Path

import pytest
from matplotlib.testing.compare import compare_images

from tests.picture_cases import picture

BASELINES = Path(__file__).parent / "baselines"
DRAWN = ("pareto", "multipliers", "time-population", "roofline", "kappa", "samples", "history")
DPI = 110
TOLERANCE = 1.5
"""Root mean square over the pixels, of 255: a mark that is missing is more, a blurred edge less."""
PINNED = next(
    line.partition("==")[2].strip()
    for line in (Path(__file__).parent.parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line.startswith("matplotlib==")
)

other_letters = pytest.mark.skipif(
    version("matplotlib") != PINNED,
    reason=f"matplotlib {version('matplotlib')} is not {PINNED}, whose letters the baselines have",
)


@other_letters
@pytest.mark.parametrize("name", DRAWN)
def test_picture_looks_as_it_did(tmp_path: Path, name: str) -> None:
    """Drawn again, it is the image that was looked at."""
    picture(name).write(tmp_path / f"{name}.png", DPI)
    baseline = str(BASELINES / f"{name}.png")
    assert compare_images(baseline, str(tmp_path / f"{name}.png"), TOLERANCE) is None


@other_letters
def test_another_picture_is_seen(tmp_path: Path) -> None:
    """A mark that is missing is more than the tolerance."""
    sheet = picture("kappa")
    sheet.axes[0].lines[-1].remove()
    sheet.write(tmp_path / "kappa.png", DPI)
    assert compare_images(str(BASELINES / "kappa.png"), str(tmp_path / "kappa.png"), TOLERANCE) is not None


def test_baselines_are_few_and_small() -> None:
    """Each is drawn by a test, and together they take less than 150 kB."""
    files = sorted(BASELINES.glob("*"))
    assert [path.stem for path in files] == sorted(DRAWN)
    assert sum(path.stat().st_size for path in files) < 150_000


if __name__ == "__main__":
    BASELINES.mkdir(exist_ok=True)
    for drawn in DRAWN:
        picture(drawn).write(BASELINES / f"{drawn}.png", DPI)
