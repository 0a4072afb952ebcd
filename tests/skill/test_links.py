"""Everything of the skill is pointed at, from one level up. Broken links: contracts/test_repository.py."""

import re

from tests.skill.pages import ROOT, find_links, read_pages


def find_routes(text: str) -> dict[str, str]:
    """Page or script -> what its row of a table says about it."""
    return dict(re.findall(r"^\| \[[^\]]+\]\(((?:references|scripts)/[^)]+)\) \| (.+?) \|$", text, flags=re.M))


def test_every_page_and_script_has_its_row() -> None:
    """A page without a reason to read it is read always or never."""
    routes = find_routes((ROOT / "SKILL.md").read_text(encoding="utf-8"))
    there = {f"references/{path.name}" for path in (ROOT / "references").iterdir()}
    there |= {f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py") if not path.name.startswith("_")}
    assert set(routes) == there
    assert all(len(words.split()) >= 5 for words in routes.values())


def test_references_are_one_level_deep_and_need_no_network() -> None:
    """Loaders follow links of SKILL.md; what is two steps away, or on a network, is often not read."""
    linked = {link.partition("#")[0] for link in find_links((ROOT / "SKILL.md").read_text(encoding="utf-8"))}
    for name, text in read_pages()[1:]:
        for link in find_links(text):
            target = ((ROOT / name).parent / link.partition("#")[0]).resolve().relative_to(ROOT).as_posix()
            assert target.startswith("docs/") or target in linked, f"{name} links {target}, SKILL.md does not"
