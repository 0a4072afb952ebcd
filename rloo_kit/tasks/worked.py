"""Demonstrations to imitate: prompts rendered as for RLOO, each with the completion that the model learns to write, or
with several turns and the tools' results between them, as a rollout writes them."""

import json
import random
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rloo_kit.config.checks import GYM_PREFIX
from rloo_kit.config.model_names import EMBEDDED_PREFIX
from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import family_of, parse_conversation, prompt_identity, refuse_surrogates, template_options
from rloo_kit.data.load import read_part, render_row
from rloo_kit.data.sources import SEED, Columns, DataSource, Part, read_given_rows, with_images
from rloo_kit.errors import ConfigError, DataError, excerpt
from rloo_kit.tasks.families import EMBEDDED_PROMPTS, find_embedded_family, worked_rows
from rloo_kit.think_tags import THINK_END, THINK_START, opens_thinking
from rloo_kit.tools.toolbox import tool_schemas
from rloo_kit.tools.turns import Message, ToolFormat, check_call, make_call


@dataclass(frozen=True)
class Example:
    """Token ids: the prompt's with the template, and the completion's with the end token; `context`: spans of the
    tools' results in the completion (first token, the one after the last), which are not trained."""

    prompt_ids: list[int]
    completion_ids: list[int]
    context: list[tuple[int, int]] = field(default_factory=list)

    @property
    def labels(self) -> list[int]:
        """The completion's ids, -100 for the tools' results."""
        labels = list(self.completion_ids)
        for start, end in self.context:
            labels[start:end] = [-100] * (end - start)
        return labels


@dataclass(frozen=True)
class Demonstrations:
    """The examples to train on, in order; how many rows the source had; what was left out, in sentences."""

    examples: list[Example]
    num_rows: int
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lengths = [len(example.completion_ids) for example in self.examples]
        return (
            f"{len(self.examples)} of {self.num_rows} demonstrations, "
            f"{sum(lengths) / len(lengths):.0f} tokens on average, {max(lengths)} at most"
        )


def load_worked(run: RunConfig, tokenizer: Any, held_out: Iterable[str], rows: Any = None) -> Demonstrations:
    """The demonstrations of `run.sft`, or `rows` as in `load_data`, without those whose rendered prompts are `held_out`
    for the evaluation. Raises DataError for a source, row or column that cannot be used, with its place, and if nothing
    is left to train on; ConfigError for `sft.thinking_column` of a model that does not think, and without a source."""
    family, thinking = family_of(run, tokenizer)
    if run.sft.thinking_column is not None and not thinking:
        raise ConfigError(
            f"sft.thinking_column is {run.sft.thinking_column}, but this model does not think (family {family}, "
            f"model.enable_thinking {run.model.enable_thinking}): set sft.thinking_column=null"
        )
    source = _read(run, rows, thinking)
    writer = _Writer(run, tokenizer, thinking)
    thoughts = None
    if (column := run.sft.thinking_column) is not None:
        if column not in source.other_names:
            columns = ", ".join([run.sft.completion_column, *source.other_names])
            problem = f"{source.name} has no column '{column}'; columns found: {columns}"
            raise DataError(f"{problem}. Name the right one in sft.thinking_column")
        thoughts = list(source.column(column))
    excluded = {prompt_identity(text) for text in held_out}
    left_out: Counter[str] = Counter()
    examples, unclosed = [], []
    limit, end = run.model.max_seq_length, tokenizer.eos_token or ""
    for row, value in enumerate(source.answers or []):
        where = source.where(row)
        turns = writer.read_turns(value, f"{where}: {run.sft.completion_column}")
        answer = turns[-1]["content"] if turns else _text(value, f"{where}: {run.sft.completion_column}")
        answer = answer.strip().removesuffix(end).rstrip()
        thought = None if thoughts is None else _text(thoughts[row], f"{where}: {column}")
        if not answer.rpartition(THINK_END)[2]:
            left_out[f"whose column '{run.sft.completion_column}' is empty (sft.completion_column)"] += 1
            continue
        if thought is not None and not thought.strip():
            left_out[f"whose column '{column}' is empty (sft.thinking_column)"] += 1
            continue
        prompt = render_row(run, tokenizer, family, source, row, writer.schemas, "sft.prompt_column")
        if prompt_identity(prompt) in excluded:
            left_out["whose prompts are held out for the evaluation"] += 1
            continue
        written = writer.write(prompt, turns or [{"role": "assistant", "content": answer}], thought, where)
        if written is None:
            unclosed.append(row)
            continue
        example = Example(tokenizer(prompt)["input_ids"], *written)
        if len(example.prompt_ids) + len(example.completion_ids) > limit:
            left_out[f"of more than {limit} tokens (model.max_seq_length)"] += 1
            continue
        examples.append(example)
    if unclosed:
        raise DataError(
            f"{len(unclosed)} of {len(source)} demonstrations have no {THINK_END} (the first: "
            f"{source.where(unclosed[0])}), and this model thinks before it answers: it would learn never to answer. "
            f"Write thinking{THINK_END} before the answer, or name a column with the thinking: "
            "sft.thinking_column=..."
        )
    notes = [f"{count} of {len(source)} rows {why} are left out" for why, count in left_out.most_common()]
    if not examples:
        raise DataError(f"{source.name}: no demonstration is left to train on: {'; '.join(notes) or 'it has no rows'}")
    return Demonstrations(examples, len(source), notes)


def _render_completion(
    tokenizer: Any, prompt: str, answer: str, thought: str | None, thinking: bool, where: str
) -> str | None:
    """The completion after the rendered `prompt`, without the end token; None if its thinking is never closed.
    `answer` is the whole demonstration, or what follows the thinking if `thought` is given."""
    text = answer if thought is None else f"{thought.strip()}\n{THINK_END}\n\n{answer}"  # as the Qwen3 models write it
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and str(token) in text and str(token) not in (THINK_START, THINK_END):
            problem = f"the demonstration contains the control token {token}"
            raise DataError(f"{where}: {problem}; give only its text, without the chat template")
    if thinking:
        text = text.removeprefix(THINK_START).lstrip("\n")
        if THINK_START in text or text.count(THINK_END) > 1:
            raise DataError(f"{where}: the demonstration opens or closes its thinking more than once")
        if THINK_END not in text:
            return None
        return text if opens_thinking(prompt) else f"{THINK_START}\n{text}"
    if THINK_START in text or THINK_END in text:
        raise DataError(
            f"{where}: the demonstration contains thinking, but this model does not think: remove it, or set "
            "model.enable_thinking=true if its template reads that, model.family=thinking if it always thinks"
        )
    return text


class _Writer:
    """Writes completions of one or several turns as a rollout does."""

    def __init__(self, run: RunConfig, tokenizer: Any, thinking: bool) -> None:
        self.tokenizer, self.thinking, self.limit = tokenizer, thinking, run.rloo.tool_result_tokens
        self.schemas = tool_schemas(run)
        self.names = [str(schema["function"]["name"]) for schema in self.schemas or ()]
        self.form = ToolFormat(tokenizer, thinking, run.model.name, **template_options(run)) if self.schemas else None

    def read_turns(self, value: Any, where: str) -> list[Message] | None:
        """The messages of a demonstration with tools, calls in one form and results named; None for any other."""
        value = parse_conversation(value)
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            return None
        if len(value) < 2 and not any(
            message.get("tool_calls") or message.get("reasoning_content") is not None for message in value
        ):
            return None
        if self.form is None and (len(value) > 1 or value[0].get("tool_calls")):
            raise DataError(f"{where} has several messages or calls a tool, and the run has no tools: set rloo.tools")
        turns, open_calls = list[Message](), list[str]()  # names of calls without a result so far
        for number, message in enumerate(value, 1):
            place, role = f"{where}: message {number}", message.get("role")
            previous = turns[-1]["role"] if turns else "tool"
            if role != ("tool" if open_calls else "assistant") or role == previous == "assistant":
                wanted = f"the result of {open_calls[0]} (tool)" if open_calls else "the assistant's, after a result"
                raise DataError(f"{place} has the role {excerpt(role)}, where there has to be {wanted}")
            turn: Message = {"role": role, "content": _text(message.get("content"), place)}
            if role == "tool":
                turn["name"] = open_calls.pop(0)
                if (name := message.get("name")) not in (None, turn["name"]):
                    raise DataError(f"{place} is a result of {excerpt(name)}, and the call is {turn['name']}")
            if isinstance(message.get("reasoning_content"), str):
                turn["reasoning_content"] = refuse_surrogates(message["reasoning_content"], place)
            if message.get("tool_calls"):
                turn["tool_calls"] = [self._read_call(call, place) for call in message["tool_calls"]]
                open_calls = [call["function"]["name"] for call in turn["tool_calls"]]
            turns.append(turn)
        if open_calls or turns[-1]["role"] != "assistant":
            raise DataError(f"{where} ends with a tool's turn or a call; the last message is the assistant's answer")
        return turns

    def _read_call(self, call: Any, place: str) -> dict[str, Any]:
        with suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
            function = call.get("function", call)
            arguments = function["arguments"]
            made = make_call(function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments)
            check_call(made)
            if function["name"] in self.names:
                return made
        wanted = '{"name": ..., "arguments": {...}} without NaN, half characters or deep nesting, of a tool of the run'
        raise DataError(f"{place} calls {excerpt(call)}; a call is {wanted}: {', '.join(self.names)}")

    def write(
        self, prompt: str, turns: list[Message], thought: str | None, where: str
    ) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Ids after the rendered `prompt` and spans of the results; None if a turn's thinking is never closed."""
        ids, context, results = list[int](), list[tuple[int, int]](), list[Message]()
        for turn in turns:
            if turn["role"] == "tool":
                assert self.form is not None
                results.append(turn | {"content": self.form.fit(turn["content"], self.limit)})
                continue
            if results:
                assert self.form is not None
                between = self._encode(self.form.render_results(results))
                context.append((len(ids), len(ids) + len(between)))
                ids, results, prompt = ids + between, [], self.form.generation_prompt
            reasoning = turn.get("reasoning_content", thought)
            text = _render_completion(self.tokenizer, prompt, turn["content"].strip(), reasoning, self.thinking, where)
            if text is None:
                return None
            if self.form is not None and "tool_calls" in turn:
                text += "\n\n" if text.endswith(THINK_END) else ""
                text += self.form.render_calls(turn["tool_calls"], text.rpartition(THINK_END)[2].strip())
            ids += [*self._encode(text), self.tokenizer.eos_token_id]
        return ids, context

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _read(run: RunConfig, rows: Any, thinking: bool) -> DataSource:
    """The rows drawn from `sft.source`; `answers` has the demonstrations."""
    section, data = run.sft, run.data
    columns = Columns(section.prompt_column or data.prompt_column, section.completion_column, prefix="sft.")
    name, key = section.source or data.source, "data.source" if section.source is None else "sft.source"
    if rows is not None:
        source = read_given_rows(rows, columns)
    elif name is None:
        raise ConfigError("data.sources is a mix; set the source of the demonstrations: sft.source=...")
    elif name.startswith(GYM_PREFIX):
        raise ConfigError(f"{key} is {name}, which has no demonstrations; set their source: sft.source=...")
    elif name.startswith(EMBEDDED_PREFIX):
        task, family = find_embedded_family(Part(name, columns, key=key), thinking)
        wanted = data.num_prompts or min(EMBEDDED_PROMPTS, family.max_rows)
        made = worked_rows(family, wanted, SEED, thinking, task)
        source = replace(read_given_rows(made, Columns(answer="completion")), name=name)
    else:
        subset, split = (data.subset, data.split) if section.source is None else (None, "train")
        subset, split = section.subset or subset, section.split or split
        part = Part(name, columns, subset, split, key="sft.source", split_key="sft.split")
        source = read_part(run, part, thinking)
    if source.answers is None:
        names = [columns.prompt, *source.other_names]
        raise DataError(
            f"{source.name} has no column '{columns.answer}' with demonstrations; columns found: {', '.join(names)}. "
            "Name the right one in sft.completion_column, or another file in sft.source"
        )
    if section.num_prompts is None or section.num_prompts >= len(source):
        return with_images(source)
    drawn = random.Random(f"sft-{SEED}").sample(range(len(source)), section.num_prompts)
    return with_images(source.select(sorted(drawn)))


def _text(value: Any, where: str) -> str:
    """A demonstration as text, given as text or as a list of one assistant message; empty for null."""
    value = parse_conversation(value)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0].get("content")
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        value = "".join(str(part.get("text")) for part in value)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where} is {excerpt(value)}; a demonstration is text, or a list of one assistant message")
    return refuse_surrogates(value, where)
