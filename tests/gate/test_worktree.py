"""Temporary work trees in real repositories: revisions that are refused, and complete clean-up."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from esbench.errors import UserError
from esbench.gate import worktree as gate_trees
from esbench.gate.protocol import Arm
from esbench.gate.worktree import PREFIX, Revision, default_base, resolve, sweep, trees
from esbench.git import GitError
from tests.gate.gate_repository import commit, git, repository, state, worktrees, write


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a folder for temporary files, and ignore the user's git configuration."""
    (tmp_path / "home").mkdir()
    (tmp_path / "temporary").mkdir()
    for name in [one for one in os.environ if one.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """Return the top folder of a repository with two commits."""
    made = repository(tmp_path / "repository", {"a.txt": "one\n", "folder/b.txt": "b\n"})
    commit(made, {"a.txt": "two\n"})
    return made


def both(top: Path, base: str = "HEAD~1", head: str = "HEAD") -> dict[Arm, Revision]:
    """Return the revisions of both arms."""
    return {"base": resolve(top, base, "base"), "head": resolve(top, head, "head")}


def refusal(top: Path, asked: str, arm: Arm = "base") -> str:
    """Return the one line with which a revision is refused."""
    with pytest.raises(GitError) as error:
        resolve(top, asked, arm)
    assert isinstance(error.value, UserError)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_both_revisions_stand_side_by_side(top: Path, tmp_path: Path) -> None:
    """Both paths have the same length, a branch may be checked out twice, and hooks do not run.

    Other work trees of the repository stay.
    """
    hook = top / ".git" / "hooks" / "post-checkout"
    write(hook.parent, {hook.name: "#!/bin/sh\ntouch hooked\nexit 1\n"})
    with trees(top, both(top)) as folders:
        assert (folders["base"] / "a.txt").read_text(encoding="utf-8") == "one\n"
        assert (folders["head"] / "a.txt").read_text(encoding="utf-8") == "two\n"
        assert len(str(folders["base"])) == len(str(folders["head"]))
        assert folders["base"].parent == folders["head"].parent
        assert len(worktrees(top)) == 2
    git(top, "worktree", "add", "--quiet", "--detach", str(tmp_path / "linked"))
    hook.chmod(0o755)
    linked = gate_trees.repository(tmp_path / "linked")
    with trees(linked, both(linked, "main", "main")) as folders:
        assert [(folder / "a.txt").exists() for folder in folders.values()] == [True, True]
        assert not (folders["base"] / "hooked").exists()
        assert len(worktrees(top)) == 3
    assert len(worktrees(top)) == 1


def test_nothing_is_left_behind(top: Path, temporary: Path) -> None:
    """Work trees are removed after an interrupt, a failed checkout, or one that git left half done."""
    before = state(top)

    def interrupted() -> None:
        with trees(top, both(top)) as folders:
            write(folders["head"], {"a.txt": "changed", "new.txt": "new"})
            git(folders["head"], "add", "new.txt")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert state(top) == before
    revisions = both(top) | {"head": Revision(asked="x", commit="0" * 40)}
    with pytest.raises(GitError, match="git worktree: "), trees(top, revisions):
        pass
    assert worktrees(top) == []
    with trees(top, both(top)) as folders:  # as if git was killed during the checkout
        (folders["head"] / ".git").unlink()
        write(top / ".git" / "worktrees" / "head", {"locked": "initializing"})
    assert worktrees(top) == []
    assert list(temporary.iterdir()) == []


def test_a_revision_is_any_name_of_a_commit(top: Path, tmp_path: Path) -> None:
    """Anything else is refused in one line; a name like an option is never passed to git."""
    tip, old = git(top, "rev-parse", "HEAD"), git(top, "rev-parse", "HEAD~1")
    git(top, "tag", "-a", "v1", "-m", "a release", "HEAD")
    for asked in ("main", "v1", tip[:10], "HEAD", "@"):
        assert resolve(top, asked, "base") == Revision(asked=asked, commit=tip)
    assert "--base nope: no such revision in " in refusal(top, "nope")
    for asked in ("", "HEAD~99", "HEAD:a.txt", "HEAD~1..HEAD", "^HEAD", "a b c"):
        assert "no such revision" in refusal(top, asked), asked
    for asked in ("-q", "--upload-pack=touch gotcha"):
        assert f"--base {asked}: not a revision" in refusal(top, asked)
    assert not list(top.rglob("gotcha"))
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


def test_without_a_repository_a_commit_or_git_the_line_says_so(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the folder, the revision or the program."""
    with pytest.raises(GitError, match="is not in a git repository, whose revisions the gate") as error:
        gate_trees.repository(tmp_path)
    assert str(tmp_path.resolve()) in str(error.value)
    git(tmp_path, "init", "--quiet", "empty")
    for asked in ("HEAD", "worktree"):
        assert refusal(tmp_path / "empty", asked)
    monkeypatch.setenv("PATH", str(top))
    with pytest.raises(GitError, match="git was not found on PATH"):
        sweep(top)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_folder_may_have_a_name_that_is_no_text(top: Path, tmp_path: Path) -> None:
    """Paths that are not valid text work, and so does the error about a revision there."""
    moved = top.rename(tmp_path / os.fsdecode(b"caf\xe9"))
    assert gate_trees.repository(moved / "folder") == moved
    assert str(moved) in refusal(moved, "nope")
    with trees(moved, both(moved, head="worktree")) as folders:
        assert (folders["head"] / "a.txt").exists()


def test_uncommitted_changes_are_refused_if_the_tip_is_asked_for(top: Path) -> None:
    """They would not be measured; the line names them, even if the user hides untracked files.

    Files written by measuring, files that git ignores and a folder of output do not matter.
    """
    git(top, "config", "status.showUntrackedFiles", "no")
    commit(top, {".gitignore": "*.log\n"})
    tip = git(top, "rev-parse", "HEAD")
    for change, shown in (
        ({"a.txt": "three\n"}, "a.txt"),
        ({"two\nlines.txt": "new\n"}, "two\\nlines.txt"),
        ({"1": "", "2": "", "3": "", "4": "", "5": ""}, "(1, 2, 3 and 2 more)"),
    ):
        write(top, change)
        for asked in ("HEAD", "@", "main"):
            told = refusal(top, asked, "head")
            assert "has uncommitted changes" in told
            assert shown in told
            assert told.endswith("commit them, or measure them with --head worktree")
        assert resolve(top, tip, "head").commit == resolve(top, "HEAD", "base").commit == tip
        git(top, "clean", "--quiet", "--force")
        git(top, "reset", "--quiet", "--hard")
    write(top, {"results/run.jsonl": "", "reports/gate/gate.json": "", "a.log": "", "mine/gate.json": ""})
    assert resolve(top, "HEAD", "head", aside=top / "mine").commit == tip
    assert "mine" in refusal(top, "HEAD", "head")


def test_the_worktree_is_what_the_folder_holds(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed, new and removed files are copied; index, branch and status stay as they are.

    Without changes the result is the commit of HEAD. A machine may have no git user. Inside a hook of another
    repository, git's variables for that repository and its index are ignored.
    """
    other = repository(tmp_path / "other", {"other.txt": ""})
    of_other = state(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    assert gate_trees.repository(top / "folder") == top
    assert resolve(top, "worktree", "head").commit == git(top, "rev-parse", "HEAD")
    git(top, "config", "--unset", "user.name")
    git(top, "config", "user.useConfigOnly", "true")
    names = {"new file.txt": "new", "two\nlines.txt": "new", "ünïcödé.txt": "new", "-q": "new"}
    write(top, {"a.txt": "three\n", **names})
    git(top, "add", "a.txt")
    write(top, {"a.txt": "four\n"})
    (top / "folder" / "b.txt").unlink()
    before = state(top)
    revision = resolve(top, "worktree", "head")
    assert state(top) == before
    assert revision.commit != git(top, "rev-parse", "HEAD")
    with trees(top, {"base": resolve(top, "HEAD", "base"), "head": revision}) as folders:
        head = folders["head"]
        found = {str(path.relative_to(head)) for path in head.rglob("*") if path.is_file()}
        assert found == {".git", "a.txt", *names}
        assert (head / "a.txt").read_text(encoding="utf-8") == "four\n"
    assert state(top) == before
    assert state(other) == of_other


def test_the_work_trees_of_a_killed_gate_are_removed_by_the_next(
    top: Path, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks left by a killed git are removed as well; running gates and similar names are kept."""
    dead, living, similar = (tmp_path / name for name in (f"{PREFIX}1-x", f"{PREFIX}2-x", f"my-{PREFIX}1-x"))
    monkeypatch.setattr("esbench.gate.worktree.psutil.pid_exists", lambda number: number == 2)
    for folder in (dead, living, similar, tmp_path / f"{PREFIX}mine"):
        git(top, "worktree", "add", "--quiet", "--detach", "--force", str(folder / "base"))
    git(top, "worktree", "add", "--quiet", "--detach", "--force", str(dead / "head"))
    (dead / "head" / ".git").unlink()
    write(top / ".git" / "worktrees" / "head", {"locked": "initializing"})
    sweep(top)
    assert not dead.exists()
    assert len(worktrees(top)) == 3
    assert (living / "base" / "a.txt").exists()
    with trees(top, both(top)):  # the folders have the gate's process id in their names
        (own,) = temporary.iterdir()
        assert own.name.startswith(f"{PREFIX}{os.getpid()}-")
