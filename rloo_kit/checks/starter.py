"""`rloo-kit init`: writes a config for one's own rows that fits this machine, a reward and its test, from templates."""

import json
import re
import shlex
import string
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader
from pydantic import ValidationError

from rloo_kit.config.checks import GENERATIONS, PROMPTS
from rloo_kit.config.model_names import EMBEDDED_PREFIX, SMOLLM2, split_model_name, thinks_by_keys, thinks_if_asked
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import LORA_LEARNING_RATE
from rloo_kit.config.section import explain_errors, suggest
from rloo_kit.config.yaml_files import read_yaml
from rloo_kit.data.chat import as_messages
from rloo_kit.data.load import comparable_text
from rloo_kit.data.sources import (
    Columns,
    DataSource,
    csv_lines,
    explained,
    find_file,
    json_lines,
    open_parquet,
    read_file,
)
from rloo_kit.data.tasks import find_family
from rloo_kit.errors import ConfigError, DataError, excerpt
from rloo_kit.plan.planner import find_machine, plan_vram, read_workload
from rloo_kit.plan.shapes import BNB_ENDING
from rloo_kit.plan.speed import describe_step
from rloo_kit.plan.vram_plan import VramPlan
from rloo_kit.rewards.answer import answers_agree, find_boxed, find_last_number, has_no_answer
from rloo_kit.runs.files import write_text
from rloo_kit.system.versions import is_importable
from rloo_kit.think_tags import THINK_END

MARKER = "####"  # before the answer in GSM8K and datasets in its format
PROMPT_NAMES = ("prompt", "question", "problem", "instruction", "query", "input", "text")
ANSWER_NAMES = ("answer", "solution", "target", "label", "output", "response", "result")
EMBEDDED = "embedded/thinking"
# The models of configs/, largest first; on a CPU the real one that learns there.
FOR_GPU = tuple(f"unsloth/Qwen3-{size}-unsloth{BNB_ENDING}" for size in ("4B-Thinking-2507", "1.7B", "0.6B"))
FOR_CPU = ("smollm2/instruct",)
# (tokens of a completion, completions that must fit at once) by whether it thinks; the first that fits is taken.
LENGTHS = {
    True: ((12288, 8), (8192, 8), (6144, 8), (4096, 4), (4096, 1), (2048, 1)),
    False: ((2048, 8), (1024, 4), (1024, 1), (512, 1)),
}
SHORT = ((64, 8),)  # of the built-in models
LEAST_TO_THINK = 4096  # a thinking model is proposed only if its completions can have so many tokens
ANSWER, CLOSING = 512, 32  # tokens of a forced answer and of the closing sentence before it, with a margin
EMBEDDED_TEMPLATE = 28  # tokens of the embedded model's template around a prompt; a byte is a token there
# By where `answer_reward` finds the answer: the function that finds it; a right answer, a wrong one in the right form,
# and 1,000, as a model writes them.
FORMS = {
    "boxed": ("find_boxed", r"so \\boxed{{{GOLD}}}", r"so \\boxed{no such answer}", r"\\boxed{1,000}"),
    "last_number": ("find_last_number", "so it is {GOLD}.", "so it is -98765.", "**1,000**"),
    "whole": ("str.strip", "{GOLD}", "no such answer", "1,000"),
}
_JINJA = Environment(
    "<%", "%>", "<<", ">>", trim_blocks=True, keep_trailing_newline=True,
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
)  # fmt: skip
# Text in double quotes is the syntax that YAML and Python share.
_JINJA.filters |= {"quoted": partial(json.dumps, ensure_ascii=False), "gib": "{:.1f}".format}


# ------------------------------------------------------------------------------------------------ the rows


@dataclass(frozen=True)
class Table:
    """A file with prompts and answers.

    Attributes:
        source: the file, as given. columns: their names. prompt_column, answer_column: two of them.
        rows: as read. texts: of the prompts; of messages, their contents. are_texts: no prompt is a list of messages.
        gold: the answer of the first row that has one. answer_after: the marker in front of every answer. are_numbers:
        every answer is a number.
    """

    source: str
    columns: list[str]
    prompt_column: str
    answer_column: str
    rows: DataSource
    texts: list[str]
    are_texts: bool
    gold: str
    answer_after: str | None
    are_numbers: bool


def read_columns(source: str) -> list[str]:
    """Column names of the file given as `--data`, from its header, first row or schema; raises DataError or ConfigError
    if it is no such file, or has none."""
    path = find_file(source)
    if path is None:
        raise ConfigError(
            f"--data {source}: there is no such file; init reads a .csv, .jsonl or .parquet file. For a dataset "
            "from the hub, copy a file of configs/ and set data.source"
        )
    with explained(path):
        if path.suffix.lower() == ".parquet":
            names = open_parquet(path, schema_only=True).names
        else:
            with path.open(encoding="utf-8-sig", newline="") as file:
                lines = csv_lines(file, path) if path.suffix.lower() == ".csv" else json_lines(file, path)
                names = list(next(lines, (0, []))[1])
    if not names:
        raise DataError(f"{path} has no rows; it needs a column of prompts and one of answers")
    return names


def guess_columns(names: list[str]) -> tuple[str, str | None]:
    """Prompt and answer columns by name; else the first column, and the last of the others (None without one).

    >>> guess_columns(["id", "Question", "answer"]), guess_columns(["sum", "value"]), guess_columns(["text"])
    (('Question', 'answer'), ('sum', 'value'), ('text', None))
    """

    def find(known: tuple[str, ...], among: list[str]) -> str | None:
        by_name = {name.strip().lower(): name for name in reversed(among)}
        return next((by_name[word] for word in known if word in by_name), None)

    prompt = find(PROMPT_NAMES, names) or names[0]
    others = [name for name in names if name != prompt]
    return prompt, find(ANSWER_NAMES, others) or (others[-1] if others else None)


def check_column(name: str, flag: str, names: list[str]) -> str:
    """`name`, if the file has it; else raises ConfigError with the nearest of `names`."""
    if name not in names:
        raise ConfigError(f"{flag} {name}: there is no such column{suggest(name, names)}")
    return name


def read_table(source: str, prompt_column: str, answer_column: str) -> Table:
    """Read the whole file once; raises DataError with the line of a row that training would refuse."""
    columns, path = read_columns(source), find_file(source)
    if prompt_column == answer_column:
        raise ConfigError(f"--prompt-column and --answer-column are both {prompt_column}; name two different columns")
    assert path is not None  # `read_columns` has found it
    rows = read_file(path, Columns(prompt_column, answer_column, answer_required=True))
    texts = []
    for row, prompt in enumerate(rows.prompts):
        try:
            texts.append("\n".join(message["content"] for message in as_messages(prompt)))
        except DataError as error:
            raise DataError(f"{rows.where(row)}: {error} (--prompt-column {prompt_column})") from None
    found = [(row, one) for row, one in enumerate(rows.answers or []) if not has_no_answer(one)]
    flag = f"--answer-column {answer_column}"
    golds = [comparable_text(one, rows.where(row), flag).strip() for row, one in found]
    if not golds:
        raise ConfigError(f"{flag}: {path} has no answer in this column; name the column with the answers")
    marked = 2 * sum(MARKER in gold for gold in golds) > len(golds)
    if marked:  # the training refuses a row without it
        key = f"data.answer_column: {answer_column}"
        golds = [comparable_text(one, rows.where(row), key, MARKER) for row, one in found]
    golds = [find_boxed(gold) or gold for gold in golds]
    return Table(
        source=source,
        columns=columns,
        prompt_column=prompt_column,
        answer_column=answer_column,
        rows=rows,
        texts=texts,
        are_texts=all(isinstance(prompt, str) for prompt in rows.prompts),
        gold=golds[0],
        answer_after=MARKER if marked else None,
        are_numbers=all(answers_agree(find_last_number(gold) or "-", gold) for gold in golds),
    )


# ------------------------------------------------------------------------------------------------ what fits


class Fitted(NamedTuple):
    """The values of the templates, and the run and the memory plan of the config that they give. `fits`: with enough
    completions at once."""

    values: dict[str, Any]
    run: RunConfig
    plan: VramPlan
    fits: bool


def suggest_model(table: Table, gpu_gib: float | None = None) -> str:
    """The model to propose: on a GPU the largest of the shipped configs that fits; on a CPU the embedded one if the
    prompts are the additions that it knows, else a small language model."""
    if not find_machine(gpu_gib).on_cuda:
        are_additions = all(re.fullmatch(r"\d+\+\d+=", text.strip()) for text in table.texts)
        return EMBEDDED if are_additions else FOR_CPU[0]
    for model in FOR_GPU:
        found = next((one for one in _candidates(model, Path("run.yaml"), table, gpu_gib) if one.fits), None)
        if found is not None and found.values["completion_length"] >= LEAST_TO_THINK:
            return model
    return FOR_GPU[-1]


def fit(model: str, file: Path, table: Table, gpu_gib: float | None = None) -> Fitted:
    """The config with the longest completions of which enough fit at once.

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
        alphabet = find_family(split_model_name(model)[1]).alphabet
        known = set(alphabet + string.whitespace)
        if (odd := next((row for row, text in enumerate(table.texts) if set(text) - known), None)) is not None:
            raise ConfigError(
                f"--model {model} was taught problems in the characters {alphabet} alone, and "
                f"{table.rows.where(odd)}: {excerpt(table.texts[odd], 60)} has others; use --model {FOR_CPU[0]}, or "
                f"--model {FOR_GPU[0]} on a GPU"
            )
    found = None
    for found in _candidates(model, file, table, gpu_gib):
        if found.fits:
            return found
    assert found is not None  # the shortest
    machine, length = found.plan.machine, found.values["completion_length"]
    others = (one for one in (FOR_GPU if machine.on_cuda else FOR_CPU) if one != model)
    other = next((one for one in others if any(two.fits for two in _candidates(one, file, table, gpu_gib))), None)
    instead = f"--model {other} fits" if other else "no model of the shipped configs fits"
    raise ConfigError(
        f"--model {model} takes {found.plan.peak_gib:.1f} GiB with completions of {length} tokens, one at a time, "
        f"more than the {machine.usable_gib:.1f} GiB of {machine.name}; {instead}, or use --gpu-gib 24 to "
        "write the file for a GPU with 24 GiB"
    )


def _candidates(model: str, file: Path, table: Table, gpu_gib: float | None) -> Iterator[Fitted]:
    """Configs of a model, best first; lengths in tokens."""
    machine, thinks, module = find_machine(gpu_gib), thinks_by_keys({"name": model}), f"{_as_module(file.stem)}_rewards"
    is_embedded, is_smollm2 = model.startswith(EMBEDDED_PREFIX), model in SMOLLM2
    is_short = is_embedded or (is_smollm2 and not machine.on_cuda)
    prompts = min((4 if is_embedded else 2 if is_short else 1) * PROMPTS, len(table.rows) - 1)
    form = "boxed"
    if is_embedded or is_smollm2:  # a small language model writes numbers in sentences, and no boxes
        form = "last_number" if is_smollm2 and table.are_numbers else "whole"
    longest_bytes = max(len(text.encode("utf-8", "replace")) for text in table.texts)
    if is_embedded:
        prompt_length = max(64, longest_bytes + EMBEDDED_TEMPLATE)
    else:  # half the bytes, a generous estimate, plus the template, in steps of 64
        prompt_length = min(max(-(-(longest_bytes // 2 + 96) // 64) * 64, 128 if is_short else 256), 2048)
    shared = {
        "file": file,
        "test": file.with_name(f"test_{module}.py"),
        "module": module,
        "model": model,
        "table": table,
        "form": form,
        "thinks": thinks,
        "thinks_if_asked": thinks_if_asked(model),
        "on_cuda": machine.on_cuda,
        "is_embedded": is_embedded,
        "is_built_in": is_embedded or is_smollm2,
        "generations": GENERATIONS,
        "prompts": prompts,
        "prompt_length": prompt_length,
        "answer_budget": ANSWER,
        "test_size": max(min(len(table.rows) // 5, 1000 if is_embedded else 200, len(table.rows) - prompts), 1),
        "usual_rate": f"{LORA_LEARNING_RATE:.0e}".replace("e-0", "e-"),
    }
    for length, rows in SHORT if is_short else LENGTHS[thinks]:
        for memory in ("fast", "low"):
            values = shared | {
                "completion_length": length,
                "memory": memory,
                "thinking_budget": length - ANSWER - CLOSING if thinks and not is_short else None,
                "eval_batch": 250 if is_embedded else prompts * GENERATIONS if is_short else min(rows, GENERATIONS),
            }
            keys = read_yaml(_render("run.yaml", values), str(file))[0] | {"run": {"name": file.stem}}
            try:
                run = RunConfig.model_validate(keys)
            except ValidationError as error:  # for example the model's name
                raise ConfigError(explain_errors(error, RunConfig)) from None
            plan = plan_vram(run, gpu_gib)
            yield Fitted(values, run, plan, plan.fits and plan.rows >= min(rows, plan.completions))


# ------------------------------------------------------------------------------------------------ the files


def name_output(output: Path | None, source: str) -> Path:
    """Path of the config: `output`, a file or a folder; by default NAME.yaml here, named after the data file."""
    name = f"{_as_module(Path(source).stem)}.yaml"
    if output is None:
        return Path(name)
    if output.is_dir():
        return output / name
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output {output}: a config file must end in .yaml; use --output {output}.yaml")
    return output


def write_starter(
    model: str, table: Table, output: Path | None = None, gpu_gib: float | None = None, overwrite: bool = False
) -> str:
    """Write the config of a run, its reward and the reward's test.

    Args:
        model: hub id, folder or embedded model. table: the data (`read_table`).
        output: the config, or a folder for it. gpu_gib: memory of another GPU; None: this machine.
        overwrite: replace existing files.

    Returns:
        What was found and written, with the next commands.

    Raises:
        ConfigError: one of the files exists already; see also `fit`.
    """
    config = name_output(output, table.source)
    module = f"{_as_module(config.stem)}_rewards"
    reward, test = config.with_name(f"{module}.py"), config.with_name(f"test_{module}.py")
    there = ", ".join(str(path) for path in (config, reward, test) if path.exists())
    if there and not overwrite:
        raise ConfigError(f"{there}: there already; --overwrite replaces, --output OTHER.yaml writes elsewhere")
    found = fit(model, config, table, gpu_gib)
    gold, plan = table.gold, found.plan
    if gold.count("{") != gold.count("}") or THINK_END in gold:  # no completion could give such an answer
        gold = "42"
    answers = dict(zip(("finder", "right", "wrong", "thousand"), FORMS[found.values["form"]], strict=True))
    values = found.values | answers | {"gold": gold, "plan": plan}
    templates = {config: "run.yaml", reward: "reward.py", test: "test_reward.py"}
    texts = {path: _render(template, values) for path, template in templates.items()}
    config.parent.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_text(path, text)
    columns = f"prompts in '{table.prompt_column}', answers in '{table.answer_column}'"
    lines = [
        f"{table.source}: {len(table.rows)} rows, {columns}",
        f"{plan.model}: {plan.peak_gib:.1f} of {plan.machine.usable_gib:.1f} GiB on {plan.machine.name} "
        "(computed, not measured)",
    ]
    if others := [name for name in table.columns if name not in (table.prompt_column, table.answer_column)]:
        lines.append(f"other columns: {', '.join(others)}; --prompt-column and --answer-column choose")
    if not plan.machine.on_cuda and not found.values["is_embedded"]:
        lines.append(describe_step(found.run, read_workload(found.run, plan.machine)))
    elif plan.step:
        lines.append(str(plan.step))
    if plan.no_gpu is not None:
        lines.append("--gpu-gib 8 writes the file for a GPU with 8 GiB")
    pytest = "pytest" if is_importable("pytest") else "pip install pytest && pytest"
    commands = [f"{pytest} {shlex.quote(str(test))}"]
    commands += [shlex.join(["rloo-kit", step, str(config)]) for step in ("preflight", "train")]
    lines += [f"wrote {config}, {reward} and {test}", "next:", *(f"  {command}" for command in commands)]
    return "\n".join(lines)


def _render(template: str, values: dict[str, Any]) -> str:
    return _JINJA.get_template(f"{template}.jinja").render(values)


def _as_module(stem: str) -> str:
    """A file's stem as an importable module name.

    >>> _as_module("my data-2"), _as_module("2024")
    ('my_data_2', 'data_2024')
    """
    name = re.sub(r"\W+", "_", stem).strip("_")
    return name if name.isidentifier() else f"data_{name}".rstrip("_")
