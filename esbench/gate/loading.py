"""What a tree has of what was asked for: its packages of variants loaded, and chosen from."""

import dataclasses
import os
import sys
from pathlib import Path

from esbench.gate.protocol import Orders
from esbench.plugins import load, load_installed
from esbench.registry import REGISTRY, Entry, Suite, UnknownNameError
from esbench.selection import suited


@dataclasses.dataclass(frozen=True)
class Tree:
    """What a tree has of what was asked for; ``unknown`` says what it has not."""

    suite: Suite
    entries: list[Entry]
    unknown: str = ""


def loaded(orders: Orders) -> Tree:
    """Load the packages of variants, those of the tree before those that are installed.

    Raises:
        UserError: a package cannot be loaded.

    """
    sys.path.insert(0, orders.root)
    os.chdir(orders.root)  # a plugin's file is named as it stands in its tree
    load_installed()
    plugins = {load(name) for name in orders.plugins}
    try:
        suite = REGISTRY.find_suite(orders.suite)
        entries = REGISTRY.select(orders.variants or ("*",))
    except UnknownNameError as error:
        return Tree(Suite(name=orders.suite, description="", cases=()), [], str(error))
    return Tree(suite, entries if orders.variants else suited(entries, suite, plugins))


def folder(package: str) -> str:
    """Return where a package of variants was loaded from, nothing where it says nothing."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return str(Path(file).resolve().parent) if file else ""
