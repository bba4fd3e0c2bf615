"""Queries to git: the commit of a folder, its uncommitted changes, and a hash of its code.

On a machine with a copy of the files but without the repository, the environment variable ``ESBENCH_COMMIT``
gives the commit. ``python -m esbench.git`` prints its value in the repository: ``<commit>:<hash of code>``.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from esbench.errors import UserError

GENERATED = (":(exclude)results", ":(exclude)reports")
"""Files that measuring writes do not count as changes."""
TIMEOUT_S = 60.0
"""Seconds after which a git command has failed: it may hang on a network disk."""
VARIABLE = "ESBENCH_COMMIT"
"""The environment variable with the commit, for machines without the repository."""
CODE = (".py", ".json")
"""Suffixes of files of code; tables of tuned kernels are code, too."""
_WITHOUT_HOOKS = ("-c", f"core.hooksPath={os.devnull}")
"""Hooks of the user are not run."""


class GitError(UserError):
    """git is not installed, or it failed; the message is the last line of its output."""


def git(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the output of a git command; raise a GitError if it fails."""
    program = shutil.which("git")
    if program is None:
        raise GitError("git was not found on PATH")
    # A hook of git sets these variables to the index of the repository of the hook.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(  # noqa: S603  # git; revisions come after --end-of-options
            [program, "-C", str(folder), *_WITHOUT_HOOKS, *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # the name of a file may be any bytes
            timeout=TIMEOUT_S,
            check=True,
            env={**inherited, **(environment or {})},
        )
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise GitError(f"git {arguments[0]}: {lines[-1] if lines else error}") from error
    return done.stdout.strip("\n")


def commit(package: Path) -> str | None:
    """Return the commit of a package's folder, or the commit in :data:`VARIABLE`; None if both are unknown.

    A package that is not under version control has no commit, even in a folder of another repository.
    """
    try:
        _require_tracked(package)
        return git(package, "rev-parse", "HEAD")
    except GitError:
        stated = _commit_and_hash()
        return stated[0] if stated else None


def is_dirty(package: Path) -> bool | None:
    """Return whether the work tree of a package has uncommitted changes, None if unknown.

    Without a repository, return whether the code differs from that of the commit in :data:`VARIABLE`.
    """
    try:
        _require_tracked(package)
        top = git(package, "rev-parse", "--show-toplevel")
        changes = git(Path(top), "status", "--porcelain", "--", ".", *GENERATED).splitlines()
        # A new file beside the packages, such as a plug-in, is no change of their code.
        return any("/" in line or not line.startswith("??") for line in changes)
    except GitError:
        stated = _commit_and_hash()
        return code_hash(package.parent) != stated[1] if stated else None


def code_hash(top: Path) -> str:
    """Return the SHA-256 of the names and contents of all code in the packages of a folder."""
    packages = sorted(path.parent for path in top.glob("*/__init__.py"))
    files = sorted(path for package in packages for path in package.rglob("*") if path.suffix in CODE)
    total = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        total.update(f"{path.relative_to(top).as_posix()} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()


def _require_tracked(package: Path) -> None:
    """Raise a GitError if a package is untracked, or if git is not installed."""
    git(package, "ls-files", "--error-unmatch", "__init__.py")


def _commit_and_hash() -> tuple[str, str] | None:
    """Return commit and hash from :data:`VARIABLE`, None if it is unset or malformed."""
    match = re.fullmatch(r"([0-9a-f]{40}):([0-9a-f]{64})", os.environ.get(VARIABLE, ""))
    return (match[1], match[2]) if match else None


def main() -> None:
    """Print the value of :data:`VARIABLE` for the repository that this file is in.

    Raises:
        GitError: the file is not in a repository, or the repository has uncommitted changes.
    """
    package = Path(__file__).parent
    _require_tracked(package)
    if is_dirty(package):
        raise GitError(f"{package.parent} has uncommitted changes: commit them, or leave {VARIABLE} unset")
    sys.stdout.write(f"{commit(package)}:{code_hash(package.parent)}\n")


if __name__ == "__main__":
    try:
        main()
    except GitError as error:
        sys.exit(str(error))
