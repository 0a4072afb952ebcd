"""The report in headless Chromium: both colour schemes, wide and narrow, for a mouse and a screen reader.
Debian's `chromium` is looked up on the PATH; axe-core in the folder that AXE_CORE names, into which it was installed
(`npm install axe-core`), or in node_modules/ of the checkout."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rloo_kit.health.rules import Finding
from rloo_kit.results.report import write_report
from rloo_kit.results.verdict import TrainResult
from rloo_kit.results.versus import compare_runs, write_comparison_page
from rloo_kit.runs.rollouts import Rollouts
from tests.browser import CHROMIUM, Browser
from tests.evaluations import mean_of
from tests.results.test_report import HOSTILE, make_config, make_evaluation, make_metrics, make_rollout, make_sample

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)")

ROOT = Path(__file__).resolve().parents[2]
AXE = next(
    (
        path
        for folder in (os.environ.get("AXE_CORE", ""), ROOT / "node_modules" / "axe-core")
        for path in sorted(Path(folder).rglob("axe.min.js") if str(folder) else ())
    ),
    None,
)
NARROW, WIDE = 390, 1280
CALL = {"function": {"name": "look_up", "arguments": {"word": HOSTILE}}}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a run with everything a page can have: findings, budgets, forced and hostile texts, a very long
    word."""
    run = make_config("a-run-" + "long" * 20, tmp_path_factory.mktemp("outputs"))
    run.folder.mkdir(parents=True)
    rows = [make_rollout(step, number) for step in range(1, 31) for number in range(8)]
    rows[1] |= {"completion": "sum. Time is up\n</think>\n\n5", "answer_start": 24}
    rows[1] |= {"forced": True, "forced_chars": [5, 26]}
    rows[2] |= {"completion": f"{HOSTILE}</think>{'w' * 400}", "answer_start": len(HOSTILE) + 8, "truncated": True}
    turns = [{"role": "assistant", "reasoning_content": "hm", "content": "", "tool_calls": [CALL]}]
    turns += [{"role": "tool", "name": "look_up", "content": HOSTILE}, {"role": "assistant", "content": "5"}]
    rows[3] |= {"turns": turns, "tool_calls": 1, "tool_failures": 1, "cut_by": None}
    Rollouts(run.folder).append(rows)
    since = {"since": 16, "last": 30, "explains": ["no_signal"]}
    finding = Finding("truncation", "90 % cut off", "raise it", cause="too short", **since)
    result = TrainResult(run.folder, run.folder / "adapter", 30, make_metrics(30), 75.4, findings=[finding])
    before = make_evaluation("before", 60, [make_sample(n, n % 2 == 0) for n in range(8)])
    after = make_evaluation("after", 20, [make_sample(n, n < 4, thinking=HOSTILE) for n in range(8)])
    after.samples[1]["turns"] = turns
    before.measures["accuracy"] = mean_of([1.0, 0.0] * 50)
    after.measures["accuracy"] = mean_of([1.0] * 4 + [0.0] * 96)
    return write_report(run, result, before, after)


@pytest.fixture(params=[(WIDE, False), (NARROW, True)], ids=str)
def page(browser: Browser, report: Path, request: pytest.FixtureRequest) -> Browser:
    """The report, opened at a given width in light or dark."""
    width, dark = request.param
    browser.view(width, dark=dark)
    browser.open(report)
    return browser


def text_of(browser: Browser, selector: str) -> str:
    return str(browser.run(f"document.querySelector({json.dumps(selector)}).innerText"))


def count(browser: Browser, selector: str) -> int:
    return int(browser.run(f"document.querySelectorAll({json.dumps(selector)}).length"))


def choose(browser: Browser, place: str, label: str, value: str) -> None:
    """Set a control by its label, as a reader does."""
    found = browser.run(
        f"""(() => {{ for (const label of document.querySelectorAll({json.dumps(f"#{place} label")}))
        if (label.firstChild.textContent === {json.dumps(label)}) {{ const control = label.lastChild;
          control.value = {json.dumps(value)};
          control.dispatchEvent(new Event(control.tagName === "SELECT" ? "change" : "input", {{bubbles: true}}));
          return true; }} return false; }})()"""
    )
    assert found, label


def test_the_page_opens_without_errors_or_requests(page: Browser, report: Path) -> None:
    """The page's policy forbids requests, so an attempt would be a message on the console."""
    assert page.messages == [] and page.requests == [report.as_uri()]
    assert page.run("document.documentElement.scrollWidth") <= page.run("innerWidth"), "it scrolls sideways"
    assert count(page, "#prompt-browser article") == 4 and count(page, "#rollout-browser article") == 4
    assert page.run("globalThis.alerted === undefined")


@pytest.mark.slow
def test_axe_finds_nothing_serious(page: Browser) -> None:
    """Labels, headings, contrast, roles: everything open, in both colours and widths."""
    page.run("for (const fold of document.querySelectorAll('details')) fold.open = true")
    page.run("new Promise(requestAnimationFrame)")
    assert not violations(page)


@pytest.mark.parametrize(("width", "dark"), [(WIDE, False), (NARROW, True)])
def test_the_comparison_of_runs_is_as_readable(browser: Browser, report: Path, width: int, dark: bool) -> None:
    """Eight colours on two backgrounds, and a table wider than a phone."""
    folder = report.parent
    (folder / "config.yaml").write_text((ROOT / "configs" / "arithmetic_thinking.yaml").read_text())
    (folder / "status.json").write_text('{"state": "finished", "step": 30, "max_steps": 30}')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_metrics(30)))
    path = write_comparison_page(compare_runs([folder, folder]), folder.parent / "comparison.html")
    browser.view(width, dark=dark)
    browser.open(path)
    assert browser.messages == [] and browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert count(browser, "svg") >= 3
    assert not violations(browser)


def violations(page: Browser) -> list[tuple[str, str, list[str]]]:
    """What axe-core calls serious or critical: rule, impact, the first elements."""
    if AXE is None:
        pytest.skip("no axe-core: npm install axe-core into a folder and name it in AXE_CORE")
    page.run(AXE.read_text(encoding="utf-8") + "; 0")
    found = page.run("axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations)")
    serious = [rule for rule in found if rule["impact"] in ("serious", "critical")]
    return [(rule["id"], rule["impact"], [node["html"][:160] for node in rule["nodes"][:3]]) for rule in serious]


def test_completions_are_filtered_and_opened(page: Browser) -> None:
    """Prompts that broke are what a reader has to see first; then rollouts by group and by what is telling."""

    def shown(place: str) -> str:
        return text_of(page, f"#{place}-browser .count")

    def opened(kind: str) -> str:
        """The first rollout of a kind, opened."""
        choose(page, "rollout-browser", "Show", kind)
        page.run("document.querySelector('#rollout-browser .rollout > summary').click()")
        page.run("new Promise((done) => setTimeout(done, 50))")
        return text_of(page, "#rollout-browser .body")

    assert text_of(page, "#prompt-browser article").startswith("broken")
    choose(page, "prompt-browser", "Show", "fixed")
    assert shown("prompt") == "2 of 2 prompts"
    choose(page, "prompt-browser", "Prompt contains", "nothing like it")
    assert shown("prompt") == "no prompts"
    assert shown("rollout") == "4 of 60 groups" and count(page, "#rollout-browser article:first-child .rollout") == 4
    choose(page, "rollout-browser", "Step", "7")
    assert shown("rollout") == "2 of 2 groups"
    choose(page, "rollout-browser", "Show", "wrong")
    assert shown("rollout") == "4 of 4 rollouts"
    choose(page, "rollout-browser", "Step", "")
    assert "<script>alerted=1</script>" in opened("truncated") and shown("rollout") == "1 of 1 rollouts"
    opened("forced")
    assert text_of(page, "#rollout-browser mark") == "Time is up\n</think>"
    body = opened("failed")  # of an episode: a tool may return markup, and a model may write it as an argument
    parts = ["hm", 'call look_up(word="</pre><script>', "result </pre><script>", "sum 3", "tool calls: 1"]
    assert [body.index(part) for part in parts] == sorted(body.index(part) for part in parts)
    choose(page, "prompt-browser", "Show", "")
    choose(page, "prompt-browser", "Prompt contains", "1+1=")
    assert "call look_up" in text_of(page, "#prompt-browser .side:last-child")
    assert page.run("document.documentElement.scrollWidth") <= page.run("innerWidth")
    assert page.run("globalThis.alerted === undefined") and page.messages == []
