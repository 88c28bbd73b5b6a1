"""git alone with itself: no configuration, variable, hook or locale of the user's gets in."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import mini_project
from mini_project import Mini, git, snapshot, tree_files
from patchctl import engine
from patchctl.engine import Target
from patchctl.git import Git, GitError, start_numstat
from patchctl.tree import open_tree

HOSTILE = """
[apply]
    whitespace = error
    ignoreWhitespace = change
[core]
    autocrlf = true
    eol = crlf
    abbrev = 5
    quotePath = true
    fsmonitor = /nonexistent/fsmonitor
    hooksPath = {hooks}
    attributesFile = {attributes}
    pager = false
    editor = false
    safecrlf = true
    symlinks = false
    fileMode = false
    ignoreCase = true
[diff]
    noprefix = true
    mnemonicPrefix = true
    context = 0
    external = false
    renames = copies
    algorithm = patience
    orderFile = /nonexistent/order
[format]
    signature = hostile
    attach = true
    subjectPrefix = HOSTILE
    signOff = true
[commit]
    gpgSign = true
[color]
    ui = always
[user]
    useConfigOnly = true
[i18n]
    logOutputEncoding = latin1
    commitEncoding = latin1
[url "https://hostile.invalid/"]
    insteadOf = /
[alias]
    rev-parse = "!false"
[init]
    templateDir = {hooks}
[filter "hostile"]
    smudge = sed s/./X/
    clean = sed s/./X/
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's and a system's configuration, attributes, hooks and variables, all against us."""
    home = tmp_path / "home"
    hooks = home / "hooks"
    hooks.mkdir(parents=True)
    for name in ("pre-commit", "post-checkout", "post-index-change", "applypatch-msg", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {home}/hook-ran\nexit 1\n")
        (hooks / name).chmod(0o755)
    (home / "attributes").write_text("* text eol=crlf filter=hostile diff=hostile\n")
    config = HOSTILE.format(hooks=hooks, attributes=home / "attributes")
    (home / ".gitconfig").write_text(config)
    (home / "git").mkdir()
    (home / "git/config").write_text(config)
    (home / "system").write_text(config)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", str(home / "system"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.abbrev")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "4")
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", "'core.abbrev'='6'")
    for name, value in {
        "GIT_DIR": "/nonexistent/.git",
        "GIT_WORK_TREE": "/nonexistent",
        "GIT_INDEX_FILE": "/nonexistent/index",
        "GIT_OBJECT_DIRECTORY": "/nonexistent/objects",
        "GIT_NAMESPACE": "hostile",
        "GIT_PREFIX": "sub/",
        "GIT_EXTERNAL_DIFF": "false",
        "GIT_DIFF_OPTS": "-u0",
        "GIT_TRACE": "1",
        "LANG": "de_DE.UTF-8",
        "LC_ALL": "de_DE.UTF-8",
        "LANGUAGE": "de",
        "TZ": "Asia/Tokyo",
        "PAGER": "false",
        "EDITOR": "false",
    }.items():
        monkeypatch.setenv(name, value)
    return home


def hostile_local(root: Path, home: Path) -> None:
    with (root / ".git/config").open("a") as file:
        file.write(HOSTILE.format(hooks=home / "hooks", attributes=home / "attributes"))
    (root / ".git/info").mkdir(exist_ok=True)
    (root / ".git/info/attributes").write_text("* text eol=crlf diff=hostile\n")


@pytest.mark.parametrize("local", [False, True])
def test_apply_and_revert_are_the_same_under_a_hostile_configuration(
    mini: Mini, tmp_path: Path, hostile: Path, local: bool
) -> None:
    pin = mini.pin()
    target = Target(mini.checkout(tmp_path / "t", pin), pin)
    if local:
        hostile_local(target.tree.root, hostile)
    quiet = ("-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false")
    git(target.tree.root, *quiet, "commit", "--quiet", "--message=x", "--allow-empty")
    before = snapshot(target.tree.root)
    outcome = engine.apply(mini.project, [target])[0]
    assert tree_files(target.tree.root) == mini.expected(pin)
    assert "HEAD is" in outcome.notes[0]  # git answered from the right repository
    engine.revert(mini.project, [target])
    assert snapshot(target.tree.root) == before
    assert not (hostile / "hook-ran").exists()


def test_git_runs_in_its_folder_whatever_the_environment_says(mini: Mini, tmp_path: Path, hostile: Path) -> None:
    pin = mini.pin()
    folder = mini.checkout(tmp_path / "t", pin).root
    assert Git(folder).line("rev-parse", "HEAD") == pin.commit
    assert Git(folder).line("rev-parse", "--show-toplevel") == str(folder)
    assert Git(folder).line("config", "--default", "unset", "user.useConfigOnly") == "unset"
    assert Git(folder).line("rev-parse", "--short", "HEAD") == pin.commit


def test_with_the_network_the_users_own_way_to_a_server_is_read_but_not_what_changes_contents(
    mini: Mini, tmp_path: Path, hostile: Path
) -> None:
    folder = mini.checkout(tmp_path / "t", mini.pin()).root
    ask = Git(folder)
    assert ask.run("config", "url.https://hostile.invalid/.insteadOf", network=True) == b"/\n"
    for key, value in {"core.autocrlf": b"false\n", "core.eol": b"lf\n", "core.hooksPath": b"/dev/null\n"}.items():
        assert ask.run("config", key, network=True) == value


def test_a_repository_around_the_folder_is_not_ours(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    inner = tmp_path / "inner"
    inner.mkdir()
    with pytest.raises(GitError, match="not a git repository"):
        Git(inner).line("rev-parse", "--git-dir")


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_repository_of_another_owner_is_read(mini: Mini, tmp_path: Path) -> None:
    folder = mini.checkout(tmp_path / "t", mini.pin()).root
    for place in (folder, *folder.rglob("*")):
        os.lchown(place, 1234, 1234)
    assert Git(folder).line("rev-parse", "HEAD") == mini.pin().commit


def test_an_error_is_one_line_that_names_verb_folder_and_cause(tmp_path: Path) -> None:
    with pytest.raises(GitError, match=f"git log in {tmp_path}: fatal: not a git repository") as caught:
        Git(tmp_path).run("log")
    assert "\n" not in str(caught.value)
    assert caught.value.stderr


def test_a_missing_git_and_a_missing_folder_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GitError, match="gone: no such folder"):
        Git(tmp_path / "gone").run("status")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GitError, match="git is not installed, or not on PATH; install it"):
        Git(tmp_path).run("status")
    (tmp_path / "git").write_text("#!/nonexistent/interpreter\n")
    (tmp_path / "git").chmod(stat.S_IRUSR)
    with pytest.raises(GitError, match="Permission denied"):
        Git(tmp_path).run("status")


def test_a_git_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(GitError, match="took longer than 0 s"):
        Git(tmp_path).run("fetch", timeout=0.2)


def test_numstat_gives_every_section_in_order(mini: Mini) -> None:
    project = mini.project
    patches = [project.patch_bytes(name) for name in project.series.for_pin(mini.pin())]
    rows = start_numstat(project.root)(patches)
    assert rows == [
        (1, 0, "verl/a.py"),
        (1, 0, "verl/b.py"),
        (0, 0, "verl/new/__init__.py"),
        (2, 0, "verl/new/mod.py"),
        (1, 0, "verl/a.py"),
        (1, 1, "verl/new/mod.py"),
        (0, 2, "verl/old.py"),
        (1, 0, "verl/run.sh"),
        (0, 0, "verl/tool.sh"),
    ]


# -- how often git is started


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git on PATH that writes a line to the file returned for every start."""
    real = subprocess.run(
        ["/bin/sh", "-c", "command -v git"], capture_output=True, text=True, check=True
    ).stdout.strip()
    folder, log = tmp_path / "bin", tmp_path / "git.log"
    folder.mkdir()
    (folder / "git").write_text(f'#!/bin/sh\necho "$@" >> "{log}"\nexec "{real}" "$@"\n')
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log


def starts(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.parametrize("patches", [15, 150])
def test_apply_starts_git_at_most_six_times_however_long_the_series(
    tmp_path: Path, counted: Path, patches: int
) -> None:
    specs = {}
    for upstream, package in mini_project.PACKAGES.items():
        path = f"{package}/f.py"
        base: dict[str, mini_project.File] = {f"{package}/__init__.py": b"", path: mini_project.PY}
        steps: list[dict[str, mini_project.File]] = []
        text = mini_project.PY
        for number in range(patches):
            text = mini_project.edit(text, 1 + number % 40, b"patch %d\n" % number)
            steps.append({path: text})
        specs[upstream] = [mini_project.PinSpec("p1", base, steps)]
    mini = mini_project.build(tmp_path / "p", specs)
    targets = [Target(mini.checkout(tmp_path / pin.upstream.name, pin), pin) for pin in mini.project.pins.pins]
    for verb in (engine.apply, engine.apply, engine.revert):
        counted.unlink(missing_ok=True)
        verb(mini.project, targets)
        assert starts(counted) <= 6
    counted.unlink(missing_ok=True)
    engine.apply(mini.project, targets)
    assert 1 <= starts(counted) <= 6  # the counter counts


def test_no_git_is_needed_to_apply_to_a_plain_folder(
    mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = mini.pin()
    plain = Target(mini.pristine(tmp_path / "plain", pin), pin)
    checkout = Target(mini.checkout(tmp_path / "checkout", pin), pin)
    monkeypatch.setenv("PATH", str(tmp_path))
    for target in (plain, checkout):
        engine.apply(mini.project, [target])
        assert tree_files(target.tree.root) == mini.expected(pin)
        engine.revert(mini.project, [target])


@pytest.mark.parametrize("locale", ["C", "POSIX", "de_DE.ISO-8859-1", "C.UTF-8"])
def test_names_beyond_ascii_work_in_every_locale(mini: Mini, tmp_path: Path, locale: str) -> None:
    pin = mini.pin()
    tree = mini.checkout(tmp_path / "树 tree", pin)
    environment = {**os.environ, "LC_ALL": locale, "LANG": locale, "PYTHONUTF8": "0", "HOME": "/nonexistent"}
    command = [sys.executable, "-m", "patchctl", "--root", str(mini.root), "apply", "--only", "verl", "--verl"]
    done = subprocess.run([*command, str(tree.root)], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"applied 4 patches to 7 files" in done.stdout
    assert tree_files(open_tree(tree.root, pin.upstream).root) == mini.expected(pin)
