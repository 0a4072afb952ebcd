"""The repository as a plugin, validated and installed by the real `claude`.

It needs no account and nothing of a network but the npm registry that it comes from (75 MB).
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.skill import installer
from tests.skill.installer import ADDRESS, ROOT, Finished, Person, Tree

PACKAGE = "@anthropic-ai/claude-code@2.1.197"
# By default it would look for updates and send figures; every address but the disk's leads nowhere.
QUIET = {
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "",
}


def get_claude(person: Person, folder: Path) -> Path:
    """The program out of its npm package; its install script is not run."""
    folder.mkdir()
    options = ["--ignore-scripts", "--include=optional", "--no-save", "--prefix", folder]
    done = person.run(["npm", "install", *options, PACKAGE], timeout_s=300)
    assert done.exit_code == 0, str(done)
    package = folder / "node_modules" / "@anthropic-ai" / "claude-code"
    programs = [path for path in package.parent.glob("claude-code-*/claude") if path.is_file()]
    if not programs:
        pytest.skip(f"{PACKAGE} has no program for this platform")
    return programs[0]


@pytest.mark.slow
def test_claude_installs_the_plugin(
    make_person: Callable[..., Person], older_node: object, expected: Tree, tmp_path: Path
) -> None:
    """A plugin can be listed and enabled and still bring nothing: its skill must be found, and its files all be there.
    Warnings count: a key with a slip is only warned about, and ignored."""
    person = make_person("1.5.18")
    claude = get_claude(person, tmp_path / "claude")
    try:
        person.env.update(QUIET)

        def said(*words: str | Path) -> Finished:
            done = person.run([claude, "plugin", *words])
            assert done.exit_code == 0, str(done)
            return done

        said("validate", "--strict", ROOT)
        said("validate", "--strict", ROOT / ".claude-plugin" / "plugin.json")
        said("marketplace", "add", ADDRESS)
        said("install", "rloo@rloo-kit")
        assert "Skills (1)  rloo" in said("details", "rloo").output
    finally:
        shutil.rmtree(tmp_path / "claude", ignore_errors=True)
    (folder,) = (person.home / ".claude" / "plugins" / "cache" / "rloo-kit" / "rloo").iterdir()
    own = ".in_use/"  # claude's own note of who uses it
    found = {name: value for name, value in installer.tree(folder).items() if not name.startswith(own)}
    differs = installer.difference(expected, found)
    assert not differs, "\n".join(differs)
