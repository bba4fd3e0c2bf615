"""Source rules that no linter checks: light imports, schemes independent of operators, stated reasons."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPERATORS = {"Linear", "Conv1d", "Conv2d", "Conv3d", "linear", "conv1d", "conv2d", "conv3d"}
DIRECTIVE = re.compile(r"#\s*(?:noqa(?::\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*)?|type:\s*ignore(?:\[[^]]*\])?)(.*)")


def test_reading_loads_no_torch() -> None:
    """Reading runs imports no torch; the command line imports no torch, pandas or matplotlib."""
    statements = (
        "import esbench.cli, esbench.report.analysis.history",
        "import esbench.report, esbench.store, esbench.registry, esbench.gate.decision",
    )
    program = "; ".join(["import sys", *(f"{statement}; print(*sys.modules)" for statement in statements)])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    light, reading = ({name.partition(".")[0] for name in line.split()} for line in done.stdout.splitlines())
    assert not light & {"torch", "pandas", "matplotlib", "ruptures", "scipy"}
    assert "torch" not in reading
    assert "esbench" in light  # the lists have the imported modules


def test_a_scheme_names_no_operator() -> None:
    """A scheme is the same mathematics on every operator, so its code must not name any."""
    schemes = [path for path in ROOT.glob("impls/schemes/*.py") if "@variant" in path.read_text()]
    assert schemes
    for path in schemes:
        assert not list(named_operators(path.read_text())), path
    for planted in ("isinstance(op, operators.Conv2d)", "type(op).__name__ == 'Linear'"):
        assert list(named_operators(planted)) == [1]
    assert not list(named_operators('"""Linear layers."""'))


def named_operators(source: str) -> Iterator[int]:
    """Yield the lines of names, imports and whole strings that name an operator."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.Constant(value=name)
            ) if isinstance(name, str) and name.rpartition(".")[2] in OPERATORS:
                yield getattr(node, "lineno", 1)


def test_files_that_sessions_name_exist() -> None:
    """Every test file and folder named by noxfile.py or the session on a rented GPU exists."""
    sources = [(ROOT / name).read_text() for name in ("noxfile.py", "tools/gpu_session.sh")]
    named = {path for source in sources for path in re.findall(r"\btests/[\w./]+", source)}
    assert len(named) > 3
    assert not {path for path in named if not (ROOT / path).exists()}


def test_a_silenced_check_gives_its_reason() -> None:
    """Each noqa and type: ignore has its reason on its line."""
    folders = ("esbench", "impls", "examples", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert not {f"{path}:{line}" for path in paths for line in unexplained(path.read_text())}
    silence = "x = 1  # no" + "qa: E501"
    assert list(unexplained(silence)) == [1]
    assert not list(unexplained(f"{silence}  a table of numbers"))


def unexplained(source: str) -> Iterator[int]:
    """Yield the lines that silence a check without a reason."""
    if not DIRECTIVE.search(source):  # most files, without splitting them into tokens
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        directive = DIRECTIVE.search(token.string) if token.type == tokenize.COMMENT else None
        if directive and not re.search(r"\w", directive[1]):
            yield token.start[0]
