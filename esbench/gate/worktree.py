"""Check out two revisions of a repository side by side, as temporary git work trees.

Both folders have names of the same length, because the length of a path shifts the stack of a process, which
is enough to change its speed (Mytkowicz et al., Producing Wrong Data Without Doing Anything Obviously Wrong,
2009).
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import psutil

from esbench.gate.protocol import ARMS, Arm
from esbench.git import GENERATED, GitError, git
from esbench.report.text import listed

WORKTREE = "worktree"
"""Name of the revision that stands for the files in the folder, committed or not."""
PREFIX = "esbench-gate-"
_NAMED = ("-c", "user.name=esbench", "-c", "user.email=esbench@localhost")


class Revision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm: the requested revision and its commit.

    For a work tree with changes that is a commit on no branch.
    """

    asked: str
    commit: str


def repository(folder: Path) -> Path:
    """Return the top folder of the repository that a folder is in.

    Raises:
        GitError: it is in no repository, or git is not installed.

    """
    try:
        return Path(git(folder, "rev-parse", "--show-toplevel"))
    except GitError as error:
        message = f"{folder.resolve()} is not in a git repository, whose revisions the gate compares: {error}"
        raise GitError(message) from error


def default_base(top: Path, head: str) -> str:
    """Return the merge base of ``head`` and the main branch, preferably that of the remote.

    Raises:
        GitError: there is no such branch.

    """
    for branch in ("origin/HEAD", "origin/main", "origin/master", "main", "master"):
        with contextlib.suppress(GitError):
            return git(top, "merge-base", branch, head)
    message = "no branch main or master to compare with: name a revision with --base"
    raise GitError(message)


def resolve(top: Path, asked: str, arm: Arm, aside: Path | None = None) -> Revision:
    """Return the commit of a revision; for ``worktree`` a new commit of the files in the folder.

    Args:
        top: the top folder of the repository.
        asked: the revision.
        arm: for error messages; a dirty folder is refused for ``head`` only.
        aside: a folder of output, whose files do not count as changes.

    Raises:
        GitError: there is no such revision, or HEAD is asked for and the folder has uncommitted changes.

    """
    if asked == WORKTREE:
        return Revision(asked=asked, commit=_snapshot(top))
    if asked.startswith("-"):
        message = f"--{arm} {asked}: not a revision, it begins with a dash"
        raise GitError(message)
    try:
        commit = git(top, "rev-parse", "--verify", f"{asked}^{{commit}}")
    except GitError:
        commit = ""
    if re.fullmatch("[0-9a-f]+", commit) is None:  # for ^commit git prints ^..., too
        message = f"--{arm} {asked}: no such revision in {top}; in a shallow clone, fetch it first"
        raise GitError(message)
    is_tip = arm == "head" and not commit.startswith(asked) and commit == git(top, "rev-parse", "HEAD")
    if is_tip and (changed := _changes(top, aside)):
        message = (
            f"{top} has uncommitted changes ({changed}), which the gate would not measure: "
            f"commit them, or measure them with --head {WORKTREE}"
        )
        raise GitError(message)
    return Revision(asked=asked, commit=commit)


@contextlib.contextmanager
def trees(top: Path, revisions: Mapping[Arm, Revision]) -> Iterator[dict[Arm, Path]]:
    """Check the revisions out side by side; remove them afterwards, and those of killed gates before.

    Raises:
        GitError: git fails.

    """
    sweep(top)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")).resolve()
    try:
        found = {}
        for arm in ARMS:
            found[arm] = folder / arm
            git(top, "worktree", "add", "--detach", "--force", str(found[arm]), revisions[arm].commit)
        yield found
    finally:
        _remove(top, folder)


def sweep(top: Path) -> None:
    """Remove the work trees of gates whose process is gone."""
    listed = git(top, "worktree", "list", "--porcelain")
    for line in listed.splitlines():
        path = Path(line.removeprefix("worktree "))
        named = re.fullmatch(rf"{PREFIX}(\d+)-.*", path.parent.name)
        if line.startswith("worktree ") and named and not psutil.pid_exists(int(named[1])):
            _remove(top, path.parent)


def _remove(top: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for arm in ARMS:  # after the folder: git refuses to remove a half-made tree, but not one that is gone
        with contextlib.suppress(GitError):
            git(top, "worktree", "remove", "--force", "--force", str(folder / arm))
    with contextlib.suppress(GitError):
        git(top, "worktree", "prune")


def _changes(top: Path, aside: Path | None) -> str:
    """Return the names of the first changed files."""
    top, generated = top.resolve(), list(GENERATED)
    if aside is not None and aside.resolve().is_relative_to(top) and aside.resolve() != top:
        generated.append(f":(exclude,literal){aside.resolve().relative_to(top).as_posix()}")
    lines = git(top, "status", "--porcelain", "--untracked-files=normal", "--", ".", *generated).splitlines()
    return listed([line[2:].strip() for line in lines])


def _snapshot(top: Path) -> str:
    """Commit the files in the folder, new ones included, on no branch and without touching the index."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        git(top, "read-tree", "HEAD", environment=index)
        git(top, "add", "--all", environment=index)
        tree = git(top, "write-tree", environment=index)
    if tree == git(top, "rev-parse", "HEAD^{tree}"):
        return git(top, "rev-parse", "HEAD")
    return git(top, *_NAMED, "commit-tree", tree, "-p", "HEAD", "-m", "state of the work tree")
