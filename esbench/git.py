"""Queries to git: the commit of a folder, its uncommitted changes, and a hash of its code.

Where only the files of a work tree arrive and its repository does not, ``ESBENCH_COMMIT`` gives the commit.
Its value is what ``python -m esbench.git`` prints in the repository: ``<commit>:<hash of the code>``.
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
"""What measuring itself writes is no change."""
SECONDS = 120.0
"""The timeout of a git command: it may hang on a network disk."""
TOLD = "ESBENCH_COMMIT"
"""The environment variable that tells the commit where git cannot."""
CODE = (".py", ".json")
"""What the files of code end in: tables of tuned kernels are code too."""
_WITHOUT_HOOKS = ("-c", f"core.hooksPath={os.devnull}")
"""A person's hooks are for their own work tree."""


class GitError(UserError):
    """git is not installed, or it failed; the message is its last line."""


def git(
    folder: Path, *arguments: str, environment: Mapping[str, str] | None = None, seconds: float = SECONDS
) -> str:
    """Return the output of a git command.

    Raises:
        GitError: it fails.

    """
    program = shutil.which("git")
    if program is None:
        message = "git was not found on PATH"
        raise GitError(message)
    # A hook that runs this has these set, and they would name another repository's index.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(  # noqa: S603  # git, with a revision that is held to be none of its options
            [program, "-C", str(folder), *_WITHOUT_HOOKS, *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # a file's name may be any bytes
            timeout=seconds,
            check=True,
            env={**inherited, **(environment or {})},
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        message = f"git {arguments[0]}: {said[-1] if said else error}"
        raise GitError(message) from error
    return done.stdout.strip("\n")


def commit(package: Path, seconds: float = SECONDS) -> str | None:
    """Return the commit of a package's folder, None if the package is not under version control.

    A package that is installed inside some other repository is not: the commit of that repository says
    nothing about the package's code. Then, or without git, the commit is what :data:`TOLD` says.
    """
    try:
        _require_tracked(package, seconds)
        return git(package, "rev-parse", "HEAD", seconds=seconds)
    except GitError:
        told = _told()
        return told[0] if told else None


def is_dirty(package: Path, seconds: float = SECONDS) -> bool | None:
    """Return whether anything in the work tree of a package is not committed, None if that is unknown.

    Where :data:`TOLD` tells the commit, this is whether the code differs from that of the commit.
    """
    try:
        _require_tracked(package, seconds)
        top = git(package, "rev-parse", "--show-toplevel", seconds=seconds)
        return bool(git(Path(top), "status", "--porcelain", "--", ".", *GENERATED, seconds=seconds))
    except GitError:
        told = _told()
        return code_hash(package.parent) != told[1] if told else None


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


def _require_tracked(package: Path, seconds: float) -> None:
    """Check that a package itself is under version control.

    Raises:
        GitError: it is not, or there is no git.

    """
    git(package, "ls-files", "--error-unmatch", "__init__.py", seconds=seconds)


def _told() -> tuple[str, str] | None:
    """Return commit and hash from the variable :data:`TOLD`, None if it is not set or malformed."""
    found = re.fullmatch(r"([0-9a-f]{40}):([0-9a-f]{64})", os.environ.get(TOLD, ""))
    return (found[1], found[2]) if found else None


def main() -> None:
    """Print the value of :data:`TOLD` for the work tree that this file is in.

    Raises:
        GitError: it is not the work tree of a repository, or something in it is not committed.

    """
    package = Path(__file__).parent
    _require_tracked(package, SECONDS)
    if is_dirty(package):
        message = f"{package.parent} holds changes that are not committed: commit them, or leave {TOLD} unset"
        raise GitError(message)
    sys.stdout.write(f"{commit(package)}:{code_hash(package.parent)}\n")


if __name__ == "__main__":
    try:
        main()
    except GitError as error:
        sys.exit(str(error))
