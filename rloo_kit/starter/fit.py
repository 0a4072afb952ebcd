"""Picks the model and the lengths of a first run that fit a machine, by the memory plan."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rloo_kit.config.batches import GENERATIONS, PROMPTS
from rloo_kit.config.derived import thinks_by_keys
from rloo_kit.config.embedded import EMBEDDED_PREFIX, SMOLLM2, split_model_name
from rloo_kit.config.messages import explain_error
from rloo_kit.config.run import RunConfig
from rloo_kit.config.yaml_files import read_yaml
from rloo_kit.data.tasks import find_family
from rloo_kit.errors import ConfigError
from rloo_kit.plan.planner import find_machine, plan_vram, read_workload
from rloo_kit.plan.result import VramPlan
from rloo_kit.plan.shapes import BNB_ENDING
from rloo_kit.plan.speed import describe_step
from rloo_kit.starter.table import Table
from rloo_kit.starter.texts import Settings, make_body, make_header

EMBEDDED = "embedded/thinking"
# The models of configs/, largest first; on a CPU the real one that learns there.
FOR_GPU = tuple(f"unsloth/Qwen3-{size}-unsloth{BNB_ENDING}" for size in ("4B-Thinking-2507", "1.7B", "0.6B"))
FOR_CPU = ("smollm2/instruct",)
# (tokens of a completion, completions that must fit at once); the first that fits is taken.
LENGTHS = {
    True: ((12288, 8), (8192, 8), (6144, 8), (4096, 4), (4096, 1), (2048, 1)),
    False: ((2048, 8), (1024, 4), (1024, 1), (512, 1)),
}
SHORT = ((64, 8),)  # of the built-in models
LEAST_TO_THINK = 4096  # a thinking model is proposed only if its completions can have so many tokens
ANSWER, CLOSING = 512, 32  # tokens of a forced answer and of the closing sentence before it, with a margin
EMBEDDED_TEMPLATE = 28  # tokens of the embedded model's template around a prompt; a byte is a token there


@dataclass(frozen=True)
class Fitted:
    """Settings, the text of the run's file, its memory plan, and the time of a step in words (empty if unknown)."""

    settings: Settings
    text: str
    plan: VramPlan
    time: str


def suggest_model(table: Table, gpu_gib: float | None = None) -> str:
    """The model to propose: on a GPU the largest of the shipped configs that fits; on a CPU the embedded one if the
    prompts are the additions that it knows, else a small language model."""
    machine = find_machine(gpu_gib)
    if not machine.on_cuda:
        return EMBEDDED if table.are_additions else FOR_CPU[0]
    for model in FOR_GPU:
        fitted = _first_that_fits(model, Path("run.yaml"), "rewards", table, gpu_gib)
        if fitted is not None and fitted.settings.completion_length >= LEAST_TO_THINK:
            return model
    return FOR_GPU[-1]


def fit(model: str, file: Path, module: str, table: Table, gpu_gib: float | None = None) -> Fitted:
    """Settings with the longest completions of which enough fit at once.

    Args:
        file: the run's config. module: the reward's module. gpu_gib: memory of another GPU; None: this machine.

    Raises:
        ConfigError: nothing fits (the message names a model that does); the model's shape is unknown; too few rows;
            an embedded model with prompts in characters that it was not taught.
    """
    if (count := len(table.rows)) < PROMPTS + 1:
        raise ConfigError(
            f"{table.source} has {count} rows; a step needs {PROMPTS} prompts and the evaluation one held-out "
            f"prompt: at least {PROMPTS + 1}"
        )
    if model.startswith(EMBEDDED_PREFIX):
        alphabet = find_family(split_model_name(model)[1], file).alphabet
        if (other := table.find_other(alphabet)) is not None:
            raise ConfigError(
                f"--model {model} was taught problems in the characters {alphabet} alone, and {other} has others; use "
                f"--model {FOR_CPU[0]}, or --model {FOR_GPU[0]} on a GPU"
            )
    fitted = _first_that_fits(model, file, module, table, gpu_gib)
    if fitted is not None:
        return fitted
    shortest = list(_candidates(model, file, module, table, gpu_gib))[-1][0]
    plan, length = shortest.plan, shortest.settings.completion_length
    machine = find_machine(gpu_gib)
    known = FOR_GPU if machine.on_cuda else FOR_CPU
    other = next((one for one in known if one != model and _first_that_fits(one, file, module, table, gpu_gib)), None)
    instead = f"--model {other} fits" if other else "no model of the shipped configs fits"
    raise ConfigError(
        f"--model {model} takes {plan.peak_gib:.1f} GiB with completions of {length} tokens, one at a time, "
        f"more than the {machine.usable_gib:.1f} GiB of {machine.name}; {instead}, or use --gpu-gib 24 to "
        "write the file for a GPU with 24 GiB"
    )


def _first_that_fits(model: str, file: Path, module: str, table: Table, gpu_gib: float | None) -> Fitted | None:
    found = _candidates(model, file, module, table, gpu_gib)
    fitting = (one for one, rows in found if one.plan.fits and one.plan.rows >= min(rows, one.plan.completions))
    return next(fitting, None)


def _candidates(
    model: str, file: Path, module: str, table: Table, gpu_gib: float | None
) -> Iterator[tuple[Fitted, int]]:
    """Candidate settings, best first, each with the completions that must fit at once."""
    machine, thinking = find_machine(gpu_gib), thinks_by_keys({"name": model})
    embedded = model.startswith(EMBEDDED_PREFIX)
    is_short = embedded or (model in SMOLLM2 and not machine.on_cuda)
    prompts = min((4 if embedded else 2 if is_short else 1) * PROMPTS, len(table.rows) - 1)
    held_out = max(min(len(table.rows) // 5, 1000 if embedded else 200, len(table.rows) - prompts), 1)
    for length, rows in SHORT if is_short else LENGTHS[thinking]:
        for memory in ("fast", "low"):
            settings = Settings(
                file=file,
                module=module,
                model=model,
                thinks=thinking,
                on_cuda=machine.on_cuda,
                table=table,
                prompt_length=_prompt_length(table, embedded, 128 if is_short else 256),
                completion_length=length,
                thinking_budget=length - ANSWER - CLOSING if thinking and not is_short else None,
                memory=memory,
                prompts=prompts,
                test_size=held_out,
                eval_batch=250 if embedded else prompts * GENERATIONS if is_short else min(rows, GENERATIONS),
            )
            body = make_body(settings)
            run = _check(read_yaml(body, str(file))[0] | {"run": {"name": file.stem}})
            plan = plan_vram(run, gpu_gib)
            on_cpu = not machine.on_cuda and not embedded
            time = describe_step(run, read_workload(run, machine)) if on_cpu else str(plan.step or "")
            yield Fitted(settings, make_header(settings, plan) + body, plan, time), rows


def _check(values: dict[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:  # for example the model's name
        raise ConfigError("\n".join(explain_error(entry, RunConfig) for entry in error.errors())) from None


def _prompt_length(table: Table, embedded: bool, least: int) -> int:
    """Tokens for the longest prompt: half its bytes (a generous estimate), plus the template."""
    if embedded:
        return max(64, table.longest_bytes + EMBEDDED_TEMPLATE)
    tokens = table.longest_bytes // 2 + 96
    return min(max(-(-tokens // 64) * 64, least), 2048)
