"""The layout holds: who imports whom, how long a file is, and that every exception says why.

Each rule is a pure function from source text to violations, so that it can be shown to fail.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from tests.floors import ROOT, SOURCES, import_violations, module_name

BESIDE = [*sorted(ROOT.glob("examples/*.py")), *sorted(ROOT.glob("tests/**/*.py")), ROOT / "noxfile.py"]
EVERYTHING = [*SOURCES, *BESIDE]

LONGEST = 300
EARNED: dict[str, int] = {
    "impls/cases.py": 400,  # all suites
    "impls/kernels/autotune.py": 940,  # tables, tasks, compiler, clock and command of one search
    "esbench/cli/run.py": 400,  # one command
    "esbench/records.py": 360,  # the schema of a run's file, whole in one place
    "esbench/measure/sitting.py": 400,  # one group of variants through all of its phases
    "esbench/store.py": 420,  # how it is written and read, whole in one place
}
"""Files that may be longer than LONGEST: path -> lines, each with the reason beside it."""

SHAPELESS = {"utils", "util", "common", "helpers", "helper", "misc"}
OPERATOR_NAMES = {"Linear", "Conv1d", "Conv2d", "Conv3d", "linear", "conv1d", "conv2d", "conv3d"}


def length_violations(source: str, path: str) -> list[str]:
    """A file that is longer than it has earned."""
    lines = len(source.splitlines())
    return [f"{path} has {lines} lines"] if lines > EARNED.get(path, LONGEST) else []


def operator_violations(source: str, path: str) -> list[str]:
    """Places where a scheme names an operator: as an identifier, an import or a whole string."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.Constant(value=name)
            ):
                if isinstance(name, str) and name.rpartition(".")[2] in OPERATOR_NAMES:
                    found.append(f"{path}:{node.lineno} names {name}")
    return found


def name_violations(path: Path) -> list[str]:
    """Parts of a path that say nothing about what is inside."""
    return [f"{path} is called {part}" for part in path.with_suffix("").parts if part in SHAPELESS]


DIRECTIVE = re.compile(
    r"#\s*(?:noqa(?::\s*[A-Z]+\d+(?:\s*,\s*[A-Z]+\d+)*)?|type:\s*ignore(?:\[[^]]*\])?)(.*)"
)
EXCUSES = {"skip", "skipif", "xfail"}


BROAD = {"Exception", "BaseException"}


def unexplained(source: str, path: str) -> list[str]:
    """Exceptions from a check or a test, and handlers of everything, without a reason on their line."""
    comments = (
        t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT
    )
    found = [
        f"{path}:{token.start[0]} {token.string}"
        for token in comments
        if (directive := DIRECTIVE.search(token.string)) and not re.search(r"\w", directive[1])
    ]
    tree = ast.parse(source)
    explained = {
        id(call.func) for call in ast.walk(tree) if isinstance(call, ast.Call) and _gives_reason(call)
    }
    lines = source.splitlines()
    found += [
        f"{path}:{node.lineno} {lines[node.lineno - 1].strip()}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and _is_broad(node)
        and not re.search(r"#.*\w", lines[node.lineno - 1])
    ]
    return found + [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in EXCUSES
        and ast.unparse(node).startswith("pytest.")
        and id(node) not in explained
    ]


def _is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether a handler takes everything: bare, or of a class that nearly all others derive from."""
    if handler.type is None:
        return True
    return any(isinstance(node, ast.Name) and node.id in BROAD for node in ast.walk(handler.type))


def _gives_reason(call: ast.Call) -> bool:
    """Whether a call has a reason: by name, or as the text that pytest.skip and pytest.xfail begin with."""
    is_mark = ".mark." in ast.unparse(call.func)
    return any(keyword.arg == "reason" for keyword in call.keywords) or bool(call.args and not is_mark)


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_a_module_imports_only_what_lies_below_it(path: Path) -> None:
    """A module imports only from the floors below its own, and the two wings never touch."""
    assert import_violations(path.read_text(), module_name(path)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("esbench.records", "from esbench.store import read"),
        ("esbench.registry", "import impls"),
        ("esbench.store", "from esbench import registry"),
        ("esbench.measure.loop", "from esbench.report.tables import table"),
        ("esbench.measure.loop", "def late():\n    import esbench.cli"),
        ("esbench.report.tables", "import torch"),
        ("esbench.report.tables", "from torch.nn import functional"),
        ("esbench.report.tables", "from esbench import measure"),
        ("esbench.cli", "from impls import perturb"),
        ("esbench.report.tables", "from ..measure import loop"),
        ("esbench.newcomer", ""),
        ("impls.axes", "from impls.operators import Linear"),
        ("impls.schemes.sparse", "from impls.schemes.permuted import Permuted"),
        ("impls.schemes.dense", "from impls import population"),
        ("impls.workload", "from esbench.measure import timing"),
        ("impls.newcomer", "import math"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    """An import from a floor above, from the other wing, or by an unplaced module is reported."""
    assert len(import_violations(source, module)) == 1


@pytest.mark.parametrize(
    "module", ["esbench.report", "esbench.report.export", "esbench.store", "esbench.registry", "esbench.cli"]
)
def test_reading_loads_no_torch(module: str) -> None:
    """Importing a module of the reading wing, or the command line, does not load torch."""
    assert "torch" not in loaded_by(f"import {module}")


def test_the_command_line_starts_light() -> None:
    """Importing the command line loads neither pandas nor matplotlib: each command loads what it needs."""
    assert loaded_by("import esbench.cli") & {"torch", "pandas", "matplotlib"} == set()


def test_a_loaded_module_is_seen() -> None:
    """What a fresh interpreter loads is seen, so that its absence means something."""
    assert {"json", "esbench"} <= loaded_by("import json, esbench.records")


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after a statement."""
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return {name.partition(".")[0] for name in result.stdout.split()}


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_a_file_is_short(path: Path) -> None:
    """No source file is longer than 300 lines unless it has earned it."""
    assert length_violations(path.read_text(), str(path.relative_to(ROOT))) == []


def test_a_long_file_is_found() -> None:
    """A file of one line too many is reported, one of just enough is not."""
    assert length_violations("x\n" * (LONGEST + 1), "esbench/long.py") == ["esbench/long.py has 301 lines"]
    assert length_violations("x\n" * LONGEST, "esbench/long.py") == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("impls/schemes/*.py")), ids=module_name)
def test_a_scheme_names_no_operator(path: Path) -> None:
    """A scheme is the same mathematics on every operator, so it names none of them."""
    assert operator_violations(path.read_text(), path.name) == []


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(op, Linear)",
        "isinstance(op, operators.Conv2d)",
        "from torch.nn.functional import conv2d",
        "functional.linear(x, weight)",
        "from impls.operators import Conv2d as Kind",
        "type(op).__name__ == 'Linear'",
    ],
)
def test_a_named_operator_is_found(source: str) -> None:
    """An operator named in a scheme's code is reported; one in a docstring is not."""
    assert len(operator_violations(source, "scheme.py")) == 1
    assert operator_violations('"""Cheaper on Linear than on Conv2d."""', "scheme.py") == []


def test_a_module_is_named_for_what_it_holds() -> None:
    """No module is called utils, common, helpers or misc."""
    assert [bad for path in EVERYTHING for bad in name_violations(path.relative_to(ROOT))] == []


@pytest.mark.parametrize("path", ["esbench/utils.py", "impls/common/axes.py", "tests/helpers.py", "misc.py"])
def test_a_shapeless_name_is_found(path: str) -> None:
    """A file or folder with a name that fits anything is reported."""
    assert len(name_violations(Path(path))) == 1


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_exception_says_why(path: Path) -> None:
    """Every noqa, type: ignore, skip and xfail carries its reason on its line."""
    assert unexplained(path.read_text(), path.name) == []


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1  # noqa: S101", ": a reason here"),
        ("x = 1  # noqa: S101, PLR2004", " # a reason here"),
        ("x = 1  # type: ignore[arg-type]", "  # a reason here"),
        ("pytest.skip(", "'a reason')"),
        ("pytest.mark.xfail(", "reason='known')"),
        ("pytest.mark.skipif(torch_is_old, ", "reason='too old')"),
    ],
)
def test_an_unexplained_exception_is_found(source: str, reason: str) -> None:
    """An exception without a reason is reported, the same one with its reason is not."""
    closed = source + ")" * source.count("(")
    assert len(unexplained(closed, "test.py")) == 1
    assert unexplained(source + reason, "test.py") == []


@pytest.mark.parametrize(
    "caught", ["except:", "except Exception:", "except (OSError, BaseException) as error:"]
)
def test_a_handler_of_everything_says_why(caught: str) -> None:
    """One without a reason is reported; with it, or of one kind of error only, it is not."""
    source = "try:\n    pass\n{}\n    pass\n"
    assert len(unexplained(source.format(caught), "test.py")) == 1
    assert unexplained(source.format(caught + "  # a reason here"), "test.py") == []
    assert unexplained(source.format("except OSError:"), "test.py") == []


def test_a_bare_mark_is_found() -> None:
    """A mark that is used without a call has no place for a reason and is reported."""
    assert len(unexplained("@pytest.mark.skip\ndef test(): ...", "test.py")) == 1
