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
    IMAGE_COLUMNS,
    Columns,
    DataSource,
    find_file,
    read_columns,
    read_data_file,
    with_images,
)
from rloo_kit.errors import ConfigError, DataError, excerpt
from rloo_kit.plan.planner import find_machine, plan_vram
from rloo_kit.plan.shapes import BNB_ENDING, find_shape
from rloo_kit.plan.vram_plan import VramPlan
from rloo_kit.rewards.answer import answers_agree, find_boxed, find_last_number, has_no_answer
from rloo_kit.runs.files import write_text
from rloo_kit.system.versions import is_importable
from rloo_kit.tasks.families import find_family
from rloo_kit.think_tags import THINK_END

MARKER = "####"  # before the answer in GSM8K and datasets in its format
# Words of columns' names: of prompts, of answers; whole names of indexes, of neither.
_PROMPT = "prompt|question|problem|instruction|query|input|message|conversation|frage|aufgabe|pregunta|domanda|问题"
_ANSWER = r"answer|solution|target|reply|gold|expected|reference|completion|\w*antwort(en)?|\w*l(ö|oe)sung(en)?|答案"
_ANSWER += "|respuesta|risposta|r[ée]ponse|solución|soluzione|label|output|response|result|ergebnis?(se)?"
_INDEX = r"(.* )?(id|idx|nr|row|category|difficulty|level|topic|subject|source|type|date) ?\d*|((s|sl) )?no|index.*"
_INDEX += "|unnamed.*|(question|problem|prompt|task) num(ber)?|"
_NEITHER = f"{_INDEX}|.+ (length|len|count|score|url|link|start)|(has|is|num|wrong|incorrect|rejected) .+"
EMBEDDED = "embedded/thinking"
# The models of configs/, largest first; on a CPU the real one that learns there.
FOR_GPU = tuple(f"unsloth/Qwen3-{size}-unsloth{BNB_ENDING}" for size in ("4B-Thinking-2507", "1.7B", "0.6B"))
FOR_CPU = ("smollm2/instruct",)
FOR_IMAGES = ("Qwen/Qwen3-VL-4B-Thinking", "Qwen/Qwen3-VL-2B-Thinking", "Qwen/Qwen3-VL-2B-Instruct")
IMAGE = 340  # tokens of an image of the default data.max_pixels and its marks, at most
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
class PromptTable:
    """A file with prompts and answers.

    Attributes:
        texts: of the prompts; of messages, their contents. are_texts: no prompt is a list of messages.
        images: of a prompt, at most.
        golds: the answers of the rows that have one. answer_after: the marker in front of every answer.
        are_numbers: every answer is a number.
    """

    source: str
    prompt_column: str
    answer_column: str
    rows: DataSource
    texts: list[str]
    are_texts: bool
    images: int
    golds: list[str]
    answer_after: str | None
    are_numbers: bool


def open_data(source: str) -> dict[str, list[Any]]:
    """The columns of the file given as `--data`; raises DataError or ConfigError if it cannot be used."""
    path = find_file(source)
    if path is None:
        where = "copy a file of configs/ and set data.source for a dataset from the hub"
        raise ConfigError(f"--data {source}: there is no such file (.csv, .jsonl or .parquet); {where}")
    columns = read_columns(path)
    if len(columns) < 2 or not any(columns.values()):
        what = "no rows" if not any(columns.values()) else f"one column ({', '.join(columns)})"
        raise DataError(f"{path} has {what}; it needs a column of prompts and one of answers")
    return columns


def find_columns(
    source: str, columns: dict[str, list[Any]], prompt: str | None = None, answer: str | None = None
) -> dict[str, list[str]]:
    """By flag the columns that it could be, by a word of their names. Raises ConfigError for flags without a column
    each, and for answers that choose from columns."""
    if prompt is not None and prompt == answer:
        raise ConfigError(f"--prompt-column and --answer-column are both {prompt}; name two different columns")
    for name, flag in ((prompt, "--prompt-column"), (answer, "--answer-column")):
        if name is not None and name not in columns:
            raise ConfigError(f"{flag} {name}: there is no such column{suggest(name, columns)}")
    names = [name for name in columns if not re.fullmatch(_INDEX, _simple(name))]
    marks = [re.sub(r"\b[a-h]$|(?<=.)\d$", "#", _simple(name)) for name in names]
    alike = {"choice", "option", *(mark for mark in marks if "#" in mark and marks.count(mark) > 1)}
    options = [name for name, mark in zip(names, marks, strict=True) if mark in alike]
    if options and (prompt is None or answer is None):
        raise ConfigError(
            f"{source}: the answer chooses from {', '.join(options)}, which the prompts do not show; write them into "
            "the prompts, or pass --prompt-column and --answer-column"
        )
    rest = [name for name in columns if name not in (prompt, answer)]
    prompts, golds, texts, tasks = (
        [name for name in rest if _has_word(name, words)] for words in (_PROMPT, _ANSWER, "text", "task")
    )
    asked = [name for name in prompts or texts or tasks if name not in golds]
    golds = [name for name in golds if name not in prompts]
    return {
        "--prompt-column": asked if prompt is None else [prompt],
        "--answer-column": golds if answer is None else [answer],
    }


def list_choices(columns: dict[str, list[Any]], found: dict[str, list[str]]) -> str:
    """The flags to choose from, each with an example; where no column fits, all that are left."""
    rest = [name for name in columns if [name] not in found.values() and name not in IMAGE_COLUMNS]
    lines = []
    for flag, names in found.items():
        for name in names or rest:
            example = next((value for value in columns[name] if not has_no_answer(value)), "")
            lines.append(f"  {shlex.join([flag, name])}  (for example {excerpt(example, 60)})")
    if not any(found.values()):
        lines.append("  If the first line of the file is a row, write names above it, for example prompt,answer")
    return "\n".join(lines)


def _simple(name: str) -> str:
    """A column's name in small words, without a plural's s: `correct answer` for Correct_Answers."""
    return re.sub(r"[\W_]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z\d])", " ", name)).strip().lower().removesuffix("s")


def _has_word(name: str, words: str) -> bool:
    """Whether a word of the name is one of `words`, and the name is not that of an index or a remark."""
    found = (re.fullmatch(words, word.removesuffix("s")) for word in _simple(name).split())
    return any(found) and not re.fullmatch(_NEITHER, _simple(name))


def read_table(source: str, prompt_column: str, answer_column: str) -> PromptTable:
    """Read the whole file once; raises DataError with the line of a row that training would refuse."""
    path, columns = find_file(source) or Path(source), Columns(prompt_column, answer_column, answer_required=True)
    rows, texts, images = with_images(read_data_file(path, columns)), [], 0
    for row, prompt in enumerate(rows.prompts):
        try:
            contents = [message["content"] for message in as_messages(prompt)]
            parts = [[{"text": one}] if isinstance(one, str) else one for one in contents]
            texts.append("\n".join("".join(part.get("text", "") for part in one) for one in parts))
            images = max(images, sum("image" in part for one in parts for part in one))
        except DataError as error:
            raise DataError(f"{rows.where(row)}: {error} (--prompt-column {prompt_column})") from None
    found = [(row, gold) for row, gold in enumerate(rows.answers or []) if not has_no_answer(gold)]
    flag = f"--answer-column {answer_column}"
    golds = [comparable_text(gold, rows.where(row), flag).strip() for row, gold in found]
    if not golds:
        raise ConfigError(f"{flag}: {rows.name} has no answer in this column; name the column with the answers")
    marked = 2 * sum(MARKER in gold for gold in golds) > len(golds)
    if marked:  # the training refuses a row without it
        key = f"data.answer_column: {answer_column}"
        golds = [comparable_text(gold, rows.where(row), key, MARKER) for row, gold in found]
    golds = [find_boxed(gold) or gold for gold in golds]
    are_numbers = all(answers_agree(find_last_number(gold) or "-", gold) for gold in golds)
    # a text with images has become a message
    are_texts = all(isinstance(prompt, str) or (images and len(prompt) == 1) for prompt in rows.prompts)
    after = MARKER if marked else None
    return PromptTable(source, prompt_column, answer_column, rows, texts, are_texts, images, golds, after, are_numbers)


# ------------------------------------------------------------------------------------------------ what fits


class Fitted(NamedTuple):
    """The templates' values and the memory plan that they give. `fits`: with enough completions at once."""

    values: dict[str, Any]
    plan: VramPlan
    fits: bool


def suggest_model(table: PromptTable, gpu_gib: float | None = None) -> str:
    """The model to propose: embedded for additions, on a GPU the largest shipped that fits, on a CPU a small one;
    raises ConfigError for images on a CPU."""
    proposed = _propose(table, gpu_gib)
    if not table.images and all(re.fullmatch(r"\d{1,3}\+\d{1,3}=", text.strip()) for text in table.texts):
        return EMBEDDED
    if not find_machine(gpu_gib).on_cuda:
        return proposed[0]
    for model in proposed:
        found = next((one for one in _candidates(model, Path("run.yaml"), table, gpu_gib) if one.fits), None)
        if found is not None and found.values["completion_length"] >= LEAST_TO_THINK:
            return model
    return proposed[-1]


def _propose(table: PromptTable, gpu_gib: float | None) -> tuple[str, ...]:
    """The models that could fit, largest first."""
    on_cuda = find_machine(gpu_gib).on_cuda
    if table.images and not on_cuda:
        found = f"{table.source} has images, and no model that reads them trains on this machine without a GPU"
        raise ConfigError(f"{found}: --gpu-gib 16 writes the file for a GPU with 16 GiB ({FOR_IMAGES[0]})")
    return FOR_IMAGES if table.images else FOR_GPU if on_cuda else FOR_CPU


def fit(model: str, file: Path, table: PromptTable, gpu_gib: float | None = None) -> Fitted:
    """The config with the longest completions of which enough fit at once; raises ConfigError if none can be made."""
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
    others = (one for one in _propose(table, gpu_gib) if one != model)
    other = next((one for one in others if any(two.fits for two in _candidates(one, file, table, gpu_gib))), None)
    instead = f"--model {other} fits" if other else "no model of the shipped configs fits"
    raise ConfigError(
        f"--model {model} takes {found.plan.peak_gib:.1f} GiB with completions of {length} tokens, one at a time, "
        f"more than the {machine.usable_gib:.1f} GiB of {machine.name}; {instead}, or use --gpu-gib 24 to "
        "write the file for a GPU with 24 GiB"
    )


def _candidates(model: str, file: Path, table: PromptTable, gpu_gib: float | None) -> Iterator[Fitted]:
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
        prompt_length += table.images * IMAGE
    shared = {
        "file": file, "test": file.with_name(f"test_{module}.py"), "module": module, "model": model, "table": table,
        "form": form, "thinks": thinks, "thinks_if_asked": thinks_if_asked(model), "on_cuda": machine.on_cuda,
        "is_embedded": is_embedded, "is_built_in": is_embedded or is_smollm2, "generations": GENERATIONS,
        "prompts": prompts, "prompt_length": prompt_length, "answer_budget": ANSWER,
        "test_size": max(min(len(table.rows) // 5, 1000 if is_embedded else 200, len(table.rows) - prompts), 1),
        "usual_rate": f"{LORA_LEARNING_RATE:.0e}".replace("e-0", "e-"),
    }  # fmt: skip
    for length, rows in SHORT if is_short else LENGTHS[thinks]:
        values = shared | {
            "completion_length": length,
            "thinking_budget": length - ANSWER - CLOSING if thinks and not is_short else None,
            "eval_batch": 250 if is_embedded else prompts * GENERATIONS if is_short else min(rows, GENERATIONS),
        }
        keys = read_yaml(_render("run.yaml", values), str(file))[0] | {"run": {"name": file.stem}}
        try:
            run = RunConfig.model_validate(keys)
        except ValidationError as error:  # for example the model's name
            raise ConfigError(explain_errors(error, RunConfig)) from None
        tower = find_shape(run).tower if table.images else None
        if table.images and tower is None:
            raise ConfigError(f"{table.source} has images, which --model {model} does not read: use {FOR_IMAGES[0]}")
        if tower is not None and tower.is_optional:
            values["vision"] = run.model.vision = True
        plan = plan_vram(run, gpu_gib)
        yield Fitted(values, plan, plan.fits and plan.rows >= min(rows, plan.completions))


# ------------------------------------------------------------------------------------------------ the files


def name_output(output: Path | None, source: str) -> Path:
    """Path of the config: `output`, a file or a folder; by default NAME.yaml here, named after the data file."""
    name = f"{_as_module(Path(source).stem)}.yaml"
    if output is None or output.is_dir():
        return (output or Path()) / name
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output {output}: a config file must end in .yaml; use --output {output}.yaml")
    return output


def write_starter(
    model: str, table: PromptTable, output: Path | None = None, gpu_gib: float | None = None, overwrite: bool = False
) -> str:
    """Write the config of a run into `output`, a file or folder, its reward and the reward's test; returns what was
    found, with the next commands. Raises ConfigError as `fit` does, and for existing files without `overwrite`."""
    config = name_output(output, table.source)
    module = f"{_as_module(config.stem)}_rewards"
    reward, test = config.with_name(f"{module}.py"), config.with_name(f"test_{module}.py")
    there = ", ".join(str(path) for path in (config, reward, test) if path.exists())
    if there and not overwrite:
        raise ConfigError(f"{there}: there already; --overwrite replaces, --output OTHER.yaml writes elsewhere")
    found = fit(model, config, table, gpu_gib)
    gold, plan = table.golds[0], found.plan
    if gold.count("{") != gold.count("}") or THINK_END in gold:  # no completion could give such an answer
        gold = "42"
    answers = dict(zip(("finder", "right", "wrong", "thousand"), FORMS[found.values["form"]], strict=True))
    values = found.values | answers | {"gold": gold, "plan": plan}
    templates = ((config, "run.yaml"), (reward, "reward.py"), (test, "test_reward.py"))
    texts = {path: _render(template, values) for path, template in templates}
    config.parent.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_text(path, text)
    columns = f"prompts in '{table.prompt_column}', answers in '{table.answer_column}'"
    columns += f"; images in a prompt: at most {table.images}" if table.images else ""
    memory = f"{plan.peak_gib:.1f} of {plan.machine.usable_gib:.1f} GiB on {plan.machine.name}"
    lines = [f"{table.source}: {len(table.rows)} rows, {columns}"]
    lines.append(f"{plan.model}: {memory} (computed, not measured)")
    used = ("", table.prompt_column, table.answer_column)
    if others := [name for name in table.rows.other_names if name not in used]:
        lines.append(f"other columns: {', '.join(others)}; --prompt-column and --answer-column choose")
    long = next((one for one in table.golds if len(one.split()) > 3 or len(one) > 40), "")
    if long and not table.are_numbers:
        advice = f"put the bare answer into '{table.answer_column}', or change the reward in {reward}"
        lines.append(f"answers are sentences, as {excerpt(long, 60)}; only the same words are right: {advice}")
    if plan.step:
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
    """A file's stem as an importable module name: my_data_2 for `my data-2`, data_2024 for `2024`."""
    name = re.sub(r"\W+", "_", stem).strip("_")
    return name if name.isidentifier() else f"data_{name}".rstrip("_")
