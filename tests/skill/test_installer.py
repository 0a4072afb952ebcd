"""The real skill installer, on what the repository holds now.

These and test_installed_package.py are the only tests that use a network, and only package registries. Without one they
are skipped with the reason; a registry that answers and an installation that fails is a failure.
"""

import json
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.skill import installer
from tests.skill.installer import ADDRESS, SKILL, Node, Person, Tree


@dataclass(frozen=True)
class Case:
    """One way to install: npm's package and version, the words after the address, and what is known to come of it."""

    version: str
    where: str
    options: tuple[str, ...] = ()
    installed: str = "all"
    package: str = "skills"


CASES = [
    Case("1.7.4", "project"),
    Case("1.7.4", "project, two agents", ("-a", "cursor")),
    Case("1.7.4", "user's folder, `-g`", ("-g",)),
    Case("1.5.18", "project"),
    Case("1.5.18", "project, `--copy`", ("--copy",)),
    Case("2.0.0", "project", package="add-skill"),
    Case("1.5.17", "project", installed="SKILL.md alone"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: re.sub(r"\W+", "-", f"{case.version}-{case.where}").strip("-"))
def test_the_installed_tree_is_the_repository(case: Case, make_person: Callable[..., Person], expected: Tree) -> None:
    """Installers end with exit code 0 and a tick whatever they copied: four versions in a row copied SKILL.md alone,
    and everything that the page points to was missing. Only the files tell."""
    person = make_person(case.version)
    done = person.install(case.version, *case.options, package=case.package)
    folder = (person.home if "-g" in case.options else person.project) / SKILL
    assert (folder / "SKILL.md").is_file(), f"nothing was installed:\n{done}"
    found = installer.tree(folder.resolve())
    differs = installer.difference(expected, found)
    if case.installed == "all":
        assert not differs, "\n".join([*differs, str(done)])
    else:
        assert list(found) == ["SKILL.md"] and found["SKILL.md"] == expected["SKILL.md"], f"{list(found)}\n{done}"
    assert folder.is_symlink() == ("cursor" in case.options), "two agents share one folder, .agents/skills/rloo"
    other = person.project if "-g" in case.options else person.home
    assert not (other / SKILL).exists(), "installed into the other scope as well"


def test_the_comparison_sees_every_kind_of_difference(tmp_path: Path) -> None:
    """A comparison of names alone passes where a script came without its executable bit, or empty."""
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
        for name in ("same.md", "content.md", "script.py"):
            (folder / name).write_text(name, encoding="utf-8")
        (folder / f"only_{folder.name}.md").touch()
    (there / "script.py").chmod(0o755)
    (here / "content.md").write_text("", encoding="utf-8")
    assert installer.difference(installer.tree(there), installer.tree(here)) == [
        "added: only_here.md",
        "content differs: content.md",
        "executable True, installed False: script.py",
        "missing: only_there.md",
    ]


@pytest.mark.slow
def test_without_yes_nothing_is_installed(make_person: Callable[..., Person]) -> None:
    """An agent has no terminal: the installer asks its first question, ends with exit code 0, and nothing is there."""
    person = make_person("1.7.4")
    done = person.run(["npx", "--yes", "skills@1.7.4", "add", ADDRESS, "-a", "claude-code"])
    assert not (person.project / ".claude").exists() and done.exit_code == 0, str(done)


@pytest.mark.slow
def test_an_update_leaves_no_old_file(
    make_person: Callable[..., Person], tmp_path: Path, snapshot: tuple[Path, Tree]
) -> None:
    """Files that a new version no longer has would be read on for ever. The folder is replaced, so whatever a person
    kept in it is gone too: environments and outputs belong into the project."""
    older = tmp_path / "older"
    older.mkdir()
    names = {"SKILL.md", "references/gone.md", "scripts/gone.py"}
    for name in names:
        (older / name).parent.mkdir(exist_ok=True)
        text = (installer.ROOT / name).read_text(encoding="utf-8") if name == "SKILL.md" else "an older version\n"
        (older / name).write_text(text, encoding="utf-8")
    person = make_person("1.7.4")
    person.serve(installer.bare_clone(tmp_path / "older_clone", older, sorted(names)))
    person.install("1.7.4")
    assert set(installer.tree(person.project / SKILL)) == names
    (person.project / SKILL / "mine.txt").write_text("kept here by mistake\n", encoding="utf-8")

    clone, expected = snapshot
    person.serve(clone)
    done = person.install("1.7.4")
    differs = installer.difference(expected, installer.tree(person.project / SKILL))
    assert not differs, "\n".join([*differs, str(done)])


@pytest.mark.slow
def test_skill_md_alone_says_how_to_get_the_rest(make_person: Callable[..., Person], expected: Tree) -> None:
    """Installed by 1.5.16, SKILL.md stands alone: its first check must show that, the page must say what to do about
    it, and doing it must give the rest."""
    person = make_person("1.7.4")
    person.install("1.5.16")
    folder = person.project / SKILL
    assert [path.name for path in folder.iterdir()] == ["SKILL.md"]
    text = (folder / "SKILL.md").read_text(encoding="utf-8")
    block = re.search(r"^## 1. Set up$.*?^```bash\n(.*?)^```", text, flags=re.M | re.S)
    assert block, "SKILL.md has no shell block under `## 1. Set up`"
    person.env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{person.env['PATH']}"
    alone = person.run(["bash", "-c", block.group(1)])
    assert alone.output.strip() == str(folder.resolve()), f"more or less than the path:\n{alone}"
    assert "pyproject.toml" in text and "npx skills" in text.replace("@latest", "")

    person.install("1.7.4")
    assert not installer.difference(expected, installer.tree(folder))
    whole = person.run(["bash", "-c", block.group(1)])
    path, _, report = whole.output.partition("\n")
    assert path == str(folder.resolve()) and json.loads(report)["skill"]["missing"] == [], str(whole)


@pytest.mark.slow
def test_only_a_registry_that_does_not_answer_is_a_reason_to_skip(
    older_node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that skips on every fault is green for ever: the installer was broken for four versions."""
    not_found = type("NotFound", (BaseHTTPRequestHandler,), {"do_GET": lambda self: self.send_error(404)})
    with ThreadingHTTPServer(("127.0.0.1", 0), not_found) as server:
        address = f"http://127.0.0.1:{server.server_port}/"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = {"npm_config_registry": address, "PIP_INDEX_URL": address, "PIP_CONFIG_FILE": os.devnull}
        for name, value in (settings | {"PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(AssertionError, match="answers, but not with what is needed"):
            installer.no_npm_registry(older_node, tmp_path)
        with pytest.raises(AssertionError, match="answers, but not with what is needed"):
            installer.no_package_index(tmp_path)
        server.shutdown()
    assert "cannot be reached" in str(installer.no_npm_registry(older_node, tmp_path))
    assert "cannot be reached" in str(installer.no_package_index(tmp_path))
