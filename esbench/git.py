"""What git says of a folder: one way to ask."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from esbench.errors import UserError

GENERATED = (":(exclude)results", ":(exclude)reports")
"""What measuring itself writes is no change."""
SECONDS = 120.0
"""After so many git hangs: on a network's disk, perhaps."""
_WITHOUT_HOOKS = ("-c", f"core.hooksPath={os.devnull}")
"""A person's hooks are for their own work tree."""


class GitError(UserError):
    """There is no git, or it fails; the message says in which words."""


def git(
    folder: Path, *arguments: str, environment: Mapping[str, str] | None = None, seconds: float = SECONDS
) -> str:
    """Return what git says.

    Raises:
        GitError: it fails.

    """
    program = shutil.which("git")
    if program is None:
        message = "there is no git on the path"
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
    """Return the commit of a package's folder, None where the package itself is not under version control.

    Installed into an environment inside somebody's repository, it is not: that repository's
    commit says nothing about the package's code.
    """
    try:
        git(package, "ls-files", "--error-unmatch", "__init__.py", seconds=seconds)
        return git(package, "rev-parse", "HEAD", seconds=seconds)
    except GitError:
        return None


def is_dirty(package: Path, seconds: float = SECONDS) -> bool | None:
    """Return whether anything in the work tree of a package is not committed; None: git cannot say."""
    try:
        top = git(package, "rev-parse", "--show-toplevel", seconds=seconds)
        return bool(git(Path(top), "status", "--porcelain", "--", ".", *GENERATED, seconds=seconds))
    except GitError:
        return None
