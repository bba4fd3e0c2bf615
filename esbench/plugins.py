"""Packages of variants, found by module name, by file, or by the entry-point group."""

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from esbench.errors import UserError

ENTRY_POINTS = "esbench.variants"
DEFAULT = "impls"
"""The package that is always loaded."""
LOADED: dict[str, str] = {}
"""Names that were loaded -> their packages: what is imported registers once in a process."""


class PluginError(UserError):
    """A package of variants that cannot be loaded; the message says which and why."""


def load(name: str) -> str:
    """Import a package of variants by module name or by file; return the package's name.

    Loading the same one twice does nothing.

    Raises:
        PluginError: it cannot be found or raises when imported.

    """
    if name in LOADED:
        return LOADED[name]
    try:
        package = _import_file(Path(name)) if name.endswith(".py") else _import_module(name)
    except PluginError:
        raise
    except (Exception, SystemExit) as error:  # foreign code may raise anything: one line says it
        message = f"cannot load variants from {name}: {type(error).__name__}: {error}"
        raise PluginError(message) from error
    LOADED[name] = package
    return package


def installed(default: str = DEFAULT) -> list[str]:
    """Name the default package and every package that declares the entry point; nothing is loaded."""
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return list(dict.fromkeys([default, *(point.module for point in points)]))


def load_installed(default: str = DEFAULT) -> None:
    """Load the default package and every package that declares the entry point."""
    for name in installed(default):
        load(name)


def _import_module(name: str) -> str:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        message = f"cannot load variants from {name}: no such module (a file's name ends in .py)"
        raise PluginError(message)
    return importlib.import_module(name).__name__.partition(".")[0]


def _import_file(path: Path) -> str:
    if not path.is_file():
        message = f"cannot load variants from {path}: no such file"
        raise PluginError(message)
    if path.stem in sys.modules:
        message = f"cannot load variants from {path}: a module {path.stem} is loaded already; rename the file"
        raise PluginError(message)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        message = f"cannot load variants from {path}: not a Python file"
        raise PluginError(message)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # whatever ends it, half a module is no module; raised again
        del sys.modules[path.stem]
        raise
    return path.stem
