"""What sources say of schemes, read as text: the same as what the classes say when they are imported."""

import importlib
import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from esbench.cli.options import load_entries
from esbench.registry import REGISTRY, Entry
from esbench.scheme_docs import Documentation, documentations
from tests.report.report_cases import ROOT
from tests.synthetic import variant

OWN = '''"""Variants of somebody else."""
from esbench import registry

HOW = "a name is no text"


@registry.variant(k=(1, 2), source="a paper")
@registry.variant(k=3, deep=True, source="another" " paper")
@registry.variant(source=HOW, mode="batched")
class Own:
    """E_m = :class:`~some.where.Else`, with ``k``.

    More words
    on it.

    Memory    n numbers,
              and more.
    Quality   kappa = 0.
    """


class Unregistered:
    """Not a variant."""


@registry.variant()
class Bare:
    pass
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package of variants that declares itself, and a file in it that is no Python."""
    folder = tmp_path / "own_variants"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from own_variants.own import Own\nraise SystemExit\n", encoding="utf-8"
    )
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    (folder / "broken.py").write_text("def (:\n", encoding="utf-8")
    (folder / "odd.py").write_bytes(b"\xff\x00")
    monkeypatch.syspath_prepend(str(tmp_path))
    point = importlib.metadata.EntryPoint("own", "own_variants", "esbench.variants")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [point])
    return folder


def entries() -> list[Entry]:
    """All variants of the default package."""
    return [entry for entry in load_entries(None, None) if entry.package == "impls"]


def test_every_scheme_is_found() -> None:
    """Of each registered variant the text has summary, source and module, as the imported class has them."""
    found = documentations()
    for entry in entries():
        kind = type(entry.scheme)
        one = found[kind.__name__]
        summary = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
        assert one.summary == plain(summary), kind
        assert one.source(entry.variant) == entry.source, entry.variant.name
        assert getattr(importlib.import_module(one.module), kind.__name__) is kind
        assert (ROOT / one.file) == Path(inspect.getfile(kind))


def plain(text: str) -> str:
    """A summary without the few marks that summaries have."""
    for start in (":class:`~impls.", ":class:`"):
        while start in text:
            before, _, rest = text.partition(start)
            name, _, after = rest.partition("`")
            text = f"{before}{name.rpartition('.')[2]}{after}"
    return text.replace("``", "")


def test_every_scheme_says_what_it_costs() -> None:
    """Every scheme that perturbs has memory, work and quality in closed form."""
    found = documentations()
    others = REGISTRY.reserved  # training workloads, which perturb nothing
    perturbed = [entry for entry in entries() if not (entry.operators and {*entry.operators} <= others)]
    perturbing = {entry.variant.scheme for entry in perturbed} - {"Base", "Naive"}
    lacking = {name for name in perturbing if set(found[name].closed) != {"Memory", "Work", "Quality"}}
    assert lacking == set()


def test_a_fused_scheme_names_what_it_computes() -> None:
    """A scheme whose text begins with another one's name computes that one; its kernels are known by name."""
    found = documentations()
    assert found["FusedLowRank"].of == "LowRank"
    assert found["LowRank"].of == ""
    assert "low_rank_kernel" in found["FusedLowRank"].kernels
    assert found["LowRank"].kernels == ()


def test_nothing_is_imported() -> None:
    """Neither the package nor torch is imported, by a reading that finds the schemes all the same."""
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from esbench.scheme_docs import documentations\n"
        "assert 'LowRank' in documentations()\n"
        "assert not {name for name in sys.modules if name.startswith(('impls', 'torch.'))}\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


@pytest.mark.usefixtures("own")
def test_a_package_of_somebody_else() -> None:
    """A package that declares itself is read too, and not run; what is no Python in it is passed over."""
    found = documentations()
    assert found.keys() >= {"LowRank", "Own", "Bare"}
    assert "Unregistered" not in found
    one = found["Own"]
    assert isinstance(one, Documentation)
    assert (one.module, one.file) == ("own_variants", "own_variants/own.py")
    assert one.summary == "E_m = Else, with k."
    assert one.text == ("More words on it.",)
    assert dict(one.closed) == {"Memory": "n numbers, and more.", "Quality": "kappa = 0."}
    assert one.source(variant("Own", k=2)) == "a paper"
    assert one.source(variant("Own", k=3, deep=True)) == "another paper"
    assert one.source(variant("Own")) == ""
    assert one.source(variant("Own", unheard=1)) == ""
    assert (found["Bare"].summary, found["Bare"].module) == ("", "own_variants.own")


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point whose package is gone is no error."""
    point = importlib.metadata.EntryPoint("gone", "no_such_package_at_all", "esbench.variants")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [point])
    assert "LowRank" in documentations()
