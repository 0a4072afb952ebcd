"""The repository as a plugin: the two files of .claude-plugin/ and what they lean on."""

import json
import re
from pathlib import Path
from typing import Any

import rloo_kit

ROOT = Path(__file__).resolve().parents[2]
PLUGIN, MARKETPLACE = (ROOT / ".claude-plugin" / name for name in ("plugin.json", "marketplace.json"))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_plugin_is_the_skill_at_the_root() -> None:
    """Without `"skills": ["./"]` a plugin looks for a folder skills/, finds none, and loads nothing, without a word."""
    plugin = read(PLUGIN)
    assert plugin["name"] == "rloo" and plugin["skills"] == ["./"]
    assert (ROOT / "SKILL.md").is_file() and not (ROOT / "skills").exists()
    assert not re.findall(r"<|>", plugin["description"]) and len(plugin["description"]) <= 1024


def test_the_plugins_version_is_the_packages() -> None:
    """`claude plugin update` compares versions only: where it stands still people stay on the old skill."""
    assert read(PLUGIN)["version"] == rloo_kit.__version__


def test_the_marketplace_offers_the_plugin_from_its_own_root() -> None:
    """A source without the leading ./ is refused; another name than the plugin's is found by no one."""
    marketplace = read(MARKETPLACE)
    assert marketplace.get("description"), f"{MARKETPLACE}: `claude plugin validate --strict` wants a `description`"
    assert re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", marketplace["name"]) and marketplace["owner"]["name"]
    (entry,) = marketplace["plugins"]
    assert entry["name"] == read(PLUGIN)["name"] and entry["source"] == "./" and entry["description"]
    assert "version" not in entry, "plugin.json holds the version; two of them drift apart"


def test_nothing_but_known_keys() -> None:
    """A mistyped key is silently ignored, or the whole plugin is refused, by version."""
    assert set(read(PLUGIN)) <= {
        "name", "version", "description", "author", "license", "keywords", "skills", "homepage", "repository"
    }  # fmt: skip
    assert set(read(MARKETPLACE)) <= {"name", "description", "owner", "plugins"}
