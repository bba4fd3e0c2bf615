"""Revisions of a repository: find their commits, and write their files into temporary folders.

Both folders have paths of the same length, because the length of a path moves the stack of a process, which
can change its speed (Mytkowicz et al., Producing Wrong Data Without Doing Anything Obviously Wrong, 2009).
"""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from esbench.gate.records import ARMS, Arm, Revision
from esbench.git import GENERATED, GitError, git
from esbench.text import first_names

WORKTREE = "worktree"
"""The revision name for the files in the folder, committed or not."""
PREFIX, LOCK = "esbench-gate-", "esbench-gate.lock"
"""The prefix of the names of temporary folders, and the file in a checkout's that its process locks."""
_AUTHOR = ("-c", "user.name=esbench", "-c", "user.email=esbench@localhost")


def repository(folder: Path) -> Path:
    """Return the top folder of the repository that a folder is in; raise a GitError if it is in none."""
    return Path(git(folder, "rev-parse", "--show-toplevel"))


def default_base(top: Path, head: str) -> str:
    """Return the merge base of ``head`` and the main branch, if possible that of the remote.

    Raises:
        GitError: the branch does not exist.
    """
    for branch in ("origin/HEAD", "origin/main", "origin/master", "main", "master"):
        with contextlib.suppress(GitError):
            return git(top, "merge-base", branch, head)
    raise GitError("no branch main or master to compare with: name a revision with --base")


def resolve(top: Path, asked: str, arm: Arm) -> Revision:
    """Return the commit of a revision; for ``worktree`` a new commit of the files in the folder.

    If ``head`` is the checked-out commit, uncommitted changes are refused, unless it is named by its hash.

    Raises:
        GitError: there is no such revision, or there are uncommitted changes.
    """
    if asked == WORKTREE:
        return Revision(asked=asked, commit=_snapshot(top))
    try:
        commit = git(top, "rev-parse", "--verify", "--end-of-options", f"{asked}^{{commit}}")
    except GitError:
        commit = ""
    if re.fullmatch("[0-9a-f]+", commit) is None:  # for "^commit" git prints "^" and the hash
        raise GitError(f"--{arm} {asked}: no such revision in {top}; in a shallow clone, fetch it first")
    # A hash names a commit, so it is measured without the changes; "HEAD" or a branch could mean the files.
    if arm == "head" and not commit.startswith(asked) and commit == git(top, "rev-parse", "HEAD"):
        status = git(top, "status", "--porcelain", "--untracked-files=normal", "--", ".", *GENERATED)
        # A line has two letters for the kind of change.
        if changed := first_names([line[2:].strip() for line in status.splitlines()]):
            raise GitError(
                f"{top} has uncommitted changes ({changed}), which the gate would not measure: "
                f"commit them, or measure them with --head {WORKTREE}"
            )
    return Revision(asked=asked, commit=commit)


@contextlib.contextmanager
def check_out(top: Path, revisions: Mapping[Arm, Revision]) -> Iterator[dict[Arm, str]]:
    """Write the files of both revisions into two temporary folders, and delete them afterwards.

    They are not git work trees, so that a crash leaves nothing registered in the repository. The next call
    deletes folders that a killed process left: their locks are free.

    Raises:
        GitError: git fails.
    """
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(Timeout, OSError), FileLock(lock, timeout=0):
            shutil.rmtree(lock.parent)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as temporary, FileLock(Path(temporary) / LOCK):
        folders = {arm: str(Path(temporary).resolve() / arm) for arm in ARMS}
        for arm, folder in folders.items():
            index = _index_in(temporary)
            git(top, "read-tree", revisions[arm].commit, environment=index)
            git(top, "checkout-index", "--all", f"--prefix={folder}/", environment=index)
        yield folders


def _index_in(folder: str) -> dict[str, str]:
    """Return the environment variable with which git uses an index in this folder, not the repository's."""
    return {"GIT_INDEX_FILE": str(Path(folder) / "index")}


def _snapshot(top: Path) -> str:
    """Commit the files in the folder, also untracked ones, to no branch; the index stays unchanged."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as temporary:
        index = _index_in(temporary)
        git(top, "read-tree", "HEAD", environment=index)
        git(top, "add", "--all", environment=index)
        tree = git(top, "write-tree", environment=index)
    if tree == git(top, "rev-parse", "HEAD^{tree}"):
        return git(top, "rev-parse", "HEAD")
    return git(top, *_AUTHOR, "commit-tree", tree, "-p", "HEAD", "-m", "state of the work tree")
