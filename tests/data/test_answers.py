"""Rows without an answer: several tasks in one file; a reward returns None for rows of another task."""

import datasets
import pytest

from rloo_kit.data.load import load_data
from rloo_kit.errors import DataError
from tests.data.conftest import BOTH, jsonl

NULLS = {"null.jsonl": None, "blank.jsonl": " ", "nan.jsonl": float("nan")}


@pytest.mark.parametrize("name", [*NULLS, "rows.csv", "rows.parquet"])
def test_rows_without_an_answer(make_run, write, tmp_path, tiny_tokenizer, capsys, name):
    """A file of sums and of free texts was refused for the answers of the texts, which no reward needs. A null is
    empty in CSV, null or NaN in JSON and Parquet."""
    if name == "rows.csv":
        path = write(name, "prompt,answer\na,1\nb,\n")
    elif name == "rows.parquet":
        path = tmp_path / name
        datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": [1.0, None]}).to_parquet(path)
    else:
        path = write(name, jsonl({"prompt": "a", "answer": 1}, {"prompt": "b", "answer": NULLS[name]}))
    data = load_data(make_run(path, reward=BOTH), tiny_tokenizer)
    assert data.train["answer"][:] == ["1" if name == "rows.csv" else 1, None]
    place = {"rows.csv": "line 3", "rows.parquet": "row 2"}.get(name, "line 2")
    assert f"1 of 2 rows of {path} have no answer (the first: {place})" in capsys.readouterr().out
    for reward in ("answer_reward", "math_answer_reward", ("answer_reward", "math_answer_reward")):
        with pytest.raises(DataError) as caught:
            load_data(make_run(path, reward=reward), tiny_tokenizer)
        message = str(caught.value)
        assert f"{path}, {place}: no answer" in message and "(data.answer_column: answer)" in message
        assert "add a reward for rows without an answer" in message


def test_a_reward_without_weight_gives_no_row_a_reward(make_run, tiny_tokenizer):
    """A reward of weight 0 is only a metric: with it alone, rows without an answer would earn nothing at all."""
    run = make_run(reward=BOTH)
    run.rewards[1].weight = 0.0
    with pytest.raises(DataError, match="the list of rows, row 2: no answer, and each reward with a weight compares"):
        load_data(run, tiny_tokenizer, rows=[{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": None}])


def test_a_marker_is_asked_of_answers_only(make_run, tiny_tokenizer):
    """Null has no marker; an answer that lacks it is a broken one, whatever the rewards are."""
    rows = [{"prompt": "a", "answer": "#### 1"}, {"prompt": "b", "answer": None}]
    run = make_run(reward=BOTH, answer_after="####")
    assert load_data(run, tiny_tokenizer, rows=rows).train["answer"][:] == ["1", None]
    with pytest.raises(DataError, match="row 2: the answer has no '####' in it"):
        load_data(run, tiny_tokenizer, rows=[rows[0], {"prompt": "b", "answer": "2"}])


def test_a_column_without_one_answer_is_no_column_of_answers(make_run, tiny_tokenizer):
    """Every row of a wrong column passed as a row without an answer, and the answer reward never scored one."""
    rows = [{"prompt": "a", "answer": None}, {"prompt": "b", "answer": ""}]
    with pytest.raises(DataError, match=r"no row has an answer.*data\.answer_column"):
        load_data(make_run(reward=BOTH), tiny_tokenizer, rows=rows)
    assert load_data(make_run(), tiny_tokenizer, rows=rows).train["answer"][:] == [None, None]
