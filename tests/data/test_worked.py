"""Demonstrations as a model imitates them: rendered as RLOO's prompts are, each fault with its place and its key."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset

from rloo_kit.checks.faults import check
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import RLOOSection, SourceSection
from rloo_kit.data.load import prepare_data
from rloo_kit.demo.cold_start import build_tokenizer
from rloo_kit.demo.embedded import SMOLLM2_TOOLS
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.rollout.types import Limits
from rloo_kit.system.problems import PreflightError
from rloo_kit.tasks.worked import load_worked
from rloo_kit.tools.episodes import Episodes, ToolParser, ToolUse
from rloo_kit.tools.toolbox import Toolbox
from rloo_kit.tools.turns import ToolFormat
from tests.episodes import Scripted, add

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "completion": f"so\n</think>\n\n{n + 1}"} for n in range(10)]
HYBRID = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture
def make_run(tmp_path: Path) -> Any:
    """`make_run(rows, model="thinking", tools=(), **sft)`: a run on these rows."""

    def make(
        rows: list[dict[str, Any]] = ROWS, model: str = "thinking", tools: tuple[str, ...] = (), **sft: Any
    ) -> RunConfig:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        rloo = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 4, "tool_result_tokens": 8}
        return RunConfig(
            run={"name": "small", "output_dir": str(tmp_path / "outputs")},
            model={"name": f"embedded/{model}"},
            data={"source": str(file), "test_size": 2},
            rewards=[{"name": "answer_reward"}],
            rloo=rloo | {"tools": list(tools)},
            sft=sft,
        )

    return make


def texts(run: RunConfig, tokenizer: Any = None, held_out: tuple[str, ...] = (), rows: Any = None) -> list[str]:
    tokenizer = tokenizer or build_tokenizer(run.model.name.removeprefix("embedded/"))
    found = load_worked(run, tokenizer, held_out, rows)
    return [tokenizer.decode(one.prompt_ids) + "|" + tokenizer.decode(one.completion_ids) for one in found.examples]


PROMPT = "<|im_start|>user\n0+1=<|im_end|>\n<|im_start|>assistant\n"


def test_a_thinking_models_completion_follows_the_open_tag(make_run):
    """A second <think>, or none that is closed, is a form that RLOO's prompts never ask for."""
    whole = "<think>\nso\n</think>\n\n1<|im_end|>"
    talk = [{"role": "assistant", "content": whole}]
    for answer in ("so\n</think>\n\n1", whole, talk, str(talk), json.dumps(talk)):  # as text, too
        run = make_run([ROWS[0] | {"completion": answer}] + ROWS[1:])
        assert texts(run)[0] == f"{PROMPT}<think>\n|so\n</think>\n\n1<|im_end|>"
    rows = [{"prompt": "0+1=", "answer": "1", "work": "so\n"}]
    run = make_run(rows, completion_column="answer", thinking_column="work")
    assert texts(run) == [f"{PROMPT}<think>\n|so\n</think>\n\n1<|im_end|>"]


def test_other_families(make_run):
    """A hybrid model opens its thinking itself, unless its prompt does; one that does not think learns the answer."""
    hybrid = build_tokenizer("instruct")
    hybrid.chat_template = HYBRID.replace("{% endif %}", "{% else %}<think>\n{% endif %}")
    assert texts(make_run(), hybrid)[0] == f"{PROMPT}<think>\n|so\n</think>\n\n1<|im_end|>"
    hybrid.chat_template = HYBRID
    run = make_run()
    assert texts(run, hybrid)[0] == f"{PROMPT}|<think>\nso\n</think>\n\n1<|im_end|>"
    run.model.enable_thinking = False
    plain = [row | {"completion": row["answer"]} for row in ROWS]
    assert texts(run, hybrid, rows=plain)[0] == f"{PROMPT}<think>\n\n</think>\n\n|1<|im_end|>"
    assert texts(make_run(plain, "instruct"))[0] == f"{PROMPT}|1<|im_end|>"
    with pytest.raises(DataError, match="line 1: the demonstration contains thinking, but this model does not think"):
        texts(make_run(ROWS, "instruct"))
    with pytest.raises(ConfigError, match=r"sft.thinking_column=null"):
        texts(make_run(ROWS, "instruct", thinking_column="answer"))


def test_prompts_are_those_of_rloo(make_run):
    """A policy that imitated another prompt would meet RLOO's for the first time there."""
    run = make_run()
    run.data.system_prompt = "Add."
    tokenizer = build_tokenizer("thinking")
    prepared = prepare_data(run, tokenizer)
    assert [one.partition("|so")[0] for one in texts(run)] == prepared.train.texts


def test_what_is_left_out_is_counted(make_run):
    """Held-out prompts that were imitated would measure memory; a cut answer teaches to stop nowhere."""
    rows = [*ROWS, {"prompt": "a", "completion": " "}, {"prompt": "b", "completion": f"{'x' * 99}</think>c"}]
    rows += [{"prompt": "d", "completion": text} for text in ("<|im_end|>", "</think>", "e</think> <|im_end|>")]
    tokenizer = build_tokenizer("thinking")
    held_out = prepare_data(make_run(), tokenizer).test
    twin = held_out.texts[0].replace("<|im_end|>", " ?<|im_end|>").upper()
    run = make_run(rows + [{"prompt": "c"}])
    run.model.max_seq_length = 60
    worked = load_worked(run, tokenizer, [twin])
    assert (len(worked.examples), worked.num_rows) == (9, 16)
    assert worked.notes == [
        "5 of 16 rows whose column 'completion' is empty (sft.completion_column) are left out",
        "1 of 16 rows whose prompts are held out for the evaluation are left out",
        "1 of 16 rows of more than 60 tokens (model.max_seq_length) are left out",
    ]


def test_the_empty_column_is_named(make_run):
    """The error "1198 rows without a demonstration" sent a table's owner to the wrong column."""
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "work": "so" if n < 2 else "", "note": None} for n in range(10)]
    tokenizer, columns = build_tokenizer("thinking"), {"completion_column": "answer", "thinking_column": "work"}
    (note,) = load_worked(make_run(rows, **columns), tokenizer, ()).notes
    assert note == "8 of 10 rows whose column 'work' is empty (sft.thinking_column) are left out"
    with pytest.raises(DataError, match=r"10 of 10 rows whose column 'note' is empty \(sft.thinking_column\)"):
        load_worked(make_run(rows, **columns | {"thinking_column": "note"}), tokenizer, ())
    with pytest.raises(DataError, match=r"10 of 10 rows whose column 'note' is empty \(sft.completion_column\)"):
        load_worked(make_run(rows, completion_column="note"), tokenizer, ())


@pytest.mark.parametrize(
    ("rows", "sft", "message"),
    [
        (ROWS, {"completion_column": "solution"}, r"no column 'solution'.* found: prompt.*sft.completion_column"),
        (ROWS, {"thinking_column": "work"}, r"no column 'work'.*sft.thinking_column"),
        (ROWS, {"completion_column": "answer"}, r"10 of 10 .*no </think> .*line 1.*sft.thinking_column"),
        (ROWS, {"source": "other.jsonl"}, r"sft.source: no file other.jsonl"),
        ([ROWS[0] | {"completion": 3}], {}, r"line 1: completion is 3; a demonstration is text"),
        ([ROWS[0] | {"completion": "\ud83d"}], {}, r"line 1: completion contains \\ud83d at character 0, half of a"),
        ([ROWS[0] | {"prompt": "\ud83d"}], {}, r"line 1: the rendered prompt contains \\ud83d.*sft.prompt_column"),
        ([ROWS[0] | {"completion": "a</think>b</think>c"}], {}, r"line 1: .* more than once"),
        ([ROWS[0] | {"completion": "a</think>b<|im_end|>c"}], {}, r"line 1: .* control token <\|im_end\|>"),
    ],
)
def test_faults_have_their_place_and_key(make_run, rows, sft, message):
    with pytest.raises(DataError, match=f"(?s){message}"):
        texts(make_run(rows, **sft))


def test_faults_are_found_before_the_model_is_loaded(make_run):
    """Together with the run's other faults."""
    run = make_run(completion_column="solution")
    with pytest.raises(PreflightError, match="sft.completion_column") as found:
        check(run, worked=True)
    assert [(fault.name, fault.key) for fault in found.value.faults] == [("data", "sft.completion_column")]
    check(make_run(), worked=True)


def test_the_embedded_task_has_worked_answers(make_run):
    """`data.source: embedded/addition` is both the prompts of RLOO and what is imitated before."""
    run = make_run(num_prompts=50)
    run.data = run.data.model_copy(update={"source": "embedded/addition", "num_prompts": 200})
    tokenizer = build_tokenizer("untaught")
    held_out = prepare_data(run, tokenizer).test
    worked = load_worked(run, tokenizer, [held_out.texts[row] for row in held_out.rows])
    assert 45 < len(worked.examples) <= worked.num_rows == 50
    assert all(tokenizer.decode(one.completion_ids).count("</think>\n\n") == 1 for one in worked.examples)


def test_rows_from_python_and_a_mix(make_run):
    """A mix does not say which source has demonstrations; rows in Python need no source."""
    run = make_run()
    mix = [SourceSection(source=str(run.data.source), weight=weight) for weight in (1.0, 2.0)]
    run.data = run.data.model_copy(update={"source": None, "sources": mix})
    with pytest.raises(ConfigError, match=r"sft.source"):
        texts(run)
    assert len(texts(run, rows=ROWS)) == 10


ADD = """
def add(a: int, b: int) -> int:
    '''Add.

    Args:
        a: One.
        b: Two.
    '''
    return a + b
"""
CALL = {"function": {"name": "add", "arguments": {"a": 2, "b": 10**9}}}
SAID = {"role": "assistant", "content": "1", "reasoning_content": ""}
CALLING, RESULT = SAID | {"content": "", "tool_calls": [CALL]}, {"role": "tool", "content": str(10**9 + 2)}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    file = tmp_path_factory.mktemp("tools") / "adder.py"
    file.write_text(ADD)
    return (f"{file}:add",)


@pytest.mark.parametrize("thinks", [True, False], ids=["untaught", "smollm2/tools"])
def test_turns_with_tools_are_those_of_a_rollout(make_run: Any, tools: tuple[str, ...], thinks: bool) -> None:
    """Rendered whole, a demonstration had other ids than rollouts have, and its results were imitated."""
    tokenizer = build_tokenizer("untaught" if thinks else "instruct")
    if not thinks:
        tokenizer.chat_template = SMOLLM2_TOOLS
    thought = {"reasoning_content": "two sums"} if thinks else {}
    both = {"role": "assistant", "content": "I add.", "tool_calls": [CALL, CALL], **thought}
    once = {"role": "assistant", "content": "so</think>\n\n" if thinks else "", "tool_calls": [CALL["function"]]}
    once["tool_calls"][0] = CALL["function"] | {"arguments": json.dumps(CALL["function"]["arguments"])}
    last = {"role": "assistant", "content": "done", **thought}
    talk = [both, RESULT, RESULT | {"name": "add"}, once, RESULT | {"reasoning_content": None}, last]
    rows = [{"prompt": "?", "completion": one} for one in (talk, json.dumps(talk))]
    run = make_run(rows, "untaught" if thinks else "instruct", tools)
    run.model.max_seq_length = 2000
    found = load_worked(run, tokenizer, ()).examples
    assert found[0] == found[1], "messages as JSON"
    assert "add" in tokenizer.decode(found[0].prompt_ids), "the prompt has the tools"

    tool_call = f"<tool_call>\n{json.dumps(CALL['function'])}\n</tool_call>"
    first, second = ("two sums\n</think>\n\n", "so</think>\n\n") if thinks else ("", "")
    turns = [f"{first}I add.\n{tool_call}\n{tool_call}", second + tool_call, f"{first}done"]
    parser = ToolParser(ToolFormat(tokenizer, thinks))
    limits = RLOOSection(max_steps=1, tool_result_tokens=8)
    dialogue = Episodes(ToolUse(Toolbox.of([add], None), parser, limits), [{"prompt": "?"}])
    rollout = Scripted(tokenizer, [turns]).sample([found[0].prompt_ids], Limits(1000), dialogue=dialogue)
    assert found[0].completion_ids == rollout.completion_ids[0]
    assert found[0].context == rollout.context[0] and len(found[0].context) == 2
    spans = [tokenizer.decode(found[0].completion_ids[start:end]) for start, end in found[0].context]
    assert spans[0].count("cut: 8 of 10 tokens") == 2, "results are as long as a rollout's"
    kept = [one for one in found[0].labels if one != -100]
    assert tokenizer.decode(kept) == "".join(f"{turn}<|im_end|>" for turn in turns)


@pytest.mark.parametrize(
    ("talk", "message"),
    [
        ([RESULT, SAID], r"completion: message 1 has the role 'tool'"),
        ([CALLING, SAID], r"message 2 has the role 'assistant', where there has to be the result of add"),
        ([SAID, SAID], r"message 2 has the role 'assistant', where .* after a result"),
        ([{"role": "user", "content": "?"}, SAID], r"message 1 has the role 'user'"),
        ([CALLING, RESULT], r"ends with a tool's turn or a call"),
        ([CALLING], r"ends with a tool's turn or a call"),
        ([CALLING, RESULT | {"name": "sub"}, SAID], r"message 2 is a result of 'sub', and the call is add"),
        ([SAID | {"tool_calls": [{"name": "sub", "arguments": {}}]}, RESULT, SAID], r"message 1 calls .*sub.*: add"),
        ([SAID | {"tool_calls": [{"name": "add", "arguments": "a=2"}]}, RESULT, SAID], r"message 1 calls .*a=2.*: add"),
        ([SAID | {"tool_calls": [{"function": "add"}]}, RESULT, SAID], r"message 1 calls .*add.*: add"),
        ([SAID | {"tool_calls": [{"name": "add", "arguments": "[" * 9999}]}, RESULT, SAID], r"message 1 calls .*: add"),
        ([SAID | {"tool_calls": [{"name": "add", "arguments": {"a": "\ud83d"}}]}, RESULT, SAID], r"calls .*half char"),
        ([SAID | {"reasoning_content": "\ud83d"}], r"message 1 contains \\ud83d"),
        ([CALLING, RESULT, {"role": "assistant", "content": "1"}], r"1 of 1 demonstrations have no </think>"),
        ([CALLING, RESULT, SAID | {"content": "1<|im_end|>2"}], r"control token <\|im_end\|>"),
    ],
)
def test_turns_that_no_rollout_has_are_refused(make_run, tools, talk, message):
    """A result without its call, or a call that nobody answers, teaches a form that is never sampled."""
    with pytest.raises(DataError, match=f"line 1: .*{message}|{message}"):
        texts(make_run([{"prompt": "?", "completion": talk}], "untaught", tools))


@pytest.mark.parametrize("kind", ["parquet", "dataset", "pandas", "jsonl"])
def test_nulls_of_arrow_are_not_imitated(make_run, tools, tmp_path, kind):
    """Arrow gives each object the keys of all: calls were imitated with arguments of other tools."""
    by_line = [
        {"a": "2", "b": "3"}, {"a": "2", "b": None}, {"c": {"e": [{"f": None, "g": "1"}, None]}}, {"c": {"h": "1"}}
    ]  # fmt: skip
    talks = [
        [CALLING | {"tool_calls": [{"function": {"name": "add", "arguments": one}}]}, RESULT, SAID] for one in by_line
    ]
    rows = [{"prompt": "?", "completion": talk} for talk in talks]
    run, table = make_run(rows, "untaught", tools), pyarrow.Table.from_pylist(rows)
    run.model.max_seq_length = 2000
    given = {"dataset": Dataset(table), "pandas": table.to_pandas().to_dict("records")}.get(kind)
    if kind == "parquet":
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
        run.sft.source = str(tmp_path / "rows.parquet")
    if kind != "jsonl":
        by_line[1:3] = {"a": "2"}, {"c": {"e": [{"g": "1"}, None]}}
    found = texts(run, rows=given)
    wanted = [f'"arguments": {json.dumps(one)}}}\n</tool_call>' for one in by_line]
    assert [one in text for one, text in zip(wanted, found, strict=True)] == [True] * 4, found


def test_calls_need_tools(make_run):
    """The calls of a demonstration would have no schema in its prompt."""
    with pytest.raises(DataError, match=r"the run has no tools: set rloo.tools"):
        texts(make_run([{"prompt": "?", "completion": [CALLING, RESULT, SAID]}], "untaught"))
    assert texts(make_run([{"prompt": "?", "completion": [SAID]}], "untaught")) == [
        "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n<think>\n|</think>\n\n1<|im_end|>"
    ]
