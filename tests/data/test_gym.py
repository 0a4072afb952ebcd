"""Sources that the library reasoning-gym draws: rows, options, levels, seeds, and what cannot be drawn."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from rloo_kit.config.run import RunConfig, load_config
from rloo_kit.data.load import load_data, prepare_data
from rloo_kit.data.sources import Part
from rloo_kit.errors import ConfigError, DataError, SetupError
from rloo_kit.tasks import gym
from rloo_kit.tasks.gym import GYM_COLUMN, read_gym
from tests.data.conftest import InPlace, jsonl, plain

SUMS, SORTING = "reasoning_gym/chain_sum", "reasoning_gym/number_sorting"
EIGHT = Part(SUMS, count=8, count_key="data.num_prompts")
REWARD = "reasoning_gym_score"
pytestmark = pytest.mark.skipif(not gym.is_importable("reasoning_gym"), reason="make reasoning-gym has not been run")
SHORT, LEVEL = {"max_terms": 3, "max_digits": 2}, {"min_terms": 5, "max_terms": 5}
LONG = {"max_prompt_length": 2000}


@pytest.fixture
def prepare(make_run, tiny_tokenizer, monkeypatch):
    """`prepare(**data)`: the prompts of a run on sums, or another source, drawn in this process."""

    def build(source=SUMS, reward=REWARD, **data):
        source = "" if "sources" in data else source
        return prepare_data(make_run(source, reward, **LONG | data), tiny_tokenizer)

    monkeypatch.setattr(gym, "Worker", InPlace)
    return build


@pytest.fixture
def fake(monkeypatch):
    """`fake(count, **options)`: rows of the stand-in for the library, which may hang or die."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("fake_gym")))
    return lambda count, **options: read_gym(replace(EIGHT, options=options, count=count), 100)


@pytest.mark.slow
def test_rows_hold_question_answer_and_what_scores_them(make_run, tiny_tokenizer):
    """The verifier needs the entry again; nested values of several types survive as JSON, not in Arrow's columns."""
    run = make_run(SUMS, REWARD, num_prompts=12, options=SHORT, test_size=2, **LONG)
    data = load_data(run, tiny_tokenizer)
    assert (len(data.train), len(data.test)) == (10, 2)
    assert set(data.train.column_names) == {"prompt", "answer", "question", GYM_COLUMN}
    assert data.train.features[GYM_COLUMN] == datasets.Value("string")
    for row in data.train:
        found = json.loads(row[GYM_COLUMN])
        assert (found["task"], found["options"]) == ("chain_sum", SHORT)
        assert found["entry"]["question"] == plain([row["prompt"]])[0] and found["entry"]["answer"] == row["answer"]
        expression = found["entry"]["metadata"]["expression"]
        assert eval(expression) == int(row["answer"]) and len(expression.split()) <= 5
    again = load_data(run, tiny_tokenizer)
    assert again.train.to_list() == data.train.to_list() and again.test.to_list() == data.test.to_list()


@pytest.mark.slow
def test_test_rows_are_drawn_by_seeds_of_their_own(prepare):
    """Item i is drawn by seed + i: a test source of the next seed had all of the training questions but one."""
    found = prepare(num_prompts=100, test_source=SUMS, test_size=50)
    assert len(found.train.rows) == 100 and len(found.test.rows) == 50
    assert not set(found.train.texts) & set(found.test.texts)
    short = {"min_terms": 1, "max_terms": 2, "max_digits": 1}  # chance repeats stay in the test set
    found = prepare(num_prompts=100, test_source=SUMS, test_size=20, options=short)
    sides = [{found_side.texts[row] for row in found_side.rows} for found_side in (found.train, found.test)]
    assert len(sides[1]) == 20 and not sides[0] & sides[1]
    assert any("their prompts are held out too" in note for note in found.notes)
    assert len(prepare(num_prompts=40, test_source=SORTING).test.rows) == 200


def test_only_one_side_is_of_the_library(prepare, write):
    """A benchmark in a file next to drawn training rows, and the other way round. The first has no use for columns."""
    rows = write("rows.jsonl", jsonl(*({"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20))))
    both = ("answer_reward", REWARD)
    found = prepare(num_prompts=30, test_source=str(rows), reward=both, answer_column="answer", split="other")
    assert (len(found.train.rows), len(found.test.rows)) == (30, 20)
    found = prepare(source=rows, test_source=SUMS, test_size=7, reward="answer_reward", options=SHORT)
    assert json.loads(found.test.row(0)[GYM_COLUMN])["options"] == SHORT, "there is no other task to take them"
    assert (len(found.train.rows), len(found.test.rows)) == (20, 7)


def test_a_mix_with_the_embedded_task_and_a_file(prepare, make_run, write, tiny_tokenizer):
    """The column has to be null for the rows of other sources, and each entry has its own options."""
    rows = write("rows.jsonl", jsonl(*({"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(60))))
    sources = [
        {"source": SUMS, "weight": 2, "options": SHORT},
        {"source": SUMS, "options": {"min_terms": 4}},
        {"source": "embedded/addition"},
        {"source": str(rows), "answer_after": None},
    ]
    run = make_run(sources=sources, num_prompts=100, reward=("answer_reward", REWARD), answer_after=None, **LONG)
    found = load_data(run, tiny_tokenizer).train
    entries = [None if text is None else json.loads(text) for text in found[GYM_COLUMN]]
    assert len(found) == 100 and sum(entry is None for entry in entries) == 40
    assert sum(entry is not None and entry["options"] == SHORT for entry in entries) == 40
    assert sum(entry is not None and entry["options"] == {"min_terms": 4} for entry in entries) == 20
    own = {f"{SUMS} {json.dumps(SHORT)}", f'{SUMS} {{"min_terms": 4}}'}
    assert set(found["source"]) == {*own, "embedded/addition", str(rows)} and None not in found["answer"]
    questions = [entry["entry"]["question"] for entry in entries if entry]
    assert len(set(questions)) >= 59, "two entries of one task draw from separate seeds"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"source": "reasoning_gym/chain_sun"}, r"^data\.source: .*no task 'chain_sun'; the nearest: chain_sum"),
        ({"source": "reasoning_gym/gsm_symbolic"}, r"^data\.source: .*gsm_symbolic is refused: .*docs/data\.md"),
        ({"options": {"min_trms": 2}}, r"^data\.options\.min_trms: .*no such option; it has min_terms \(2\)"),
        ({"options": {"min_terms": "2"}}, r"^data\.options\.min_terms is '2'; it takes a whole number, .* is 2$"),
        ({"options": {"allow_negation": "no"}}, r"^data\.options\.allow_negation is 'no'; it takes true or false"),
        ({"options": {"min_terms": 9}}, r"^data\.options: .*refuses .*max_terms must be >= min_terms"),
        ({"options": {"seed": 3}}, r"^data\.options\.seed: remove it"),
        ({"num_prompts": 10**9}, r"^data\.num_prompts asks for 1000000000 .*at most 100000"),
        ({"sources": [{"source": SUMS, "options": {"x": 1}}]}, r"^data\.sources\.0\.options\.x: .*no such option"),
        (
            {"num_prompts": 50, "options": {"min_terms": 1, "max_terms": 1, "max_digits": 1}},
            r"gave 10 different questions in \d+ draws; 50 were .*data\.num_prompts=10 or .* another data\.options",
        ),
    ],
)
def test_what_cannot_be_drawn_is_said_with_its_key(prepare, data, words):
    """A traceback of the library's names no key; an error named keys that were not in the file."""
    with pytest.raises(DataError, match=words):
        prepare(**{"num_prompts": 5} | data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"options": {"min_terms": float("nan")}}, r"data\.options\.min_terms: is nan"),
        ({"source": "rows.csv", "options": {"a": 2}}, r"data: options is set, but rows\.csv is not a reasoning_gym"),
        ({"split": "all", "answer_after": "##"}, r"data: split=all, answer_after=##: .*remove them"),
        ({"prompt_column": "q", "test_source": SORTING}, r"data: prompt_column=q: .*remove it"),
        ({"sources": [{"source": SUMS, "answer_column": "a"}]}, r"data\.sources\.0: answer_column=a: .*remove it"),
        ({"test_split": "test"}, r"data\.test_split|test_split is 'test'.*remove data\.test_split"),
    ],
)
def test_keys_that_make_no_sense(tmp_path, data, words):
    """Each is refused with the configuration, before anything is drawn."""
    file = tmp_path / "run.yaml"
    file.write_text("model: {name: my-model}\nrewards: [{name: reasoning_gym_score}]\nrloo: {max_steps: 1}\n")
    source = {} if "sources" in data else {"source": SUMS}
    with pytest.raises(ConfigError, match=words):
        load_config(file, data=source | data)


def test_a_dataset_is_made_once(prepare, monkeypatch):
    """Made again for every 500 rows, 10,000 rows of acre took 103 s in place of 16 s."""
    make, made = gym.make_dataset, []
    monkeypatch.setattr(gym, "make_dataset", lambda *args, **where: made.append(where["size"]) or make(*args, **where))
    monkeypatch.setattr(gym, "PER_CALL", 10)
    assert len(prepare(num_prompts=40, options={"max_digits": 7}, test_size=5).train.rows) == 35
    assert [size for size in made if size > 1] == [64]


@pytest.mark.slow
def test_a_seed_that_hangs_is_left_out(fake, monkeypatch):
    """A seed that never comes back stopped a run's start; rows whose stored answer scores nothing go too."""
    monkeypatch.setattr(gym, "ROW_LIMIT_S", 1.0)
    found = fake(8, hang_at=3)
    rows = [json.loads(row)["entry"]["metadata"]["index"] for row in found.others[GYM_COLUMN]]
    assert rows == [0, 1, 2, 4, 7, 8, 9, 10] and found.prompts[3] == "104 + 1 ="
    assert [note.partition(": ")[2] for note in found.notes] == [
        "1 questions that took more than 1 s to draw are left out",
        "1 questions whose stored answer the verifier does not score 1 are left out",
    ]


def test_a_process_that_dies_is_said(fake, monkeypatch):
    """Guards against a crash in the library, or the library itself, that ends without the command that repairs it."""
    with pytest.raises(DataError, match=r"^data\.source: .*its process ended its process with exit code 3\. If the li"):
        fake(8, die_at=2)
    monkeypatch.setenv("RLOO_KIT_BROKEN_GYM", "1")
    with pytest.raises(DataError, match=r"cannot be drawn: ImportError: libgym\.so is missing\. .*make reasoning"):
        fake(8)


@pytest.mark.slow
def test_what_takes_too_long_is_said_with_its_key(fake, monkeypatch):
    """A billion numbers to sort, or a sieve of a large max_n: the run stood still without a word."""
    with pytest.raises(DataError, match=r"^data\.options: .*MemoryError"):
        fake(8, memory=10**13)
    monkeypatch.setattr(gym, "BUILD_LIMIT_S", 0.3)
    with pytest.raises(DataError, match=r"^data\.options: .*took more than 0\.3 s to set up .*{'build_s': 60}"):
        fake(8, build_s=60)


def test_options_go_to_the_tasks_that_they_are_written_for(prepare):
    """The task of a test source got the options of another."""

    def first(side, **data):
        return json.loads(getattr(prepare(**data), side).row(0)[GYM_COLUMN])["options"]

    entry = {"source": SUMS, "options": SHORT}
    assert first("train", num_prompts=20, sources=[entry], options={"min_terms": 4}) == SHORT
    assert first("train", num_prompts=20, sources=[{"source": SUMS}], options=SHORT) == SHORT
    assert first("test", num_prompts=10, test_source=SORTING, test_size=5, options=SHORT) == {}
    assert first("test", num_prompts=10, test_source=SUMS, test_size=5, options=SHORT) == SHORT


def test_rows_that_no_reward_scores(prepare, write):
    """A third of a mix was trained on without any reward; a file alone ended in an error of the reward's."""
    rows = str(write("rows.jsonl", jsonl(*({"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20)))))
    mix = [{"source": SUMS}, {"source": rows}]
    with pytest.raises(DataError, match=r"^data\.sources\.1\.source: .*rows\.jsonl has no rows .*add a reward"):
        prepare(sources=mix, num_prompts=10)
    assert len(prepare(sources=mix, num_prompts=10, reward=(REWARD, "answer_reward")).train.rows) == 10
    for given in ({"source": rows}, {"sources": mix[1:], "reward": (REWARD, "answer_reward")}):
        with pytest.raises(DataError, match=r"^data\.sources?: .* a reward other than reasoning_gym_score"):
            prepare(**given)
    drawn = prepare(num_prompts=10).train
    kept = [{"prompt": f"Question {n}", GYM_COLUMN: drawn.row(n)[GYM_COLUMN]} for n in range(10)]
    kept = str(write("kept.jsonl", jsonl(*kept)))
    assert len(prepare(source=kept).train.rows) == len(prepare(sources=[{"source": kept}]).train.rows) == 10


def test_what_keeps_a_task_from_being_drawn(prepare, monkeypatch):
    """An empty list of rows was an IndexError; an ImportError in a child does not say how to install the library."""
    with (
        monkeypatch.context() as patch,
        pytest.raises(DataError, match=r"^data\.source: .*500 .*another data\.options$"),
    ):
        patch.setattr(gym, "_score", lambda *_: 0.0)
        prepare()
    monkeypatch.setattr(gym, "is_importable", lambda name: False)
    with pytest.raises(SetupError, match=r"^data\.source: .*make reasoning-gym, or pip install"):
        prepare(num_prompts=5)


def test_a_task_is_no_hub_id_and_has_no_demonstrations(make_run, tiny_tokenizer):
    """owner/name is a dataset of the hub; SFT on bare answers unteaches thinking; the embedded model only adds."""
    from rloo_kit.export.formats import hub_id, public_name
    from rloo_kit.tasks.worked import load_worked

    assert hub_id(SUMS) is None and public_name(SUMS) == SUMS
    with pytest.raises(ConfigError, match=r"data\.source is reasoning_gym/chain_sum, which has no demonstrations"):
        load_worked(make_run(SUMS, REWARD), tiny_tokenizer, [])
    embedded = {"model": {"name": "embedded/thinking"}, "rewards": [{"name": REWARD}], "rloo": {"max_steps": 1}}
    with pytest.raises(ValueError, match=r"knows only addition, but data\.source is reasoning_gym/chain_sum"):
        RunConfig(data={"source": SUMS}, **embedded)
