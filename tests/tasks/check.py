"""Checks every figure on every surface of a run against `recompute.py`. Imports nothing of the kit.

A figure with a label that is not known here is a problem too, so that none goes unchecked.
"""

import html
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.tasks.recompute import Estimate, Recomputed, Side, change_of, ends_of
from tests.tasks.tasks import Task

NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
SHARE = rf"{NUMBER}(?: ?%)?"  # a number, or a share in percent
AT_STEPS = rf"({SHARE}) at step (\d+), ({SHARE}) at step (\d+)"
CELL = re.compile(rf"(?P<value>{NUMBER})(?P<unit> ?%| points)?(?: ?\[(?P<low>{NUMBER}), (?P<high>{NUMBER})\])?")
SPARK = "▁▂▃▄▅▆▇█"


class Checks:
    """The problems of a run, as lines `surface: what: shown ..., recomputed ...`."""

    def __init__(self, task: Task, model: str, run: Recomputed, surfaces: Any) -> None:
        self.task, self.model, self.run, self.on = task, model, run, surfaces
        self.problems: list[str] = []
        self.change = run.change(run.leads)

    def all(self) -> list[str]:
        """Check everything; returns the problems."""
        for name in ("files", "verdict", "printed", "show", "show_json", "report", "versus", "batch", "notebook"):
            getattr(self, f"check_{name}")()
        self.check_words()
        return list(dict.fromkeys(self.problems))

    # -------------------------------------------------------------------------------------------- tools

    def say(self, where: str, what: str) -> None:
        self.problems.append(f"{where}: {what}")

    def near(self, where: str, what: str, found: Any, expected: float | None, tolerance: float = 1e-5) -> None:
        """A number of a file or of JSON."""
        if expected is None or found is None or isinstance(found, str):
            if not (expected is None and found is None):
                self.say(where, f"{what}: shown {found}, recomputed {expected}")
        elif not math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance):
            self.say(where, f"{what}: shown {found:.6g}, recomputed {expected:.6g}")

    def shown(self, where: str, what: str, text: str, expected: float | None, slack: float = 0.0) -> None:
        """A number as text: right to its last digit."""
        if expected is None:
            if text not in ("", "-"):
                self.say(where, f"{what}: shown {text}, not measured")
            return
        found = re.fullmatch(rf"({NUMBER})( ?%)?", text.strip())
        if found is None:
            self.say(where, f"{what}: shown {text!r}, recomputed {expected:.6g}")
            return
        value = float(found[1].replace(",", ""))
        expected = expected * 100 if found[2] else expected
        if abs(value - expected) > _last_digit(found[1]) * 0.5001 + 1e-5 * abs(expected) + slack:
            self.say(where, f"{what}: shown {text.strip()}, recomputed {expected:.6g}")

    def cell(self, where: str, what: str, text: str, expected: Estimate | float | None) -> None:
        """A value with its interval, `0.213 [0.155, 0.286]`."""
        found = CELL.fullmatch(text.strip())
        if expected is None or found is None:
            if not (expected is None and text.strip() in ("", "-")):
                self.say(where, f"{what}: shown {text!r}, recomputed {expected}")
            return
        scale = 100 if found["unit"] else 1
        if not isinstance(expected, Estimate):
            self.shown(where, what, found["value"], expected * scale)
            return
        self.shown(where, what, found["value"], expected.value * scale)
        self.ends(where, what, [found["low"], found["high"]], expected, scale)

    def ends(self, where: str, what: str, shown: Sequence[Any], expected: Estimate, scale: float = 1) -> None:
        """The ends of an interval, as texts or numbers."""
        for name, text, value in zip(("low", "high"), shown, expected[1:], strict=True):
            if text is None:
                self.say(where, f"{what}: no interval, recomputed {expected}")
                return
            half = (expected.high - expected.low) * scale
            if isinstance(text, str):
                self.shown(where, f"{what}, {name}", text, value * scale, 0.002 * half)
            else:
                self.near(where, f"{what}, {name}", text, value * scale, 1e-5 + 0.002 * half)

    def consume(self, where: str, text: str, patterns: Sequence[tuple[str, Callable[..., None]]]) -> str:
        """Check each pattern's matches and cut them out; a digit that is left is a problem."""
        for pattern, check in patterns:
            while match := re.search(pattern, text):
                check(*match.groups())
                text = f"{text[: match.start()]} · {text[match.end() :]}"
        if left := re.findall(r"\S*\d\S*", text):
            self.say(where, f"figures without a recomputation: {' '.join(left)} in {text.strip()!r}")
        return text

    # -------------------------------------------------------------------------------------------- the files

    def check_files(self) -> None:
        """`metrics.jsonl`, `rollouts.jsonl`, `before.json`, `after.json` and `evaluations.jsonl`."""
        run = self.run
        if len(run.metrics) != len(run.steps):
            self.say("metrics.jsonl", f"{len(run.metrics)} rows, rollouts of {len(run.steps)} steps")
        for row, again in zip(run.metrics, run.steps, strict=False):
            for name, value in again.items():
                if name != "tokens":
                    self.near("metrics.jsonl", f"step {row['step']}, {name}", row.get(name), value)
        for number, row in enumerate(run.rollouts, 1):
            self.near("rollouts.jsonl", f"row {number}, reward", row["reward"], row["reward_again"])
            self.near("rollouts.jsonl", f"row {number}, advantage", row["advantage"], row["advantage_again"], 1e-4)
            if row["completion_tokens"] != len(row["completion_ids"]):
                self.say("rollouts.jsonl", f"row {number}: {row['completion_tokens']} tokens")
        if not run.metrics[-1]["seconds"] <= run.seconds <= run.metrics[-1]["seconds"] + 5:
            self.say("status.json", f"{run.seconds} s of training, {run.metrics[-1]['seconds']} s at the last step")
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
        for name in ("accuracy", "greedy_accuracy", "reward"):
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
        thoughts = side.thinking if side.closed else None
        pairs = {"closed_share": side.closed, "truncated_share": side.truncated, "mean_tokens": side.tokens,
                 "mean_thinking_tokens": thoughts}  # fmt: skip
        for name, expected in pairs.items():
            self.near(where, name, found[name], expected)

    def _in_range(self, where: str, what: str, low: Any, high: Any) -> None:
        if low is None or high is None:
            self.say(where, f"{what}: no interval")
        elif low < self.task.low - 1e-9 or high > self.task.high + 1e-9:
            self.say(
                where, f"{what}: [{low:.3f}, {high:.3f}] leaves the reward's range {self.task.low} to {self.task.high}"
            )
        elif high - low < 1e-9:
            self.say(where, f"{what}: an interval of zero width at {low:.3f}")

    def _during(self, row: dict[str, Any], best: dict[str, Any] | None) -> None:
        """An evaluation during training, from its values per prompt: it keeps no completions."""
        where, found = f"evaluations.jsonl, step {row['step']}", row["evaluation"]
        side = self._side_of(found)
        if row["measure"] != self.run.leads:
            self.say(where, f"the deciding measure is {row['measure']}, not {self.run.leads}")
        for name in ("accuracy", "reward"):
            estimate = side.measure(name)
            if estimate is None:
                continue
            entry = found["measures"][name]
            self.near(where, name, entry["value"], estimate.value)
            self.ends(where, name, [entry["low"], entry["high"]], estimate)
        self._in_range(where, "reward", found["measures"]["reward"]["low"], found["measures"]["reward"]["high"])
        estimate = side.measure(row["measure"])
        assert estimate is not None
        self.near(where, "value", row["value"], estimate.value)
        if best is not None:
            change = change_of(
                self._side_of(best["evaluation"]).per_prompt[row["measure"]], side.per_prompt[row["measure"]]
            )
            against = row["against_best"]
            against = list(against.values()) if isinstance(against, dict) else against
            self.near(where, "against the best", against[0], change.value)
            self.ends(where, "against the best", against[1:], change)

    def _side_of(self, found: dict[str, Any]) -> Side:
        measures = found["measures"].items()
        per_prompt = {name.removeprefix("rewards/"): entry["per_prompt"] for name, entry in measures}
        return Side(
            found["num_prompts"], per_prompt, found.get("closed_share"), found["truncated_share"],
            found["mean_tokens"], found.get("mean_thinking_tokens"),
        )  # fmt: skip

    # -------------------------------------------------------------------------------------------- the verdict

    def check_verdict(self) -> None:
        """The word, its reason, the advice and the numbers in `status.json`."""
        found = self.run.status.get("verdict") or {}
        kind, change = found.get("kind"), self.change
        kinds = self.task.kinds if self.model == "toy" else self.task.real_kinds
        if kind not in kinds:
            self.say("verdict", f"{kind}, expected {' or '.join(kinds)}: {found.get('sentence')}")
        assert change is not None
        if kind == "learnt" and not change.low > 0:
            self.say("verdict", f"learnt, although the change is {change}")
        if kind in ("no evidence", "no signal") and change.low > 0:
            self.say("verdict", f"{kind}, although the change is {change}")
        if kind == "broken" and not change.high < 0:
            self.say("verdict", f"broken, although the change is {change}")
        self._change_numbers("status.json", found.get("change"), *self.run.sides.values())
        self.sentence("verdict", found.get("sentence", ""))
        advice = found.get("next", "")
        if kind == "learnt" and advice:
            self.say("verdict", f"learnt, but the advice is {advice!r}")
        if kind in self.task.kinds and self.task.advice and not any(word in advice for word in self.task.advice):
            self.say("verdict", f"the advice has none of {self.task.advice}: {advice!r}")
        if kind != "learnt" and not advice:
            self.say("verdict", f"{kind}, and no advice")
        self.advice("verdict", advice)
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

    def sentence(self, where: str, text: str) -> None:
        """The verdict's sentence: each of its figures."""
        before, after = self.run.sides.values()

        def change(title: str, verb: str, old: str, new: str, rest: str) -> None:
            name = _measure_in(title)
            found = self.run.change(name)
            if found is None:
                self.say(where, f"{title} was not measured")
                return
            scale = 1 if name == "reward" else 100
            for shown, side in ((old, before), (new, after)):
                estimate = side.measure(name)
                assert estimate is not None
                self.shown(where, f"{title} from/to", shown.removesuffix(" %"), estimate.value * scale)
            expected = "rose" if found.low > 0 else "fell" if found.high < 0 else "went"
            if verb != expected:
                self.say(where, f"{title} {verb}, recomputed {expected} ({found})")
            value, interval, *others = rest.split(", ")
            self.shown(where, f"{title}, change", value.removesuffix(" points"), found.value * scale)
            ends = re.fullmatch(rf"95 % CI ({NUMBER}) to ({NUMBER})", interval)
            self.ends(where, f"{title}, change", ends.groups() if ends else [None, None], found, scale)
            self.prompts(where, ", ".join(others), after)

        def pair(name: str) -> Callable[[str, str], None]:
            def check(old: str, new: str) -> None:
                for shown, side in ((old, before), (new, after)):
                    value = side.thinking if name == "thinking" else side.measure(name)
                    value = value.value if isinstance(value, Estimate) else value
                    self.shown(where, name, shown, value)

            return check

        patterns = [
            (
                rf"([A-Za-z][A-Za-z ,-]*?) (rose|fell|went) from ({SHARE}) to ({SHARE}) \((.*?prompts)\)",
                change,
            ),
            (rf"greedy from ({SHARE}) to ({SHARE})", pair(f"greedy_{self.run.leads}")),
            (rf"exact match from ({NUMBER} %) to ({NUMBER} %)", pair("accuracy")),
            (rf"thinking from ({NUMBER}) to ({NUMBER}) tokens", pair("thinking")),
            *self.evidence(where),
        ]
        self.consume(where, text, patterns)

    def evidence(self, where: str) -> list[tuple[str, Callable[..., None]]]:
        """Patterns of the health rules' evidence."""
        series = self.run.series

        def tied(steps: str, mean: str | None) -> None:
            shares = self.run.series("frac_score_zero_std")
            count = next((n for n, share in enumerate(reversed(shares)) if share < 1), len(shares))
            if where != "progress" or int(steps) > count:  # it prints a finding when it is found
                self.shown(where, "steps in a row without signal", steps, count)
            if mean is not None:
                self.shown(where, "mean reward", mean, series("reward")[-1])

        def since(step: str) -> None:
            if not 1 <= int(step) <= len(self.run.steps):
                self.say(where, f"since step {step}")

        def values_of(what: str) -> list[float]:
            """A metric by the name that evidence gives it; held-out accuracy at each evaluation."""
            if what.startswith("held-out"):
                return [row["evaluation"][_measure_in(what)] for row in self.run.during]
            return series({"the reward": "reward", "the entropy": "entropy", "completions": "completions/mean_length",
                           "thinking": "thinking/mean_length"}.get(what, f"rewards/{what}/mean"))  # fmt: skip

        def moved(what: str, old: str, new: str) -> None:
            """Both values are means of at most five values in a row."""
            values = values_of(what)
            means = [math.fsum(part) / len(part) for place in range(len(values)) for width in range(1, 6)
                     if (part := values[place : place + width])]  # fmt: skip
            for text in (old, new):
                if not any(abs(float(text) - mean) <= _last_digit(text) for mean in means):
                    self.say(where, f"{what} from {old} to {new}, but {text} is no mean of {values}")

        def zero(steps: str) -> None:
            norms = series("grad_norm")
            self.shown(
                where,
                "steps without a gradient",
                steps,
                next((n for n, one in enumerate(reversed(norms)) if one), len(norms)),
            )

        def done(share: str) -> None:
            if not 50 <= float(share) <= 100:
                self.say(where, f"{share} % of the planned steps")

        def last(what: str) -> Callable[[str], None]:
            return lambda text: self.shown(where, what, text, series(what)[-1])

        return [
            (rf"every group earned the same reward in (\d+) steps in a row(?: \(mean reward ({NUMBER})\))?", tied),
            (r"since step (\d+)", since),
            (r"over after step (\d+)", since),
            (rf"the entropy is ({NUMBER}) nats", last("entropy")),
            (
                rf"and ({SHARE}) of the completions, of all prompts, are identical",
                last("completions/most_common_ratio"),
            ),
            (r"after (\d+)% of the planned steps", done),
            (r"the gradient was zero in (\d+) steps in a row", zero),
            (
                rf"(the reward|the entropy|held-out [a-z ]+|[a-z_]+) (?:rose|fell|went) from ({NUMBER}) to ({NUMBER})",
                moved,
            ),
            (r"--completions \d+", lambda: None),
        ]

    def advice(self, where: str, text: str) -> None:
        """The figures in an advice: current values of keys, and the number of prompts that would settle it."""

        def current(section: str, key: str, value: str) -> None:
            expected = self.run.config[section][key]
            same = value == str(expected) or (re.fullmatch(NUMBER, value) and math.isclose(float(value), expected))
            if not same:
                self.say(where, f"{section}.{key} (currently {value}), recomputed {expected}")

        def prompts(count: str) -> None:
            assert self.change is not None
            value, low, _ = self.change
            number = 1.2 * self.run.sides["after"].count * ((value - low) / max(value, 0.02)) ** 2
            if abs(int(count.replace(",", "")) - number) > 110 + 0.01 * number:
                self.say(where, f"about {count} prompts, recomputed {number:.0f}")

        def solved(share: str) -> None:
            estimate = self.run.sides["before"].measure(self.run.leads)
            assert estimate is not None
            self.shown(where, "solved before training", share, estimate.value)

        patterns = [
            (r"(\w+)\.(\w+)(?: \(|, )currently ([^)]+)\)", current),
            (r"about ([\d,]+) prompts", prompts),
            (rf"solved before training \((?:[a-z -]*)({SHARE})\)", solved),
        ]
        self.consume(where, text, patterns)

    def prompts(self, where: str, text: str, side: Side) -> None:
        """`120 held-out prompts`, with the pairing in words."""
        count = re.match(r"([\d,]+) (?:held-out )?prompts$", text)
        if count is None or int(count[1].replace(",", "")) != side.count:
            self.say(where, f"shown {text!r}, recomputed {side.count} held-out prompts")

    # -------------------------------------------------------------------------------------------- progress

    def check_printed(self) -> None:
        """What `rloo-kit train` prints, line by line."""
        where, run, number = "progress", self.run, 0
        kind = run.status["verdict"]["kind"]
        skip = ("machine:", "policy:", "loading ", "rollout:", "scoring:", "memory:", "  rloo-kit ", "  (first, once")
        for line in self.on.printed.splitlines():
            if not re.search(r"\d", line) or line.startswith(skip):
                continue
            if line.startswith("data:"):
                found = re.fullmatch(r"data: ([\d,]+) training prompts, ([\d,]+) held out", line)
                if found and int(found[2]) != run.sides["before"].count:
                    self.say(where, line)
            elif line.startswith("rewards:"):
                weights = re.findall(r"(\w+) x([\d.]+)", line)
                if [(name, float(weight)) for name, weight in weights] != [(n, float(w)) for n, w in run.rewards]:
                    self.say(where, f"{line!r}, the config has {run.rewards}")
            elif line.startswith("evaluation "):
                self._evaluation_progress(where, line)
            elif line.startswith("Evaluation "):
                self._evaluation_line(where, line)
            elif line.startswith("held-out at step "):
                self._held_out_line(where, line)
            elif line.startswith("step "):
                self._step_line(where, line, number)
                number += 1
            elif found := re.fullmatch(r"(\d+) steps, (.+?) of training\. Everything is in .*", line):
                self.near(where, "steps", int(found[1]), run.steps[-1]["step"])
                self._seconds(where, "training time", found[2])
            elif line.startswith(f"{kind}: "):
                self.sentence(where, line.removeprefix(f"{kind}: "))
            elif line.startswith("  to do: "):
                self.advice(where, line)
            elif found := re.match(r"(?:health|alarming|watch|WARNING|healthy)?:? ?([a-z ]+) since step ", line):
                self.finding(where, line)
            else:
                self.say(where, f"a line without a recomputation: {line!r}")
        if number != len(run.steps):
            self.say(where, f"{number} lines of steps, {len(run.steps)} steps")
        if f"{kind}: {run.status['verdict']['sentence']}" not in self.on.printed:
            self.say(where, "the verdict is not that of status.json")

    def finding(self, where: str, text: str) -> None:
        """A health finding with its evidence and its fix."""
        text = re.sub(
            r"(\w+)\.(\w+)(?: \(|, )currently [^)]+\)", lambda found: (self.advice(where, found[0]), "")[1], text
        )
        self.consume(where, text, self.evidence(where))

    def _evaluation_progress(self, where: str, line: str) -> None:
        found = re.fullmatch(
            r"evaluation (before|after|at step \d+): (\d+)/(\d+) completions \((?:sampled|greedy)\)( \| eta [\d:]+)?",
            line,
        )
        if found is None:
            self.say(where, f"a line without a recomputation: {line!r}")
            return
        during = found[1] not in ("before", "after")
        total = self.run.during[0]["evaluation"]["num_prompts"] if during else self.run.sides["before"].count
        if not during and any("greedy" in name for name in self.run.sides["before"].per_prompt):
            total *= 2
        if int(found[3]) != total or int(found[2]) > total:
            self.say(where, f"{line!r}, but there are {total} completions")

    def _evaluation_line(self, where: str, line: str) -> None:
        """`Evaluation before: accuracy 0.213 [0.155, 0.286], thinking 4 tokens, 0% truncated; 120 held-out prompts`."""
        found = re.fullmatch(r"Evaluation (before|after): (.*); ([\d,]+ held-out prompts)", line)
        if found is None:
            self.say(where, f"a line without a recomputation: {line!r}")
            return
        side = self.run.sides[found[1]]
        self.prompts(where, found[3], side)
        parts = re.split(r", (?![^\[]*\])", found[2])
        first = _measure_in(parts[0])
        if first != self.run.leads:
            self.say(where, f"the line of the evaluation begins with {parts[0]!r}, not with the {self.run.leads}")
        if not any(_measure_in(part) == self.run.leads for part in parts):
            self.say(where, f"the line of the evaluation has no {self.run.leads}")
        led = ""
        for part in parts:
            what = f"Evaluation {found[1]}, {part!r}"
            if part.startswith("greedy "):  # of the measure before it
                self.shown(where, what, part.split()[1], side.measure(f"greedy_{led}").value)  # type: ignore[union-attr]
                continue
            led = _measure_in(part) or led
            if match := re.fullmatch(r"thinking (\d+) tokens", part):
                self.shown(where, what, match[1], side.thinking)
            elif match := re.fullmatch(r"(\d+ ?%) truncated", part):
                self.shown(where, what, match[1], side.truncated)
            elif match := re.fullmatch(rf"([A-Za-z -]+?) ({NUMBER}(?: \[.*\])?)", part):
                estimate = side.measure(_measure_in(match[1]))
                self.cell(where, what, match[2], estimate)
            else:
                self.say(where, f"{what}: no recomputation")

    def _held_out_line(self, where: str, line: str) -> None:
        """`held-out at step 4: reward 0.5 [0.4, 0.6], +0.1 [+0.0, +0.2] against the best before; the best so far`."""
        found = re.fullmatch(
            r"held-out at step (\d+): ([a-z _-]+?) (\S+ \[.*?\])(?:, (\S+ \[.*?\]) against the best before)?(;.*)?",
            line,
        )
        if found is None:
            self.say(where, f"a line without a recomputation: {line!r}")
            return
        step, title, value, against, rest = found.groups()
        rows = [row for row in self.run.during if row["step"] <= int(step)]
        if _measure_in(title) != self.run.leads:
            self.say(where, f"held-out at step {step}: {title}, not the {self.run.leads}")
        name = _measure_in(title)
        side = self._side_of(rows[-1]["evaluation"])
        self.cell(where, f"held-out at step {step}", value, side.measure(name))
        earlier = max(rows[:-1], key=lambda row: row["value"], default=None)
        if earlier is not None:
            old = self._side_of(earlier["evaluation"])
            self.cell(
                where,
                f"held-out at step {step}, change",
                against or "",
                change_of(old.per_prompt[name], side.per_prompt[name]),
            )
        is_best = earlier is None or rows[-1]["value"] > earlier["value"]
        if earlier is not None and is_best != ("the best so far" in (rest or "")):
            self.say(where, f"{line!r}, but the best before was {earlier['value']:.3f}")
        if best := re.search(rf"best ({NUMBER}) at step (\d+)", rest or ""):
            assert earlier is not None
            self.shown(where, "the best", best[1], earlier["value"])
            self.near(where, "the best's step", int(best[2]), earlier["step"])

    def _step_line(self, where: str, line: str, number: int) -> None:
        """`step 3/8 | reward 0.594 | held-out 0.150 | think 7 | 1108 tok/s | eta 0:02`."""
        again, row = self.run.steps[number], self.run.metrics[number]
        head, *parts = line.split(" | ")
        if head != f"step {again['step']}/{len(self.run.steps)}":
            self.say(where, f"{head}, expected step {again['step']}")
        answers = next((name for name, _ in self.run.rewards if name in ("answer_reward",)), None)
        last = [one for one in self.run.during if one["step"] <= again["step"]][-1:]
        values = {
            "reward": again["reward"],
            "accuracy": again[f"rewards/{answers}/mean"] if answers else None,
            "held-out": last[0]["value"] if last else None,
            "think": again.get("thinking/mean_length"),
        }
        for part in parts:
            words = part.split()
            if part.endswith(" tok/s"):
                speed = again["tokens"] / row["step_time"]
                if abs(float(words[0].replace(",", "")) / speed - 1) > 0.25:
                    self.say(
                        where,
                        f"step {again['step']}: {part}, but {again['tokens']:.0f} tokens in {row['step_time']:.3f} s",
                    )
            elif words[0] == "eta":
                self._eta(where, words[1], again, row)
            elif words[0] in values and len(words) == 2:
                self.shown(where, f"step {again['step']}, {words[0]}", words[1], values[words[0]])
            else:
                self.say(where, f"step {again['step']}: no recomputation of {part!r}")

    def _eta(self, where: str, text: str, again: dict[str, float], row: dict[str, Any]) -> None:
        """Time left: at most the steps and evaluations left, each as long as the slowest so far, plus those after."""
        left = len(self.run.steps) - again["step"]
        slowest = max(one["step_time"] for one in self.run.metrics)
        evaluations = sum(found["seconds"] for found in self.run.stored.values())
        during = sum(one["evaluation"]["seconds"] for one in self.run.during)
        if _clock(text) > left * slowest * 2 + 2 * (evaluations + during) + row["seconds"] + 1:
            self.say(where, f"step {again['step']}: eta {text} with {left} steps of at most {slowest:.2f} s left")

    def _seconds(self, where: str, what: str, text: str) -> None:
        """Training time in any form, against `status.json`."""
        seconds = self.run.seconds
        if match := re.fullmatch(rf"({NUMBER}) s", text):
            self.shown(where, what, match[1], seconds)
        elif re.fullmatch(r"[\d:]+", text):
            self.near(where, what, _clock(text), round(seconds))
        elif match := re.fullmatch(r"(\d+) min (\d+) s", text):
            self.near(where, what, 60 * int(match[1]) + int(match[2]), round(seconds))
        else:
            self.say(where, f"{what}: no recomputation of {text!r}")

    # -------------------------------------------------------------------------------------------- show

    def check_show(self) -> None:
        """`rloo-kit show RUN`, as text."""
        where, run, verdict = "show", self.run, self.run.status["verdict"]
        head, *lines = self.on.show.splitlines()
        found = re.fullmatch(r".*: finished, (\d+) of (\d+) steps, (.*) of training", head)
        if found is None:
            self.say(where, f"the first line: {head!r}")
        else:
            self.near(where, "steps", int(found[1]), run.steps[-1]["step"])
            self._seconds(where, "training time", found[3])
        if not lines[0].startswith(f"{verdict['kind']}: {verdict['sentence']}"):
            self.say(where, f"the verdict is not that of status.json: {lines[0]!r}")
        part, rows = "", []
        for line in lines[1:]:
            if not line.strip():
                part = ""
            elif line.startswith(("held-out", "training", "Health", "Worth checking")):
                part = line.split()[0].rstrip(",")
            elif part == "held-out" and line.startswith("Prompt by prompt"):
                self._kinds_line(where, line)
            elif part == "held-out":
                rows.append(re.split(r"\s{2,}", line.strip()))
            elif part == "training":
                self._curve_line(where, line)
            elif part == "Health":
                self.finding(where, line)
            elif part == "Worth":
                self._worth_line(where, line)
            elif line.startswith("  to do: "):
                self.advice(where, line)
            elif re.search(r"\d", line) and not line.startswith("  rloo-kit "):
                self.say(where, f"a line without a recomputation: {line!r}")
        self.table(where, rows)

    def table(self, where: str, rows: Sequence[Sequence[str]], sides: Sequence[Side] = ()) -> None:
        """The measures, one a row, before and after; the leading one comes first."""
        sides = sides or list(self.run.sides.values())
        if not rows:
            self.say(where, "no measures")
            return
        if _measure_in(rows[0][0]) != self.run.leads:
            self.say(where, f"the first measure is {rows[0][0]!r}, not the {self.run.leads}")
        labels = [row[0] for row in rows]
        if not any(_measure_in(label) == self.run.leads for label in labels):
            self.say(where, f"no row of the {self.run.leads}")
        values = [row[1] for row in rows if _measure_in(row[0]) == "accuracy"]
        if self.run.says_nothing and not all(value.startswith("not measured: ") for value in values):
            self.say(where, "exact match is shown, although it is 0 before and after")
        for label, *cells in rows:
            if cells[0].startswith("not measured: "):
                continue
            for cell, side in zip(cells, sides, strict=False):
                found = self.quantity(label, side)
                if found is None:
                    self.say(where, f"no recomputation of the measure {label!r}: {cell}")
                else:
                    self.cell(where, label, cell, found[0])
            if len(cells) != len(sides):
                self.say(where, f"{label}: {cells}")

    def quantity(self, label: str, side: Side) -> tuple[Any] | None:
        """The value of a measure by its label in a table; None for an unknown label."""
        text = label.lower()
        limit = re.fullmatch(r"truncated at (\d+) tokens", text)
        if limit:
            if int(limit[1]) != self.run.config["rloo"]["max_completion_length"]:
                self.say("tables", f"the limit in {label!r}")
            return (side.truncated,)
        known = {"thinking closed": side.closed, "tokens per completion": side.tokens, "thinking tokens": side.thinking,
                 "thinking tokens, closed completions": side.thinking}  # fmt: skip
        if text in known:
            return (known[text],)
        for name, _ in self.run.rewards:
            if text in (f"reward {name}", f"held-out reward {name}"):
                return (side.measure(name),)
        temperature = re.search(r"temperature ([\d.]+)", text)
        if temperature and float(temperature[1]) != 1:
            self.say("tables", f"the temperature in {label!r}")
        name = _measure_in(text)
        return None if not name else (side.measure(name),)

    def _kinds_line(self, where: str, line: str) -> None:
        found = re.fullmatch(r"Prompt by prompt \((.*)\): (.*)\.", line)
        if found is None:
            self.say(where, f"a line without a recomputation: {line!r}")
            return
        counts = {kind: int(count.replace(",", "")) for count, kind in re.findall(r"([\d,]+) ([a-z ]+)", found[2])}
        self.kinds(where, found[1], counts)

    def kinds(self, where: str, title: str, counts: dict[str, int]) -> None:
        """Counts of prompts by what happened to them."""
        counts = {kind: count for kind, count in counts.items() if count}
        if ("reward" in title) != (self.run.leads == "reward"):
            self.say(where, f"prompt by prompt by {title!r}, but the {self.run.leads} leads")
            return
        expected = self.run.kinds(title.startswith("greedy"))
        if counts != expected:
            self.say(where, f"prompt by prompt ({title}): shown {counts}, recomputed {expected}")

    def _curve_line(self, where: str, line: str) -> None:
        found = re.fullmatch(rf"(.+?)\s+[{SPARK}]+\s+({SHARE})\s+({SHARE})\s*", line)
        if found is None:
            self.say(where, f"a line without a recomputation: {line!r}")
            return
        self.curve(where, found[1], found[2], found[3])

    def curve(self, where: str, title: str, first: str, last: str, is_smooth: bool = True) -> None:
        """The ends of a curve of training."""
        name = self.metric_of(title)
        if name is None:
            self.say(where, f"no recomputation of the curve {title!r}: {first} to {last}")
            return
        values = self.run.series(name)
        if title.lower().startswith("groups without"):
            values = [1 - value for value in values]
        ends = ends_of(values) if is_smooth else (values[0], values[-1])
        for shown, value in zip((first, last), ends, strict=True):
            self.shown(
                where, f"curve {title!r}", shown, value, 0.005 * abs(value) if name == "tokens_per_second" else 0.0
            )

    def metric_of(self, title: str) -> str | None:
        """The metric of a curve's title."""
        text = title.lower().strip()
        names = {
            "reward": "reward", "reward, weighted sum": "reward", "groups with signal": "signal",
            "groups without signal": "signal", "thinking tokens": "thinking/mean_length",
            "tokens, thinking": "thinking/mean_length", "thinking": "thinking/mean_length",
            "tokens, completion": "completions/mean_length", "completion tokens": "completions/mean_length",
            "completion": "completions/mean_length", "tokens": "completions/mean_length",
            "thinking closed": "thinking/closed_ratio", "share that closes its thinking": "thinking/closed_ratio",
            "truncated": "completions/clipped_ratio", "truncated at the limit": "completions/clipped_ratio",
            "share truncated": "completions/clipped_ratio", "entropy": "entropy", "entropy, nats": "entropy",
            "gradient norm": "grad_norm", "tokens per second": "tokens_per_second",
        }  # fmt: skip
        for name, _ in self.run.rewards:
            names[f"reward: {name}"] = f"rewards/{name}/mean"
        return names.get(text)

    def _worth_line(self, where: str, line: str) -> None:
        if re.search(r"\d", re.sub(r"\(currently [^)]+\)", "", line)):
            self.consume(where, line, [(r"\d+(?:\.\d+)?(?:e-\d+)?", lambda: None)])  # limits, not figures of the run

    def check_show_json(self) -> None:
        """`rloo-kit show RUN --json`: every number in it."""
        where, run, found = "show --json", self.run, self.on.show_json
        if found["verdict"] != run.status["verdict"]:
            self.say(where, "the verdict is not that of status.json")
        last = 10
        for path, value in _leaves(found):
            if path.startswith(("verdict/", "health/")):
                continue
            expected = self._json_value(path, last)
            if expected is None:
                self.say(where, f"no recomputation of {path}: {value}")
            else:
                self.near(where, path, value, expected[0], 1e-5 if len(expected) == 1 else expected[1])
        for one in found["health"]:
            self.finding(where, f"since step {one['since']}: {one['evidence']}. {one['cause']}. {one['fix']}")
        if found["measure"] != run.leads:
            self.say(where, f"the leading measure is {found['measure']}, not {run.leads}")
        judges = {found["accuracy"][when]["judged_by"] for when in run.sides}
        if "accuracy" in run.sides["after"].per_prompt and judges != {
            "answer_reward" if run.compares_answers else "exact match"
        }:
            self.say(where, f"judged by {judges}")

    def _json_value(self, path: str, last: int) -> tuple[Any, ...] | None:
        """Recomputed value and tolerance of a number in `show --json`."""
        run, parts = self.run, path.split("/")
        if path in ("step", "max_steps", "adapter_step"):
            return (run.steps[-1]["step"],)
        if parts[0] == "accuracy" and parts[1] in run.sides:
            return self._side_value(run.sides[parts[1]], parts[2:])
        names = {"difference": "accuracy", "reward_difference": "reward"}
        if parts[0] == "accuracy" and parts[1] in names:
            return self._of_estimate(run.change(names[parts[1]]), parts[-1])
        if parts[0] == "prompts":
            if ("reward" in parts[1]) != (run.leads == "reward"):
                return None
            return (run.kinds(parts[1].startswith("greedy")).get(parts[-1]),)
        if parts[0] in ("means", "first"):
            values = run.series("/".join(parts[1:]))
            part = values[-last:] if parts[0] == "means" else values[:last]
            return (sum(part) / len(part),)
        if parts[0] == "metrics" and parts[-1] == "value":
            values = run.series(self.on.show_json["metrics"][int(parts[1])]["metric"])[-last:]
            return (sum(values) / len(values),)
        if path == "seconds":
            return (run.seconds,)
        return None

    def _side_value(self, side: Side, path: Sequence[str]) -> tuple[Any, ...] | None:
        name = "/".join(path)
        known = {"thinking_tokens": side.thinking, "closed_share": side.closed, "truncated_share": side.truncated,
                 "prompts": side.count}  # fmt: skip
        if name in known:
            return (known[name],)
        for key, measure in (("greedy_accuracy", "greedy_accuracy"), ("greedy_reward", "greedy_reward"),
                             ("greedy", "greedy_accuracy"), ("reward", "reward"),
                             ("accuracy", "accuracy"), ("exact_match", "accuracy")):  # fmt: skip
            estimate = side.measure(measure)
            if name == key:
                return (None if estimate is None else estimate.value,)
            if name.startswith(f"{key}_") or name.startswith(f"{key}/"):
                return self._of_estimate(estimate, name.removeprefix(key).strip("_/"))
        if name in ("low", "high"):
            return self._of_estimate(side.measure("accuracy"), name)
        return None

    def _of_estimate(self, found: Estimate | None, key: str) -> tuple[Any, ...] | None:
        keys = {"value": 0, "mean": 0, "difference": 0, "low": 1, "high": 2, "0": 0, "1": 1, "2": 2}
        if key not in keys:
            return None
        return (None,) if found is None else (found[keys[key]], 1e-5 + 0.002 * (found.high - found.low))

    # -------------------------------------------------------------------------------------------- the report

    def check_report(self) -> None:
        """`report.html`."""
        where, run, page = "report", self.run, self.on.report
        verdict = run.status["verdict"]
        if f'<span class="kind">{verdict["kind"]}</span>' not in page:
            self.say(where, "the word of the verdict is not that of status.json")
        if _text(_between(page, '<p class="sentence">', "</p>")) != verdict["sentence"]:
            self.say(where, "the verdict's sentence is not that of status.json")
        if verdict["next"] and f"Next: {verdict['next']}" not in html.unescape(page):
            self.say(where, "the advice is not that of status.json")
        tiles = re.findall(r'<div class="tile">(.*?)(?=<div class="tile">|<dl)', page, re.S)
        if not tiles or _measure_in(_text(_between(tiles[0], '<div class="name">', "</div>"))) != run.leads:
            self.say(where, f"the first tile is not the {run.leads}")
        for tile in tiles:
            self._tile(where, tile)
        settings = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
        self.shown(where, "steps", settings["steps"], run.steps[-1]["step"])
        self.shown(where, "tokens generated", settings["tokens generated"], sum(step["tokens"] for step in run.steps))
        self._seconds(where, "training time", settings["training time"])
        self.shown(where, "K", settings["K, completions per prompt"], run.config["rloo"]["num_generations"])
        self.shown(where, "learning rate", settings["learning rate"], run.config["rloo"]["learning_rate"])
        self._figures(where, page)
        self._constants(where, page)
        section = _between(page, '<section id="evaluation"', "</section>")
        self.difference(where, _text(_between(section, "<p>After minus before: ", "</p>")))
        self.prompts(where, _text(_between(section, '<p class="notes">', ", one completion")), run.sides["after"])
        self.table(where, _table(section, "Evaluations before and after training"))
        head = _head(page, "Held-out prompts by change")
        for title, *counts in _table(page, "Held-out prompts by change"):
            self.kinds(
                where, title, {kind: int(count.replace(",", "")) for kind, count in zip(head[1:], counts, strict=True)}
            )
        self._during_table(where, page)
        self._health_table(where, page)
        self._stored(
            where, json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
        )  # type: ignore[index]

    def _tile(self, where: str, tile: str) -> None:
        title = _text(_between(tile, '<div class="name">', "</div>"))
        old, new = _text(_between(tile, '<span class="old">', "</span>")), _text(_between(tile, "→ </span>", "</div>"))
        found = [self.quantity(title, side) for side in self.run.sides.values()]
        name = _measure_in(title)
        for shown, value in zip((old, new), found, strict=True):
            if value is None:
                self.say(where, f"no recomputation of the tile {title!r}: {old} to {new}")
                continue
            number = value[0].value if isinstance(value[0], Estimate) else value[0]
            self.shown(where, f"tile {title!r}", shown, number)
        if name == "accuracy" and self.run.says_nothing:
            self.say(where, "a tile of exact match, although it is 0 before and after")
        change = _text(_between(tile, '<div class="change">', "</div>")) if 'class="change"' in tile else ""
        if name:
            self.cell(where, f"tile {title!r}, change", change, self.run.change(name))

    def _figures(self, where: str, page: str) -> None:
        """Titles, start, end and description of every curve."""
        section = _between(page, '<section id="curves"', "</section>")
        for figure in re.findall(r"<figure.*?</figure>", section, re.S):
            title = _text(_between(figure, "<figcaption><span>", "</span>"))
            label = html.unescape(_between(figure, 'aria-label="', '"'))
            ends = _text(_between(figure, '<span class="ends">', "</span>")).split(" → ")
            if title.startswith("Held-out"):
                self._held_out_figure(where, title, ends, label)
                continue
            if len(ends) == 2:
                self.curve(where, "tokens, thinking" if title == "Tokens" and self.run.thinks else title, *ends)
            for name, first, a, last, b in re.findall(
                rf"(?:^|; |: )((?:completion|thinking) )?{AT_STEPS}",
                label,
            ):
                self.curve(where, name.strip() or title, first, last, is_smooth=False)
                if (int(a), int(b)) != (1, len(self.run.steps)):
                    self.say(where, f"curve {title!r} from step {a} to step {b}")

    def _held_out_figure(self, where: str, title: str, ends: Sequence[str], label: str) -> None:
        name = _measure_in(title)
        if name != self.run.leads:
            self.say(where, f"the held-out curve is {title!r}, not the {self.run.leads}")
        sides = list(self.run.sides.values())
        for shown, side in zip(ends, sides, strict=False):
            estimate = side.measure(name)
            self.shown(where, title, shown, None if estimate is None else estimate.value)
        rows = self.run.during
        parts = {"before and after": [(0, sides[0]), (len(self.run.steps), sides[1])]}
        parts["during training"] = [(row["step"], self._side_of(row["evaluation"])) for row in (rows[0], rows[-1])]
        for part, points in parts.items():
            found = re.search(rf"{part}, ([\d,]+) prompts {AT_STEPS}", label)
            if found is None:
                self.say(where, f"{title}: nothing on {part} in {label!r}")
                continue
            self.near(where, f"{title}, {part}", int(found[1].replace(",", "")), points[0][1].count)
            for shown, step, (at, side) in zip(found.groups()[1::2], found.groups()[2::2], points, strict=True):
                estimate = side.measure(name)
                self.shown(where, f"{title}, {part}", shown, None if estimate is None else estimate.value)
                self.near(where, f"{title}, {part}, step", int(step), at)

    def _constants(self, where: str, page: str) -> None:
        """`Constant or nearly so: truncated at the limit 0.0 %; thinking closed 99.1 % to 100.0 %.`"""
        section = _between(page, '<section id="curves"', "</section>")
        found = re.search(r"(?:Constant or nearly so|One step was logged): (.*?)\.</p>", section)
        for one in found[1].split("; ") if found else ():
            match = re.fullmatch(rf"(.+?) ({SHARE})(?: to ({SHARE}))?", html.unescape(one))
            name = self.metric_of(match[1]) if match else None
            if match is None or name is None:
                self.say(where, f"no recomputation of {one!r}")
                continue
            values = self.run.series(name)
            self.shown(where, one, match[2], min(values))
            self.shown(where, one, match[3] or match[2], max(values))

    def difference(self, where: str, text: str, old: str = "before", new: str = "after") -> None:
        """`reward +0.447 [+0.350, +0.531] on the same 120 prompts; greedy +0.913 [...]`."""
        first = re.match(r"[A-Za-z -]+", text)
        if first is None or _measure_in(first[0]) != self.run.leads:
            self.say(where, f"the comparison begins with {text[:40]!r}, not with the {self.run.leads}")

        def check(title: str, value: str) -> None:
            name = f"greedy_{self.run.leads}" if title.strip() == "greedy" else _measure_in(title)
            if name == "accuracy" and self.run.says_nothing:
                self.say(where, "exact match is compared, although it is 0 before and after")
            self.cell(where, f"difference in {title}", value, self.run.change(name, old, new))

        def prompts(count: str) -> None:
            self.near(where, "prompts", int(count.replace(",", "")), self.run.sides[new].count)

        patterns = [
            (r"on the same ([\d,]+) prompts", prompts),
            (rf"([A-Za-z][A-Za-z -]*?) ({NUMBER}(?: \[[^\]]*\])?)", check),
        ]
        text = self.consume(where, text, patterns)
        for words, overlap in (("do not overlap", False), ("intervals overlap", True)):
            first, last = (self.run.sides[when].measure(self.run.leads) for when in (old, new))
            assert first is not None and last is not None
            if words in text and overlap != (first.high >= last.low and last.high >= first.low):
                self.say(where, f"the two intervals {words}: {first}, {last}")

    def _during_table(self, where: str, page: str) -> None:
        section = _between(page, '<section id="during"', "</section>")
        head = _head(section, "Each evaluation, with its interval")
        note = _text(_between(section, '<p class="notes">', "</p>"))
        if (
            _measure_in((re.search(r"The deciding measure is (?:the )?([a-z -]+)", note) or ["", ""])[1])
            != self.run.leads
        ):
            self.say(where, f"the deciding measure: {note[:60]!r}")
        best: Any = None
        for cells, row in zip(_table(section, "Each evaluation, with its interval"), self.run.during, strict=True):
            side = self._side_of(row["evaluation"])
            for title, cell in zip(head, cells, strict=True):
                if title == "step":
                    self.near(where, "step", int(cell), row["step"])
                elif title == "thinking tokens":
                    self.shown(where, "during training, thinking tokens", cell, side.thinking)
                elif title == "vs. the best before":
                    old = None if best is None else self._side_of(best["evaluation"]).per_prompt[row["measure"]]
                    change = None if old is None else change_of(old, side.per_prompt[row["measure"]])
                    self.cell(where, "during training, vs. the best before", cell, change)
                elif title != "kept":
                    name = _measure_in(title)
                    if self.run.leads == "reward" and "accuracy" in title:
                        self.say(where, f"a column {title!r}")
                    self.cell(where, f"during training, {title}", cell, side.measure(name))
            best = row if best is None or row["value"] > best["value"] else best

    def _health_table(self, where: str, page: str) -> None:
        for row in _table(page, "Health findings"):
            self.finding(where, " ".join(f"since step {part}" if place == 2 and part.isdigit() else part
                                         for place, part in enumerate(row)))  # fmt: skip

    def _stored(self, where: str, data: dict[str, Any]) -> None:
        """The completions in the page: rewards, advantages, lengths, kinds."""
        run, rollouts = self.run, data["rollouts"]
        if len(rollouts["rows"]) != len(run.rollouts):
            self.say(where, f"{len(rollouts['rows'])} rollouts of {len(run.rollouts)}")
        for row, again in zip(rollouts["rows"], run.rollouts, strict=False):
            for name, expected in (("reward", again["reward_again"]), ("advantage", again["advantage_again"]),
                                   ("tokens", again["completion_tokens"]), ("step", again["step"])):  # fmt: skip
                self.near(where, f"rollout of step {row['step']}, {name}", row[name], expected, 1e-4)
        kinds = [one["kind"] for one in data["prompts"]]
        counts, expected = {kind: kinds.count(kind) for kind in {*kinds}}, run.kinds()
        if counts != expected:
            self.say(where, f"kinds of the prompts shown: {counts}, recomputed {expected}")
        for side in ("before", "after"):
            by_prompt = {one.prompt: one for one in run.sides[side].completions}
            for entry in data["prompts"]:
                matches = [one for prompt, one in by_prompt.items() if _asks(prompt, entry["prompt"])]
                if len(matches) != 1:
                    self.say(where, f"the prompt {entry['prompt']!r} is none of those held out")
                    continue
                self._notes(where, entry[side]["notes"], matches[0])
                self._mark(where, entry[side]["correct"], matches[0])

    def _notes(self, where: str, text: str, one: Any) -> None:
        if earned := re.match(rf"reward ({NUMBER}), ", text):
            self.shown(where, f"{one.prompt!r}, reward", earned[1], self.run.total(one))
            text = text[earned.end() :]
        elif not self.run.compares_answers:
            self.say(where, f"{one.prompt!r}: nothing judges it, and its reward is not shown")
        notes = [f"{one.tokens} tokens"]
        notes += [] if one.thinking_tokens is None else [f"{one.thinking_tokens} of them thinking"]
        notes += [] if one.ended else ["truncated"]
        if text != ", ".join(notes):
            self.say(where, f"{one.prompt!r}: shown {text!r}, recomputed {', '.join(notes)!r}")

    def _mark(self, where: str, correct: Any, one: Any) -> None:
        """Right or wrong: only where a reward of the run compares answers."""
        expected = bool(self.run.score("answer_reward", one)) if self.run.compares_answers else None
        if correct != expected:
            self.say(where, f"{one.prompt!r} is shown as {correct}, recomputed {expected}")

    # -------------------------------------------------------------------------------------------- two runs

    def check_versus(self) -> None:
        """The untrained twin and the run: the lead is the change through training."""
        where, run = "comparison", self.run
        found = self.on.versus_json
        before, after = run.sides.values()
        twin, trained = found["runs"]
        self._change_numbers(f"{where}, JSON", trained["lead"], before, after)
        if trained["verdict"] != run.status["verdict"]:
            self.say(where, "the run's verdict is not that of status.json")
        if twin["verdict"]["kind"] == "learnt" or twin["verdict"]["kind"] == "broken":
            self.say(where, f"the untrained twin's verdict is {twin['verdict']['kind']}: {twin['verdict']['sentence']}")
        for entry, sides in ((twin, (before, before)), (trained, (before, after))):
            for key, side in zip(("before", "after"), sides, strict=True):
                for path, value in _leaves(entry[key]):
                    expected = self._side_value(side, path.split("/"))
                    if expected is None:
                        self.say(f"{where}, JSON", f"no recomputation of {key}/{path}: {value}")
                    else:
                        self.near(
                            f"{where}, JSON",
                            f"{key}/{path}",
                            value,
                            expected[0],
                            expected[1] if len(expected) > 1 else 1e-5,
                        )
            self.near(f"{where}, JSON", "seconds", entry["seconds"], run.seconds)
            self.near(f"{where}, JSON", "steps", entry["steps"], run.steps[-1]["step"])
        self._versus_sentence(where, found["sentence"])
        if not self.on.versus.startswith(found["sentence"]):
            self.say(where, "the printed sentence is another")
        lines = self.on.versus.splitlines()
        rows = []
        for line, below in zip(lines, [*lines[1:], ""], strict=True):
            row = re.split(r"\s{2,}", line.strip())
            if row[0] not in ("untrained", self.task.name):
                continue
            intervals = iter(re.findall(r"\[.*?\]", below))  # of before, after and the lead
            row[2:5] = [cell if cell == "-" else f"{cell} {next(intervals, '')}".strip() for cell in row[2:5]]
            rows.append(row)
        self._versus_rows(where, rows)
        page = self.on.page
        if html.escape(found["sentence"]) not in page and found["sentence"] not in html.unescape(page):
            self.say("comparison page", "its sentence is another")
        self._versus_rows("comparison page", _table(page, "Every run"))
        head = _head(page, "Every run")[2]
        if _measure_in(head) != run.leads:
            self.say("comparison page", f"the column {head!r}, not the {run.leads}")

    def _versus_sentence(self, where: str, text: str) -> None:
        change = self.change
        assert change is not None
        name = self.task.name
        differ = change.low > 0 or change.high < 0
        if not differ:
            if f"{name} and untrained do not differ significantly" not in text:
                self.say(where, f"{text!r}, recomputed {change}")
            return
        better, worse = (name, "untrained") if change.low > 0 else ("untrained", name)
        found = re.match(
            rf"(\S+) is ahead of (\S+): ([A-Za-z -]+?) ({NUMBER})( points)?, 95 % CI ({NUMBER}) to ({NUMBER}), (.*)\.$",
            text,
        )
        if found is None or (found[1], found[2]) != (better, worse):
            self.say(where, f"{text!r}, recomputed {change}")
            return
        if _measure_in(found[3]) != self.run.leads:
            self.say(where, f"compared by {found[3]!r}, not by the {self.run.leads}")
            return
        scale, sign = (100 if found[5] else 1), (1 if change.low > 0 else -1)
        ahead = Estimate(abs(change.value), *sorted((sign * change.low, sign * change.high)))
        self.shown(where, "ahead", found[4], ahead.value * scale)
        self.ends(where, "ahead", [found[6], found[7]], ahead, scale)
        self.prompts(where, found[8], self.run.sides["after"])

    def _versus_rows(self, where: str, rows: Sequence[Sequence[str]]) -> None:
        """run, verdict, before, after, vs. the first, steps, time."""
        run, before, after = self.run, *self.run.sides.values()
        if len(rows) != 2:
            self.say(where, f"{len(rows)} rows of 2 runs")
            return
        for row, sides in zip(rows, ((before, before), (before, after)), strict=True):
            for cell, side in zip(row[2:4], sides, strict=True):
                estimate = side.measure(run.leads)
                assert estimate is not None
                self.cell(where, f"{row[0]}, {run.leads}", cell, estimate)
            lead = None if row is rows[0] else self.change
            self.cell(where, f"{row[0]}, lead", row[4], lead)
            self.shown(where, "steps", row[5], run.steps[-1]["step"])
            self._seconds(where, "time", row[6])

    def check_batch(self) -> None:
        """The batch of the run and its twin: table, CSV, page."""
        where, run = "batch", self.run
        before, after = run.sides.values()
        for row, sides in zip(self.on.batch_rows, ((before, after), (before, before)), strict=True):
            self.near(f"{where}, CSV", "reward_last", float(row["reward_last"]), run.steps[-1]["reward"])
            self.near(f"{where}, CSV", "steps", float(row["steps"]), run.steps[-1]["step"])
            for when, side in zip(("before", "after"), sides, strict=True):
                values = {"accuracy": side.measure("accuracy"), "greedy_accuracy": side.measure("greedy_accuracy"),
                          "held_out_reward": side.measure("reward")}  # fmt: skip
                for name, estimate in values.items():
                    for key, place in (("", 0), ("_low", 1), ("_high", 2)):
                        text = row.get(f"{name}{key}_{when}") or None
                        if estimate is None and text in (None, "0.0"):
                            continue
                        tolerance = 1e-5 if estimate is None else 1e-5 + 0.002 * (estimate.high - estimate.low)
                        self.near(f"{where}, CSV", f"{name}{key}_{when}", None if text is None else float(text),
                                  None if estimate is None else estimate[place], tolerance)  # fmt: skip
                for name, value in (("thinking_tokens", side.thinking), ("closed_share", side.closed),
                                    ("tokens", side.tokens), ("eval_prompts", side.count)):  # fmt: skip
                    text = row[f"{name}_{when}"]
                    self.near(f"{where}, CSV", f"{name}_{when}", float(text) if text else None, value)
        self._batch_text(where)
        self._batch_page(where)

    def _batch_text(self, where: str) -> None:
        lines = [line for line in self.on.batch.splitlines() if "│" in line or "┃" in line]
        head, *rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines]
        before, after = self.run.sides.values()
        measures = [title for title in head if _measure_in(title)]
        if not measures or _measure_in(measures[0]) != self.run.leads:
            self.say(where, f"the first measure of the table is {measures[:1]}, not the {self.run.leads}")
        if self.run.says_nothing and any(_measure_in(title) == "accuracy" for title in head):
            self.say(where, "a column of exact match, although it is 0 before and after")
        for row, sides in zip(rows, ((before, after), (before, before)), strict=True):
            self._batch_cells(where, head, row, sides)

    def _batch_cells(self, where: str, head: Sequence[str], row: Sequence[str], sides: Sequence[Side]) -> None:
        for title, cell in zip(head, row, strict=True):
            name = _measure_in(title)
            if title in ("run", "state", "time"):
                continue
            if title == "verdict":
                if cell != self.run.status["verdict"]["kind"]:  # the twin's status.json is a copy
                    self.say(where, f"verdict {cell}")
            elif "95 %" in title:
                estimate = sides[1].measure(self.run.leads)
                found = re.fullmatch(rf"\[({NUMBER}), ({NUMBER})\]", cell)
                assert estimate is not None
                self.ends(where, title, found.groups() if found else [None, None], estimate)
            elif title in ("thinking tokens", "closed", "thinking closed"):
                values = [side.thinking if "tokens" in title else side.closed for side in sides]
                values = [value for value in values if value is not None] or [None]  # those that were measured
                for shown, value in zip(cell.split(" → "), values, strict=True):
                    self.shown(where, title, shown, value)
            elif name == "accuracy" and self.run.says_nothing and cell == "-":
                continue
            elif name:
                if name == "accuracy" and self.run.leads == "reward" and cell != "-":  # each run has its judge
                    if not cell.endswith(" (exact match)"):
                        self.say(where, f"{title}: {cell}, although no reward compares answers")
                    cell = cell.removesuffix(" (exact match)")
                when = 0 if title.endswith("before") else 1 if title.endswith("after") else None
                estimates = [side.measure(name) for side in sides]
                if when is not None:
                    self.cell(where, title, cell, estimates[when])
                    continue
                if None in estimates:
                    if cell not in ("-", "", "0.000 → 0.000"):
                        self.say(where, f"{title}: {cell}, not measured")
                    continue
                for shown, estimate in zip(cell.split(" → "), estimates, strict=False):
                    self.cell(where, title, shown, estimate if "[" in shown else estimate.value)  # type: ignore[union-attr]
            else:
                self.say(where, f"no recomputation of the column {title!r}: {cell}")

    def _batch_page(self, where: str) -> None:
        head, rows = _head(self.on.batch_page, "Every run"), _table(self.on.batch_page, "Every run")
        before, after = self.run.sides.values()
        if len(rows) != 2:
            self.say(f"{where} page", f"{len(rows)} rows of 2 runs")
        for cells, sides in zip(rows, ((before, after), (before, before)), strict=False):
            self._batch_cells(f"{where} page", head, cells, sides)

    # -------------------------------------------------------------------------------------------- the notebook

    def check_notebook(self) -> None:
        """What cells show: curves, completions, tables."""
        where, run = "notebook", self.run
        found = re.fullmatch(r"steps (\d+) to (\d+)(?: \(means of the first and the last (\d+)\))?: (.*)", self.on.plot)
        if found is None:
            self.say(where, f"plot_training: {self.on.plot!r}")
        else:
            self.near(where, "last step", int(found[2]), run.steps[-1]["step"])
            parts = [part for one in found[4].split("; ") for part in re.split(r", (?=[a-z])", one)]
            for part in parts:
                self._plot_part(where, part)
        self._completions(where)
        head = None
        rows: dict[str, list[list[str]]] = {}
        for line in self.on.evaluation.splitlines():
            if title := re.match(r"Evaluation (before|after): (\d+) prompts", line):
                head = title[1]
                rows[head] = []
                self.near(where, "prompts", int(title[2]), run.sides[head].count)
            elif line.startswith("│") and head is not None:
                rows[head].append([cell.strip() for cell in line.strip("│").split("│")])
        for when, side in run.sides.items():
            self.table(f"{where}, evaluation {when}", rows.get(when, []), [side])
        self.difference(f"{where}, compare", self.on.comparison)

    def _plot_part(self, where: str, part: str) -> None:
        if part.startswith("KL not measured"):
            return
        match = re.fullmatch(rf"(.+?) ({NUMBER}%?)(?: -> ({NUMBER}%?))?", part)
        if match is None:
            self.say(where, f"plot_training: no recomputation of {part!r}")
            return
        title, first, last = match.groups()
        if title.startswith("held-out"):
            if _measure_in(title) != self.run.leads:
                self.say(where, f"the held-out curve is {title!r}, not the {self.run.leads}")
            name = _measure_in(title)
            values = [self._side_of(row["evaluation"]).measure(name) for row in self.run.during if row["step"]]
            for shown, estimate in zip((first, last), (values[0], values[-1]), strict=True):
                self.shown(where, title, shown, None if estimate is None else estimate.value)
            return
        self.curve(where, title, first, last or first)

    def _completions(self, where: str) -> None:
        kept = self.run.config["eval"]["num_completions"]
        head, *lines = self.on.completions.splitlines()
        if f"{kept} of {kept} kept prompts" not in head:
            self.say(where, f"show_completions: {head!r}")
        notes = [line.strip() for line in lines if re.match(r"\s+(before|after): ", line)]
        expected = [
            (when, self.run.sides[when].completions[place]) for place in range(kept) for when in ("before", "after")
        ]
        if len(notes) != len(expected):
            self.say(where, f"show_completions: {len(notes)} of {len(expected)} completions")
        for note, (when, one) in zip(notes, expected, strict=False):
            found = re.fullmatch(rf"{when}: (?:(right|wrong|not judged), )?(.*)", note)
            if found is None:
                self.say(where, f"show_completions: {note!r}")
                continue
            self._notes(where, found[2], one)
            self._mark(where, {"right": True, "wrong": False}.get(found[1] or ""), one)
        for place in range(kept):
            gold = self.run.sides["before"].completions[place].gold
            if gold is not None and f"(right answer: {gold})" not in " ".join(self.on.completions.split()):
                self.say(where, f"show_completions has no (right answer: {gold})")
            if gold is not None and str(gold) not in html.unescape(self.on.cells):
                self.say(where, f"the cell has no {gold}")

    # -------------------------------------------------------------------------------------------- words

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
            if not self.run.thinks and (
                found := re.search(r"(?i).{0,30}\bthink(?:ing|s)? ?(?:tokens|closed|from|\d).{0,30}", text)
            ):
                self.say(where, f"thinking of a model that does not think: {found[0]!r}")


def check_run(task: Task, model: str, surfaces: Any) -> list[str]:
    """The problems of a run and of everything that is shown of it."""
    run = Recomputed(surfaces.folder, surfaces.folder.parents[1] / "rewards.py")
    checks = Checks(task, model, run, surfaces)
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


def _last_digit(number: str) -> float:
    digits, _, exponent = number.partition("e")
    _, _, decimals = digits.partition(".")
    scale = 10.0 ** -len(decimals) * 10.0 ** int(exponent or 0)
    significant = digits.replace(",", "").lstrip("+-0.").replace(".", "")
    return scale if decimals or len(significant) < 4 else scale


def _clock(text: str) -> int:
    seconds = 0
    for part in text.split(":"):
        seconds = 60 * seconds + int(part)
    return seconds


def _between(text: str, start: str, end: str) -> str:
    """The part of a page between two marks; empty without them."""
    return text.partition(start)[2].partition(end)[0]


def _text(part: str) -> str:
    """The text of a part of a page."""
    return " ".join(
        html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script).*?</\1>", "", part, flags=re.S))).split()
    )


def _head(page: str, caption: str) -> list[str]:
    """The names of the columns of the table with this caption."""
    head = _between(page, f"<caption>{caption}", "</thead>")
    return [_text(cell) for cell in re.findall(r"<th .*?>(.*?)</th>", head, re.S)]


def _table(page: str, caption: str) -> list[list[str]]:
    """The rows of the table with this caption."""
    body = _between(_between(page, f"<caption>{caption}", "</table>"), "<tbody>", "</tbody>")
    rows = re.findall(r"<tr.*?>(.*?)</tr>", body, re.S)
    return [[_text(cell) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.S)] for row in rows]


def _asks(prompt: str, shown: str) -> bool:
    """Whether a rendered prompt asks what the page shows."""
    question = shown.strip().rpartition("\nuser: ")[2]
    return prompt == shown or f"\n{question}<|im_end|>" in prompt


def _leaves(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """Every number in JSON, with its path."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(one, f"{path}/{key}" if path else key)
    elif isinstance(value, list):
        for place, one in enumerate(value):
            yield from _leaves(one, f"{path}/{place}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value
