"""What a notebook shows, and what a script prints of it."""

import base64
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from rloo_kit.notebook.display import plot_training, show_completions
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.results.plots import Point
from tests.html_page import Page

HOSTILE = "</pre></div><script>alert(1)</script><img src=x onerror=alert(2)> \x00\x1b[31m & $x^2$ ünïcode 你好"


def result_of(rows: list[dict[str, Any]]) -> Any:
    return SimpleNamespace(metrics=rows)


def thinking_rows(steps: int, **more: float) -> list[dict[str, Any]]:
    row = {"thinking/mean_length": 20.0, "thinking/closed_ratio": 0.9, "completions/mean_length": 26.0, "loss": 0.0}
    row |= {"completions/clipped_ratio": 0.1} | more
    return [{"step": step, "reward": step / steps} | row for step in range(1, steps + 1)]


def make_sample(prompt: str, **changes: Any) -> dict[str, Any]:
    sample = {"prompt": prompt, "thinking": "2+4=6", "answer": "46", "gold": "46", "correct": True, "ended": True}
    return sample | {"closed": True, "tokens": 9, "thinking_tokens": 5} | changes


def make_evaluation(*samples: dict[str, Any], label: str = "") -> Evaluation:
    return Evaluation(label, 10, 1, 1.0, 48, samples=list(samples))


def html_of(shown: Any) -> str:
    return shown._repr_html_()


def titles_of(plot: Any) -> list[str]:
    return [chart.title for chart in plot.curves]


def test_evaluations_during_training_are_a_curve_of_their_own() -> None:
    """A gamed reward rises while the held-out measure falls. Most rows have none, which is no missing number."""
    rows = thinking_rows(30, kl=0.1)
    for step, accuracy in ((10, 0.5), (20, 0.25)):
        rows[step - 1] |= {"eval/accuracy": accuracy, "eval/reward": accuracy}
    shown = plot_training(result_of(rows))
    assert titles_of(shown)[:2] == ["Reward", "Held-out accuracy"]
    assert shown.curves[1].series == {"": [Point(10, 0.5), Point(20, 0.25)]}
    assert "held-out accuracy 0.500 -> 0.250" in shown.summary and not shown.notes
    only = plot_training(result_of([{"step": 5, "reward": 1.0, "kl": 0.1, "eval/reward": 2.5}]))
    assert titles_of(only)[:2] == ["Reward", "Held-out reward"]


def test_plot_of_a_thinking_model() -> None:
    """The four curves; the text says what they show, because a log and a screen reader have nothing else."""
    plot = plot_training(result_of(thinking_rows(30, kl=0.01)))
    titles = ["Reward", "KL to the reference, nats a token", "Thinking tokens", "Share that closes its thinking"]
    assert titles_of(plot) == titles and plot.notes == []
    assert plot.curves[0].series[""][:2] == [Point(1, 1 / 30), Point(2, 2 / 30)]
    assert repr(plot) == plot.summary
    assert "reward 0.100 -> 0.933" in plot.summary
    page = Page(html_of(plot))
    assert page.tags == ["img"] and page.values("alt") == [f"Training curves, {plot.summary}"]
    image = base64.b64decode(page.values("src")[0].removeprefix("data:image/svg+xml;base64,")).decode()
    assert image == plot.svg
    assert [text for text in Page(image).texts if text[1] in titles] == [("text", title) for title in titles]
    assert "thick: mean of the last 5 steps" in image


def test_plot_of_a_model_that_does_not_think() -> None:
    """Completion length instead; one stray tag in 80 steps once made a thinking model of it."""
    rows = [{key: value for key, value in row.items() if "thinking" not in key} for row in thinking_rows(8)]
    rows[3] |= {"thinking/mean_length": 4.0, "thinking/closed_ratio": 0.0}
    plot = plot_training(result_of(rows))
    assert titles_of(plot) == ["Reward", "Completion tokens", "Share truncated"]
    assert "completion tokens 26.0 -> 26.0, share truncated 10.0% -> 10.0%" in plot.summary


@pytest.mark.parametrize(
    ("rows", "summary"),
    [
        ([{"loss": 1.0}], "no step was logged, so there is nothing to plot"),
        (thinking_rows(1, kl=0.5)[:1], "step 1: reward 1.000, KL to the reference 0.5000, thinking tokens 20.0, share"),
        ([{"step": 1, "reward": None}], "step 1: Reward: 1 of 1 steps without a finite number; KL not measured"),
        ([{"step": 4, "loss": 0.0}], "step 4: reward not logged; KL not measured: rloo.beta is 0; completion"),
        ([{"step": 1, "reward": 0.0, "kl": math.nan}, {"step": 2, "reward": math.inf, "kl": None}],
         "steps 1 to 2: reward 0.000; Reward: 1 of 2 steps without a finite number; KL to the reference, nats a tok"),
    ],
)  # fmt: skip
def test_plot_of_hardly_anything(rows: list[dict[str, Any]], summary: str) -> None:
    """A run stopped at once, a metric that was not finite (null in metrics.jsonl): a clear line, no empty axes."""
    plot = plot_training(result_of(rows))
    assert plot.summary.startswith(summary)
    assert (plot._repr_html_() is not None) == bool(plot.curves) == (plot.svg is not None)


def test_completions_side_by_side() -> None:
    """Prompt, right answer, thinking and answer apart, and whether it is right; the same prompt on one card."""
    chat = "<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n<think>\n"
    wrong = make_sample(chat, correct=False, answer="47", thinking="", tokens=4, thinking_tokens=0)
    before, after = make_evaluation(wrong, make_sample("2")), make_evaluation(make_sample(chat), make_sample("2"))
    page = Page(html_of(show_completions(before, after)))
    texts = [text for _, text in page.texts if text.strip()]
    assert texts[1:18] == [
        "1 · right answer ", "46", "12+34=",
        "before", "✗ wrong", "thinking", "(none)", "answer", "47", "4 tokens, 0 of them thinking",
        "after", "✓ right", "thinking", "2+4=6", "answer", "46", "9 tokens, 5 of them thinking",
    ]  # fmt: skip


def test_completions_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    """What a log, a terminal and a script show, which prints it. Without a right answer nothing is called wrong, and a
    model that does not think shows no thinking."""
    one = make_sample("12+34=", correct=False, thinking="2+4=6\n1+3=4", ended=False, forced=True)
    shown = show_completions(make_evaluation(one), make_evaluation(make_sample("12+34=")), num=9)
    assert repr(shown) == capsys.readouterr().out.rstrip("\n")
    assert "1. 12+34=   (right answer: 46)\n   before: wrong, 9 tokens, 5 of them thinking, closed by" in repr(shown)
    assert "      thinking: 2+4=6\n                1+3=4\n      answer:   46\n   after: right, 9 tokens" in repr(shown)
    plain = make_sample("q", thinking="", closed=False, thinking_tokens=None, gold=None, correct=None)
    text = repr(show_completions(make_evaluation(plain)))
    assert "completion: not judged, 9 tokens" in text and "thinking" not in text and "right answer" not in text


def test_completions_cannot_break_the_notebook() -> None:
    """A model in training writes anything: markup, terminal codes, formulas that JupyterLab would typeset."""
    sample = make_sample(HOSTILE, thinking=HOSTILE, answer=HOSTILE, gold=HOSTILE)
    shown = show_completions(make_evaluation(sample, label="<b>"), make_evaluation(sample))
    page = Page(html_of(shown))
    assert set(page.tags) == {"div", "pre", "code", "b"} and {name for name, _ in page.attributes} == {"style"}
    assert {tag for tag, text in page.texts if "$x^2$" in text} == {"pre", "code"}
    for text in (page.text, " ".join(repr(shown).split())):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
        assert "<script>alert(1)</script>" in text and "␀␛[31m" in text and "你好" in text
    assert "<b>" in [text for _, text in Page(html_of(show_completions(make_evaluation(sample, label="<b>")))).texts]


def test_long_completions_are_cut_in_the_middle() -> None:
    """32,000 tokens of thought on each side, in each of four cards, made a notebook of megabytes."""
    long = make_sample("p" * 9000, thinking="a" * 50_000 + "END", answer="word " * 20_000)
    shown = show_completions(make_evaluation(*[long] * 4), make_evaluation(*[long] * 4))
    assert len(html_of(shown)) < 200_000 and len(repr(shown)) < 30_000
    assert "\n[... 44,003 characters left out ...]\n" in html_of(shown) and "aEND<" in html_of(shown)
    assert "[... 49,403 characters left out ...]" in repr(shown)
    assert max(map(len, repr(shown).splitlines())) <= 100


def test_prompts_that_do_not_match() -> None:
    """Two evaluations of different prompts, and a prompt that comes twice: nothing is paired with another's answer."""
    before = make_evaluation(make_sample("a", answer="1"), make_sample("b", answer="2"), make_sample("b", answer="3"))
    after = make_evaluation(make_sample("b", answer="4"), make_sample("c", answer="5"), make_sample("b", answer="6"))
    shown = show_completions(before, after)
    answers = [[sample["answer"] for sample in pair.samples.values()] for pair in shown.pairs]
    assert answers == [["2", "4"], ["3", "6"], ["1"], ["5"]]
    assert shown.note == "4 of 4 kept prompts, one completion of each; the two evaluations are of different prompts"
    assert "different" not in show_completions(before, after, num=2).note


def test_nothing_kept() -> None:
    """An evaluation during training keeps none."""
    shown = show_completions(make_evaluation(), make_evaluation())
    assert repr(shown) == "no completions were kept" and repr(shown) in html_of(shown)
