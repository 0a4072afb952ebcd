"""Which form of the KL penalty does not punish thinking? Figures go to `results/kl_forms.json`.

    python benchmarks/kl_forms.py                       # mechanism, then every arm for seeds 0, 1 and 2
    python benchmarks/kl_forms.py --only mechanism      # two minutes

The embedded model skips its thinking in about 30 % of its answers, and learns to think because thinking pays. A penalty
on drift from the start may work against that, depending on its form.

- mechanism: a policy that has trained a few steps without a penalty answers each prompt eight times. Its per-token KL
  goes through each form alone (the task reward is 0), and the advantage is regressed on the thinking tokens within each
  prompt; for `per_token`, that of the first token and the mean over the tokens. Forms are compared at equal strength:
  beta times the penalty has the spread of the task reward within a prompt. Two kinds of drift: `learned` (on the task)
  and `unrelated` (on a reward of coin flips).
- training, through `rloo-kit train`: arms of form and beta, several seeds; thinking tokens, closed share and accuracy
  on held-out prompts before and after. `length_normalized` also runs at beta times the mean length, which gives the
  mean penalty of `sum`.

Exit code 0 with any result: this measures and has no bar. Left out: other tasks and other models.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reporting

RESULT = reporting.RESULTS / "kl_forms.json"
CONFIG = reporting.ROOT / "configs" / "arithmetic_thinking.yaml"
FORMS = ("sum", "length_normalized", "per_token")
STEPS, PROMPTS, SAMPLES = 24, 150, 8
PROBE_STEPS = {"learned": 8, "unrelated": 60}  # few enough that some answers still have no thinking
EVAL_PROMPTS = 500
BETA = 0.5


@dataclass(frozen=True)
class Arm:
    """One setting of the penalty."""

    kl_form: str
    beta: float

    @property
    def name(self) -> str:
        return "no penalty" if self.beta == 0 else f"{self.kl_form}, beta {self.beta:g}"


def arms(beta: float, mean_length: float) -> list[Arm]:
    """No penalty, every form at `beta`, and the normalised one at the beta of equal mean penalty."""
    matched = float(f"{beta * mean_length:.2g}")
    return [Arm("sum", 0.0), *(Arm(form, beta) for form in FORMS), Arm("length_normalized", matched)]


# ------------------------------------------------------------------------------------------------------- training


def train(output: Path, name: str, seed: int, *overrides: str) -> Path:
    """One run through the command line; its folder."""
    command = [str(Path(sys.executable).with_name("rloo-kit")), "train", str(CONFIG), f"run.seed={seed}"]
    where = [f"run.output_dir={output}", f"run.name={name}", "--overwrite"]
    done = subprocess.run(
        [*command, *overrides, *where], cwd=reporting.ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return output / name


def run_arm(arm: Arm, seed: int, steps: int, output: Path) -> dict[str, Any]:
    """The figures of an arm's run before and after training."""
    name = f"{arm.kl_form}-{arm.beta:g}-{seed}"
    settings = [f"rloo.max_steps={steps}", f"rloo.beta={arm.beta}", f"rloo.kl_form={arm.kl_form}"]
    folder = train(output, name, seed, *settings, f"eval.num_prompts={EVAL_PROMPTS}", "eval.greedy=false")
    before, after = (json.loads((folder / f"{when}.json").read_text(encoding="utf-8")) for when in ("before", "after"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "arm": arm.name, "kl_form": arm.kl_form, "beta": arm.beta, "seed": seed, "steps": rows[-1]["step"],
        "training_s": rows[-1]["seconds"], "before": _figures(before), "after": _figures(after),
        "kl_last_steps": _mean([row["kl"] for row in rows[-5:] if row.get("kl") is not None]),
    }  # fmt: skip


def _figures(evaluation: dict[str, Any]) -> dict[str, Any]:
    names = ("num_prompts", "accuracy", "low", "high", "closed_share", "truncated_share")
    return {name: evaluation[name] for name in (*names, "mean_thinking_tokens", "mean_tokens")}


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


# ------------------------------------------------------------------------------------------------------ mechanism


def measure_mechanism(output: Path, prompts: int, samples: int) -> list[dict[str, Any]]:
    """The effect of each form alone on the advantage of longer thinking, for both kinds of drift."""
    import rloo_kit as kit

    found = []
    for drift, reward in (("learned", None), ("unrelated", coin_reward)):
        steps = PROBE_STEPS[drift]
        settings = [f"rloo.max_steps={steps}", "rloo.beta=0"]
        settings += ["run.sample_every_steps=0"]
        where = [f"run.output_dir={output}", f"run.name=probe-{drift}"]
        run = kit.load_config(str(CONFIG), *settings, *where)
        policy = kit.load_policy(run)
        data = kit.load_data(run, policy.tokenizer)
        kit.train(run, policy, data, [reward] if reward else kit.build_rewards(run, policy.tokenizer), overwrite=True)
        found.append({"drift": drift, "steps": steps} | weigh_forms(run, policy, data.test, prompts, samples))
    return found


def coin_reward(completions: list[Any], **_: Any) -> list[float]:
    """A coin flip, for a drift that has nothing to do with thinking."""
    return [float(_COIN.random() < 0.5) for _ in completions]


_COIN = random.Random(0)


def weigh_forms(run: Any, policy: Any, held_out: Any, prompts: int, samples: int) -> dict[str, Any]:
    """The cost of a thinking token under each form, on real completions with their real KL."""
    completions, rewards, kl = answer(run, policy, held_out.select(range(prompts)), samples)
    thinking = [float(one.thinking_tokens or 0) for one in completions]
    reward_spread = _within_spread(rewards, samples)
    result = {
        "prompts": prompts,
        "samples": samples,
        "mean_tokens": statistics.fmean(len(one.ids) for one in completions),
        "mean_thinking_tokens": statistics.fmean(thinking),
        "without_thought_share": sum(value == 0 for value in thinking) / len(thinking),
        "accuracy": statistics.fmean(rewards),
        "kl_per_token": sum(map(sum, kl)) / sum(map(len, kl)),
        "kl_per_completion": statistics.fmean(map(sum, kl)),
        "reward_spread_within_prompts": reward_spread,
        "task_reward_slope": slope(rewards, thinking, samples),
        "forms": [],
    }
    for name, advantages in penalty_advantages(kl, samples).items():
        spread = _within_spread(advantages, samples)
        scaled = [value * reward_spread / spread for value in advantages]
        result["forms"].append(
            {
                "form": name,
                "beta_of_equal_spread": reward_spread / spread,
                "thinking_token": slope(scaled, thinking, samples),
                "correlation": correlation(scaled, thinking, samples),
            }
        )
    return result


def answer(run: Any, policy: Any, data: Any, samples: int) -> tuple[list[Any], list[float], list[list[float]]]:
    """Completions of the prompts, whether each is right, and the KL of each of their tokens (k1, nats)."""
    import torch

    import rloo_kit as kit
    from rloo_kit.rollout.completions import generate_completions

    completions = generate_completions(
        policy, list(data["prompt"]), max_completion_length=run.rloo.max_completion_length, num_samples=samples
    )
    (reward,) = kit.build_rewards(run, policy.tokenizer)
    ids = [one.ids for one in completions]
    gold = [data["answer"][one.prompt_index] for one in completions]
    prompts = [data["prompt"][one.prompt_index] for one in completions]
    rewards = reward(prompts=prompts, completions=[one.text for one in completions], completion_ids=ids, answer=gold)
    policy.model.eval()
    kl = []
    with torch.no_grad():
        for prompt, row in zip(prompts, ids, strict=True):
            prefix = policy.tokenizer(prompt)["input_ids"]
            tokens = torch.tensor([prefix + row])
            logps = _logps(policy.model(input_ids=tokens).logits, tokens, len(prefix))
            with policy.model.disable_adapter():
                reference = _logps(policy.model(input_ids=tokens).logits, tokens, len(prefix))
            kl.append((logps - reference).tolist())
    return completions, [float(value or 0) for value in rewards], kl


def _logps(logits: Any, tokens: Any, prompt_tokens: int) -> Any:
    scores = logits[0, prompt_tokens - 1 : -1].float().log_softmax(dim=-1)
    return scores.gather(1, tokens[0, prompt_tokens:, None]).squeeze(1)


def penalty_advantages(kl: list[list[float]], samples: int) -> dict[str, list[float]]:
    """The advantage of each completion at beta 1 with a task reward of 0, by form, from the kit's own code; `kl`: per
    token, for each completion."""
    import torch

    from rloo_kit.gradient.advantages import AdvantageSettings, make_advantages

    lengths = [len(row) for row in kl]
    flat = torch.tensor([value for row in kl for value in row], dtype=torch.float64)
    nothing = torch.zeros(len(kl), dtype=torch.float64)

    def make(form: str, baseline: str = "leave_one_out") -> Any:
        settings = AdvantageSettings(beta=1.0, kl_form=form, baseline=baseline)
        return make_advantages(nothing, flat, torch.ones_like(flat), lengths, samples, settings)

    found = {form: make(form).per_row.tolist() for form in ("sum", "length_normalized")}
    by_token = make("per_token", baseline="none")  # only the task reward has a baseline, and it is 0
    found["per_token, first token"] = [part[0].item() for part in by_token.trained.split(lengths)]
    found["per_token, mean over the tokens"] = by_token.per_row.tolist()
    return found


def _centred(values: Sequence[float], samples: int) -> list[float]:
    """Each value less the mean of its prompt."""
    out: list[float] = []
    for start in range(0, len(values), samples):
        group = values[start : start + samples]
        mean = statistics.fmean(group)
        out += [value - mean for value in group]
    return out


def _within_spread(values: Sequence[float], samples: int) -> float:
    return statistics.fmean(value**2 for value in _centred(values, samples)) ** 0.5


def slope(values: Sequence[float], lengths: Sequence[float], samples: int) -> dict[str, float]:
    """Change of the value for one more thinking token, within prompts, with a 95 % interval (bootstrap of prompts)."""
    return _bootstrap(_centred(values, samples), _centred(lengths, samples), samples, _slope)


def correlation(values: Sequence[float], lengths: Sequence[float], samples: int) -> dict[str, float]:
    """Pearson's, within prompts, with a 95 % interval (bootstrap of prompts)."""
    return _bootstrap(_centred(values, samples), _centred(lengths, samples), samples, _correlation)


def _slope(sums: tuple[float, float, float]) -> float:
    xy, xx, _ = sums
    return xy / xx if xx else 0.0


def _correlation(sums: tuple[float, float, float]) -> float:
    xy, xx, yy = sums
    return xy / (xx * yy) ** 0.5 if xx and yy else 0.0


def _bootstrap(ys: list[float], xs: list[float], samples: int, statistic: Any, draws: int = 1000) -> dict[str, float]:
    groups = []
    for start in range(0, len(ys), samples):
        part = range(start, start + samples)
        sums = (sum(xs[i] * ys[i] for i in part), sum(xs[i] ** 2 for i in part), sum(ys[i] ** 2 for i in part))
        groups.append(sums)
    chance = random.Random(0)

    def total(chosen: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
        return tuple(map(sum, zip(*chosen, strict=True)))  # type: ignore[return-value]

    values = sorted(statistic(total(chance.choices(groups, k=len(groups)))) for _ in range(draws))
    return {"value": statistic(total(groups)), "low": values[draws // 40], "high": values[-1 - draws // 40]}


# ---------------------------------------------------------------------------------------------------- the command


def main() -> int:
    """Measure the selected parts and write the results."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("mechanism", "training"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--beta", type=float, default=BETA, help="of every form; the mechanism shows its strength")
    parser.add_argument("--output", type=Path, default=reporting.ROOT / "outputs" / "kl_forms")
    parser.add_argument("--results", type=Path, default=RESULT)
    options = parser.parse_args()
    started = time.monotonic()
    result = reporting.header("benchmarks/kl_forms.py") | {"steps": options.steps, "beta": options.beta}
    mean_length = 20.0
    if options.only != "training":
        result["mechanism"] = measure_mechanism(options.output, PROMPTS, SAMPLES)
        mean_length = result["mechanism"][0]["mean_tokens"]
        print(json.dumps(result["mechanism"], indent=1), flush=True)
    if options.only != "mechanism":
        result["runs"] = []
        for seed in options.seeds:
            for arm in arms(options.beta, mean_length):
                found = run_arm(arm, seed, options.steps, options.output)
                result["runs"].append(found)
                print(reporting.kl_line(found), flush=True)
    reporting.write(result | {"seconds": round(time.monotonic() - started)}, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
