"""Demonstrations as a model imitates them: rendered as RLOO's prompts are, each fault with its place and its key."""

import json
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.checks.cheap import PreflightError, find_tokenizer, refuse_worked_faults
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import SourceSection
from rloo_kit.data.load import prepare_data
from rloo_kit.data.worked import load_worked
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.models.embedded import build_tokenizer

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "completion": f"so\n</think>\n\n{n + 1}"} for n in range(10)]
HYBRID = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture
def make_run(tmp_path: Path) -> Any:
    """`make_run(rows, model="thinking", **sft)`: a run on these rows."""

    def make(rows: list[dict[str, Any]] = ROWS, model: str = "thinking", **sft: Any) -> RunConfig:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return RunConfig.model_validate(
            {
                "run": {"name": "small", "output_dir": str(tmp_path / "outputs")},
                "model": {"name": f"embedded/{model}"},
                "data": {"source": str(file), "test_size": 2},
                "rewards": [{"name": "answer_reward"}],
                "rloo": {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 4},
                "sft": sft,
            }
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
    """A hybrid model opens its thinking itself, unless its prompt does (Qwen3.5-4B), and must not learn a second tag.
    One that does not think learns the answer alone."""
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
    worked = load_worked(make_run(rows + [{"prompt": "c"}], max_length=60), tokenizer, [twin])
    assert (len(worked.examples), worked.num_rows) == (9, 16)
    assert worked.notes == [
        "5 of 16 rows whose column 'completion' is empty (sft.completion_column) are left out",
        "1 of 16 rows whose prompts are held out for the evaluation are left out",
        "1 of 16 rows of more than 60 tokens (sft.max_length) are left out",
    ]


def test_the_empty_column_is_named(make_run):
    """A table with thinking in one column and answers in another ended in "1198 rows without a demonstration", and its
    owner looked for the fault in the wrong column. A column that is mostly empty is a wrong key."""
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
        (
            ROWS,
            {"completion_column": "answer"},
            r"10 of 10 demonstrations have no </think> .*line 1.*sft.thinking_column",
        ),
        (ROWS, {"max_length": 5}, r"no demonstration is left to train on: .*10 of 10 rows of more than 5 tokens"),
        (ROWS, {"source": "other.jsonl"}, r"sft.source: no file other.jsonl"),
        ([ROWS[0] | {"completion": 3}], {}, r"line 1: completion is 3; a demonstration is text"),
        ([ROWS[0] | {"completion": "a</think>b</think>c"}], {}, r"line 1: .* more than once"),
        ([ROWS[0] | {"completion": "a</think>b<|im_end|>c"}], {}, r"line 1: .* control token <\|im_end\|>"),
    ],
)
def test_faults_have_their_place_and_key(make_run, rows, sft, message):
    with pytest.raises(DataError, match=f"(?s){message}"):
        texts(make_run(rows, **sft))


def test_faults_are_found_before_the_model_is_loaded(make_run):
    """Without the stack, by the tokenizer that preflight reads, together with the run's other faults."""
    run = make_run(completion_column="solution")
    with pytest.raises(PreflightError, match="sft.completion_column") as found:
        refuse_worked_faults(run)
    assert [(fault.name, fault.key) for fault in found.value.faults] == [("data", "sft.completion_column")]
    refuse_worked_faults(make_run())
    light, heavy = find_tokenizer(run), build_tokenizer("thinking")
    assert load_worked(make_run(), light, ()).examples == load_worked(make_run(), heavy, ()).examples


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
