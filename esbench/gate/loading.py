"""The packages of variants of one revision, or of two side by side, in one process.

Names of modules and the registry belong to one revision at a time. Packages that are not part of the
repository, and come before all that are, are imported once for both.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from esbench.errors import UserError
from esbench.gate.records import ARMS, Arm
from esbench.measure.validation import TorchState
from esbench.registry import LOADED, REGISTRY, installed_packages, load
from esbench.workload import WrongResultError

SHARED: tuple[object, ...] = (
    *(torch, torch.Tensor, torch.nn, torch.nn.functional, torch.nn.init),
    *(torch.linalg, torch.fft, torch.func, torch.autograd),
    *(layer for layer in vars(torch.nn).values() if isinstance(layer, type)),
)
"""Modules and classes whose functions a revision may not replace, because both would use the new ones."""
_COMPILER = str(Path(torch.__file__).parent / "_dynamo"), str(torch._compile.__file__)  # noqa: SLF001  # its file only
"""Where torch has the functions with which it replaces some of its own as soon as something is compiled."""


@dataclass
class Tree:
    """The state of the process while a revision is active: the registry, loaded packages, and modules."""

    root: str
    registry: dict[str, Any]
    loaded: dict[str, str]
    modules: dict[str, ModuleType] = field(default_factory=dict)


class Trees:
    """Loaded revisions, one of which is active: its modules and variants are those that Python finds.

    Changing the revision takes some microseconds.
    """

    def __init__(self, roots: Mapping[Arm, str], plugins: tuple[str, ...], order: Sequence[Arm]) -> None:
        """Import the packages of the revisions of these arms, in this order; the last stays active.

        Raises:
            UserError: a package cannot be imported, changes torch for both revisions, or is not part of both.
        """
        names = [*dict.fromkeys((*installed_packages(), *plugins))]
        self.own = own_packages(names, roots)
        first = names.index(self.own[0])
        for name in names[:first]:
            load(name)
        known = {path.stem for root in roots.values() for path in Path(root).iterdir()} | set(names[first:])
        self._names = {name for name in known if name not in sys.modules}
        self._modules = 0
        self._active = shared = Tree("", {**vars(REGISTRY)}, {**LOADED})
        self.arms: dict[Arm, Tree] = {}
        for arm in order:
            registry = {kind: registered.copy() for kind, registered in shared.registry.items()}
            tree = self.arms[arm] = Tree(roots[arm], registry, {**shared.loaded})
            self.activate(arm)
            before, state = dict(_functions()), TorchState()
            try:
                for name in names[first:]:
                    load(name)
                state.check()
            except (UserError, WrongResultError) as error:
                alone = f"if it can be loaded without {order[0]} in the same process, gate with --separate"
                advice = f": {alone}" if arm != order[0] else ""
                raise UserError(f"{arm} cannot be loaded: {error}{advice}") from error
            tree.loaded = {**LOADED}
            replaced = [
                key
                for key, function in _functions()
                if before.get(key, function) is not function and not _is_of_compiler(function)
            ]
            if replaced and len(order) > 1:
                advice = "leave it unchanged, or gate with --separate"
                raise UserError(f"{arm} replaces {replaced[0]}, which both revisions use: {advice}")

    def activate(self, arm: Arm) -> None:
        """Make a revision the one whose modules and variants are found."""
        tree, old = self.arms[arm], self._active
        if tree is old:
            return
        if len(sys.modules) != self._modules:  # something was imported since the old revision became active
            old.modules = {
                name: module for name, module in sys.modules.items() if name.partition(".")[0] in self._names
            }
        for name in old.modules:
            del sys.modules[name]
        sys.modules.update(tree.modules)
        self._modules = len(sys.modules)
        sys.path[:] = [tree.root, *(path for path in sys.path if path != old.root)]
        os.chdir(tree.root)  # a plug-in file is named relative to the top folder
        vars(REGISTRY).update(tree.registry)
        LOADED.clear()
        LOADED.update(tree.loaded)
        self._active = tree


def own_packages(names: list[str], roots: Mapping[Arm, str]) -> list[str]:
    """Return the names of those packages that are files of the repository; raise a UserError if none is."""
    own = {arm: [name for name in names if _is_in(name, roots[arm])] for arm in ARMS}
    for arm, other in (ARMS, ARMS[::-1]):
        if missing := [name for name in own[other] if name not in own[arm]]:
            raise UserError(
                f"{arm} does not contain the variant package {', '.join(missing)}, which would be "
                "imported from elsewhere: compare two revisions that both contain it"
            )
    if not own["head"]:
        raise UserError(
            "no variant package is part of this repository: name one with --plugin, or a file by its path "
            "from the top folder"
        )
    return own["head"]


def _is_in(name: str, root: str) -> bool:
    """Return whether a package or file of variants is in the folder of a revision."""
    if name.endswith(".py"):
        return not Path(name).is_absolute() and (Path(root) / name).is_file()
    return PathFinder.find_spec(name.partition(".")[0], [root]) is not None


def _functions() -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield the functions that both revisions share, by name."""
    for owner in SHARED:
        for name, value in vars(owner).items():
            if callable(value):
                yield f"{getattr(owner, '__qualname__', None) or owner.__name__}.{name}", value  # type: ignore[attr-defined]  # a module or class


def _is_of_compiler(function: Callable[..., object]) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_COMPILER)
