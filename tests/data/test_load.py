"""Reading, checking, rendering and splitting of prompts; every error names its file and line."""

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from PIL import Image
from tokenizers import processors

from rloo_kit.data.chat import prompt_identity
from rloo_kit.data.load import Data, load_data, prepare_data
from rloo_kit.demo.cold_start import build_tokenizer
from rloo_kit.errors import DataError
from rloo_kit.rewarding.guard import guard
from rloo_kit.tools.turns import ToolFormat
from tests.data.conftest import BOTH, jsonl, plain, rendered

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1), "level": number % 3} for number in range(20)]


def test_embedded_task(make_run, tiny_tokenizer):
    """The main job reads no file at all."""
    data = load_data(make_run("embedded/addition", num_prompts=50, test_size=20), tiny_tokenizer)
    assert (len(data.train), len(data.test)) == (30, 20)
    assert str(data) == "30 training prompts, 20 held out"
    for row in data.test:
        question = row["prompt"].removeprefix("<|im_start|>user\n").partition("=")[0]
        assert sum(map(int, question.split("+"))) == int(row["answer"])
    with pytest.raises(DataError, match="data.source: there is no task family 'chess': take addition, subtraction"):
        load_data(make_run("embedded/chess"), tiny_tokenizer)


def test_hub_offline(make_run, tiny_tokenizer):
    """Behind a firewall the bare error was a traceback through three libraries; it has to say what to do instead."""
    with pytest.raises(DataError) as caught:
        load_data(make_run("some-owner/no-such-data"), tiny_tokenizer)
    for part in ("data.source: 'some-owner/no-such-data'", "cannot be reached", "HF_HOME", "to_parquet", "HF_TOKEN"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("error", "key"),
    [
        ("Config name is missing. Please pick one among the available configs: ['main']", "data.subset"),
        ("Unknown split \"x\". Should be one of ['train', 'test'].", "data.split"),
    ],
)
def test_hub_says_which_key(make_run, tiny_tokenizer, monkeypatch, error, key):
    """A wrong subset is no connection problem: advice about caches sends the user the wrong way."""

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError(error)

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError) as caught:
        load_data(make_run("openai/gsm8k"), tiny_tokenizer)
    assert error in str(caught.value) and f"Set {key} to one of those named" in str(caught.value)
    assert "HF_HOME" not in str(caught.value)


def test_file_is_looked_up_next_to_the_config(make_run, tmp_path, tiny_tokenizer, monkeypatch):
    """A notebook runs in its own folder; a config that names `rows.jsonl` means the file next to it."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "rows.jsonl").write_text(jsonl({"prompt": "hi"}))
    monkeypatch.chdir(tmp_path)
    run = make_run("rows.jsonl")
    with pytest.raises(DataError, match=f"no file rows.jsonl; looked for as {tmp_path}/rows.jsonl; set data.source"):
        load_data(run, tiny_tokenizer)
    run._source = tmp_path / "configs" / "run.yaml"
    assert len(load_data(run, tiny_tokenizer).train) == 1


BAD_JSONL = [
    ("", "has no rows"),
    (jsonl({"prompt": "a"}) + '{"prompt": \n', "line 2: broken JSON"),
    (jsonl({"prompt": "a"}, {"text": "b"}), "line 2: no column 'prompt'; columns found: text. Name the right one in"),
    (jsonl({"prompt": "a"}) + "\n" + jsonl({"prompt": " "}), "line 3: the prompt is empty"),
    (jsonl({"prompt": "a"}, {"prompt": [{"role": "x", "content": "b"}]}), "line 2: message 1 has the role 'x'"),
    (jsonl({"prompt": "a\ud800"}), "half of a surrogate pair (data.prompt_column"),
    (jsonl({"prompt": "a", "n": "b"}, {"prompt": "b", "n": "\ud800"}), "column 'n' has values that Arrow"),
    (jsonl({"prompt": "a", "n": {"b": 1}}, {"prompt": "b", "n": 1}), "column 'n' has values that"),
    (jsonl({"prompt": "a"}) + '{"n": ' + "[" * 99_999 + "\n", "line 2: JSON that cannot be read: maximum recursion"),
    (jsonl({"prompt": "a"}) + '{"prompt": "b", "n": ' + "[" * 900 + "]" * 900 + "}\n", "column 'n' is nested"),
    (jsonl({"prompt": "a", "n": 1}, {"prompt": "b", "n": "2"}), "column 'n' has values that Arrow"),
]


BAD_CSV = [
    ("", "has no rows"),
    ("prompt,prompt\na,b\n", "line 1: duplicate column name"),
    ('prompt,answer\n"a\nb",1\nc\n', "line 4: 1 fields, but the header has 2"),
    ('prompt,answer\na,"1\n', "line 2: broken CSV"),
    ("prompt,answer\na,1\n,2\n", "line 3: the prompt is empty"),
]


@pytest.mark.parametrize(
    ("ending", "content", "text"), [("jsonl", *bad) for bad in BAD_JSONL] + [("csv", *bad) for bad in BAD_CSV]
)
def test_bad_rows_are_named_by_file_and_line(make_run, write, tiny_tokenizer, ending, content, text):
    """In a file of 50,000 lines the line is what one has to know, counted as an editor does."""
    path = write(f"rows.{ending}", content)
    with pytest.raises(DataError) as caught:
        load_data(make_run(path), tiny_tokenizer)
    assert str(path) in str(caught.value) and text in str(caught.value)


def test_files_that_cannot_be_read(make_run, tmp_path, tiny_tokenizer):
    """A spreadsheet's Latin-1, a broken disk, another ending, a failed download, a folder of `save_to_disk`."""
    path = tmp_path / "rows.csv"
    path.write_bytes(b"prompt\n" + b"coffee\n" * 9_000 + "café\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"rows.csv, line 9002: not UTF-8 text \(.*\). Save the file as UTF-8."):
        load_data(make_run(path), tiny_tokenizer)
    (tmp_path / "rows.jsonl").symlink_to("/proc/self/mem")
    (tmp_path / "rows.txt").write_text("hi")
    (tmp_path / "rows.parquet").write_text("<html>")
    datasets.Dataset.from_dict({"prompt": ["a", None]}).to_parquet(tmp_path / "nulls.parquet")
    for name, message in (
        ("rows.jsonl", "cannot be read: Input/output error"),
        ("rows.txt", r"has the ending '\.txt'; supported are \.jsonl, \.csv, \.parquet"),
        ("rows.parquet", "is not a Parquet file that can be read"),
        ("nulls.parquet", "row 2: the prompt is of type NoneType"),
        (".", r"is a folder; name a file in it \(\.jsonl, \.csv, \.parquet\).*save_to_disk"),
    ):
        with pytest.raises(DataError, match=message):
            load_data(make_run(tmp_path / name), tiny_tokenizer)


def test_bad_rows_in_python(make_run, tiny_tokenizer):
    """Rows from a notebook have numbers too, and lists that hold themselves, over which Arrow died."""
    itself = []
    itself.append(itself)
    with pytest.raises(DataError, match="rows: column 'n' is nested more than 100 levels deep, or contains itself"):
        load_data(make_run(), tiny_tokenizer, rows=[{"prompt": "a", "n": []}, {"prompt": "b", "n": itself}])
    with pytest.raises(DataError, match="the list of rows has no rows"):
        load_data(make_run(), tiny_tokenizer, rows=[])
    with pytest.raises(DataError, match="the dataset has no rows"):
        load_data(make_run(), tiny_tokenizer, rows=datasets.Dataset.from_dict({"prompt": []}))
    with pytest.raises(DataError, match="the list of rows, row 2: the prompt is of type int"):
        load_data(make_run(), tiny_tokenizer, rows=["a", 5])
    for rows in (3, "abc", {"prompt": ["a"]}, SimpleNamespace(columns=["prompt"], __iter__=None)):  # the last: pandas
        with pytest.raises(DataError, match=f"rows is a {type(rows).__name__}; it takes a list of dicts or of prompts"):
            load_data(make_run(), tiny_tokenizer, rows=rows)


def test_missing_answer_column(make_run, write, tiny_tokenizer):
    """Answers are optional until a key or a reward says that they are there; a mistyped column was then no answers."""
    path = write("rows.jsonl", jsonl({"prompt": "a", "gold": "1"}))
    assert load_data(make_run(path), tiny_tokenizer).train.column_names == ["prompt", "question", "gold"]
    for run in (
        make_run(path, answer_column="golds"),
        make_run(path, reward="answer_reward"),
        make_run(path, reward="math_answer_reward"),
        make_run(path, answer_after="####"),
    ):
        with pytest.raises(DataError, match=r"line 1: no column '(golds|answer)'; columns found: prompt, gold. Name"):
            load_data(run, tiny_tokenizer)
    assert load_data(make_run(path, answer_column="gold"), tiny_tokenizer).train["answer"][:] == ["1"]


def test_answer_after_a_marker(make_run, tiny_tokenizer):
    """gsm8k's answer follows the last ####; null has no marker, and another answer without it is a broken one."""
    rows = [{"prompt": "a", "answer": "#### is 3, so\n#### 1,234 "}, {"prompt": "b", "answer": None}]
    run = make_run(reward=BOTH, answer_after="####")
    assert load_data(run, tiny_tokenizer, rows=rows).train["answer"][:] == ["1,234", None]
    for answer, problem in (("2", r"has no '####' in it \(data.answer_after"), ("2+2 ####", "is empty")):
        for asked in (run, make_run(answer_after="####")):
            with pytest.raises(DataError, match=f"row 2: the answer {problem}"):
                load_data(asked, tiny_tokenizer, rows=[rows[0], {"prompt": "b", "answer": answer}])


def test_rows_drawn_here_and_there_are_a_table_of_their_own(make_run, tiny_tokenizer):
    """Each row kept, and pickled, the column of all rows: hashing 1,000 held-out rows took 24 GB."""
    rows = [{"prompt": f"{number}?", "answer": "1", "extra": f"{number:0200}"} for number in range(400)]
    data = load_data(make_run(test_size=100), tiny_tokenizer, rows=rows)
    for part in (data.train, data.test):
        table = part.data.table
        assert len(pickle.dumps(table)) < 2 * sum(len(row["extra"]) + len(row["prompt"]) + 50 for row in part)
        assert plain(part["prompt"]) == [f"{int(extra)}?" for extra in part["extra"]]


def test_columns_that_the_trainer_uses_itself(make_run, tiny_tokenizer, capsys):
    """A dataset with a column `completions` made every reward call fail with "multiple values for argument"."""
    rows = [{"q": "a", "gold": "1", "answer": "long", "prompts": "x", "completions": "y", "level": 2}]
    data = load_data(make_run(prompt_column="q", answer_column="gold"), tiny_tokenizer, rows=rows)
    own = {"q": "a", "gold": "1", "level": 2}
    assert data.train.to_list() == [{"prompt": rendered("a"), "answer": "1", "question": "a", **own}]
    printed = capsys.readouterr().out
    assert "column 'answer' is replaced by the column that data.answer_column names" in printed
    for column in ("prompts", "completions"):
        assert f"column '{column}' is left out" in printed


def test_images_for_a_model_of_text_are_refused(make_run, tiny_tokenizer, tmp_path):
    """Image columns were dropped with a note, and the run trained on questions about pictures that were not there."""
    with pytest.raises(DataError, match="row 1: column 'images': there is no file 'b'.*rename the column"):
        load_data(make_run(), tiny_tokenizer, rows=[{"prompt": "a", "images": "b"}])
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    rows = [{"prompt": "a", "image": None}, {"prompt": "b", "image": str(tmp_path / "a.png")}]
    with pytest.raises(DataError, match="row 2: the prompt has an image, .*model.vision=true .*model.name"):
        load_data(make_run(), tiny_tokenizer, rows=rows)
    assert load_data(make_run(), tiny_tokenizer, rows=rows[:1]).train["prompt"][:] == [rendered("a")]
    data = load_data(make_run(prompt_column="images"), tiny_tokenizer, rows=[{"images": "a"}])
    assert data.train["prompt"][:] == [rendered("a")], "named by data.prompt_column it is a text"


def test_too_long_prompts(make_run, tiny_tokenizer, capsys):
    """Prompts that do not fit used to be cut, or to vanish without a word; the template counts too."""
    rows = ["a" * 5, "b" * 30, "c" * 6, "d" * 80]
    limit = len(tiny_tokenizer(rendered(rows[2]))["input_ids"])
    data = load_data(make_run(max_prompt_length=limit), tiny_tokenizer, rows=rows)
    assert data.train["prompt"][:] == [rendered(rows[0]), rendered(rows[2])]
    assert data.dropped == 2 and str(data) == "2 training prompts, 0 held out, 2 dropped as too long"
    longest = len(tiny_tokenizer(rendered(rows[3]))["input_ids"])
    found = f"2 of 4 prompts are longer than data.max_prompt_length={limit} tokens; the longest has {longest}"
    assert f"{found} (the list of rows, row 4)" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"none is left. Raise data.max_prompt_length"):
        load_data(make_run(max_prompt_length=3), tiny_tokenizer, rows=rows)


def test_tokenizer_that_appends_its_end(make_run, tiny_tokenizer):
    """With `add_eos_token` every prompt ended with the end token: the model was asked to go on after its own end."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", 258)]
    )
    with pytest.raises(DataError, match=r"appends <\|im_end\|> to every text.*add_eos_token = False"):
        load_data(make_run(), tokenizer, rows=["a"])


def prompts_of(data: Data) -> tuple[list[str], list[str]]:
    return data.train["prompt"][:], data.test["prompt"][:]


@pytest.mark.parametrize(("size", "held_out"), [(5, 5), (0.25, 5), (0.01, 1), (0, 0)])
def test_split_sizes(make_run, tiny_tokenizer, size, held_out):
    """A whole number is prompts, a share is a share (of few prompts at least one), and nothing is nothing."""
    train, test = prompts_of(load_data(make_run(test_size=size), tiny_tokenizer, rows=ROWS))
    assert (len(train), len(test)) == (20 - held_out, held_out)
    assert not set(train) & set(test) and len({*train, *test}) == 20
    with pytest.raises(DataError, match="different prompts, and data.test_size=20 .* none is left.* data.test_source"):
        load_data(make_run(test_size=20), tiny_tokenizer, rows=ROWS)


def test_split_with_repeated_prompts(make_run, tiny_tokenizer):
    """A split by rows put copies of a prompt, or the same with other spaces, on both sides."""
    rows = [{**row, "prompt": row["prompt"] + " " * (copy % 2)} for row in ROWS for copy in range(4)]
    data = load_data(make_run(test_size=6), tiny_tokenizer, rows=rows)
    train, test = ({prompt.replace("= <", "=<") for prompt in side} for side in prompts_of(data))
    assert not train & test and (len(train), len(test)) == (14, 6)
    assert (len(data.train), len(data.test)) == (14 * 4, 6)
    assert any("60 rows repeat an earlier prompt" in note and "18 repeats" in note for note in data.notes)
    talks = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    assert len(load_data(make_run(test_size=6), tiny_tokenizer, rows=talks).train) == 14 * 4
    # `1 1+2=` and `11+2=` are two problems: a repeat is left out of the test set, a different prompt is not
    data = load_data(make_run(test_size=1), tiny_tokenizer, rows=["1 1+2=", "11+2=", "1  1+2="])
    assert len({*data.train["prompt"], *data.test["prompt"]}) >= 2
    assert data.notes and "1 rows repeat" in data.notes[0]


def test_split_by_what_the_model_reads(make_run, write, tiny_tokenizer):
    """Rows that carry data.system_prompt themselves stood in training and test: 16 of 20 were trained on."""
    system = "Answer briefly."
    asked = [f"what is {number}+1?" for number in range(20)]
    talks = [[{"role": "system", "content": system}, {"role": "user", "content": text}] for text in asked]
    data = load_data(make_run(test_size=8, system_prompt=system), tiny_tokenizer, rows=[*asked, *talks])
    assert (len(data.train), len(data.test)) == (24, 8) and not {*data.train["prompt"]} & {*data.test["prompt"]}
    with pytest.raises(DataError, match=r"all 20 training prompts of .*data\.test_source or data\.test_split"):
        held_out = write("test.jsonl", jsonl(*({"prompt": talk} for talk in talks)))
        load_data(make_run(test_source=str(held_out), system_prompt=system), tiny_tokenizer, rows=asked)
    other = load_data(make_run(test_size=20), tiny_tokenizer, rows=[*asked, *talks])
    assert (len(other.train), len(other.test), other.notes) == (20, 20, []), "without the key they are other prompts"


def test_twins_of_a_prompt():
    """A scraped data set has each question several times over, typed differently; 2³ is not 23, nor 5! the number 5."""
    text = "<|im_start|>user\nWie groß ist José's Café in m²?<|im_end|>\n<|im_start|>assistant\n"
    changes = [
        ("groß", "GROSS"), ("é", "e\u0301"), ("²", "^2"), ("Café", "Ca\u200bfé\ufeff"), ("groß", "gr\u00adoß\ufe0f"),
        ("m²?", "m²"), ("m²?", "m² ?!"), ("m²?", "m²？"), ("m²?", "m²? \n"), (" ist ", "\u00a0 ist\t"), ("C", "Ｃ"),
    ]  # fmt: skip
    assert {prompt_identity(text.replace(*change)) for change in changes} == {prompt_identity(text)}
    assert prompt_identity("ﾊﾟﾝ！") == prompt_identity("パン") and prompt_identity("Ｘ＋1？") == prompt_identity("x+1?")
    others = ["1 1+2=", "11+2=", "1.1+2=", "-11+2=", "1+12=", "11+2=-", "e", "é", "e'", "x^2", "x2", "?x", "1?2", "1.2"]
    others += ["5", "5!", "5!!", "n!", "n", "(n)!", "(n)", "2³", "23", "2³!"]
    assert prompt_identity("Is 5!?") == prompt_identity("is 5! ") and prompt_identity("?" * 60_000 + "x").endswith("x")
    assert len({prompt_identity(other) for other in others}) == len(others)


def test_the_split_is_always_the_same(make_run, tiny_tokenizer):
    """Another split after a restart would measure on prompts that were trained on, by the seed of Python's hashes."""
    first = load_data(make_run(test_size=5), tiny_tokenizer, rows=ROWS)
    again = load_data(make_run(test_size=5), tiny_tokenizer, rows=ROWS)
    assert prompts_of(first) == prompts_of(again)
    assert sorted(first.test["answer"][:], key=int) == ["14", "16", "18", "19", "20"]
    train = first.train["prompt"][:]
    assert train == [rendered(row["prompt"]) for row in ROWS if rendered(row["prompt"]) in train]


def test_the_file_s_own_names_and_the_question_reach_the_rewards(make_run, write, tiny_tokenizer):
    """A published reward's `problem` and `solution` were gone, and the question was only inside the prompt."""
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]
    for second, kept in (("b", ["a", "b"]), (talk, None)):
        path = write("rows.jsonl", jsonl({"problem": "a", "solution": "x #### 1"}, {"problem": second, "solution": 2}))
        run = make_run(path, prompt_column="problem", answer_column="solution")
        train = load_data(run, tiny_tokenizer).train
        assert train["question"][:] == ["a", "b"] and train["answer"][:] == ["x #### 1", "2"]
        assert (train["problem"][:] if "problem" in train.column_names else None) == kept
        assert "solution" not in train.column_names, "text and number"
    path = write("rows.jsonl", jsonl({"problem": "a", "solution": "x #### 1"}))
    names = {"prompt_column": "problem", "answer_column": "solution", "answer_after": "####"}
    row = load_data(make_run(path, **names), tiny_tokenizer).train[0]
    assert (row["answer"], row["solution"]) == ("1", "x #### 1")
    other = write("other.jsonl", jsonl({"prompt": "p", "question": "its own"}))
    sources = [{"source": str(path), "prompt_column": "problem"}, {"source": str(other)}]
    mixed = load_data(make_run(None, sources=sources), tiny_tokenizer).train
    assert mixed["question"][:] == ["a", "its own"] and "problem" not in mixed.column_names


PASSAGE = "Normans came from Norway."
ASKED = f"{PASSAGE}\n\nWhere from?"
TALK = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi!"}]
TALK += [{"role": "user", "content": ASKED}]


@pytest.mark.parametrize("prompt", [ASKED, TALK], ids=["text", "messages"])
@pytest.mark.parametrize("kind", ["jsonl", "rows", "parquet"])
def test_a_column_question_of_the_file_s_own_is_not_taken_for_the_user_s_message(
    make_run, write, tiny_tokenizer, tmp_path, prompt, kind
):
    """SQuAD's `question` lacks the passage that its prompt has: judges and reward models never saw it."""
    rows = [{"prompt": prompt, "question": "Where from?", "answer": "Norway"}]
    path = write("squad.jsonl", jsonl(*rows))
    if kind == "parquet":
        path = tmp_path / "squad.parquet"
        datasets.Dataset.from_list(rows).to_parquet(path)
    run = make_run(path)
    given = rows if kind == "rows" else None
    (row,) = load_data(run, tiny_tokenizer, rows=given).train.to_list()
    assert (row["question"], row["user_message"], row["answer"]) == ("Where from?", ASKED, "Norway")
    assert prepare_data(run, tiny_tokenizer, given).train.row(0) == row, "cheap checks and rewards see the same row"
    form = ToolFormat(build_tokenizer("untaught"))
    shown = form.observe(row, " (1 of 2)")
    assert shown == row["prompt"].replace(ASKED, f"{ASKED} (1 of 2)") and PASSAGE in shown
    seen = []

    def reads_messages(prompts, completions, **columns):
        seen.append([prompts[0][0]["content"], completions[0][0]["content"]])
        return [1.0]

    guard(reads_messages).score(**{name: [value] for name, value in row.items() if name != "prompt"},
                                prompts=[row["prompt"]], completions=["From Norway."])  # fmt: skip
    assert seen == [[ASKED, "From Norway."]]


def test_only_sources_with_a_column_question_get_another_for_the_user_s_message(make_run, write, tiny_tokenizer):
    """In a mix rows without such a column have the user's message in both; a column `user_message` stays."""
    squad = write("squad.jsonl", jsonl({"prompt": ASKED, "question": "Where from?", "answer": "Norway"}))
    sums = write("sums.jsonl", jsonl({"prompt": "1+1=", "answer": "2"}))
    talks = write("talks.jsonl", jsonl({"question": TALK, "answer": "Norway"}))
    named = {"source": str(talks), "prompt_column": "question"}
    sources = [{"source": str(squad)}, {"source": str(sums)}, named]
    mixed = load_data(make_run(None, sources=sources), tiny_tokenizer).train
    assert mixed["question"][:] == ["Where from?", "1+1=", ASKED] and mixed["user_message"][:] == [ASKED, "1+1=", ASKED]
    plain = load_data(make_run(None, sources=sources[1:]), tiny_tokenizer).train
    assert plain["question"][:] == ["1+1=", ASKED] and "user_message" not in plain.column_names
    alone = load_data(make_run(sums), tiny_tokenizer).train
    assert alone.column_names == ["prompt", "answer", "question"]
    own = write("own.jsonl", jsonl({"prompt": "p", "question": "q", "user_message": "mine"}))
    assert load_data(make_run(own), tiny_tokenizer).train["user_message"][:] == ["mine"]
    data = load_data(make_run(squad, test_source=str(sums)), tiny_tokenizer)
    assert data.train["user_message"][:] == [ASKED] and "user_message" not in data.test.column_names


NULLS = {"null.jsonl": None, "blank.jsonl": " ", "nan.jsonl": float("nan")}


@pytest.mark.parametrize("name", [*NULLS, "rows.csv", "rows.parquet"])
def test_rows_without_an_answer(make_run, write, tmp_path, tiny_tokenizer, capsys, name):
    """A file of sums and free texts was refused for answers that no reward needs; nulls differ by format."""
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


def test_a_column_without_one_answer_is_no_column_of_answers(make_run, tiny_tokenizer):
    """Every row of a wrong column passed as a row without an answer, and the answer reward never scored one."""
    rows = [{"prompt": "a", "answer": None}, {"prompt": "b", "answer": ""}]
    with pytest.raises(DataError, match=r"no row has an answer.*data\.answer_column"):
        load_data(make_run(reward=BOTH), tiny_tokenizer, rows=rows)
    assert load_data(make_run(), tiny_tokenizer, rows=rows).train["answer"][:] == [None, None]
    run = make_run(reward=BOTH)
    run.rewards[1].weight = 0.0  # only a metric: rows without an answer would earn nothing at all
    with pytest.raises(DataError, match="the list of rows, row 2: no answer, and each reward with a weight compares"):
        load_data(run, tiny_tokenizer, rows=[{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": None}])


def test_num_prompts_draws_from_the_whole_source(make_run, tiny_tokenizer):
    """Files are often sorted by difficulty: the first thousand rows are then the easy ones."""
    rows = [{"prompt": str(number), "answer": "1"} for number in range(200)]
    data = load_data(make_run(num_prompts=20), tiny_tokenizer, rows=rows)
    numbers = [int(prompt.split("\n")[1].removesuffix("<|im_end|>")) for prompt in data.train["prompt"]]
    assert len(set(numbers)) == 20 and numbers == sorted(numbers) and max(numbers) > 100
