"""`report.html` of a run, a single file that fetches nothing: the outcome, then its reasons, then the completions."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.results.changes import Changes, Comparison, compare, find_changes
from rloo_kit.results.charts import Chart
from rloo_kit.results.curves import budget_chart, draw_curves_of, held_out_chart, tokens_generated
from rloo_kit.results.evaluation import Evaluation, name_of, says_nothing, shared_measures
from rloo_kit.results.held_out import HeldOutHistory, parse_evaluations, read_evaluations
from rloo_kit.results.pages import escape_text, format_count, format_duration, make_page, make_section, make_table
from rloo_kit.results.result import EARLY, TrainResult
from rloo_kit.results.rollout_sample import RolloutSample, sample_rollouts
from rloo_kit.results.tiles import make_tiles
from rloo_kit.results.verdict import Verdict, judge_run, record_verdict
from rloo_kit.runs.files import read_object, saving
from rloo_kit.runs.rollouts import read_rollouts
from rloo_kit.runs.run_dir import RunDir
from rloo_kit.system.versions import installed_versions

FILES = {
    "adapter": "the trained adapter; load it with model.adapter",
    "best": "the adapter of the best evaluation during training",
    "config.yaml": "the resolved configuration",
    "versions.json": "versions and git revision",
    "task_families": "the files of your own task families",
    "status.json": "how the run ended",
    "metrics.jsonl": "one row of metrics per step",
    "health.jsonl": "findings of the health rules: since which step, evidence, cause, fix",
    "rollouts.jsonl": "every completion with its ids, rewards and advantage; older ones in rollouts-STEP.jsonl.gz",
    "inputs.json": "digests of the rows, the rewards' sources and the base's weights",
    "prompts.json": "the training prompts selected by pass rate",
    "evaluations.jsonl": "the evaluations during training",
    "before.json": "the evaluation before training",
    "after.json": "the evaluation after training",
    "memory.json": "peak memory, planned and measured",
    "checkpoints": "what --resume continues from",
}
KINDS = {"rloo": "RLOO", "sft": "Supervised"}
LONGEST_TABLE = 12  # longer tables of measures are folded
NO_SCRIPT = "<noscript><p>Browsing completions needs JavaScript, which is off. They are in {}.</p></noscript>"


def write_report(
    run: RunConfig, result: TrainResult, before: Evaluation | None = None, after: Evaluation | None = None
) -> Path:
    """Write `report.html` into the run's folder, the evaluations it shows as `before.json` and `after.json`, and the
    verdict into `status.json`.

    Args:
        result: its folder, steps, metrics, seconds, stopped, adapter_step, method and findings are read.
        before, after: evaluations; None if the run was not evaluated.

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
    verdict = judge_run(run, result, before, after)
    during = read_evaluations(folder, run_dir.id)
    changes = find_changes(before, after)
    rollouts = sample_rollouts(read_rollouts(folder), result.steps)
    chart = _held_out(before, after, during, result.kept_step)
    sections = [
        _top(run, result, verdict, before, after, read_object(folder / "status.json")),
        make_section("Curves", draw_curves_of(result.metrics, result.findings, chart), "curves"),
        make_section("Health", _health(result), "health"),
        make_section("Before and after", _before_and_after(before, after, comparison), "evaluation"),
        make_section("Prompt by prompt", _changes(changes, comparison), "prompts") if changes.total else "",
        make_section("Evaluations during training", _during_training(during), "during") if during else "",
        make_section("Rollouts", _rollouts(rollouts), "rollouts"),
        make_section("Configuration, versions, files", _details(run, folder), "details"),
    ]
    script = Path(__file__).with_name("report.js").read_text(encoding="utf-8")
    data = {
        "prompts": changes.prompts,
        "rollouts": {"rows": rollouts.rows, "prompts": rollouts.prompts, "rewards": rollouts.rewards},
    }
    page = make_page(f"{run.name} - {KINDS[result.method]} run", sections, script, data)
    record_verdict(folder, verdict)
    with saving(folder / "report.html"):
        return run_dir.write_text("report.html", page)


def _top(
    run: RunConfig,
    result: TrainResult,
    verdict: Verdict,
    before: Evaluation | None,
    after: Evaluation | None,
    status: Mapping[str, Any],
) -> str:
    advice = f"<p class='next'>Next: {escape_text(verdict.next)}</p>" if verdict.next else ""
    command = status.get("command")
    commands = [("Made by", [command])] if isinstance(command, str) and command else []
    commands += [("Use it" if verdict.kind == "learnt" else "Look closer", list(verdict.commands))]
    blocks = "".join(
        f"<div class='command'><h2>{title}</h2><pre>{_shell(lines)}</pre></div>" for title, lines in commands if lines
    )
    ended = _how_it_ended(result)
    note = f"<p class='notes'>{escape_text(ended)}</p>\n" if ended else ""
    return (
        f"<header>\n<p class='kicker'>{KINDS[result.method]} run{_day(result, ' · ')}</p>\n"
        f"<h1>{escape_text(run.name)}</h1>\n"
        f"<div class='verdict {verdict.kind.replace(' ', '-')}'><span class='kind'>{escape_text(verdict.kind)}</span>"
        f"<p class='sentence'>{escape_text(verdict.sentence)}</p>{advice}</div>\n"
        f"{make_tiles(before, after)}\n{_settings(run, result, status)}\n"
        f"{note}<div class='commands'>{blocks}</div>\n</header>\n"
    )


def _settings(run: RunConfig, result: TrainResult, status: Mapping[str, Any]) -> str:
    """The facts a reader needs first: model, data, machine and the most important keys."""
    folder, is_rloo = Path(result.folder), result.method == "rloo"
    tokens, energy = tokens_generated(result.metrics), status.get("energy_wh")
    entries = {
        "model": run.model.name,
        "data": " + ".join(run.data.all_sources) if is_rloo else run.sft.source or run.data.source,
        "rewards": ", ".join(entry.name for entry in run.rewards) if is_rloo else None,
        "hardware": read_object(folder / "versions.json").get("machine"),
        "steps": f"{result.steps:,}",
        "K, completions per prompt": run.rloo.num_generations if is_rloo else None,
        "learning rate": f"{(run.rloo if is_rloo else run.sft).learning_rate:g}",
        "seed": run.run.seed,
        "tokens generated": format_count(tokens) if tokens else None,
        "training time": format_duration(result.seconds) if result.seconds else None,
        "energy": f"{energy:,.1f} Wh" if isinstance(energy, int | float) else None,
    }
    shown = "".join(
        f"<div><dt>{name}</dt><dd>{escape_text(value)}</dd></div>"
        for name, value in entries.items()
        if value is not None
    )
    return f"<dl class='settings'>{shown}</dl>"


def _day(result: TrainResult, between: str) -> str:
    """The day the run started, from its record; empty without one."""
    written = read_object(Path(result.folder) / "versions.json").get("written")
    return f"{between}{escape_text(written[:10])}" if isinstance(written, str) and written else ""


def _shell(lines: Sequence[str]) -> str:
    """Commands that wrap only between words; a browser would also break them at hyphens."""
    return "\n".join(
        " ".join(f"<span class='word'>{escape_text(word)}</span>" for word in one.split(" ")) for one in lines
    )


def _how_it_ended(result: TrainResult) -> str:
    """What is unusual about the end; empty for a complete run whose last weights were kept."""
    if result.stopped == "running":
        return f"The run has not ended; it is at step {result.steps:,}."
    end = {"interrupted": "The run was interrupted", "no signal": "The run stopped: no learning signal"}
    end[EARLY] = "The run stopped early, because there was no new best (eval.patience)"
    text = ""
    if result.stopped is not None:
        text = f"{end.get(result.stopped, f'The run ended as {result.stopped}')}, at step {result.steps:,}. "
    adapter_step = result.adapter_step
    if adapter_step not in (None, result.steps):
        text += f"adapter/ has the weights of step {adapter_step}, the best evaluation."
    return text.strip()


def _held_out(
    before: Evaluation | None, after: Evaluation | None, during: Sequence[dict[str, Any]], last: int
) -> Chart | None:
    found = parse_evaluations(during)
    measure = during[-1]["measure"] if found else next(iter(shared_measures(before, after)), "accuracy")
    return held_out_chart(before, after, found, measure, last)


def _health(result: TrainResult) -> str:
    if not result.findings:
        return "<p>No health rule found a problem.</p>"
    rows, lasting = [], {one.name for one in result.lasting}
    for one in result.findings:
        steps = f"{one.since}" if one.name in lasting else f"{one.since} to {one.last}"
        also = f"; consequences: {', '.join(one.explains).replace('_', ' ')}" if one.explains else ""
        rows.append((one.title, one.level, steps, one.found + also, one.cause, one.fix))
    head = ("finding", "level", "since step", "evidence", "cause", "fix")
    return make_table("Health findings", head, rows, ids=[f"finding-{one.name}" for one in result.findings])


def _before_and_after(before: Evaluation | None, after: Evaluation | None, comparison: Comparison | None) -> str:
    measured = {name: one for name, one in (("before", before), ("after", after)) if one is not None}
    if not measured:
        return "<p>The run was not evaluated (run.evaluate).</p>"
    parts = []
    if comparison is not None:
        apart = {True: " The two intervals do not overlap.", False: " The two intervals overlap."}
        text = f"After minus before: {comparison}.{apart.get(comparison.apart, '')}"  # type: ignore[arg-type]
        parts.append(f"<p>{escape_text(text)}</p>")
    columns = [dict(evaluation.rows(*measured.values())) for evaluation in measured.values()]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
    last = list(measured.values())[-1]
    each = "one completion" if last.num_samples == 1 else f"{last.num_samples} completions"
    head = ("measure [95 % interval]", *measured)
    table = make_table("Evaluations before and after training", head, rows, numbers=range(1, 3))
    parts.append(f"<p class='notes'>{last.num_prompts:,} held-out prompts, {each} each.</p>")
    parts.append(budget_chart(before, after))
    if len(rows) > LONGEST_TABLE:
        table = f"<details><summary>All {len(rows)} measures</summary>{table}</details>"
    return "".join(parts) + f"<div class='panel-table'>{table}</div>"


def _changes(changes: Changes, comparison: Comparison | None) -> str:
    """The counts over all prompts; the page's script shows the prompts themselves."""
    kinds = list(dict.fromkeys(kind for counts in changes.counts.values() for kind in counts))
    parts = []
    if changes.counts:
        rows = [(name, *(f"{counts.get(kind, 0):,}" for kind in kinds)) for name, counts in changes.counts.items()]
        table = make_table("Held-out prompts by change", ("measure", *kinds), rows, range(1, 9))
        parts.append(f"<div class='panel-table'>{table}</div>")
    elif comparison is not None:
        parts.append("<p>The two evaluations cannot be compared prompt by prompt.</p>")
    if not changes.prompts:
        return "".join(parts) + "<p>No completions were stored (eval.num_completions).</p>"
    kept = "all" if len(changes.prompts) >= changes.total else f"the first {len(changes.prompts):,}"
    note = (
        f"Below: {kept} of {changes.total:,} held-out prompts, the first sampled completion of each, regressions first."
    )
    parts.append(f"<p class='notes'>{note}</p><div class='browser' id='prompt-browser'></div>")
    return "".join(parts) + NO_SCRIPT.format("before.json and after.json")


def _rollouts(found: RolloutSample) -> str:
    if not found.total:
        return "<p>No rollouts were stored.</p>"
    return (
        f"<p class='notes'>{escape_text(found.describe())}</p>"
        f"<div class='browser' id='rollout-browser'></div>{NO_SCRIPT.format('rollouts.jsonl')}"
    )


def _during_training(during: Sequence[dict[str, Any]]) -> str:
    found = parse_evaluations(during)
    measure, best = str(during[-1]["measure"]), during[-1].get("best_step")
    history, sides = HeldOutHistory(measure, None), [one.evaluation for one in found]
    shown = [name for name in shared_measures(*sides) if name in ("reward", measure) or not says_nothing(*sides)]
    rows, thoughts = [], ["thinking tokens"] if any(one.mean_thinking_tokens is not None for one in sides) else []
    for one in found:
        entry = one.evaluation
        values = [str(value) for name in shown if (value := entry.measure(name)) is not None]
        tokens = ["-" if (mean := entry.mean_thinking_tokens) is None else f"{mean:.1f}" for _ in thoughts]
        against = history.compare_with_best(one)
        history.observe(one)
        rows.append((
            one.step, *values, *tokens,
            f"{against:+.3f}" if against else "-", "best" if one.step == best else "",
        ))  # fmt: skip
    named = name_of(measure, *sides)
    text = (
        f"The deciding measure is {named} (eval.measure), on the same {found[-1].evaluation.num_prompts:,} held-out "
        "prompts each time, with 95 % intervals. The best of many evaluations is partly luck: compare before and after."
    )
    head = ("step", *(name_of(name, *sides) for name in shown), *thoughts, "vs. the best before", "kept")
    return f"<p class='notes'>{escape_text(text)}</p>" + make_table(
        "Each evaluation, with its interval", head, rows, range(len(head) - 1)
    )


def _details(run: RunConfig, folder: Path) -> str:
    files = "".join(
        f"<li><a href='{name}'>{name}</a> <span>{escape_text(what)}</span></li>\n"
        for name, what in FILES.items()
        if (folder / name).exists()
    )
    return (
        f"<details><summary>Configuration</summary><pre>{escape_text(run.to_yaml())}</pre></details>\n"
        f"<details><summary>Versions</summary><pre>{escape_text(_versions(folder))}</pre></details>\n"
        f"<details><summary>Files</summary><p>The run's folder is <code>{escape_text(folder)}</code>.</p>"
        f"<ul class='files'>\n{files}</ul></details>\n"
    )


def _versions(folder: Path) -> str:
    """The versions that the run recorded when it started, else those of this process."""
    recorded = read_object(folder / "versions.json")
    return json.dumps(recorded or installed_versions(), indent=2, ensure_ascii=False)
