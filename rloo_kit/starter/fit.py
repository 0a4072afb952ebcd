"""Which model and which lengths fit a machine, by the memory plan: the settings of a first run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rloo_kit.config.batches import GENERATIONS, PROMPTS
from rloo_kit.config.derived import thinks_by_keys
from rloo_kit.config.messages import explain_error
from rloo_kit.config.run import RunConfig
from rloo_kit.config.yaml_files import read_yaml
from rloo_kit.errors import ConfigError
from rloo_kit.plan.load import find_machine
from rloo_kit.plan.planner import plan_vram
from rloo_kit.plan.result import VramPlan
from rloo_kit.plan.shapes import BNB_ENDING
from rloo_kit.starter.table import Table
from rloo_kit.starter.texts import Settings, make_body, make_header

EMBEDDED = "embedded/thinking"
# Those of configs/, the largest first; on a CPU the smallest in 16 bit, which needs no kernels for 4 bit.
FOR_GPU = tuple(
    f"unsloth/Qwen3-{size}-unsloth{BNB_ENDING}" for size in ("4B-Thinking-2507", "1.7B", "0.6B")
)  # fmt: skip
FOR_CPU = ("Qwen/Qwen3-0.6B",)
# (tokens of a completion, completions at once that they are worth), the first that fits.
LENGTHS = {
    True: ((12288, 8), (8192, 8), (6144, 8), (4096, 4), (4096, 1), (2048, 1)),
    False: ((2048, 8), (1024, 4), (1024, 1), (512, 1)),
}
LEAST_TO_THINK = 4096  # a model that thinks is proposed where its completions can have so many
ANSWER, CLOSING = 512, 32  # tokens of a forced answer, and of the sentence in front of it, with some to spare
EMBEDDED_TEMPLATE = 28  # tokens of the embedded model's template around a prompt; a byte is a token there


@dataclass(frozen=True)
class Fitted:
    """Settings, the text of the run's file and its memory plan."""

    settings: Settings
    text: str
    plan: VramPlan


def suggest_model(table: Table, gpu_gib: float | None = None) -> str:
    """The model that is proposed: on a GPU the largest of the shipped configs' that fits, else the embedded one where
    the prompts are additions, which is all that it knows."""
    machine = find_machine(gpu_gib)
    if not machine.on_cuda:
        return EMBEDDED if table.not_an_addition is None else FOR_CPU[0]
    for model in FOR_GPU:
        fitted = _first_that_fits(model, Path("run.yaml"), "rewards", table, gpu_gib)
        if fitted is not None and fitted.settings.completion_length >= LEAST_TO_THINK:
            return model
    return FOR_GPU[-1]


def fit(model: str, file: Path, module: str, table: Table, gpu_gib: float | None = None) -> Fitted:
    """The longest completions of which enough fit at once.

    Args:
        file: of the run. module: of its reward. gpu_gib: memory of another GPU to fit; None: this machine.

    Raises:
        ConfigError: nothing fits, with a model that does; the model's shape is not known; too few rows; an embedded
            model and prompts that are no additions.
    """
    if table.num_rows < PROMPTS + 1:
        raise ConfigError(
            f"{table.source} has {table.num_rows} rows; a step needs {PROMPTS} prompts and the evaluation one that is "
            f"held out: at least {PROMPTS + 1}"
        )
    if model.startswith("embedded/") and table.not_an_addition is not None:
        raise ConfigError(
            f"--model {model} knows only additions like '12+34=', and {table.not_an_addition} is none; take "
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
    instead = f"--model {other} fits" if other else f"--model {EMBEDDED} fits any machine, and knows additions"
    raise ConfigError(
        f"--model {model} takes {plan.peak_gib:.1f} GiB with completions of {length} tokens, one at a time, "
        f"more than the {machine.usable_gib:.1f} of {machine.name}; {instead}, or --gpu-gib 24 writes the "
        "file for a GPU with 24 GiB"
    )


def _first_that_fits(model: str, file: Path, module: str, table: Table, gpu_gib: float | None) -> Fitted | None:
    for candidate, rows in _candidates(model, file, module, table, gpu_gib):
        if candidate.plan.fits and candidate.plan.rows >= min(rows, candidate.plan.completions):
            return candidate
    return None


def _candidates(
    model: str, file: Path, module: str, table: Table, gpu_gib: float | None
) -> Iterator[tuple[Fitted, int]]:
    """What may be written, best first, each with the completions at once that it is worth."""
    embedded, on_cuda = model.startswith("embedded/"), find_machine(gpu_gib).on_cuda
    thinking = thinks_by_keys({"name": model})
    prompt = _prompt_length(table, embedded)
    prompts = min(4 * PROMPTS if embedded else PROMPTS, table.num_rows - 1)
    held_out = max(min(table.num_rows // 5, 1000 if embedded else 200, table.num_rows - prompts), 1)
    lengths = ((64, 1),) if embedded else LENGTHS[thinking]
    for length, rows in lengths:
        for memory in ("fast", "low"):
            settings = Settings(
                file=file,
                module=module,
                model=model,
                thinks=thinking,
                on_cuda=on_cuda,
                table=table,
                prompt_length=prompt,
                completion_length=length,
                thinking_budget=length - ANSWER - CLOSING if thinking and not embedded else None,
                memory=memory,
                prompts=prompts,
                test_size=held_out,
                eval_batch=250 if embedded else min(rows, GENERATIONS),
            )
            body = make_body(settings)
            values = read_yaml(body, str(file))[0]
            plan = plan_vram(_check(values | {"run": {"name": file.stem}}), gpu_gib)
            yield Fitted(settings, make_header(settings, plan) + body, plan), rows


def _check(values: dict[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:  # a model's name, say
        raise ConfigError("\n".join(explain_error(entry, RunConfig) for entry in error.errors())) from None


def _prompt_length(table: Table, embedded: bool) -> int:
    """Tokens that hold the longest prompt: about half its bytes, which is generous, and the template."""
    if embedded:
        return max(64, table.longest_bytes + EMBEDDED_TEMPLATE)
    tokens = table.longest_bytes // 2 + 96
    return min(max(-(-tokens // 64) * 64, 256), 2048)
