"""Checks the files of a run, its verdict, every interval on every surface and the words there against `recompute.py`.
Imports nothing of the kit.
"""

import html
import math
import re
from collections.abc import Sequence
from typing import Any

from tests.tasks.recompute import Estimate, Recomputed, Side, change_of
from tests.tasks.tasks import Task

NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
# `0.213 [0.155, 0.286]`; the value may stand elsewhere, and a sentence says `95 % CI 0.155 to 0.286`
INTERVAL = re.compile(
    rf"(?:(?<![\d:.])(?P<value>{NUMBER})(?P<unit> ?%| points)?,? )?(?:\[(?P<low>{NUMBER}), (?P<high>{NUMBER})\]"
    rf"|95 % CI (?P<from>{NUMBER}) to (?P<to>{NUMBER}))"
)


class Checks:
    """The problems of a run, as lines `surface: what: shown ..., recomputed ...`."""

    def __init__(self, task: Task, run: Recomputed, surfaces: Any) -> None:
        self.task, self.run, self.on = task, run, surfaces
        self.problems: list[str] = []
        self.change = run.change(run.leads)

    def all(self) -> list[str]:
        """Check everything; returns the problems."""
        self.check_files()
        self.check_verdict()
        self.check_surfaces()
        self.check_versus()
        self.check_words()
        return list(dict.fromkeys(self.problems))

    def say(self, where: str, what: str) -> None:
        self.problems.append(f"{where}: {what}")

    def near(self, where: str, what: str, found: Any, expected: float | None, tolerance: float = 1e-5) -> None:
        """A number of a file or of JSON."""
        if expected is None or found is None or isinstance(found, str):
            if not (expected is None and found is None):
                self.say(where, f"{what}: shown {found}, recomputed {expected}")
        elif not math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance):
            self.say(where, f"{what}: shown {found:.6g}, recomputed {expected:.6g}")

    def ends(self, where: str, what: str, shown: Sequence[Any], expected: Estimate) -> None:
        """The ends of an interval in a file or in JSON."""
        for name, found, value in zip(("low", "high"), shown, expected[1:], strict=True):
            self.near(where, f"{what}, {name}", found, value, 1e-5 + 0.002 * (expected.high - expected.low))

    def check_files(self) -> None:
        """`metrics.jsonl`, `rollouts`, `before.json`, `after.json` and `evaluations.jsonl`."""
        run = self.run
        if len(run.metrics) != len(run.steps):
            self.say("metrics.jsonl", f"{len(run.metrics)} rows, rollouts of {len(run.steps)} steps")
        for row, again in zip(run.metrics, run.steps, strict=False):
            for name, value in again.items():
                if name != "tokens":
                    self.near("metrics.jsonl", f"step {row['step']}, {name}", row.get(name), value)
        for number, row in enumerate(run.rollouts, 1):
            self.near("rollouts", f"row {number}, reward", row["reward"], row["reward_again"])
            self.near("rollouts", f"row {number}, advantage", row["advantage"], row["advantage_again"], 1e-4)
            if row["completion_tokens"] != len(row["completion_ids"]):
                self.say("rollouts", f"row {number}: {row['completion_tokens']} tokens")
        took, last = run.status["seconds"], run.metrics[-1]["seconds"]
        if not last <= took <= last + 5:
            self.say("status.json", f"{took} s of training, {last} s at the last step")
        for when, side in run.sides.items():
            self._evaluation_file(f"{when}.json", run.stored[when], side)
        prompts = [one.prompt for one in run.sides["before"].completions]
        if prompts != [one.prompt for one in run.sides["after"].completions]:
            self.say("after.json", "not the prompts of before.json")
        best: dict[str, Any] | None = None
        for row in run.during:
            self._during(row, best)
            best = row if best is None or row["value"] > best["value"] else best

    def _evaluation_file(self, where: str, found: dict[str, Any], side: Side) -> None:
        if found["num_prompts"] != side.count:
            self.say(where, f"{found['num_prompts']} prompts, completions of {side.count}")
        for name in ("accuracy", "greedy_accuracy", "reward", "thinking_tokens"):
            entry, estimate = found["measures"].get(name), side.measure(name)
            value = None if entry is None else entry["value"]
            if name == "accuracy" and estimate is None and value == 0:
                continue  # exact match with a list or JSON: 0 is true, and no surface may show it
            self.near(where, name, value, None if estimate is None else estimate.value)
            if estimate is not None and entry is not None:
                self.ends(where, name, [entry["low"], entry["high"]], estimate)
        for name, _ in self.run.rewards:
            entry, estimate = found["measures"][f"rewards/{name}"], side.measure(name)
            assert estimate is not None
            self.near(where, f"reward {name}", entry["value"], estimate.value)
            self.ends(where, f"reward {name}", [entry["low"], entry["high"]], estimate)
        reward = found["measures"]["reward"]
        self._in_range(where, "reward", reward["low"], reward["high"])
        pairs = {"closed_share": side.closed, "truncated_share": side.truncated, "mean_tokens": side.tokens}
        for name, expected in pairs.items():
            self.near(where, name, found[name], expected)

    def _in_range(self, where: str, what: str, low: Any, high: Any) -> None:
        if low is None or high is None:
            self.say(where, f"{what}: no interval")
        elif low < self.task.low - 1e-9 or high > self.task.high + 1e-9:
            limits = f"{self.task.low} to {self.task.high}"
            self.say(where, f"{what}: [{low:.3f}, {high:.3f}] leaves the reward's range {limits}")
        elif high - low < 1e-9:
            self.say(where, f"{what}: an interval of zero width at {low:.3f}")

    def _during(self, row: dict[str, Any], best: dict[str, Any] | None) -> None:
        """An evaluation during training, from its values per prompt: it keeps no completions."""
        where, found = f"evaluations.jsonl, step {row['step']}", row["evaluation"]
        side = self._side_of(found)
        if row["measure"] != self.run.leads:
            self.say(where, f"the deciding measure is {row['measure']}, not {self.run.leads}")
        for name in ("accuracy", "reward"):
            if (estimate := side.measure(name)) is not None:
                entry = found["measures"][name]
                self.near(where, name, entry["value"], estimate.value)
                self.ends(where, name, [entry["low"], entry["high"]], estimate)
        self._in_range(where, "reward", found["measures"]["reward"]["low"], found["measures"]["reward"]["high"])
        estimate = side.measure(row["measure"])
        assert estimate is not None
        self.near(where, "value", row["value"], estimate.value)
        if best is not None:
            sides = (self._side_of(best["evaluation"]), side)
            change = change_of(*(each.per_prompt[row["measure"]] for each in sides))
            against = row["against_best"]
            against = list(against.values()) if isinstance(against, dict) else against
            self.near(where, "against the best", against[0], change.value)
            self.ends(where, "against the best", against[1:], change)

    def _side_of(self, found: dict[str, Any]) -> Side:
        measures = found["measures"].items()
        per_prompt = {name.removeprefix("rewards/"): entry["per_prompt"] for name, entry in measures}
        closed, truncated = found.get("closed_share"), found["truncated_share"]
        return Side(found["num_prompts"], per_prompt, closed, truncated, found["mean_tokens"])

    def check_verdict(self) -> None:
        """The word, its reason, the advice and the numbers in `status.json`."""
        found = self.run.status.get("verdict") or {}
        kind, change = found.get("kind"), self.change
        if kind not in self.task.kinds:
            self.say("verdict", f"{kind}, expected {' or '.join(self.task.kinds)}: {found.get('sentence')}")
        assert change is not None
        if kind == "learnt" and not change.low > 0:
            self.say("verdict", f"learnt, although the change is {change}")
        if kind in ("no evidence", "no signal") and change.low > 0:
            self.say("verdict", f"{kind}, although the change is {change}")
        reward = self.run.change("reward")
        is_risen = self.run.leads != "reward" and kind != "learnt" and reward is not None and reward.low > 0
        said = found.get("sentence", "")
        if is_risen and (not said.startswith("The held-out reward rose") or "could be learnt" in said):
            self.say("verdict", f"the reward rose ({reward}), and it is not said first: {said}")
        if kind == "broken" and not change.high < 0:
            self.say("verdict", f"broken, although the change is {change}")
        self._change_numbers("status.json", found.get("change"), *self.run.sides.values())
        before, after = (side.measure(self.run.leads) for side in self.run.sides.values())
        sentence = found.get("sentence", "")
        leads = ("The held-out greedy", "Greedy", *(["The held-out reward"] if self.run.leads != "reward" else []))
        if sentence.startswith(leads):
            sentence = sentence.partition("), but ")[2]  # after what rose, and decides nothing
        if moved := re.match(rf"(.*?) (rose|fell|went) from ({NUMBER})( ?%)? to ({NUMBER})", sentence):
            verb = "rose" if change.low > 0 else "fell" if change.high < 0 else "went"
            scale = 100 if moved[4] else 1
            shown = _measure_in(moved[1]), moved[2], _is_near(moved[3], before, scale), _is_near(moved[5], after, scale)
            if shown != (self.run.leads, verb, True, True):
                self.say("verdict", f"{found['sentence']!r}, recomputed {verb} from {before} to {after}")
        advice = found.get("next", "")
        if kind == "learnt" and bool(advice) != bool(found.get("rule")):
            self.say("verdict", f"learnt, but the advice is {advice!r}")
        if self.task.advice and not any(word in advice for word in self.task.advice):
            self.say("verdict", f"the advice has none of {self.task.advice}: {advice!r}")
        if kind != "learnt" and not advice:
            self.say("verdict", f"{kind}, and no advice")
        for section, key, value in re.findall(r"(\w+)\.(\w+)(?: \(|, )currently ([^)]+)\)", advice):
            expected = self.run.config[section][key]
            if value != str(expected) and not (re.fullmatch(NUMBER, value) and math.isclose(float(value), expected)):
                self.say("verdict", f"{section}.{key} (currently {value}), recomputed {expected}")
        commands = {"learnt": ("ask", "export")}.get(kind or "", ("show",))
        if tuple(one.split()[1] for one in found.get("commands", ())) != commands:
            self.say("verdict", f"commands {found.get('commands')}")
        for name, key in (("step", "step"), ("max_steps", "step"), ("adapter_step", "step")):
            self.near("status.json", name, self.run.status.get(name), self.run.steps[-1][key])

    def _change_numbers(self, where: str, found: dict[str, Any] | None, old: Side, new: Side) -> None:
        """A change as JSON, from `old` to `new`."""
        if found is None:
            self.say(where, "no change")
            return
        name = found["measure"]
        if name != self.run.leads:
            self.say(where, f"the leading measure is {name}, not {self.run.leads}")
        if name not in old.per_prompt or name not in new.per_prompt:
            self.say(where, f"the leading measure {name} cannot be recomputed")
            return
        change = change_of(old.per_prompt[name], new.per_prompt[name])
        for key, side in (("before", old), ("after", new)):
            estimate = side.measure(name)
            assert estimate is not None
            self.near(where, f"change.{key}", found[key], estimate.value)
        self.near(where, "change.value", found["value"], change.value)
        self.ends(where, "change", [found["low"], found["high"]], change)
        self.near(where, "change.prompts", found["prompts"], old.count)

    def check_surfaces(self) -> None:
        """Every interval that is shown, with its value, is one of those recomputed; the leading measure comes first,
        and the verdict is that of `status.json`."""
        verdict, on, known = self.run.status["verdict"], self.on, self.estimates()
        report, page = _text(on.report.partition('<section id="details"')[0]), _text(on.page)
        texts = {"progress": on.printed, "show": on.show, "report": report, "comparison": on.versus,
                 "comparison page": page.partition("What differs")[0], "evaluation": on.evaluation,
                 "compare": on.comparison}  # fmt: skip
        for where, text in texts.items():
            text = " ".join(html.unescape(text).replace("│", " ").split())
            found = list(INTERVAL.finditer(text))
            if not found:
                self.say(where, "no interval")
            for one in found:
                if not any(_is_of(one, estimate) for estimate in known):
                    self.say(where, f"{one[0]} is no interval of this run")
        leads = {"progress": r"Evaluation before: ([a-z -]+?) [+-]?\d", "show": r"(?m)^held-out.*\n+ *(\S.*?)  ",
                 "compare": r"\A([A-Za-z -]+)"}  # fmt: skip
        for where, pattern in leads.items():
            first = re.search(pattern, texts[where])
            if first is None or _measure_in(first[1]) != self.run.leads:
                self.say(where, f"the first measure is {first and first[1]!r}, not the {self.run.leads}")
        tile = re.search(r"<div class=.name.>(.*?)</div>", on.report)
        if tile is None or _measure_in(_text(tile[1])) != self.run.leads:
            self.say("report", f"the first tile is not the {self.run.leads}")
        for where, text in (("progress", on.printed), ("show", on.show), ("report", report)):
            shown = " ".join(text.split())
            if verdict["kind"] not in shown or " ".join(verdict["sentence"].split()) not in shown:
                self.say(where, "the verdict is not that of status.json")

    def estimates(self) -> list[Estimate]:
        """Every value with an interval that may be shown of the run or of its twin."""
        run = self.run
        during = [self._side_of(row["evaluation"]) for row in run.during]
        names = {name for side in (*run.sides.values(), *during) for name in side.per_prompt}
        found = [side.measure(name) for side in (*run.sides.values(), *during) for name in names]
        for name in names:
            found += [run.change(name), run.change(name, "before", "before")]
            rows = [side.per_prompt[name] for side in during if name in side.per_prompt]
            found += [change_of(old, new) for place, new in enumerate(rows) for old in rows[:place]]
        return [one for one in found if one is not None]

    def check_versus(self) -> None:
        """The untrained twin and the run: the lead is the change through training."""
        where, run, found = "comparison, JSON", self.run, self.on.versus_json
        before, after = run.sides.values()
        twin, trained = found["runs"]
        self._change_numbers(where, trained["lead"], before, after)
        if trained["verdict"] != run.status["verdict"]:
            self.say(where, "the run's verdict is not that of status.json")
        if twin["verdict"]["kind"] in ("learnt", "broken"):
            self.say(where, f"the untrained twin's verdict is {twin['verdict']['kind']}: {twin['verdict']['sentence']}")
        assert self.change is not None
        name, sentence = self.task.name, found["sentence"]
        expected = f"{name} and untrained do not differ significantly"
        if self.change.low > 0 or self.change.high < 0:
            better, worse = (name, "untrained") if self.change.low > 0 else ("untrained", name)
            expected = f"{better} is ahead of {worse}: "
            if _measure_in(sentence.partition(": ")[2].partition(",")[0]) != run.leads:
                self.say(where, f"compared by {sentence!r}, not by the {run.leads}")
        if expected not in sentence:
            self.say(where, f"{sentence!r}, recomputed {self.change}")
        for where, text in (("comparison", self.on.versus), ("comparison page", html.unescape(self.on.page))):
            if sentence not in text:
                self.say(where, "its sentence is another")

    def check_words(self) -> None:
        """No surface speaks of accuracy where nothing compares answers, nor of thinking of a model that has none."""
        shown = {
            "progress": self.on.printed,
            "show": self.on.show,
            "report": _text(self.on.report.partition('<section id="details"')[0].partition("</style>")[2]),
            "comparison": self.on.versus.partition("\n  ")[0],
            "comparison page": _text(self.on.page.partition("</style>")[2].partition("<h2>What differs")[0]),
            "notebook": f"{self.on.plot} {self.on.evaluation} {self.on.comparison}",
        }
        for where, text in shown.items():
            text = re.sub(r"accuracy, temperature 1[ │]+not measured", "", text)
            if self.run.leads == "reward" and (found := re.search(r"(?i).{0,30}accurac(?:y|ies).{0,30}", text)):
                self.say(where, f"the word accuracy, although no reward compares answers: {found[0]!r}")
            thinking = re.search(r"(?i).{0,30}\bthink(?:ing|s)? ?(?:tokens|closed|from|\d).{0,30}", text)
            if thinking and not self.run.thinks:
                self.say(where, f"thinking of a model that does not think: {thinking[0]!r}")


def check_run(task: Task, surfaces: Any) -> list[str]:
    """The problems of a run and of everything that is shown of it."""
    run = Recomputed(surfaces.folder, surfaces.folder.parents[1] / "rewards.py")
    checks = Checks(task, run, surfaces)
    if run.leads != task.leads:
        checks.say("task", f"the leading measure should be {task.leads}")
    return checks.all()


def _measure_in(title: str) -> str:
    """The measure that a title names: "accuracy", "reward", or one of them at temperature 0; empty for any other."""
    text = title.lower()
    if "greedy" in text:
        return "greedy_reward" if "reward" in text else "greedy_accuracy"
    if "accuracy" in text or "exact match" in text or "exact_match" in text:
        return "accuracy"
    return "reward" if re.search(r"\breward\b(?! \w+_)|held_out_reward", text) else ""


def _is_near(text: str, expected: Estimate | float | None, scale: float = 1, slack: float = 0.0) -> bool:
    """Whether a number as text is `scale` times a value, or a measure's, to its last digit."""
    value = expected.value if isinstance(expected, Estimate) else expected
    if value is None:
        return False
    off = abs(float(text.replace(",", "")) - value * scale)
    return off <= _last_digit(text) * 0.5001 + 1e-5 * abs(value * scale) + slack


def _is_of(shown: re.Match[str], expected: Estimate) -> bool:
    """Whether an interval, and its value if it stands before it, are those of `expected`, or of the same change the
    other way around."""
    scale = 100 if shown["unit"] else 1
    slack = 0.002 * (expected.high - expected.low) * scale
    texts = [shown["value"], shown["low"] or shown["from"], shown["high"] or shown["to"]]
    mirrored = Estimate(-expected.value, -expected.high, -expected.low)
    return any(
        all(text is None or _is_near(text, value, scale, slack) for text, value in zip(texts, one, strict=True))
        for one in (expected, mirrored)
    )


def _last_digit(number: str) -> float:
    digits, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


def _text(part: str) -> str:
    """The text of a part of a page."""
    part = re.sub(r"<(style|script).*?</\1>", "", part, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", part)).split())
