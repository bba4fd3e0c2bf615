"""What packages of variants say that their schemes come from, read from their files without importing them.

Measuring puts the sources of a run's variants into its header. Runs that are older than that have none, and
a report must not import a package of variants, which needs torch: so their source text is read.
"""

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from esbench.plugins import installed

_DECORATOR = "variant"


def catalogue() -> dict[str, str]:
    """The sources of the schemes of all installed packages: class -> words, semicolons between several."""
    found: dict[str, dict[str, None]] = {}
    for name in installed():
        for path in _files(name):
            for scheme, words in declared(_text(path)):
                found.setdefault(scheme, {})[words] = None
    return {scheme: "; ".join(words) for scheme, words in sorted(found.items())}


def declared(text: str) -> Iterator[tuple[str, str]]:
    """The classes in a source text that are decorated as variants with a source, and that source."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return  # a package with such a file cannot be measured either
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from ((node.name, words) for words in _sources(node.decorator_list))


def _sources(decorators: Iterable[ast.expr]) -> Iterator[str]:
    for call in decorators:
        if not (isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == _DECORATOR):
            continue
        for keyword in call.keywords:
            value = keyword.value
            if keyword.arg == "source" and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value


def _files(name: str) -> list[Path]:
    """The Python files of a package, which is found but not loaded; none of one that is not there."""
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return sorted(
            path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*.py")
        )
    return [Path(spec.origin)] if spec.origin and spec.origin.endswith(".py") else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
