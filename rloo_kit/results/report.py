"""`report.html`: one file, without scripts or anything to fetch, that says what a run did.

Accuracy before and after with intervals, the learning curve, the same prompts answered before and after with thinking
and answer apart, the configuration, the versions, and where the files are. Everything that comes from the model, the
data or the configuration is escaped. Left out: several runs side by side.
"""

import json
from pathlib import Path
from typing import Any

from rloo_kit.results.evaluation import Comparison, Evaluation, compare
from rloo_kit.results.figures import draw_accuracies, draw_learning_curve
from rloo_kit.results.html import escape_text, format_duration, make_page, make_section
from rloo_kit.results.samples import SamplePair, describe_sample, is_thinking, pair_samples
from rloo_kit.runs.files import saving
from rloo_kit.runs.run_dir import RunDir
from rloo_kit.system.versions import installed_versions

FILES = {
    "adapter": "the trained adapter; load it with model.adapter",
    "config.yaml": "the resolved configuration",
    "versions.json": "versions and git revision",
    "status.json": "how the run ended",
    "metrics.jsonl": "one row of metrics a step",
    "rollouts.jsonl": "every completion with its ids, rewards and advantage",
    "prompts.json": "the training prompts that were chosen by their pass rate",
    "before.json": "the evaluation before training",
    "after.json": "the evaluation after training",
    "checkpoints": "what --resume goes on from",
}


def write_report(run: Any, result: Any, before: Evaluation | None = None, after: Evaluation | None = None) -> Path:
    """Write `report.html` into the run's folder, and the evaluations it shows as `before.json` and `after.json`.

    Args:
        run: the `RunConfig`.
        result: the `TrainResult`; read are folder, steps, metrics, seconds, stopped.
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
    sections = [
        _headline(run, result, before, after, comparison),
        make_section("Accuracy", _accuracy(before, after, comparison)),
        make_section("Learning curve", _learning_curve(result.metrics)),
        make_section("Completions before and after", _completions(before, after)),
        make_section("Configuration, versions, files", _details(run, folder)),
    ]
    page = make_page(f"{run.name} - RLOO run", sections)
    with saving(folder / "report.html"):
        return run_dir.write_text("report.html", page)


def _headline(
    run: Any, result: Any, before: Evaluation | None, after: Evaluation | None, comparison: Comparison | None
) -> str:
    end = {None: "ran to its end", "interrupted": "was interrupted", "no signal": "stopped for want of signal"}
    how = end.get(result.stopped, f"stopped: {result.stopped}")
    summary = (
        f"{run.model.name} on {run.data.source}: {result.steps} steps in {format_duration(result.seconds)}; {how}."
    )
    tiles = [
        _tile("accuracy", before and before.accuracy, after and after.accuracy, comparison and comparison.sampled),
        _tile(
            "greedy accuracy",
            before and before.greedy_accuracy,
            after and after.greedy_accuracy,
            comparison and comparison.greedy,
        ),
        _tile("thinking closed", before and before.closed_share, after and after.closed_share),
        _tile(
            "thinking tokens", before and before.mean_thinking_tokens, after and after.mean_thinking_tokens, form=".1f"
        ),
    ]
    return (
        f"<h1>{escape_text(run.name)}</h1>\n<p>{escape_text(summary)}</p>\n<div class='tiles'>{''.join(tiles)}</div>\n"
    )


def _tile(name: str, before: float | None, after: float | None, change: str | None = None, form: str = ".3f") -> str:
    if before is None and after is None:
        return ""
    old, new = ("-" if value is None else format(value, form) for value in (before, after))
    return (
        f"<div class='tile'><div class='name'>{escape_text(name)}</div>"
        f"<div class='value'><span class='old'>{old}</span> → {new}</div>"
        + (f"<div class='change'>{escape_text(change)}</div></div>" if change else "</div>")
    )


def _accuracy(before: Evaluation | None, after: Evaluation | None, comparison: Comparison | None) -> str:
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
    drawing = draw_accuracies(before, after)
    if drawing is not None:
        parts.append(f"<figure class='wide'>{drawing}</figure>")
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


def _details(run: Any, folder: Path) -> str:
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
    """What the run wrote down when it started; this process's own where it wrote nothing."""
    try:
        return (folder / "versions.json").read_text(encoding="utf-8")
    except OSError:
        return json.dumps(installed_versions(), indent=2)
