"""Studies: accuracy of the timers, power of the gate, digits, tasks, scaling, goals of kernels."""

from collections.abc import Sequence
from pathlib import Path

from esbench.errors import UserError
from esbench.schema import Environment
from esbench.text import escape, pluralize
from esbench.units import format_value


def newest_files(results: Path, folder: str) -> list[Path]:
    """Return the newest study of each device in ``<results>/<device>/<folder>/``, by the devices' folders."""
    # The names of studies begin with their time, so the newest file of a folder overwrites the others.
    newest = {path.parent: path for path in sorted(results.glob(f"*/{folder}/*.json"))}
    return list(newest.values())


def newest_file(results: Path, device: str, folder: str, what: str, command: str) -> Path:
    """Return the newest study of a device; raise a UserError if there is none."""
    paths = sorted((results / device / folder).glob("*.json"))
    if not paths:
        raise UserError(f"no {what} in {results / device / folder}: train with `esbench {command}`")
    return paths[-1]


def origin(study_id: str, started: str, here: Environment, facts: Sequence[str]) -> str:
    """Return a line with when, where and with which code a study was measured, and more facts about it."""
    commit = f"commit {here.commit[:7]}" if here.commit else "commit unknown"
    every = [
        f"Study {study_id}, started {started}",
        f"{pluralize(here.threads, 'thread')} on {escape(here.cpu)}",
        commit + (" with uncommitted changes" if here.dirty else ""),
        f"esbench {here.esbench}, torch {here.torch}, Python {here.python}",
        *(f"{name} {version}" for name, version in (("CUDA", here.cuda), ("driver", here.driver)) if version),
    ]
    return "; ".join([*every, *facts]) + "."


def percent(share: float) -> str:
    """Return a share as a percentage: ``1.5 %`` for 0.015."""
    return format_value("share_percent", 100 * share)
