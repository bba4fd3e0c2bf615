"""Revisions of real repositories: names that are refused, the files of both arms, and complete clean-up."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from esbench.gate import revisions as gate_revisions
from esbench.gate.records import Arm, Revision
from esbench.gate.revisions import check_out, default_base, resolve
from esbench.git import GitError
from tests.gate.gate_repository import commit, git, repository, state, write


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a folder for temporary files, and ignore the user's git configuration."""
    (tmp_path / "home").mkdir()
    (tmp_path / "temporary").mkdir()
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """Return the top folder of a repository with two commits."""
    folder = repository(tmp_path / "repository", {"a.txt": "one\n", "folder/b.txt": "b\n"})
    commit(folder, {"a.txt": "two\n"})
    return folder


def both(top: Path, base: str = "HEAD~1", head: str = "HEAD") -> dict[Arm, Revision]:
    """Return the revisions of both arms."""
    return {"base": resolve(top, base, "base"), "head": resolve(top, head, "head")}


def refusal(top: Path, name: str, arm: Arm = "base") -> str:
    """Return the one line with which a revision is refused."""
    with pytest.raises(GitError) as error:
        resolve(top, name, arm)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_both_revisions_are_checked_out_side_by_side(top: Path, temporary: Path) -> None:
    """Both paths have the same length; the repository is unchanged, its hooks do not run.

    The folders are deleted after an interrupt, and after a commit that git cannot check out.
    """
    write(top / ".git" / "hooks", {"post-checkout": "#!/bin/sh\ntouch hooked\nexit 1\n"})
    (top / ".git" / "hooks" / "post-checkout").chmod(0o755)
    before = state(top)

    def interrupted() -> None:
        with check_out(top, both(top)) as folders:
            base, head = map(Path, folders.values())
            assert (base / "a.txt").read_text(encoding="utf-8") == "one\n"
            assert (head / "a.txt").read_text(encoding="utf-8") == "two\n"
            assert (base / "folder" / "b.txt").exists()
            assert len(str(base)) == len(str(head))
            assert base.parent == head.parent
            write(head, {"a.txt": "changed", "new.txt": "new"})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    revisions = both(top) | {"head": Revision("x", "0" * 40)}
    with pytest.raises(GitError, match="git read-tree: "), check_out(top, revisions):
        pass
    assert state(top) == before
    assert not list(top.rglob("hooked"))
    assert list(temporary.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from esbench.gate.revisions import check_out, resolve
top = Path(sys.argv[1])
with check_out(top, {arm: resolve(top, "HEAD", arm) for arm in ("base", "head")}):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_folders_of_a_killed_process_are_deleted_by_the_next(top: Path, temporary: Path) -> None:
    """Those of a process that still runs, and folders of other programs, are kept."""
    other = temporary / f"{gate_revisions.PREFIX}other"
    other.mkdir()
    (other / "lock").touch()
    with check_out(top, both(top)) as running:
        environment = {**os.environ, "TMPDIR": str(temporary)}
        killed = subprocess.run([sys.executable, "-c", KILLED, str(top)], env=environment, check=False)
        assert killed.returncode == -signal.SIGKILL
        assert len(list(temporary.iterdir())) == 3
        with check_out(top, both(top)) as folders:
            kept = {Path(running["base"]).parent, Path(folders["base"]).parent, other}
            assert {*temporary.iterdir()} == kept
            assert (Path(running["head"]) / "a.txt").exists()
    assert list(temporary.iterdir()) == [other]


def test_a_revision_is_any_name_of_a_commit(top: Path, tmp_path: Path) -> None:
    """Anything else is refused in one line; git never reads such a name as an option."""
    tip, old = git(top, "rev-parse", "HEAD"), git(top, "rev-parse", "HEAD~1")
    git(top, "tag", "-a", "v1", "-m", "a release", "HEAD")
    for name in ("main", "v1", tip[:10], "HEAD", "@"):
        assert resolve(top, name, "base") == Revision(name, tip)
    assert "--base nope: no such revision in " in refusal(top, "nope")
    for name in ("", "HEAD~99", "HEAD:a.txt", "HEAD~1..HEAD", "^HEAD", "a b c", "-q", "--all"):
        assert "no such revision" in refusal(top, name), name
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{top}", "shallow")
    assert "in a shallow clone, fetch it first" in refusal(tmp_path / "shallow", old)
    # The default base is the commit where the branch left main.
    git(top, "checkout", "--quiet", "-b", "work")
    commit(top, {"a.txt": "three\n"})
    git(top, "checkout", "--quiet", "main")
    assert commit(top, {"a.txt": "four\n"}) == default_base(top, "HEAD")
    assert default_base(top, "work") == tip
    git(top, "checkout", "--quiet", "work")
    git(top, "branch", "--quiet", "-m", "main", "trunk")
    with pytest.raises(GitError, match="name a revision with --base"):
        default_base(top, "HEAD")
    with pytest.raises(GitError, match="not a git repository"):
        gate_revisions.repository(tmp_path)


def test_uncommitted_changes_are_refused_if_the_tip_is_tested(top: Path) -> None:
    """The error names the changes, which would not be measured, even if the user hides untracked files.

    Files written by measuring and files that git ignores do not matter.
    """
    git(top, "config", "status.showUntrackedFiles", "no")
    commit(top, {".gitignore": "*.log\n"})
    tip = git(top, "rev-parse", "HEAD")
    for change, shown in (
        ({"a.txt": "three\n"}, "a.txt"),
        ({"1": "", "2": "", "3": "", "4": "", "5": ""}, "(1, 2, 3 and 2 more)"),
    ):
        write(top, change)
        for name in ("HEAD", "@", "main"):
            message = refusal(top, name, "head")
            assert "has uncommitted changes" in message
            assert shown in message
            assert message.endswith("commit them, or measure them with --head worktree")
        assert resolve(top, tip, "head").commit == resolve(top, "HEAD", "base").commit == tip
        git(top, "clean", "--quiet", "--force")
        git(top, "reset", "--quiet", "--hard")
    write(top, {"results/run.jsonl": "", "reports/gate/gate.json": "", "a.log": ""})
    assert resolve(top, "HEAD", "head").commit == tip


def test_worktree_stands_for_the_files_in_the_folder(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed, new and removed files are copied; index, branch and status stay unchanged.

    Without changes it is the commit of HEAD. A machine may have no git user, and paths may be no valid text.
    In a hook of another repository, git's variables for that repository are ignored.
    """
    if sys.platform == "linux":  # other systems refuse such names
        top = top.rename(tmp_path / os.fsdecode(b"caf\xe9"))
    unrelated = repository(tmp_path / "other", {"other.txt": ""})
    of_other = state(unrelated)
    monkeypatch.setenv("GIT_DIR", str(unrelated / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(unrelated))
    monkeypatch.setenv("GIT_INDEX_FILE", str(unrelated / ".git" / "index"))
    assert gate_revisions.repository(top / "folder") == top
    assert resolve(top, "worktree", "head").commit == git(top, "rev-parse", "HEAD")
    git(top, "config", "--unset", "user.name")
    git(top, "config", "user.useConfigOnly", "true")
    new = {"new file.txt": "new", "two\nlines.txt": "new", "ünïcödé.txt": "new", "-q": "new"}
    write(top, {"a.txt": "three\n", **new})
    git(top, "add", "a.txt")
    write(top, {"a.txt": "four\n"})
    (top / "folder" / "b.txt").unlink()
    before = state(top)
    with check_out(top, both(top, "HEAD", "worktree")) as folders:
        head = Path(folders["head"])
        files = {str(path.relative_to(head)) for path in head.rglob("*") if path.is_file()}
        assert files == {"a.txt", *new}
        assert (head / "a.txt").read_text(encoding="utf-8") == "four\n"
    assert state(top) == before
    assert state(unrelated) == of_other
