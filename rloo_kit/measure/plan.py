"""Measure a memory plan: the rollout and training, next to the computed figures."""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.table import Table

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import BackendError, RlooKitError
from rloo_kit.loop.memory import MemoryPeak
from rloo_kit.measure.memory import NOT_HERE, load_of, measure_rollout, measure_training, rows_of_a_pass
from rloo_kit.measure.stand_ins import save_random_checkpoint
from rloo_kit.models.policy import load_policy
from rloo_kit.plan.parts import context_bytes, rollout_gib, training_gib
from rloo_kit.plan.result import VramPlan
from rloo_kit.system.console import fill_text, render_text
from rloo_kit.system.memory import GIB, is_out_of_memory


@dataclass(frozen=True)
class Measured:
    """One measurement and its computed figure, in GiB.

    Attributes:
        what: "rollout" or "training". rows: completions at once, of a rollout or of a training batch.
        tokens: of each, prompt included.
        computed_gib: on a GPU without CUDA's context, which torch does not count. measured_gib: None if it failed.
        reserved_gib: reserved by torch's allocator, on a GPU. seconds: of the measurement.
        error: why there is no figure.
    """

    what: str
    rows: int
    tokens: int
    computed_gib: float
    measured_gib: float | None
    reserved_gib: float
    seconds: float
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain values, GiB with four decimals."""
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}


def measure_plan(run: RunConfig, plan: VramPlan, say: Callable[[str], None] = print) -> list[Measured]:
    """Measure what `plan` computed, with random weights of the run's shape, after `setup_environment`.

    Args:
        run: the planned `RunConfig`. plan: from `plan_vram`; its rows are measured.
        say: called with a line before and after each measurement.

    Returns:
        The rollout and training; only training, without vLLM loaded, if vLLM or a server samples.

    Raises:
        BackendError: the plan is for another machine, or the run does not fit and there is no GPU to refuse it.
        ConfigError: see `load_policy`.
    """
    if plan.machine.on_cuda != torch.cuda.is_available():
        raise BackendError(f"the plan is for {plan.machine.name}, not for this machine: measure without --gpu-gib")
    if not torch.cuda.is_available() and plan.headroom_gib < 0:
        raise BackendError(
            f"the run takes {plan.peak_gib:.1f} GiB and this machine has {plan.machine.usable_gib:.1f}: without a GPU, "
            "measuring it would get other programs killed. Apply the changes that `rloo-kit plan` lists"
        )
    with tempfile.TemporaryDirectory(prefix="rloo-kit-measure-") as folder:
        run = run.model_copy(deep=True)
        if not run.model.is_embedded:
            say(f"measure: random weights of the shape of {run.model.name}")
            save_random_checkpoint(run, folder)
            run.model.name, run.model.adapter = folder, None
            run.model.family, run.model.enable_thinking = "auto", None
        if plan.engine.name in NOT_HERE:
            say(f"measure: training only; {NOT_HERE[plan.engine.name]}")
            run.rollout = run.rollout.model_copy(update={"engine": "generate", "server_url": None})
        return list(_measure_all(run, plan, say))


def _measure_all(run: RunConfig, plan: VramPlan, say: Callable[[str], None]) -> Iterator[Measured]:
    policy = load_policy(run, check=False)  # data and rewards are not used
    load = load_of(run, policy)
    load = replace(load, tokens_per_pass=plan.tokens_per_pass)
    outside = context_bytes(load) / GIB if load.on_cuda else 0.0

    def measure(what: str, rows: int, computed: float, call: Callable[[], MemoryPeak]) -> Measured:
        say(f"measure: {what}, {rows} x {load.row_tokens} tokens")
        started, peak, error = time.monotonic(), None, None
        try:
            peak = call()
        except (RuntimeError, RlooKitError) as raised:
            if not is_out_of_memory(raised) and not isinstance(raised, RlooKitError):
                raise
            error = "out of memory" if is_out_of_memory(raised) else str(raised)
        seconds = time.monotonic() - started
        computed -= outside
        gib, reserved = (None, 0.0) if peak is None else (peak.gib, peak.reserved_gib)
        say(f"measure: {error or f'{gib:.3f} GiB'}, computed {computed:.3f}, {seconds:.0f} s")
        return Measured(what, rows, load.row_tokens, computed, gib, reserved, seconds, error)

    if plan.engine.name not in NOT_HERE:
        call = partial(measure_rollout, policy, run, plan.rows, load.row_tokens)
        yield measure("rollout", plan.rows, rollout_gib(load, plan.rows), call)
    rows = rows_of_a_pass(load)[1]
    yield measure("training", rows, training_gib(load), partial(measure_training, policy, run))


def format_measured(found: list[Measured]) -> str:
    """A table of computed and measured memory."""
    table = Table(title="Memory, GiB: computed vs. measured", title_justify="left")
    table.add_column("part", no_wrap=True)
    for name in ("rows x tokens", "computed", "measured", "seconds"):
        table.add_column(name, no_wrap=True, justify="right")
    errors = []
    for one in found:
        measured = "failed" if one.measured_gib is None else f"{one.measured_gib:.3f}"
        if one.error:
            errors.append(fill_text(f"{one.what}: {one.error}"))
        table.add_row(one.what, f"{one.rows} x {one.tokens}", f"{one.computed_gib:.3f}", measured, f"{one.seconds:.0f}")
    return "\n".join([render_text(table), *errors])
