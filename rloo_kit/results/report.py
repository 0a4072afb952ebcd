"""`report.html` of a run: one file without scripts or anything to fetch, and the frame that other pages share.

Everything that comes from the model, the data or the configuration is escaped.
"""

import html
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.results.evaluation import (
    Comparison,
    Evaluation,
    SamplePair,
    compare,
    describe_sample,
    is_thinking,
    pair_samples,
    signed,
    with_interval,
)
from rloo_kit.results.figures import draw_accuracies, draw_held_out, draw_learning_curve, draw_rewards
from rloo_kit.results.held_out import HeldOutHistory, parse_evaluations, read_evaluations
from rloo_kit.results.result import EARLY, TrainResult
from rloo_kit.runs.files import read_object, saving
from rloo_kit.runs.run_dir import RunDir
from rloo_kit.system.console import picture_controls
from rloo_kit.system.versions import installed_versions

FILES = {
    "adapter": "the trained adapter; load it with model.adapter",
    "best": "the adapter of the best evaluation during training",
    "config.yaml": "the resolved configuration",
    "versions.json": "versions and git revision",
    "status.json": "how the run ended",
    "metrics.jsonl": "one row of metrics a step",
    "health.jsonl": "what was wrong with the run: since which step, evidence, cause, fix",
    "rollouts.jsonl": "every completion with its ids, rewards and advantage; older ones in rollouts-STEP.jsonl.gz",
    "prompts.json": "the training prompts that were chosen by their pass rate",
    "evaluations.jsonl": "the evaluations during training",
    "before.json": "the evaluation before training",
    "after.json": "the evaluation after training",
    "checkpoints": "what --resume continues from",
}


def write_report(
    run: RunConfig, result: TrainResult, before: Evaluation | None = None, after: Evaluation | None = None
) -> Path:
    """Write `report.html` into the run's folder, and the evaluations it shows as `before.json` and `after.json`.

    Args:
        result: the `TrainResult`; read are folder, steps, metrics, seconds, stopped, findings.
        before, after: evaluations; None where the run was not evaluated.

    Returns:
        The file.
    """
    folder = Path(result.folder)
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = RunDir(folder)
    for name, evaluation in (("before.json", before), ("after.json", after)):
        if evaluation is not None:
            run_dir.write_json(name, evaluation.to_dict())
    comparison = compare(before, after) if before is not None and after is not None else None
    during = read_evaluations(folder, run_dir.id)
    sections = [
        _headline(run, result, before, after, comparison),
        make_section("Before and after", _before_and_after(before, after, comparison)),
        make_section("Held-out during training", _during_training(during)) if during else "",
        make_section("Health", _health(result)),
        make_section("Learning curve", _learning_curve(result.metrics)),
        make_section("Completions before and after", _completions(before, after)),
        make_section("Configuration, versions, files", _details(run, folder)),
    ]
    page = make_page(f"{run.name} - RLOO run", sections)
    with saving(folder / "report.html"):
        return run_dir.write_text("report.html", page)


def _headline(
    run: RunConfig,
    result: TrainResult,
    before: Evaluation | None,
    after: Evaluation | None,
    comparison: Comparison | None,
) -> str:
    end = {None: "ran to its end", "interrupted": "was interrupted", "no signal": "stopped: no learning signal"}
    end[EARLY] = "stopped early, without a new best for too long (eval.patience)"
    how = end.get(result.stopped, f"stopped: {result.stopped}")
    sources = " + ".join(run.data.all_sources)
    summary = f"{run.model.name} on {sources}: {result.steps} steps in {format_duration(result.seconds)}; {how}."
    adapter_step = getattr(result, "adapter_step", None)
    if adapter_step not in (None, result.steps):
        summary += f" adapter/ holds the weights of step {adapter_step}, the best evaluation's."
    shows_reward = any(one is not None and one.reward != one.accuracy for one in (before, after))
    tiles = [
        _tile(name, getattr(before, key, None), getattr(after, key, None), change, form)
        for name, key, change, form in (
            ("accuracy", "accuracy", comparison.sampled if comparison else None, ".3f"),
            ("greedy accuracy", "greedy_accuracy", comparison.greedy if comparison else None, ".3f"),
            *((("reward", "reward", comparison.reward if comparison else None, ".3f"),) if shows_reward else ()),
            ("thinking closed", "closed_share", None, ".3f"),
            ("thinking tokens", "mean_thinking_tokens", None, ".1f"),
        )
    ]
    return (
        f"<h1>{escape_text(run.name)}</h1>\n<p>{escape_text(summary)}</p>\n<div class='tiles'>{''.join(tiles)}</div>\n"
    )


def _tile(name: str, before: float | None, after: float | None, change: str | None, form: str) -> str:
    if before is None and after is None:
        return ""
    old, new = ("-" if value is None else format(value, form) for value in (before, after))
    return (
        f"<div class='tile'><div class='name'>{escape_text(name)}</div>"
        f"<div class='value'><span class='old'>{old}</span> → {new}</div>"
        + (f"<div class='change'>{escape_text(change)}</div></div>" if change else "</div>")
    )


def _before_and_after(before: Evaluation | None, after: Evaluation | None, comparison: Comparison | None) -> str:
    measured = [evaluation for evaluation in (before, after) if evaluation is not None]
    if not measured:
        return "<p>The run was not evaluated (run.evaluate).</p>"
    parts = []
    if comparison is not None:
        verdict = {
            True: " The intervals before and after are apart.",
            False: " The intervals before and after overlap.",
            None: "",
        }
        parts.append(f"<p>After minus before: {escape_text(str(comparison))}.{verdict[comparison.apart]}</p>")
    drawings = [draw_accuracies(before, after), draw_rewards(before, after)]
    parts += [f"<figure class='wide'>{drawing}</figure>" for drawing in drawings if drawing is not None]
    columns = [dict(evaluation.rows()) for evaluation in measured]
    names = list(dict.fromkeys(name for column in columns for name in column))
    titles = [title for title, evaluation in (("before", before), ("after", after)) if evaluation is not None]
    head = "".join(f"<th>{title}</th>" for title in titles)
    rows = "".join(
        f"<tr><td>{escape_text(name)}</td>"
        + "".join(f"<td>{escape_text(column.get(name, '-'))}</td>" for column in columns)
        + "</tr>"
        for name in names
    )
    num_samples = measured[-1].num_samples
    each = "one completion" if num_samples == 1 else f"{num_samples} completions"
    parts.append(f"<p>{measured[-1].num_prompts} held-out prompts, {each} of each; 95 % intervals in brackets.</p>")
    parts.append(f"<table><thead><tr><th>measure</th>{head}</tr></thead><tbody>{rows}</tbody></table>")
    return "\n".join(parts)


def _during_training(rows: list[dict[str, Any]]) -> str:
    """The curve of the measure, and a line for each evaluation."""
    measure, best = rows[-1]["measure"], rows[-1].get("best_step")
    found = parse_evaluations(rows)
    names = dict.fromkeys((measure, "accuracy", "reward"))
    names = {name: None for name in names if any(one.measure(name) for one in found)}
    history = HeldOutHistory(measure, patience=None)
    titles = ("step", *names, "thinking tokens", "against the best before", "")
    head = "".join(f"<th>{escape_text(title)}</th>" for title in titles)
    body = ""
    for one in found:
        values = [with_interval(*measured[:3]) if measured else "-" for measured in map(one.measure, names)]
        tokens = one.evaluation.mean_thinking_tokens
        against = history.compare_with_best(one)
        history.observe(one)
        cells = [one.step, *values, "-" if tokens is None else f"{tokens:.1f}", signed(*against) if against else "-"]
        cells.append("best" if one.step == best else "")
        body += f"<tr>{''.join(f'<td>{escape_text(cell)}</td>' for cell in cells)}</tr>"
    count = found[-1].evaluation.num_prompts
    text = (
        f"<p>{escape_text(measure)} decides (eval.measure), on the same {count} held-out prompts each time; "
        "95 % intervals. The best of many evaluations is partly luck: compare before and after by the table above.</p>"
    )
    points = [(one.step, measured) for one in found if (measured := one.measure(measure)) is not None]
    drawing = draw_held_out(points, measure, best)
    figure = "" if drawing is None else f"<figure class='wide'>{drawing}</figure>"
    return f"{text}{figure}\n<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _health(result: TrainResult) -> str:
    if not result.findings:
        return "<p>No rule of health found anything.</p>"
    rows = []
    for one in result.findings:
        steps = f"{one.since}" if one.last >= result.steps else f"{one.since} to {one.last}"
        also = f"; seen with it: {', '.join(one.explains).replace('_', ' ')}" if one.explains else ""
        cells = (one.title, steps, one.evidence + also, one.cause, one.fix)
        rows.append("<tr>" + "".join(f"<td>{escape_text(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("what", "since step", "evidence", "cause", "to do"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _learning_curve(metrics: list[dict[str, Any]]) -> str:
    drawings = draw_learning_curve(metrics)
    if not drawings:
        return "<p>No step was logged.</p>"
    return "<div class='curves'>" + "".join(f"<figure>{drawing}</figure>" for drawing in drawings) + "</div>"


def _completions(before: Evaluation | None, after: Evaluation | None) -> str:
    pairs = pair_samples(before=before, after=after)
    if not pairs:
        return "<p>No completions were kept (eval.num_completions).</p>"
    return "".join(_pair(number, pair) for number, pair in enumerate(pairs, 1))


def _pair(number: int, pair: SamplePair) -> str:
    expected = "" if pair.gold is None else f"<p class='gold'>right answer: <b>{escape_text(pair.gold)}</b></p>"
    sides = "".join(_side(title, sample) for title, sample in pair.samples.items())
    return (
        f"<article><div class='prompt'><span class='number'>{number}</span>"
        f"<pre>{escape_text(pair.prompt.strip())}</pre></div>{expected}<div class='pair'>{sides}</div></article>\n"
    )


def _side(title: str, sample: dict[str, Any]) -> str:
    marks = {True: "<span class='mark right'>✓ right</span>", False: "<span class='mark wrong'>✗ wrong</span>"}
    block = _block("thinking", sample["thinking"])
    thinking = f"<div class='label'>thinking</div>{block}" if is_thinking(sample) else ""
    return (
        f"<div class='side'><div class='title'>{title} {marks.get(sample['correct'], '')}</div>{thinking}"
        f"<div class='label'>answer</div>{_block('answer', sample['answer'])}"
        f"<p class='notes'>{escape_text(describe_sample(sample))}</p></div>"
    )


def _block(kind: str, text: str) -> str:
    return f"<pre class='{kind}'>{escape_text(text)}</pre>" if text else "<p class='notes'>none</p>"


def _details(run: RunConfig, folder: Path) -> str:
    files = "".join(
        f"<tr><td><a href='{name}'>{name}</a></td><td>{escape_text(what)}</td></tr>"
        for name, what in FILES.items()
        if (folder / name).exists()
    )
    return (
        f"<details><summary>Configuration</summary><pre>{escape_text(run.to_yaml())}</pre></details>\n"
        f"<details><summary>Versions</summary><pre>{escape_text(_versions(folder))}</pre></details>\n"
        f"<p>Everything of the run lies in <code>{escape_text(folder)}</code>.</p>\n"
        f"<table><tbody>{files}</tbody></table>\n"
    )


def _versions(folder: Path) -> str:
    """The versions that the run recorded when it started, else those of this process."""
    recorded = read_object(folder / "versions.json")
    return json.dumps(recorded or installed_versions(), indent=2, ensure_ascii=False)


# ------------------------------------------------------------------------------------------------ pages


def make_page(title: str, sections: Iterable[str]) -> str:
    """A whole page: nothing to fetch, and columns that fold on a narrow screen.

    Args:
        title: as plain text.
        sections: HTML, already escaped.
    """
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape_text(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def make_section(title: str, content: str) -> str:
    """A section with its heading."""
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>\n"


def escape_text(value: Any) -> str:
    """Any value as text that HTML shows as it is.

    >>> escape_text("a <b> & c")
    'a &lt;b&gt; &amp; c'
    """
    return html.escape(picture_controls(str(value)))


def format_duration(seconds: float) -> str:
    """Seconds in words.

    >>> format_duration(7.25), format_duration(75), format_duration(3675)
    ('7.2 s', '1 min 15 s', '1 h 1 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
