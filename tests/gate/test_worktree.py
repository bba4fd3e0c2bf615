"""Two revisions side by side, in real repositories: what is refused, and that nothing is left behind."""

import os
import subprocess
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
def nobodys_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither the git configuration of who runs the tests, nor their folder for temporary files."""
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
    """A repository of two commits."""
    made = repository(tmp_path / "repository", {"a.txt": "one\n", "folder/b.txt": "b\n"})
    commit(made, {"a.txt": "two\n"})
    return made


def both(top: Path, base: str = "HEAD~1", head: str = "HEAD") -> dict[Arm, Revision]:
    """The revisions of both arms."""
    return {"base": resolve(top, base, "base"), "head": resolve(top, head, "head")}


def refusal(top: Path, asked: str, arm: Arm = "base") -> str:
    """Why a revision cannot be had, in one line for a person."""
    with pytest.raises(GitError) as error:
        resolve(top, asked, arm)
    assert isinstance(error.value, UserError)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_both_revisions_stand_side_by_side(top: Path) -> None:
    """In folders whose paths have the same length, each with the files of its commit."""
    with trees(top, both(top)) as folders:
        assert (folders["base"] / "a.txt").read_text(encoding="utf-8") == "one\n"
        assert (folders["head"] / "a.txt").read_text(encoding="utf-8") == "two\n"
        assert len(str(folders["base"])) == len(str(folders["head"]))
        assert folders["base"].parent == folders["head"].parent
        assert len(worktrees(top)) == 2


def test_a_revision_against_itself_is_checked_out_twice(top: Path) -> None:
    """Though git lets a branch be checked out once only."""
    with trees(top, both(top, "main", "main")) as folders:
        assert [(folder / "a.txt").exists() for folder in folders.values()] == [True, True]


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_behind(top: Path, nobodys_home: Path, error: type[BaseException] | None) -> None:
    """Whatever happens meanwhile, and whatever was written into the trees."""
    before = state(top)
    try:
        with trees(top, both(top)) as folders:
            write(folders["head"], {"a.txt": "changed", "new.txt": "new"})
            git(folders["head"], "add", "new.txt")
            if error:
                raise error
    except (ValueError, KeyboardInterrupt, SystemExit):
        assert error
    assert state(top) == before
    assert list(nobodys_home.iterdir()) == []


def test_a_tree_that_cannot_be_checked_out_leaves_nothing_either(top: Path, nobodys_home: Path) -> None:
    """The first one stands already when the second fails."""
    revisions = both(top) | {"head": Revision(asked="x", commit="0" * 40)}
    with pytest.raises(GitError, match="git worktree: "), trees(top, revisions):
        pass
    assert worktrees(top) == []
    assert list(nobodys_home.iterdir()) == []


def test_a_tree_that_git_has_half_made_is_removed_as_well(top: Path) -> None:
    """As where git was ended while it checked out: its lock is still there."""
    with trees(top, both(top)) as folders:
        (folders["head"] / ".git").unlink()
        write(top / ".git" / "worktrees" / "head", {"locked": "initializing"})
    assert worktrees(top) == []


def test_hooks_do_not_run_in_the_trees(top: Path) -> None:
    """A person's hook that fails after a checkout does not concern the gate."""
    hook = top / ".git" / "hooks" / "post-checkout"
    write(hook.parent, {hook.name: "#!/bin/sh\ntouch hooked\nexit 1\n"})
    hook.chmod(0o755)
    with trees(top, both(top)) as folders:
        assert not (folders["base"] / "hooked").exists()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("nope", "--base nope: no such revision in "),
        ("", "no such revision"),
        ("HEAD~99", "no such revision"),
        ("HEAD:a.txt", "no such revision"),
        ("HEAD~1..HEAD", "no such revision"),
        ("^HEAD", "no such revision"),
        ("a b\nc", "no such revision"),
        ("-q", "--base -q: not a revision"),
        ("--upload-pack=touch gotcha", "not a revision"),
        ("--exec=touch gotcha", "not a revision"),
    ],
)
def test_what_is_no_revision_is_said_in_one_line(top: Path, asked: str, words: str) -> None:
    """With its name and the arm; what looks like an option never reaches git."""
    assert words in " ".join(refusal(top, asked.replace("\n", " ")).split())
    assert not list(top.rglob("gotcha"))


def test_a_revision_is_any_name_of_a_commit(top: Path) -> None:
    """A branch, a tag with a message, a short hash or a relative."""
    tip = git(top, "rev-parse", "HEAD")
    git(top, "tag", "-a", "v1", "-m", "a release", "HEAD")
    for asked in ("main", "v1", tip[:10], "HEAD", "@"):
        assert resolve(top, asked, "base") == Revision(asked=asked, commit=tip)


def test_a_shallow_clone_says_what_to_do(top: Path, tmp_path: Path) -> None:
    """The revision is there, and was not fetched."""
    old = git(top, "rev-parse", "HEAD~1")
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{top}", "shallow")
    assert "in a shallow clone, fetch it first" in refusal(tmp_path / "shallow", old)


def test_without_a_repository_there_is_nothing_to_compare(tmp_path: Path) -> None:
    """The line names the folder."""
    with pytest.raises(
        GitError, match="is in no git repository, and the gate compares revisions of one"
    ) as error:
        gate_trees.repository(tmp_path)
    assert str(tmp_path.resolve()) in str(error.value)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_folder_may_have_a_name_that_is_no_text(top: Path, tmp_path: Path) -> None:
    """Git says bytes, as they are on disk, and so does the line about a revision."""
    moved = top.rename(tmp_path / os.fsdecode(b"caf\xe9"))
    assert gate_trees.repository(moved / "folder") == moved
    assert str(moved) in refusal(moved, "nope")
    with trees(moved, both(moved, head="worktree")) as folders:
        assert (folders["head"] / "a.txt").exists()


def test_a_repository_without_a_commit_has_no_revision(tmp_path: Path) -> None:
    """Nor can what its folder holds be compared with one."""
    git(tmp_path, "init", "--quiet", "empty")
    for asked in ("HEAD", "worktree"):
        assert refusal(tmp_path / "empty", asked)


def test_without_git_the_line_says_so(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a program of its own."""
    monkeypatch.setenv("PATH", str(top))
    with pytest.raises(GitError, match="there is no git on the path"):
        sweep(top)


def test_the_top_is_found_from_below(top: Path) -> None:
    """Wherever a person stands in their repository."""
    assert gate_trees.repository(top / "folder") == top


def test_the_base_is_where_the_work_left_the_main_branch(top: Path) -> None:
    """That of upstream where there is one; without any such branch a person has to name it."""
    began = git(top, "rev-parse", "HEAD")
    git(top, "checkout", "--quiet", "-b", "work")
    commit(top, {"a.txt": "three\n"})
    assert default_base(top, "HEAD") == began
    git(top, "checkout", "--quiet", "main")
    commit(top, {"a.txt": "four\n"})
    assert default_base(top, "work") == began
    assert default_base(top, "HEAD") == git(top, "rev-parse", "HEAD")
    git(top, "checkout", "--quiet", "work")
    git(top, "branch", "--quiet", "-m", "main", "trunk")
    with pytest.raises(GitError, match="name a revision with --base"):
        default_base(top, "HEAD")


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"a.txt": "three\n"}, "a.txt"),
        ({"new file.txt": "new\n"}, "new file.txt"),
        ({"two\nlines.txt": "new\n"}, "two\\nlines.txt"),
        ({"1": "", "2": "", "3": "", "4": "", "5": ""}, "(1, 2, 3 and 2 more)"),
    ],
    ids=["changed", "space", "newline", "many"],
)
def test_a_dirty_tree_is_not_judged_by_its_commit(top: Path, change: dict[str, str], shown: str) -> None:
    """Whoever asks for the tip means what they see: the line names it, and the way out."""
    write(top, change)
    for asked in ("HEAD", "@", "main"):
        told = refusal(top, asked, "head")
        assert "holds changes that are in no commit" in told
        assert shown in told
        assert told.endswith("commit them, or gate them with --head worktree")
    tip = git(top, "rev-parse", "HEAD")
    assert resolve(top, tip, "head").commit == tip
    assert resolve(top, "HEAD", "base").commit == git(top, "rev-parse", "HEAD")


def test_a_new_file_counts_where_a_person_has_git_hide_it(top: Path) -> None:
    """Their configuration is for their eyes."""
    git(top, "config", "status.showUntrackedFiles", "no")
    write(top, {"new.txt": "new\n"})
    assert "new.txt" in refusal(top, "HEAD", "head")


def test_what_measuring_writes_is_no_change(top: Path) -> None:
    """Nor is what git ignores."""
    commit(top, {".gitignore": "*.log\n"})
    write(top, {"results/run.jsonl": "", "reports/gate/gate.json": "", "a.log": ""})
    assert resolve(top, "HEAD", "head").commit == git(top, "rev-parse", "HEAD")
    write(top, {"mine/gate.json": ""})
    assert resolve(top, "HEAD", "head", aside=top / "mine").commit == git(top, "rev-parse", "HEAD")
    assert "mine" in refusal(top, "HEAD", "head")


def test_the_worktree_is_what_the_folder_holds(top: Path) -> None:
    """Changed, new and removed files; neither index nor branch nor status have moved."""
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


def test_a_worktree_without_changes_is_its_commit(top: Path) -> None:
    """There is no second name for it."""
    assert resolve(top, "worktree", "head").commit == git(top, "rev-parse", "HEAD")


def test_a_worktree_needs_no_name_of_a_person(top: Path) -> None:
    """A machine that runs the gate may have nobody's."""
    git(top, "config", "--unset", "user.name")
    git(top, "config", "user.useConfigOnly", "true")
    write(top, {"a.txt": "three\n"})
    assert resolve(top, "worktree", "head").commit != git(top, "rev-parse", "HEAD")


def test_a_hook_of_another_repository_may_run_the_gate(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git tells its hooks in variables which repository and which index they are about: not this one's."""
    other = repository(tmp_path / "other", {"other.txt": ""})
    before = state(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    write(top, {"new.txt": "new"})
    assert gate_trees.repository(top / "folder") == top
    with trees(top, both(top, head="worktree")) as folders:
        assert (folders["head"] / "new.txt").exists()
    assert state(other) == before


def test_a_gate_runs_in_a_work_tree_too(top: Path, tmp_path: Path) -> None:
    """One that a person added, and which stays."""
    git(top, "worktree", "add", "--quiet", "--detach", str(tmp_path / "linked"))
    with trees(gate_trees.repository(tmp_path / "linked"), both(tmp_path / "linked")):
        assert len(worktrees(top)) == 3
    assert len(worktrees(top)) == 1


KILLED = """
import os, sys
from pathlib import Path
from esbench.gate.worktree import resolve, trees

top = Path(sys.argv[1])
with trees(top, {arm: resolve(top, "HEAD", arm) for arm in ("base", "head")}):
    os.kill(os.getpid(), 9)
"""
"""A gate that is killed while its trees stand."""


@pytest.mark.parametrize("rest", ["whole", "no folder", "half made"])
def test_the_trees_of_a_gate_that_was_killed_are_swept(top: Path, nobodys_home: Path, rest: str) -> None:
    """By the next one, also where git was killed with it and has left a lock; those of the living stay."""
    environment = {**os.environ, "TMPDIR": str(nobodys_home)}
    subprocess.run([sys.executable, "-c", KILLED, str(top)], env=environment, check=False)
    (dead,) = nobodys_home.iterdir()
    assert len(worktrees(top)) == 2
    for arm in ("base", "head") if rest != "whole" else ():
        (dead / arm / ".git").unlink()
        if rest == "half made":
            write(top / ".git" / "worktrees" / arm, {"locked": "initializing"})
    with trees(top, both(top)) as living:
        assert not dead.exists()
        assert len(worktrees(top)) == 2
        sweep(top)
        assert (living["head"] / "a.txt").exists()
    assert worktrees(top) == []


def test_a_persons_tree_of_a_similar_name_is_not_swept(top: Path, tmp_path: Path) -> None:
    """Only those that a gate has named after its process."""
    names = [f"{PREFIX}mine/base", f"my-{PREFIX}1-x/base", "mine"]
    for name in names:
        git(top, "worktree", "add", "--quiet", "--detach", str(tmp_path / name))
    sweep(top)
    assert len(worktrees(top)) == len(names)
