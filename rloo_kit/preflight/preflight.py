"""What a preflight does with the model: a probe rollout, and optimizer steps at full length.

It changes nothing in the run: `train` afterwards gives the same weights as without a preflight.
"""

import io
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch

from rloo_kit.checks.preflight_result import Measures, Preflight
from rloo_kit.config.run import RunConfig
from rloo_kit.data.load import Data
from rloo_kit.errors import RlooKitError
from rloo_kit.models.policy import Policy
from rloo_kit.plan.speed import count_evaluated, step_completions
from rloo_kit.preflight.probe import WIDER, Probe, draw_rows, run_probe
from rloo_kit.preflight.trial_steps import try_steps
from rloo_kit.system.console import fill_text, format_seconds
from rloo_kit.system.problems import Problem, catching
from rloo_kit.system.processes import is_distributed, keep_random_numbers, say
from rloo_kit.training.rloo import check_sampling


def check_preflight(run: RunConfig, policy: Policy, data: Data, reward_funcs: list[Any]) -> Preflight:
    """Check whether a run can learn as configured, in about the time of a rollout: GO, or NO-GO with every problem.

    Samples and judges a few groups of training prompts as the run does and takes optimizer steps at full length. Then
    restores weights, random numbers and files. `kit.check(run)` finds what needs no model. For one process.

    Args:
        run: a `RunConfig`. policy: from `load_policy`. data: from `load_data`. reward_funcs: from `build_rewards`.
    """
    started = time.monotonic()
    faults: list[Problem] = []
    if is_distributed():
        text = "the probe is for one process: run rloo-kit preflight without a launcher"
        return Preflight(run.run.name or "", (Problem("rollout", text, level="warning"),))
    first, most = (len(draw_rows(run, data.train, times)) // run.rloo.num_generations for times in (1, WIDER))
    wider = f" ({most} prompts if few groups have a signal or no answer is right)" if most > first else ""
    text = f"{first} prompts x {run.rloo.num_generations} completions{wider}, then steps at full length"
    say(fill_text(f"preflight: {text}"))
    measures, shown = Measures(), sys.stdout

    def tell(text: str) -> None:
        with redirect_stdout(shown):
            say(f"preflight {format_seconds(time.monotonic() - started)} | {text}")

    with redirect_stdout(io.StringIO()), leave_untouched(policy):
        with catching("data", faults):
            run.check_prompts(len(data.train))
        with catching("rollout", faults):
            check_sampling(run, policy)
        if not faults:
            probe = None
            with catching("rollout", faults):
                probe = run_probe(run, policy, data, reward_funcs, faults, measures, tell)
            gradient_s = None
            try:
                gradient_s = try_steps(run, policy, measures, faults, tell)
            except RlooKitError as error:  # a model whose memory cannot be planned can still be trained
                faults.append(Problem("memory", str(error), level="warning"))
            if probe is not None and gradient_s is not None:
                _estimate(run, data, probe, gradient_s, measures)
    return Preflight(run.run.name or "", tuple(faults), measures, time.monotonic() - started)


@contextmanager
def leave_untouched(policy: Policy) -> Iterator[None]:
    """Restores policy and random numbers after the block."""
    model = policy.model
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    weights = {name: value.detach().to("cpu", copy=True) for name, value in trained.items()}
    # accelerate's forward in mixed precision; use_cache and the like
    settings = [(vars(owner), dict(vars(owner))) for owner in (model, model.config, model.generation_config)]
    was_training = model.training
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with keep_random_numbers(), torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in trained.items():
                    value.copy_(weights[name])
            for now, before in settings:
                now.clear()
                now.update(before)
            model.train(was_training)


def _estimate(run: RunConfig, data: Data, probe: Probe, gradient_s: float, measures: Measures) -> None:
    """Seconds of a step, and hours of the run, for completions as long as the probe's; `gradient_s`: of a token."""
    batch, each = probe.batch, step_completions(run)
    completion_s = (probe.sample_s + probe.judge_s) / len(batch)
    tokens = (sum(batch.lengths) + sum(map(len, batch.prompts))) / len(batch)
    share = 1.0 if run.rloo.beta else (measures.signal or 0) / (measures.prompts or 1)  # groups without are left out
    measures.step_s = each * (completion_s / run.rloo.num_iterations + share * tokens * gradient_s)
    epochs = (run.rloo.num_train_epochs or 0.0) * len(data.train) * run.rloo.num_generations * run.rloo.num_iterations
    measures.steps = run.rloo.max_steps or math.ceil(epochs / each)
    measures.device = "GPU" if torch.cuda.is_available() else "CPU"
    evaluated = count_evaluated(run, len(data.test), measures.steps)
    measures.hours = (measures.steps * measures.step_s + evaluated * completion_s) / 3600
