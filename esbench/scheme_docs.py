"""What the source of a scheme says of it: read as text, so that neither it nor torch is imported.

A run names its variants and says nothing of their formulas. The packages of variants that are installed do,
in the docstrings of the classes that ``@variant`` registers.
"""

import ast
import hashlib
import importlib.machinery
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from esbench.registry import installed
from esbench.schema import Scalar, Variant

SECTIONS = ("Memory", "Work", "Quality")
"""What a scheme's docstring says in closed form, a paragraph for each."""

_SECTION = re.compile(rf"({'|'.join(SECTIONS)})\s{{2,}}(.*)", re.DOTALL)
_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")
_REGISTERS, _COMPILES = "variant", "jit"
_NO_OPTIONS = ("mode", "baseline", "operators", "on_request")
"""What ``@variant`` takes beside the options of a scheme."""

Registration = tuple[Mapping[str, tuple[Scalar, ...]], str]
"""The options that a ``@variant`` registers, each with its values, and where these are from."""


@dataclass(frozen=True)
class Documentation:
    """What is known of a scheme without running it.

    Attributes:
        scheme: the class's name.
        module: where to import it from: its package, if that re-exports it.
        file: its source, from the folder of the package on.
        digest: the SHA-256 sum of that file.
        summary: the first paragraph of its docstring, which has the formula.
        text: the other paragraphs.
        closed: memory, work and quality in closed form, by their names in :data:`SECTIONS`.
        sources: each ``@variant`` above the class.
        of: the scheme that this one computes in another way, empty where it is one of its own.
        kernels: the names of compiled functions in the modules that its file imports from.

    """

    scheme: str
    module: str
    file: str
    digest: str
    summary: str
    text: tuple[str, ...] = ()
    closed: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[Registration, ...] = ()
    of: str = ""
    kernels: tuple[str, ...] = ()

    def source(self, variant: Variant) -> str:
        """Where a variant is from: of the registration that made it, empty where none says.

        Options that have their default stand in a registration and not in a variant: the one with the fewest
        of these is the variant's.
        """
        options = dict(variant.options)
        fitting = [
            (len(grid.keys() - options.keys()), source)
            for grid, source in self.sources
            if options.keys() <= grid.keys() and all(options[key] in grid[key] for key in options)
        ]
        return min(fitting, key=lambda one: one[0], default=(0, ""))[1]


def documentations() -> dict[str, Documentation]:
    """What the installed packages of variants say of their schemes, by name; the default package first."""
    found: dict[str, Documentation] = {}
    for name in dict.fromkeys(module.partition(".")[0] for module in installed()):
        for one in _Package(name).documentations():
            found.setdefault(one.scheme, one)
    return found


@dataclass(frozen=True)
class _Package:
    """A package of variants, as text."""

    name: str

    def documentations(self) -> Iterator[Documentation]:
        """Yield what stands above each class that is registered, in the order of the files."""
        for path, tree in self._trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and (sources := tuple(_sources(node))):
                    yield self._documentation(node, path, sources)

    def _documentation(
        self,
        node: ast.ClassDef,
        path: Path,
        sources: tuple[Registration, ...],
    ) -> Documentation:
        summary, text, closed = _parts(ast.get_docstring(node) or "")
        computed = _ROLE.match(ast.get_docstring(node) or "")
        return Documentation(
            scheme=node.name,
            module=self.name if node.name in self._exports else self._module(path),
            file=path.relative_to(self._root.parent).as_posix(),
            digest=hashlib.sha256(path.read_bytes()).hexdigest(),
            summary=summary,
            text=text,
            closed=closed,
            sources=sources,
            of=computed[1] if computed else "",
            kernels=tuple(sorted(self._kernels(self._trees[path]))),
        )

    def _kernels(self, tree: ast.Module) -> Iterator[str]:
        """Yield the compiled functions of a file and of the modules of this package that it imports from."""
        modules = {self._module(path): path for path in self._trees}
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        for one in (tree, *(self._trees[modules[name]] for name in modules.keys() & imported)):
            for function in one.body:
                if isinstance(function, ast.FunctionDef) and any(map(_compiles, function.decorator_list)):
                    yield function.name

    def _module(self, path: Path) -> str:
        parts = path.relative_to(self._root.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def _exports(self) -> set[str]:
        """The names that the package itself hands on."""
        tree = self._trees.get(self._root / "__init__.py") or ast.Module([], [])
        nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        return {alias.asname or alias.name for node in nodes for alias in node.names}

    @cached_property
    def _root(self) -> Path:
        """The folder of the package; of a module of one file that file."""
        spec = _spec(self.name)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        return Path(folders[0] if folders else (spec and spec.origin) or self.name)

    @cached_property
    def _trees(self) -> dict[Path, ast.Module]:
        """The files that can be read and parsed, in the order of their names."""
        paths = sorted(self._root.rglob("*.py")) if self._root.is_dir() else [self._root]
        found = {}
        for path in paths:
            try:
                found[path] = ast.parse(path.read_bytes())
            except (OSError, SyntaxError, ValueError, RecursionError):
                continue  # what cannot be parsed cannot have been measured either
        return found


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _sources(node: ast.ClassDef) -> Iterator[Registration]:
    """Yield the options and the source of each ``@variant(...)`` above a class."""
    for call in node.decorator_list:
        if not (isinstance(call, ast.Call) and _last(call.func) == _REGISTERS):
            continue
        given = {keyword.arg: _literal(keyword.value) for keyword in call.keywords if keyword.arg}
        source = given.pop("source", "")
        options = {key: value for key, value in given.items() if key not in _NO_OPTIONS}
        grid = {key: value if isinstance(value, tuple) else (value,) for key, value in options.items()}
        yield grid, source if isinstance(source, str) else ""


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return None


def _compiles(decorator: ast.expr) -> bool:
    return _last(decorator.func if isinstance(decorator, ast.Call) else decorator) == _COMPILES


def _last(node: ast.expr) -> str:
    """The last name of a dotted one."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _parts(docstring: str) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """The summary of a docstring, its other paragraphs, and what it says in closed form."""
    lines = _plain(inspect.cleandoc(docstring)).split("\n")
    paragraphs: list[str] = [""]
    for line in lines:
        if not line.strip() or _SECTION.match(line):
            paragraphs.append("")
        paragraphs[-1] += f" {line.strip()}" if paragraphs[-1] else line.strip()
    told = [one for one in paragraphs if one]
    closed = {found[1]: found[2] for one in told if (found := _SECTION.fullmatch(one))}
    rest = [one for one in told if not _SECTION.fullmatch(one)]
    return rest[0] if rest else "", tuple(rest[1:]), closed


def _plain(text: str) -> str:
    """A docstring without its markup."""
    return _ROLE.sub(r"\1", text).replace("``", "")
