"""Everything that the skill points at is there, and everything of the skill is pointed at."""

import re
from pathlib import Path

import pytest

from tests.skill.pages import ROOT, find_links, list_pages, read_pages


def find_broken(page: Path, text: str) -> list[str]:
    """Links of a page that lead nowhere or out of the folder."""
    broken = []
    for link in find_links(text):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if re.match(r"[a-z]+:", link):
            broken.append(f"{link} needs a network")
        elif ROOT not in target.parents or not target.exists():
            broken.append(f"{link} is not there")
        elif anchor and not has_anchor(target.read_text(encoding="utf-8"), anchor):
            broken.append(f"{link} has no such heading")
    return broken


def has_anchor(text: str, anchor: str) -> bool:
    titles = re.findall(r"^#+ +(.+)$", text, flags=re.M)
    return anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def find_routes(text: str) -> dict[str, str]:
    """Page or script -> what its row of a table says about it."""
    return dict(re.findall(r"^\| \[[^\]]+\]\(((?:references|scripts)/[^)]+)\) \| (.+?) \|$", text, flags=re.M))


@pytest.mark.parametrize("page", list_pages(), ids=lambda path: path.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    """A page that was renamed leaves an agent with a route to nothing, and it goes on by guessing."""
    assert find_broken(page, page.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_found() -> None:
    """The check above has to fail on each kind of broken link."""
    text = "[a](references/no.md) [b](../out.md) [c](SKILL.md#no-such) [d](https://x.y) [e](SKILL.md#traps) `[f](no)`"
    assert len(find_broken(ROOT / "SKILL.md", text)) == 4


def test_every_page_and_script_has_its_row() -> None:
    """A page without a reason to read it is read always or never."""
    routes = find_routes((ROOT / "SKILL.md").read_text(encoding="utf-8"))
    there = {f"references/{path.name}" for path in (ROOT / "references").iterdir()}
    there |= {f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py") if not path.name.startswith("_")}
    assert set(routes) == there
    assert all(len(words.split()) >= 5 for words in routes.values())
    assert find_routes("| [x](references/x.md) |  |") == {}


def test_every_page_says_at_the_top_what_it_is_for() -> None:
    """An agent that opened the wrong page should see so in its first lines."""
    for path in list_pages()[1:]:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("# ") and lines[2].startswith("For "), path.name


def test_references_are_one_level_deep() -> None:
    """Loaders follow links of SKILL.md; what is two steps away is often not read."""
    linked = {link.partition("#")[0] for link in find_links((ROOT / "SKILL.md").read_text(encoding="utf-8"))}
    for name, text in read_pages()[1:]:
        for link in find_links(text):
            target = ((ROOT / name).parent / link.partition("#")[0]).resolve().relative_to(ROOT).as_posix()
            assert target.startswith("docs/") or target in linked, f"{name} links {target}, SKILL.md does not"


def test_the_table_of_values_is_the_codes() -> None:
    """A threshold that was moved in the code alone would be judged one way and explained another."""
    from rloo_kit.runs.health import THRESHOLDS

    text = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w/]+)`[^|]* \| ([^|]+ \| [^|]+) \|", text.partition("## Healthy")[2], flags=re.M))
    for one in THRESHOLDS:
        written = [float(number) for number in re.findall(r"\d+\.?\d*", rows[one.metrics[0]])]
        limits = [limit for limit in (one.low, one.high, one.alarm_low, one.alarm_high) if limit is not None]
        assert written == limits, one.metrics[0]
