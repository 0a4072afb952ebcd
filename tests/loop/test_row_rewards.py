"""Rows of several tasks in one file: each is scored by the rewards that it names."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import rloo_kit as kit
from rloo_kit.checks.faults import find_faults
from rloo_kit.data.answers import gold_answers, task_of
from rloo_kit.data.sources import DataSource
from rloo_kit.rewarding.guard import guard

ROWS = [
    {"prompt": "1+1=", "answer": "2", "rewards": ["answer_reward"]},
    {"prompt": "Say more.", "answer": None, "rewards": ["by_length", "by_kind"]},
    {"prompt": "2+2=", "answer": "4", "rewards": ["answer_reward", "by_kind"]},
    {"prompt": "3+3=", "answer": "6", "rewards": None},
]


def by_length(completions: list[str], log_extra: Any = None, **_: Any) -> list[float]:
    log_extra("length", [len(text) for text in completions])
    return [float(len(text)) for text in completions]


def by_kind(completions: list[str], kind: list[str], **_: Any) -> list[float]:
    return [{"a": 1.0, "b": 2.0}[one] for one in kind]


def test_a_reward_sees_only_the_rows_that_name_it() -> None:
    """Guards against a code reward that is called on a sum, fails, and takes the whole batch with it."""
    logged: dict[str, Any] = {}
    batch: dict[str, Any] = {"completions": ["x", "yy", "zzz", "wwww"], "kind": ["a", "b", "a", "b"]}
    batch |= {"rewards": [row["rewards"] for row in ROWS], "log_extra": logged.__setitem__}
    assert guard(by_length).score(**batch).values == [None, 2.0, None, 4.0]
    assert logged["length"] == [None, 2, None, 4]
    assert guard(by_kind).score(**batch).values == [None, 2.0, 1.0, 2.0]
    batch["kind"] = ["a", "?", "a", "b"]
    found = guard(by_kind).score(**batch)
    assert found.values == [None, None, 1.0, 2.0] and found.failed == [False, True, False, False]
    assert guard(by_kind).score(**batch | {"rewards": ["other"] * 4}).values == [None] * 4


def test_other_data_are_neither_walked_nor_measured_by_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a metric for each prompt where the column `task` is the prompt, and minutes of looking for it."""
    assert task_of({"task": "Write a poem."}) is None
    assert task_of({"task": "code", "rewards": None}) == "code"
    assert task_of({"rewards": ["a", "b"], "task": None}) == "a+b"
    monkeypatch.chdir(tmp_path)
    rows = [{name: value for name, value in row.items() if name != "rewards"} for row in mixed_rows(12)]
    run, read = kit.load_config(config(tmp_path, rows)), list[str]()
    column = DataSource.column
    monkeypatch.setattr(DataSource, "column", lambda self, name: read.append(name) or column(self, name))
    find_faults(run)
    assert "rewards" not in read


def test_a_row_without_an_answer_reward_is_not_counted_wrong() -> None:
    """Guards against an accuracy over rows that another reward judges."""
    import datasets

    rows = [{"prompt": "p", "answer": "1", "rewards": names} for names in (["answer_reward"], ["by_length"], None)]
    assert gold_answers(datasets.Dataset.from_list(rows)) == ["1", None, "1"]


def config(folder: Path, rows: list[dict[str, Any]], **rloo: Any) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "own.py").write_text(
        "def by_length(completions, **_):\n    return [float(len(text)) for text in completions]\n", encoding="utf-8"
    )
    values = {
        "run": {"name": "mixed", "output_dir": str(folder / "outputs")},
        "model": {"name": "embedded/thinking", "lora": {"r": 4}},
        "data": {"source": "rows.jsonl", "test_size": 4},
        "rewards": [{"name": "answer_reward"}, {"name": "own.py:by_length", "weight": 0.01}],
        "rloo": {"max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 16} | rloo,
        "eval": {"greedy": False},
    }
    file = folder / "mixed.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")
    return file


def mixed_rows(count: int) -> list[dict[str, Any]]:
    """Sums of which every second has a task of its own, with a reward for length."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"{i}+{i + 1}=", "answer": str(2 * i + 1), "rewards": ["answer_reward"]} for i in range(count)
    ]
    return rows + [
        {"prompt": f"1+{i}+{i}=", "answer": None, "rewards": ["by_length"], "task": "talk"} for i in range(count)
    ]


@pytest.mark.slow
def test_a_mixture_is_measured_by_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one mean over tasks of different scales: metrics, held-out rewards and shares are by task."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    run = kit.load_config(config(tmp_path, mixed_rows(12)))
    kit.setup_environment(run.model.backend)
    policy = kit.load_policy(run)
    data = kit.load_data(run, policy.tokenizer)
    result = kit.train(run, policy, data, kit.build_rewards(run, policy.tokenizer))
    for row in result.metrics:
        shares = {name.split("/")[1]: row[name] for name in row if name.startswith("tasks/") and name.endswith("share")}
        assert set(shares) <= {"talk", "answer_reward"} and math.isclose(sum(shares.values()), 1.0)
        mean = sum(share * row[f"tasks/{name}/reward"] for name, share in shares.items())
        assert math.isclose(mean, row["reward"], rel_tol=1e-4)
        if "answer_reward" in shares:
            assert math.isclose(row["tasks/answer_reward/reward"], row["rewards/answer_reward/mean"], rel_tol=1e-4)
    measured = kit.evaluate(run, policy, data.test)
    tasks = [row.get("task") or "answer_reward" for row in data.test]
    per_prompt = measured.rewards["task talk"].per_prompt
    assert [value is not None for value in per_prompt] == [task == "talk" for task in tasks]
    assert "reward task talk" in str(measured)


@pytest.mark.parametrize("named, words", [(["answer_reward", "code_rewards"], "code_rewards"), ([], "[]")])
def test_a_row_that_no_reward_scores_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: list[str], words: str
) -> None:
    """Guards against a typo that leaves a task untrained: found before the model loads, with the file's line."""
    monkeypatch.chdir(tmp_path)
    rows = mixed_rows(12)
    rows[0]["rewards"] = named
    faults = [fault for fault in find_faults(kit.load_config(config(tmp_path, rows))) if fault.name == "data"]
    assert len(faults) == 1 and words in str(faults[0]) and "line 1" in str(faults[0])
    assert "by_length" in str(faults[0])
