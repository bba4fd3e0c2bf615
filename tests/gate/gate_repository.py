"""A small git repository for a test."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

Files = Mapping[str, str]


def git(folder: Path, *arguments: str) -> str:
    """Return the output of git, independent of the user's git configuration."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    no_configuration = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        [str(shutil.which("git")), "-C", str(folder), *arguments],
        env={**environment, **no_configuration},
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        check=True,
    )
    return done.stdout.strip("\n")


def write(folder: Path, files: Files) -> None:
    """Write files into a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def commit(top: Path, files: Files, *removed: str) -> str:
    """Commit new files and removals; return the commit."""
    write(top, files)
    for name in removed:
        (top / name).unlink()
    git(top, "add", "--all")
    git(top, "commit", "--quiet", "--allow-empty", "--message", "a change")
    return git(top, "rev-parse", "HEAD")


def repository(folder: Path, files: Files) -> Path:
    """Create a repository with one commit on the branch main; return its top folder."""
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet")
    git(folder, "symbolic-ref", "HEAD", "refs/heads/main")
    git(folder, "config", "user.name", "Somebody")
    git(folder, "config", "user.email", "somebody@localhost")
    commit(folder, files)
    return folder.resolve()


def state(top: Path) -> dict[str, object]:
    """Return index, branches, status, work trees and files of a repository, which a gate must not change."""
    folder = Path(git(top, "rev-parse", "--absolute-git-dir"))
    return {
        "index": (folder / "index").read_bytes(),
        "head": (folder / "HEAD").read_text(encoding="utf-8"),
        "refs": git(top, "for-each-ref"),
        "status": git(top, "status", "--porcelain", "--untracked-files=all"),
        "worktrees": git(top, "worktree", "list"),
        "files": sorted(
            (str(path.relative_to(top)), path.read_bytes())
            for path in top.rglob("*")
            if path.is_file() and ".git" not in path.relative_to(top).parts
        ),
    }
