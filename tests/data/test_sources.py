"""Sources beyond one file: test sources, other splits, mixes."""

import datasets
import pytest

from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import DataSection
from rloo_kit.data.load import load_data
from rloo_kit.errors import DataError
from tests.data.conftest import BOTH, jsonl, plain

SUMS = [{"prompt": f"{number}+1=", "answer": str(number + 1), "level": number % 3} for number in range(20)]


def test_a_test_file(make_run, write, tiny_tokenizer, capsys):
    """A hand-made test set shared prompts with training; data.test_size's default must not halve a chosen one."""
    train = write("train.jsonl", jsonl(*SUMS))
    test = write("test.csv", "prompt,answer,note\n3+1=,4,x\n 3+1=,4,y\n100+1=,101,z\n7+1=,8,z\n")
    data = load_data(make_run(train, test_source=str(test), test_size=0.1), tiny_tokenizer)
    assert sorted(plain(data.test["prompt"])) == ["100+1=", "3+1=", "7+1="] and data.test.column_names[-1] == "note"
    left = [row["prompt"] for row in SUMS if row["prompt"] not in ("3+1=", "7+1=")]
    assert plain(data.train["prompt"]) == left
    printed = capsys.readouterr().out
    assert f"2 rows of {train} are left out of training" in printed
    assert f"1 repeats of held-out prompts are left out of {test}" in printed
    sizes = {size: load_data(make_run(train, test_source=str(test), test_size=size), tiny_tokenizer) for size in (0, 2)}
    assert len(sizes[0].test) == 3 and plain(sizes[2].test["prompt"]) == plain(data.test["prompt"])[:2]
    # the held-out prompts are few, and data.num_prompts is of the training rows alone
    few = load_data(make_run(train, test_source=str(test), test_size=50, num_prompts=4), tiny_tokenizer)
    assert len(few.test) == 3 and len(few.train) <= 4


def test_faults_of_the_test_source_name_its_key(make_run, write, tiny_tokenizer):
    """A mistyped test file was looked for under data.source."""
    path = write("rows.jsonl", jsonl(*SUMS))
    with pytest.raises(DataError, match=r"^data\.test_source: no file missing\.csv"):
        load_data(make_run(path, test_source="missing.csv"), tiny_tokenizer)
    broken = write("broken.jsonl", jsonl({"prompt": "a", "answer": "1"}, {"prompt": "", "answer": "1"}))
    with pytest.raises(DataError, match=r"broken\.jsonl, line 2: the prompt is empty"):
        load_data(make_run(path, test_source=str(broken)), tiny_tokenizer)


def test_another_split(make_run, tiny_tokenizer, monkeypatch):
    """gsm8k has 1,319 test problems; they are read by naming the split, and `test` where only the source is named."""
    table = datasets.Dataset.from_list(SUMS)
    splits = {"train": table.select(range(12)), "test": table.select(range(12, 20)), "dev": table.select(range(3))}
    asked = []

    def load(source, name, split):
        asked.append((source, name, split))
        return splits[split]

    monkeypatch.setattr(datasets, "load_dataset", load)
    by_split = load_data(make_run("some/set", test_split="test", subset="main"), tiny_tokenizer)
    by_source = load_data(make_run("some/set", test_source="other/set", split="dev"), tiny_tokenizer)
    assert (len(by_split.train), len(by_split.test)) == (12, 8)
    assert (len(by_source.train), len(by_source.test)) == (3, 8)
    assert ("some/set", "main", "train") in asked and ("some/set", "main", "test") in asked
    assert ("other/set", None, "test") in asked


@pytest.mark.parametrize(
    ("data", "fix"),
    [
        ({"source": "a.csv", "test_split": "test"}, r"a\.csv is a file.*set data\.test_source"),
        ({"source": "a/b", "test_source": "t.csv", "test_split": "x"}, r"file t\.csv; remove data\.test_split"),
        ({"source": "embedded/addition", "test_split": "x"}, r"remove data\.test_split and use data\.test_size"),
        ({"source": "a.csv", "test_source": "embedded/addition"}, r"remove data\.test_source and use data\.test_size"),
        ({"source": "a.csv", "test_source": "a.csv"}, r"a\.csv, the training data; .* or remove data\.test_source"),
        ({"source": "a/b", "test_split": "train"}, r"a/b, the training data"),
        ({"sources": [{"source": "a/b"}], "test_split": "x"}, r"data\.sources is a mix; set data\.test_source too"),
        ({}, r"neither source nor sources is there; give one of the two: data\.source=.*data\.sources"),
        ({"source": "a", "sources": [{"source": "b"}]}, r"source and sources are both set"),
        ({"sources": []}, r"sources"),
        ({"sources": [{"source": "a", "weight": 0}]}, r"weight"),
    ],
)
def test_keys_that_contradict_each_other(data, fix):
    """Keys that would be ignored silently are refused: the split of a file, a test set that is the training set."""
    with pytest.raises(ValueError, match=fix):
        DataSection(**data)


def test_a_test_source_is_something_to_measure_on(make_run):
    """`run.evaluate` was refused at test_size 0, and a number of prompts above data.num_prompts too."""
    values = make_run("a.csv", test_source="t.csv").model_dump() | {"run": {"evaluate": True}}
    assert RunConfig.model_validate(values).data.separate_test
    assert make_run("a.csv", test_source="t.csv", test_size=200, num_prompts=100).data.test_size == 200
    with pytest.raises(ValueError, match=r"set data\.test_size above 0"):
        RunConfig.model_validate(values | {"data": {"source": "a.csv", "test_size": 0}})


def test_a_mix(make_run, write, tmp_path, tiny_tokenizer, capsys):
    """Each source has its share and its own columns: `source` is a row's task, and what a source lacks is null."""
    sums = write("sums.jsonl", jsonl(*SUMS))
    texts, words = tmp_path / "texts.parquet", list(range(30))
    datasets.Dataset.from_dict({"q": [f"Write {n} words" for n in words], "words": words}).to_parquet(texts)
    sources = [{"source": str(sums), "weight": 1.5}, {"source": str(texts), "weight": 0.5, "prompt_column": "q"}]
    run = make_run(reward=BOTH, sources=sources, num_prompts=16)
    data = load_data(run, tiny_tokenizer)
    by_source = {name: [row for row in data.train if row["source"] == name] for name in (str(sums), str(texts))}
    assert {name: len(rows) for name, rows in by_source.items()} == {str(sums): 12, str(texts): 4}
    answers = {row["prompt"]: row["answer"] for row in SUMS}
    for row, prompt in zip(data.train, plain(data.train["prompt"]), strict=True):
        if row["source"] == str(sums):
            assert (row["answer"], row["words"]) == (answers[prompt], None) and row["level"] is not None
        else:
            assert (row["answer"], row["level"]) == (None, None) and prompt == f"Write {row['words']} words"
    for start in (0, 4, 8, 12):
        assert list(data.train["source"])[start : start + 4].count(str(texts)) == 1, "every stretch is mixed"
    assert f"12 of the 20 rows of {sums}, 4 of the 30 rows of {texts}" in capsys.readouterr().out
    assert load_data(run, tiny_tokenizer).train.to_list() == data.train.to_list()
    # the split is over the mix; a test source takes its place
    halves = load_data(make_run(reward=BOTH, sources=sources, num_prompts=16, test_size=0.5), tiny_tokenizer)
    assert (len(halves.train), len(halves.test)) == (8, 8) and set(halves.test["source"]) == {str(sums), str(texts)}
    test = write("test.jsonl", jsonl({"prompt": "100+1=", "answer": 101}))
    apart = load_data(make_run(reward=BOTH, sources=sources, test_source=str(test)), tiny_tokenizer)
    assert plain(apart.test["prompt"]) == ["100+1="] and len(apart.train) == 20 + 6, "until the sums are exhausted"


def test_faults_of_a_mix_name_the_entry(make_run, write, tiny_tokenizer):
    """With five sources "no column 'answer'" says nothing: the entry of data.sources is what one has to change."""
    sums, gold = write("a.jsonl", jsonl(*SUMS)), write("b.jsonl", jsonl({"prompt": "x", "gold": 1, "level": "high"}))

    def fails(text, *entries, reward=BOTH, **data):
        with pytest.raises(DataError, match=text):
            load_data(make_run(reward=reward, sources=[{"source": str(sums)}, *entries], **data), tiny_tokenizer)

    fails(r"b\.jsonl: column 'level' has values that Arrow .* convert, rename or", {"source": str(gold)})
    fails(r"^data\.sources\.1\.source: no file c\.csv", {"source": "c.csv"})
    fails(r"data\.sources\.1\.prompt_column", {"source": str(gold), "prompt_column": "q"})
    fails(r"data\.sources\.1\.answer_column", {"source": str(gold), "answer_column": "q"})
    fails(r"data\.sources\.1\.answer_column", {"source": str(gold)}, reward="answer_reward")
    fails(r"line 1: the answer has no '#' in it \(data\.sources\.1\.answer_after", {
        "source": str(gold), "answer_column": "gold", "answer_after": "#",
    })  # fmt: skip
    other = write("c.jsonl", jsonl({"prompt": 3}))
    fails(r"c\.jsonl, line 1: the prompt is of type int.* \(prompt_column of data\.sources\)", {"source": str(other)})
    with pytest.raises(DataError, match=r"no source has an answer column.*data\.sources\.0\.answer_column: x"):
        load_data(make_run(sources=[{"source": str(sums)}], answer_column="x"), tiny_tokenizer)


def test_columns_called_source_and_the_embedded_task(make_run, write, tiny_tokenizer):
    """A dataset with a column `source` keeps it; the embedded task can be one of a mix."""
    own = write("own.jsonl", jsonl(*({"prompt": f"{n}+0=", "answer": str(n), "source": "mine"} for n in range(9))))
    sources = [{"source": "embedded/addition"}, {"source": str(own)}]
    rows = [{"prompt": "a", "answer": "=1"}]
    train = load_data(make_run(sources=sources, answer_after="="), tiny_tokenizer, rows=rows).train
    assert len(train) == 1, "rows in Python replace the mix"
    train = load_data(make_run(sources=sources, num_prompts=10), tiny_tokenizer).train
    assert sorted(map(str, train["source"])) == ["None"] * 5 + ["mine"] * 5
