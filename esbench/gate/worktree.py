"""Two revisions of a repository side by side: git work trees in a folder of their own, gone afterwards.

Both folders have names of the same length: the length of a path moves what a process has on its stack, which
is enough to change how fast it is (Mytkowicz et al., Producing Wrong Data Without Doing Anything Obviously
Wrong, 2009).
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

WORKTREE = "worktree"
"""The name of the revision that is what the folder holds now, committed or not."""
PREFIX = "esbench-gate-"
_NAMED = ("-c", "user.name=esbench", "-c", "user.email=esbench@localhost")


class Revision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm: what was asked for, and the commit that it is.

    ``base`` of a work tree that differs from its commit is a commit that no branch has.
    """

    asked: str
    commit: str


def repository(folder: Path) -> Path:
    """Return the top of the repository that holds a folder.

    Raises:
        GitError: it is in none, or there is no git.

    """
    try:
        return Path(git(folder, "rev-parse", "--show-toplevel"))
    except GitError as error:
        message = (
            f"{folder.resolve()} is in no git repository, and the gate compares revisions of one: {error}"
        )
        raise GitError(message) from error


def default_base(top: Path, head: str) -> str:
    """Return where the work up to ``head`` left the main branch, upstream's if there is one.

    Raises:
        GitError: there is no such branch.

    """
    for branch in ("origin/HEAD", "origin/main", "origin/master", "main", "master"):
        with contextlib.suppress(GitError):
            return git(top, "merge-base", branch, head)
    message = "no branch main or master to compare with: name a revision with --base"
    raise GitError(message)


def resolve(top: Path, asked: str, arm: Arm, aside: Path | None = None) -> Revision:
    """Return the commit of what was asked for; for ``worktree`` a commit of what the folder holds now.

    ``aside`` is a folder of output: what it holds is nobody's change.

    Raises:
        GitError: there is no such revision, or the tip is asked for and the folder holds something else.

    """
    if asked == WORKTREE:
        return Revision(asked=asked, commit=_snapshot(top))
    if asked.startswith("-"):
        message = f"--{arm} {asked}: not a revision"
        raise GitError(message)
    try:
        commit = git(top, "rev-parse", "--verify", f"{asked}^{{commit}}")
    except GitError:
        commit = ""
    if re.fullmatch("[0-9a-f]+", commit) is None:  # git says ^... of what stands for all but a commit
        message = f"--{arm} {asked}: no such revision in {top}; in a shallow clone, fetch it first"
        raise GitError(message)
    is_tip = arm == "head" and not commit.startswith(asked) and commit == git(top, "rev-parse", "HEAD")
    if is_tip and (changed := _changes(top, aside)):
        message = (
            f"{top} holds changes that are in no commit ({changed}), and the gate would not judge them: "
            f"commit them, or gate them with --head {WORKTREE}"
        )
        raise GitError(message)
    return Revision(asked=asked, commit=commit)


@contextlib.contextmanager
def trees(top: Path, revisions: Mapping[Arm, Revision]) -> Iterator[dict[Arm, Path]]:
    """Check the revisions out side by side; leave nothing behind, and nothing that others left.

    Raises:
        GitError: git cannot.

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
    """Remove the trees of gates that were killed: those whose process is gone."""
    listed = git(top, "worktree", "list", "--porcelain")
    for line in listed.splitlines():
        path = Path(line.removeprefix("worktree "))
        named = re.fullmatch(rf"{PREFIX}(\d+)-.*", path.parent.name)
        if line.startswith("worktree ") and named and not psutil.pid_exists(int(named[1])):
            _remove(top, path.parent)


def _remove(top: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for arm in ARMS:  # behind the folder: git does not remove what it has half made, but what is gone
        with contextlib.suppress(GitError):
            git(top, "worktree", "remove", "--force", "--force", str(folder / arm))
    with contextlib.suppress(GitError):
        git(top, "worktree", "prune")


def _changes(top: Path, aside: Path | None) -> str:
    """Return in words what the folder holds that no commit does."""
    top, generated = top.resolve(), list(GENERATED)
    if aside is not None and aside.resolve().is_relative_to(top) and aside.resolve() != top:
        generated.append(f":(exclude,literal){aside.resolve().relative_to(top).as_posix()}")
    lines = git(top, "status", "--porcelain", "--untracked-files=normal", "--", ".", *generated).splitlines()
    names = [line[2:].strip() for line in lines]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")  # noqa: PLR2004  # as many as fit a line


def _snapshot(top: Path) -> str:
    """Commit what the folder holds, new files among it, to no branch; touch nothing."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        git(top, "read-tree", "HEAD", environment=index)
        git(top, "add", "--all", environment=index)
        tree = git(top, "write-tree", environment=index)
    if tree == git(top, "rev-parse", "HEAD^{tree}"):
        return git(top, "rev-parse", "HEAD")
    return git(top, *_NAMED, "commit-tree", tree, "-p", "HEAD", "-m", "what the gate judged")
