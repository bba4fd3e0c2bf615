"""Studies: accuracy of the timers, power of the gate, digits, tasks, scaling, goals of kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from esbench import store
from esbench.errors import UserError
from esbench.schema import Environment
from esbench.text import escape, pluralize
from esbench.units import format_value


class StoredStudy(msgspec.Struct, frozen=True, kw_only=True):
    """What the studies of all kinds have; ``study_id`` begins with the time at which the study started."""

    schema: int
    study_id: str
    started: str
    environment: Environment


S = TypeVar("S", bound=StoredStudy)


@dataclass(frozen=True)
class StudyFiles(Generic[S]):
    """The files of one kind of study: ``<results>/<device>/<folder>/<study id>.json``.

    Attributes:
        kind: the class of the studies.
        schema: the version of their format.
        folder: their folder in the results of a device.
        what: their name in messages, such as ``timer study``.
        again: what to do about a study of another version, such as ``measure again``.
    """

    kind: type[S]
    schema: int
    folder: str
    what: str
    again: str

    def path(self, study: S, results: Path) -> Path:
        """Return the file of a study."""
        return results / study.environment.slug / self.folder / f"{study.study_id}.json"

    def write(self, study: S, results: Path) -> Path:
        """Write a study atomically and return its file."""
        return store.write_document(study, self.path(study, results))

    def read(self, path: Path) -> S:
        """Read a study; raise a UserError with the file and the field if it is invalid."""
        return store.read_document(path, self.kind, what=self.what, schema=self.schema, again=self.again)

    def newest(self, results: Path) -> list[S]:
        """Read the newest study of each device; raise a UserError if one is invalid."""
        return [self.read(path) for path in newest_files(results, self.folder)]

    def newest_of(self, device: str, results: Path) -> S:
        """Read the newest study of a device; raise a UserError if there is none, or if it is invalid."""
        folder = results / device / self.folder
        if not (paths := sorted(folder.glob("*.json"))):
            raise UserError(f"no {self.what} in {folder}: train with `esbench {self.folder}`")
        return self.read(paths[-1])


def newest_files(results: Path, folder: str) -> list[Path]:
    """Return the newest study of each device in ``<results>/<device>/<folder>/``, by the devices' folders."""
    # The names of studies begin with their time, so the newest file of a folder overwrites the others.
    newest = {path.parent: path for path in sorted(results.glob(f"*/{folder}/*.json"))}
    return list(newest.values())


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
