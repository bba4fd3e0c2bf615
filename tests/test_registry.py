"""Registration: a decorator that returns its argument, and errors that list the registered names."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import pytest

from esbench.errors import UserError
from esbench.registry import Registry, Suite, UnknownNameError, load, parse_phases, select_cases
from esbench.schema import Case, Mode, Variant
from esbench.text import suggest
from esbench.workload import build


@dataclass(frozen=True)
class Thing:
    """A scheme of a kind unknown to the registry."""

    side: str = "in"
    share: float = 1.0


CASE = Case(operator="Linear", out_channels=2, in_channels=3)


def registered() -> Registry:
    """Return a registry with three variants, one of them a baseline, and a suite."""
    registry = Registry()
    registry.variant(mode="base", baseline=True)(type("Base", (), {}))
    assert registry.variant(side=("in", "out"))(Thing) is Thing
    registry.suite(Suite(name="small", description="", cases=(CASE,)))
    return registry


def test_options_that_differ_from_their_default_make_the_label() -> None:
    """A label has scheme, operator and changed options; that of a baseline is its name.

    Options 1 and 1.0 differ, because 1 may be a number of channels and 1.0 a share of them.
    """
    registry = registered()
    registry.variant(share=1)(Thing)
    *entries, baseline = registry.select()
    assert [entry.variant for entry in entries] == [
        Variant(scheme="Thing"),
        Variant(scheme="Thing", options=(("side", "out"),)),
        Variant(scheme="Thing", options=(("share", 1),)),
    ]
    assert entries[1].variant.label("Linear") == "ThingLinear(side=out)"
    assert baseline.variant.label("Linear") == "Base"


def test_globs_match_names_and_labels() -> None:
    """A glob selects by name or label, in registration order; phases are in the order of a step."""
    registry = registered()
    assert [e.variant.name for e in registry.select(["Thing*"])] == ["Thing", "Thing(side=out)"]
    assert [e.variant.name for e in registry.select(["ThingLinear"])] == ["Thing"]
    assert [e.variant.name for e in registry.select(["Thing*", "!*side*"])] == ["Thing"]
    assert parse_phases("quality, step,forward,step") == ("forward", "step", "quality")


def test_a_reserved_operator_has_only_variants_that_name_it() -> None:
    """A variant without operators supports all but reserved ones, even if reserved later."""
    registry = registered()
    work = msgspec.structs.replace(CASE, operator="Work")
    assert all(entry.supports(work) for entry in registry.select())
    registry.variant(operators=registry.reserve("Work"))(type("Own", (), {}))
    assert [entry.variant.name for entry in registry.select() if entry.supports(work)] == ["Own"]
    assert [entry.variant.name for entry in registry.select() if not entry.supports(CASE)] == ["Own"]
    registry.suite(Suite("work", "a case of the operator", (work,)))
    assert [entry.variant.name for entry in registry.select(["*Work"])] == ["Own"]


def test_an_unknown_name_is_an_error_with_known_names() -> None:
    """The error for unknown variants, suites and cases has the glob and all known names, or the closest."""
    registry = registered()
    with pytest.raises(UnknownNameError, match=r"'No\*'.*Thing, Thing\(side=out\)"):
        registry.select(["No*"])
    with pytest.raises(UnknownNameError, match="no variant matches 'No"):
        registry.select(["*", "!No*"])
    with pytest.raises(UnknownNameError, match=r"'no'; available: small"):
        registry.find_suite("no")
    with pytest.raises(UnknownNameError, match=r"available: Linear\(2, 3\)"):
        select_cases([CASE], "Conv*")
    assert suggest("Thin", ["A", "B", "C", "Thing", "Thingy", "Thong"], "esbench list") == (
        "closest: Thing, Thingy, Thong; `esbench list` lists all"
    )


def test_duplicates_are_refused() -> None:
    """Registering a variant or suite twice, or another base of the same operators, is an error."""
    registry = registered()
    own = registry.reserve("Own")
    registry.variant(mode="base", operators=own)(type("OwnBase", (), {}))
    for operators, other in (
        (None, "Base"),
        (("Linear",), "Base"),
        (("Linear", "Own"), "Base"),
        (own, "OwnBase"),
    ):
        with pytest.raises(ValueError, match=f"^Second and {other} are both base: "):
            registry.variant(mode="base", operators=operators)(type("Second", (), {}))
    with pytest.raises(ValueError, match=r"^mode 'nope' is unknown: use base, naive, batched$"):
        registry.variant(mode=cast("Mode", "nope"))(Thing)
    with pytest.raises(ValueError, match="variant Thing is registered twice"):
        registry.variant()(Thing)
    with pytest.raises(ValueError, match="suite small is registered twice"):
        registry.suite(Suite(name="small", description="", cases=()))


def test_a_scheme_of_an_unknown_kind_is_unavailable() -> None:
    """A scheme that no workload supports has a reason instead of a workload."""
    with pytest.raises(Exception, match="Thing cannot be measured: its package registers no"):
        build(Thing(), CASE, "cpu", 0)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.py", None, "FileNotFoundError: no such file"),
        ("syntax_error_here.py", "def", "SyntaxError"),
        ("raises_here.py", "raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ("exits_here.py", "raise SystemExit(3)", "SystemExit: 3"),
        ("raises_odd.py", "class Odd(BaseException): ...\nraise Odd", "Odd"),
        ("json.py", "", "a module json is loaded already"),
        ("empty_here.py", "import math", "it registers nothing: put @variant"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_has_a_reason(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    """The error names the file and the reason, and no module stays partly imported."""
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    for _ in range(2):
        with pytest.raises(UserError, match=words):
            load(str(path))


def test_a_module_that_is_not_there_is_named() -> None:
    """A plug-in given without .py is taken for a module name."""
    with pytest.raises(UserError, match="No module named 'no_such_module_anywhere'"):
        load("no_such_module_anywhere.inside")
    with pytest.raises(UserError, match="cannot load variants from '': ValueError"):
        load("")
