"""Reports `relatives.json`: curves with bands, accuracy over the seeds, differences from RLOO; tables and a picture.

All intervals are Student's, 95 %, over the seeds. An arm is compared with RLOO seed by seed: the mean difference, its
interval, and the p-value of the paired t-test, Holm-corrected for all tests on the page. The intervals are not
corrected, so one may exclude 0 although the corrected test finds nothing. RLOO with another seed, which shows the
effect of chance, is not tested, nor is an arm with identical results. With five seeds the test assumes roughly normal
differences; the table lists each seed's difference as a check.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import reporting
from reporting import table

FIRST, CONTROL = "rloo", "rloo_again"  # the reference, and its repetition with another seed
LABELS = {
    "rloo": "RLOO, K = 8", "rloo_again": "RLOO, K = 8, another seed", "grpo": "GRPO", "dr_grpo": "Dr. GRPO",
    "dapo": "GRPO, mean over tokens (DAPO)",
    "reinforce_pp": "REINFORCE++", "reinforce_pp_baseline": "REINFORCE++-baseline", "reinforce": "REINFORCE",
    "rloo_k2": "RLOO, K = 2", "rloo_k4": "RLOO, K = 4", "rloo_k16": "RLOO, K = 16",
}  # fmt: skip
MEASURES = {"accuracy": "accuracy after", "reward": "reward, mean over the run"}
LEVEL = 0.05
LAST = 10  # steps whose entropy is in the table
COLORS = ("#2878e0", "#d9730d", "#2f9e6e", "#c2409a", "#8b8f98", "#7a5af5", "#b3261e")
PICTURES = reporting.ROOT / "docs" / "pictures"
INKS = {"light": "#24292f", "dark": "#d0d7de"}


# ------------------------------------------------------------------------------------------------------ statistics


def p_value(t: float, freedom: int) -> float:
    """The two-sided p-value of Student's t: the area beyond |t|, by Simpson's rule over atan(t / sqrt(freedom)).

    >>> [round(p_value(t, freedom), 3) for t, freedom in ((2.776, 4), (12.706, 1), (0.0, 4), (2.0, 60))]
    [0.05, 0.05, 1.0, 0.05]
    """
    if math.isinf(t):
        return 0.0

    def area(low: float, high: float, steps: int = 2000) -> float:
        width = (high - low) / steps
        values = [max(math.cos(low + width * place), 0.0) ** (freedom - 1) for place in range(steps + 1)]
        return width / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))

    return min(1.0, area(math.atan(abs(t) / math.sqrt(freedom)), math.pi / 2) / area(0.0, math.pi / 2))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values after Holm's step-down correction (1979), in the given order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    found, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda one: p_values[one])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        found[place] = highest
    return found


def t_quantile(freedom: int) -> float:
    """The 0.975 quantile of Student's t: exact for 1 and 2 degrees of freedom, else to 0.2 % (Cornish and Fisher).

    >>> [round(t_quantile(freedom), 2) for freedom in (1, 2, 4, 63)]
    [12.71, 4.3, 2.78, 2.0]
    """
    if freedom <= 2:
        return math.tan(0.475 * math.pi) if freedom == 1 else 0.95 / math.sqrt(2 * 0.975 * 0.025)
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def student(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and its 95 % interval; the interval of a single value is null."""
    mean, num = statistics.fmean(values), len(values)
    if num < 2:
        return {"value": mean, "low": None, "high": None}
    half = t_quantile(num - 1) * statistics.stdev(values) / math.sqrt(num)
    return {"value": mean, "low": mean - half, "high": mean + half}


def paired_p(differences: Sequence[float]) -> float:
    """The p-value of the paired t-test; 1 if all differences are 0.

    >>> round(paired_p([0.1, 0.2, 0.3]), 3), paired_p([0.0, 0.0])
    (0.074, 1.0)
    """
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return p_value(mean / error, len(differences) - 1)


def measure(run: dict[str, Any], name: str) -> float:
    """One number of a run: its accuracy after, or the mean of its steps' rewards, a measure of how fast it learnt."""
    if name == "accuracy":
        return float(run["after"]["accuracy"])
    return statistics.fmean(value for value in run["curves"]["reward"] if value is not None)


def compare(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Each arm over its seeds, and the differences from RLOO, paired by seed and corrected."""
    by_arm: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        by_arm.setdefault(run["arm"], {})[run["seed"]] = run
    arms = [
        {"arm": arm, "seeds": sorted(found), "before": student([run["before"]["accuracy"] for run in found.values()])}
        | {name: student([measure(run, name) for run in found.values()]) for name in MEASURES}
        | {"entropy": student([statistics.fmean(run["curves"]["entropy"][-LAST:]) for run in found.values()])}
        | {"curve": _mean_curve([run["curves"]["reward"] for run in found.values()])}
        for arm, found in by_arm.items()
    ]
    differences = []
    for name in MEASURES:
        rows = [_difference(name, arm, found, by_arm.get(FIRST, {})) for arm, found in by_arm.items() if arm != FIRST]
        differences += [row for row in rows if row is not None]
    tested = [row for row in differences if row["p"] is not None]
    for row, corrected in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row |= {"p_holm": corrected, "is_significant": corrected < LEVEL}
    return {"arms": arms, "differences": differences}


def _mean_curve(curves: list[list[float]]) -> list[dict[str, float | None]]:
    return [student(values) for values in zip(*curves, strict=True)]


def _difference(
    name: str, arm: str, found: dict[int, dict[str, Any]], first: dict[int, dict[str, Any]]
) -> dict[str, Any] | None:
    seeds = sorted(found.keys() & first.keys())
    if not seeds:
        return None
    values = [measure(found[seed], name) - measure(first[seed], name) for seed in seeds]
    p = paired_p(values) if len(values) > 1 and any(values) and arm != CONTROL else None
    row = {"measure": name, "arm": arm, "seeds": seeds, "by_seed": values, "p": p, "p_holm": None}
    return row | {"is_significant": None} | student(values)


# ---------------------------------------------------------------------------------------------------------- tables


def _cell(figure: dict[str, float | None], form: str = "{:.3f}") -> str:
    if figure["low"] is None:
        return form.format(figure["value"])
    return f"{form} ({form} to {form})".format(figure["value"], figure["low"], figure["high"])


def arms_table(result: dict[str, Any]) -> list[str]:
    """relatives.json: each arm over its seeds."""
    rows = [
        [LABELS[arm["arm"]], str(len(arm["seeds"]))]
        + [_cell(arm[name]) for name in ("before", "accuracy", "reward", "entropy")]
        for arm in result["arms"]
    ]
    head = ["arm", "seeds", "accuracy before", "accuracy after", "reward, mean over the run"]
    return table([*head, f"entropy of the last {LAST} steps, nats"], rows)


def differences_table(result: dict[str, Any]) -> list[str]:
    """relatives.json: every arm minus RLOO with K = 8, seed by seed."""
    rows = []
    for row in result["differences"]:
        p_values = ["" if row[name] is None else f"{row[name]:.3f}" for name in ("p", "p_holm")]
        seeds = ", ".join(f"{value:+.3f}" for value in row["by_seed"])
        difference = _cell(row, "{:+.3f}")
        rows.append([LABELS[row["arm"]], MEASURES[row["measure"]], difference, seeds, *p_values, _judge(row)])
    head = ["arm minus RLOO, K = 8", "measure", "difference (95 %)", "seed by seed", "p", "p, Holm", ""]
    return table(head, rows)


def grpo_table(result: dict[str, Any]) -> list[str]:
    """relatives.json: the rows of `differences_table` for the accuracy of the two GRPO arms."""
    rows = [row for row in result["differences"] if row["arm"] in ("grpo", "dapo") and row["measure"] == "accuracy"]
    return differences_table({"differences": rows})


def _judge(row: dict[str, Any]) -> str:
    """A difference in words."""
    if row["is_significant"] is None:
        return "chance alone" if row["arm"] == CONTROL else "one seed: no test" if any(row["by_seed"]) else "identical"
    if row["is_significant"]:
        return "**significant**"
    excludes_zero = row["low"] > 0 or row["high"] < 0
    return "not after correction" if excludes_zero else "not significant"


def setting_line(result: dict[str, Any]) -> list[str]:
    """relatives.json: the size of the comparison, and the machine."""
    runs = result["runs"]
    rate = "the config's" if result["rate"] is None else f"{result['rate']:g}"
    seconds = statistics.median(run["wall_s"] for run in runs)
    return [
        f"{len(runs)} runs of {result['steps']} steps of {result['completions_a_step']} completions, learning rate "
        f"{rate}, {runs[0]['after']['num_prompts']} held-out prompts; {seconds:.0f} s a run in the median, "
        f"{result['jobs']} side by side, {result['machine']['processor']}, {result['measured']}. `{result['command']}`"
    ]


def picture_lines(result: dict[str, Any]) -> list[str]:
    """The picture as a page shows it, in both themes."""
    return [
        "<picture>",
        '  <source media="(prefers-color-scheme: dark)" srcset="pictures/relatives-dark.svg">',
        '  <img alt="Reward over the steps: RLOO and its relatives; RLOO with four K" '
        'src="pictures/relatives-light.svg">',
        "</picture>",
    ]


# --------------------------------------------------------------------------------------------------------- picture


def draw(result: dict[str, Any], folder: Path = PICTURES) -> None:
    """`relatives-light.svg` and `relatives-dark.svg`: reward over the steps, mean and band; panels by method and K."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = {
        "Methods, K = 8": [arm for arm in result["arms"] if not arm["arm"].startswith("rloo_")],
        "RLOO at equal samples": [arm for arm in result["arms"] if arm["arm"].startswith("rloo")],
    }
    for theme, ink in INKS.items():
        inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        style: dict[Any, Any] = dict.fromkeys(inked, ink) | {
            "svg.hashsalt": "rloo-kit", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9,
            "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "path.simplify": True,
        }  # fmt: skip
        with rc_context(style):
            figure = Figure(figsize=(9.0, 3.2), layout="constrained")
            shared = None
            for number, (title, arms) in enumerate(panels.items(), 1):
                axes = figure.add_subplot(1, 2, number, sharey=shared)
                shared = shared or axes
                for arm, color in zip(arms, COLORS * 2, strict=False):
                    _draw_arm(axes, arm, color)
                axes.set_title(title, loc="left", fontsize=10, color=ink)
                axes.set_xlabel("step")
                axes.grid(axis="y", color=ink, alpha=0.15, linewidth=0.6)
                axes.legend(fontsize=8, loc="lower right")
            shared.set_ylabel("reward (mean and 95 % over seeds)")  # type: ignore[union-attr]
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"relatives-{theme}.svg"
            figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        lines = (line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{path.relative_to(folder.parents[1])}: {path.stat().st_size:,} bytes", flush=True)


def _draw_arm(axes: Any, arm: dict[str, Any], color: str) -> None:
    curve = arm["curve"]
    steps = range(1, len(curve) + 1)
    axes.plot(steps, [one["value"] for one in curve], color=color, linewidth=1.5, label=LABELS[arm["arm"]])
    if len(arm["seeds"]) > 1:
        axes.fill_between(
            steps, [one["low"] for one in curve], [one["high"] for one in curve], color=color, alpha=0.15, linewidth=0
        )
