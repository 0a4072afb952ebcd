"""`report.html` of a run: the outcome, its reasons, the completions. `templates/report.html.jinja` has the text."""

import json
from pathlib import Path
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.data.answers import EXACT
from rloo_kit.results.changes import change_of, compare, find_changes, parse_evaluations, read_evaluations
from rloo_kit.results.evaluation import (
    SHARES,
    THINKING,
    Evaluation,
    merge_rows,
    name_of,
    named_sides,
    says_nothing,
    shared_measures,
)
from rloo_kit.results.pages import Table, make_page
from rloo_kit.results.plots import (
    choose_curves,
    held_out_chart,
    in_order,
    split_time,
    tokens_generated,
)
from rloo_kit.results.samples import read_pictures, sample_rollouts
from rloo_kit.results.verdict import TrainResult, judge_run, record_verdict
from rloo_kit.runs.files import read_object, saving
from rloo_kit.runs.folder import RunDir
from rloo_kit.system.versions import installed_versions


def write_report(
    run: RunConfig, result: TrainResult, before: Evaluation | None = None, after: Evaluation | None = None
) -> Path:
    """Write `report.html` into the run's folder, the evaluations it shows as `before.json` and `after.json` (None if
    the run was not evaluated), and the verdict into `status.json`; returns the page's file."""
    folder = Path(result.folder)
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = RunDir(folder)
    sides = named_sides(before, after)
    for name, evaluation in sides.items():
        run_dir.write_json(f"{name}.json", evaluation.to_dict())
    status, recorded = (read_object(folder / name) for name in ("status.json", "versions.json"))
    verdict = judge_run(run, result, before, after)
    evaluations = read_evaluations(folder, run_dir.id)
    during = parse_evaluations(evaluations)
    measure = evaluations[-1]["measure"] if during else next(iter(shared_measures(before, after)), "accuracy")
    held_out = held_out_chart(before, after, during, measure, result.kept_step)
    curves, constant = choose_curves(result.metrics, held_out)
    measures = ("measure [95 % interval]", *sides), merge_rows(*sides.values())
    changes = find_changes(before, after)
    rollouts = sample_rollouts(folder)
    shown = {name: getattr(rollouts, name) for name in ("rows", "prompts", "rewards")}
    images = read_pictures(folder, [entry["prompt"] for entry in changes.prompts], rollouts.prompts)
    page = make_page(
        "report.html.jinja",
        data={"prompts": changes.prompts, "rollouts": shown, "images": images},
        run=run,
        result=result,
        status=status,
        recorded=recorded,
        verdict=verdict,
        tiles=_tiles(before, after),
        tokens=tokens_generated(result.metrics),
        curves=curves,
        constant=constant,
        steps_logged=len(in_order(result.metrics)),
        time=split_time(result.metrics),
        health=_health(result),
        measures=Table("Evaluations before and after training", *measures, numbers=(1, 2)),
        comparison=compare(before, after) if before is not None and after is not None else None,
        last=after or before,
        changes=changes,
        rollouts=rollouts,
        versions=json.dumps(recorded or installed_versions(), indent=2, ensure_ascii=False),
        folder=folder,
    )
    record_verdict(folder, verdict)
    with saving(folder / "report.html"):
        return run_dir.write_text("report.html", page)


def _tiles(before: Evaluation | None, after: Evaluation | None) -> list[dict[str, Any]]:
    """Each measure before and after, with its change and a bar, the deciding measure first."""
    sides = list(named_sides(before, after).values())
    by_reward = any(side.leading == "reward" for side in sides)
    repeats = [side.value("accuracy") == side.value("reward") for side in sides]
    is_exact = all(repeats) and all(side.judged_by == EXACT for side in sides)
    names = [] if says_nothing(*sides) or is_exact else ["accuracy", "greedy_accuracy"]
    if by_reward or not all(repeats):
        names = ["reward", "greedy_reward", *names] if by_reward else [*names, "reward"]
    names = [*(["win_rate"] if any(side.measure("win_rate") for side in sides) else []), *names]
    titles = {name: name_of(name, *sides).capitalize() for name in names}
    titles |= {THINKING: "Thinking tokens", "closed_share": "Thinking closed", "forced_share": "Closed by the budget"}
    tiles = []
    for name, title in titles.items():
        values = [None if side is None else getattr(side, name, side.value(name)) for side in (before, after)]
        if values == [None, None]:
            continue
        measured = {kind: side.measure(name) for kind, side in (("s0", before), ("s1", after)) if side is not None}
        tiles.append(
            {
                "title": title,
                "sides": values,
                "is_share": name in (*SHARES, "closed_share", "forced_share"),
                "change": None if before is None or after is None else change_of(name, before, after),
                "bar": [(kind, share.ends) for kind, share in measured.items() if share is not None and name in SHARES],
            }
        )
    return tiles


def _health(result: TrainResult) -> Table:
    """Each finding with its steps."""
    rows, lasting = [], {finding.name for finding in result.lasting}
    for finding in result.findings:
        steps = f"{finding.since}" if finding.name in lasting else f"{finding.since} to {finding.last}"
        also = f"; consequences: {', '.join(finding.explains).replace('_', ' ')}" if finding.explains else ""
        rows.append((finding.title, steps, finding.found + also, finding.cause, finding.fix))
    head = ("finding", "since step", "evidence", "cause", "fix")
    return Table("Health findings", head, rows)
