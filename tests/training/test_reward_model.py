"""A reward model from preferences: one form of text in training and use, its measures, and runs that use it."""

import functools
import json
import random
import shutil
import signal

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from rloo_kit import load_config, read_rollouts, train_reward_model
from rloo_kit.cli import app
from rloo_kit.data.chat import render_prompt, resolve_family
from rloo_kit.errors import ConfigError, DataError, NonFiniteError, RlooKitError, RunExistsError
from rloo_kit.graders.scoring_model import RewardModel, TextForm
from rloo_kit.models.source import find_source
from rloo_kit.results.intervals import clustered
from rloo_kit.runs.folder import open_folder
from rloo_kit.training import reward_model
from rloo_kit.training.reward_model import (
    Pair,
    RewardModelResult,
    load_classifier,
    load_pairs,
    measure_pairs,
    merge_adapter,
)
from tests.conftest import make_tiny_tokenizer
from tests.loop.conftest import lines, status

TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "2+2=?"}]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
DOT = "data:image/gif;base64,R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs="
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BOS = "{{ bos_token }}" + CHATML + OPENING


def make_rows(number=40, seed=0):
    """Preferences whose better answer has a `b` and whose worse one has not, of lengths that say nothing."""
    rng = random.Random(seed)
    rows = []
    for n in range(number):
        good, bad = ("".join(rng.choice("aei") for _ in range(rng.randint(3, 9))) for _ in range(2))
        rows.append({"prompt": f"add {n}", "chosen": f"b{good}", "rejected": bad})
    return rows


@pytest.fixture
def load(write_config, tmp_path):
    """`load(*overrides, rows=...)`: the run of the tiny model with preferences in a file."""

    def prepare(*overrides, rows=None):
        text = "".join(json.dumps(row) + "\n" for row in rows or make_rows())
        (tmp_path / "pairs.jsonl").write_text(text)
        return load_config(write_config(), f"reward_model.source={tmp_path / 'pairs.jsonl'}", *overrides)

    return prepare


def tokenizer_of(kind, request):
    if kind.startswith("qwen3"):
        return request.getfixturevalue("qwen3_tokenizer"), {"on": True, "off": False}.get(kind[6:])
    tokenizer = make_tiny_tokenizer()
    templates = {"instruct": CHATML + OPENING, "bos": BOS, "plain": None}
    tokenizer.chat_template = templates.get(kind, tokenizer.chat_template)
    if kind == "bos":
        tokenizer.bos_token = "<|endoftext|>"
    return tokenizer, None


QWEN3 = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3-on", "qwen3-off")]


@pytest.mark.parametrize("kind", ["thinking", "instruct", "bos", "plain", *QWEN3])
def test_training_and_a_run_read_the_same_ids_which_are_trls(kind, request):
    """A reward model that scores other ids than it was trained on ranks by a token that it never read."""
    tokenizer, enable_thinking = tokenizer_of(kind, request)
    prompt = "2+2=?" if kind == "plain" else TALK
    answers = {
        side: text if kind == "plain" else [{"role": "assistant", "content": text}]
        for side, text in {"chosen": "It is 4.", "rejected": "5"}.items()
    }
    args = trl.RewardConfig("unused", use_cpu=True, bf16=False)
    rows = Dataset.from_list([{"prompt": prompt} | answers]).to_iterable_dataset()  # not hashed with the tokenizer
    (by_trl,) = trl.RewardTrainer._prepare_dataset(None, rows, tokenizer, args, "train")
    form, family = TextForm(tokenizer, ends=True), resolve_family(tokenizer, "")
    rendered = render_prompt(tokenizer, prompt, family, enable_thinking)
    for side, ids in (("chosen", by_trl["chosen_ids"]), ("rejected", by_trl["rejected_ids"])):
        text = answers[side] if kind == "plain" else answers[side][0]["content"]
        assert form.encode(prompt, answers[side]) == ids, "as a conversation"
        assert form.encode(rendered, text) == ids, "as a run passes it"
    assert family == {"plain": "plain", "thinking": "thinking", "qwen3-on": "hybrid"}.get(kind, family)


def test_a_prompt_of_another_template_becomes_the_question(tiny_tokenizer):
    """A reward model of another family read the policy's control tokens as text."""
    form = TextForm(tiny_tokenizer)
    foreign = "[INST] 2+2=? [/INST]"
    asked = [{"role": "user", "content": "2+2=?"}]
    assert form.encode(foreign, "4", "2+2=?") == form.encode(asked, "4") != form.encode(foreign, "4")
    assert tiny_tokenizer.decode(form.encode(foreign, "4")) == f"{foreign}4"


FILES = {"config.yaml", "versions.json", "status.json", "metrics.jsonl", "result.json", "reward_model"}
FAST = (
    "reward_model.test_size=0.3", "reward_model.num_train_epochs=6", "reward_model.learning_rate=0.01",
    "rloo.max_steps=1",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora", ["reward_model.lora=null", "reward_model.lora={r: 8, alpha: 32}"], ids=["full", "lora"]
)
def test_it_learns_a_rule_and_a_run_uses_it(load, lora, tmp_path, monkeypatch, write_config):
    """The whole road by its commands: accuracy, files, the printed entry in a config, the published recipe's call."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    load()
    command = ["reward-model", str(write_config()), "reward_model.source=pairs.jsonl", *FAST, lora]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "outputs" / "tiny-reward-model"
    entry = "{name: reward_model, params: {model: outputs/tiny-reward-model/reward_model}}"
    assert f"\n  - {entry}\n" in done.stdout
    assert max(map(len, done.stdout.partition("held-out pairs")[2].partition("to use it")[0].splitlines())) <= 80
    found = json.loads((folder / "result.json").read_text())
    assert found["measures"]["accuracy"]["low"] > 0.5 and found["steps"] == 24 == len(lines(folder, "metrics.jsonl"))
    assert status(folder)["state"] == "finished" and load_config(folder / "config.yaml").reward_model is not None
    saved = folder / "reward_model"
    assert not list(saved.glob("adapter*")) and {path.name for path in folder.glob("[!.]*")} == FILES
    model = AutoModelForSequenceClassification.from_pretrained(saved)
    assert model.config.num_labels == 1 and AutoTokenizer.from_pretrained(saved).chat_template

    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2 and "--overwrite" in again.output + again.stderr
    run = load_config(write_config(), f"rewards=[{entry}]", "rloo.max_steps=1", "reward_model=null")
    done = CliRunner().invoke(app, ["train", str(write_config()), f"rewards=[{entry}]", "rloo.max_steps=1"])
    assert done.exit_code == 0, done.output
    row = lines(run.folder, "metrics.jsonl")[0]
    assert "rewards/reward_model/mean" in row


def test_a_published_recipe_runs(start, tiny_folder, tmp_path):
    """`reward_model.get_rewards(prompts, completions)`, and the same object as `reward_funcs`, give the same values."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=1)
    model.save_pretrained(tmp_path / "classifier")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path / "classifier")
    scorer = RewardModel(str(tmp_path / "classifier"))
    result = start("rloo.max_steps=1", rewards=[scorer])
    rows = list(read_rollouts(result.folder))
    alone = scorer.get_rewards([row["prompt"] for row in rows], [row["completion"] for row in rows])
    assert len(rows) == 8 and all(isinstance(value, float) for value in alone)
    assert [row["rewards"]["reward_model"] for row in rows] == pytest.approx(alone, abs=1e-5)


THOUGHT, ANSWER = "hm</think>", [104, 109, 260]


def test_of_a_thinking_model_it_reads_the_answer_alone(tiny_folder, tmp_path):
    """With the thought in front its length decided; a completion that never closes it gets the call's lowest score."""
    AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=1).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.save_pretrained(tmp_path)
    prompt = render_prompt(tokenizer, TALK, "thinking")
    thinks = RewardModel(str(tmp_path), think_end_id=260, thinking=True, decode=tokenizer.decode)
    ids = [[*ANSWER, 52], [*ANSWER, 53], [104, 109], ANSWER]
    scores = thinks([prompt] * 4, [f"{THOUGHT}4", f"{THOUGHT}5", "hm", THOUGHT], ids)
    plain = RewardModel(str(tmp_path)).get_rewards([TALK] * 2, ["4", "5"])
    assert scores == pytest.approx([*plain, min(plain), min(plain)], abs=1e-6) and plain[0] != plain[1]
    assert thinks([prompt], ["hm"], [[104, 109]]) == [None]
    with pytest.raises(ValueError, match="completion_ids"):
        thinks.get_rewards([prompt], [f"{THOUGHT}4"])
    whole = RewardModel(str(tmp_path))([prompt], [f"{THOUGHT}4"])
    assert whole != pytest.approx(plain[:1], abs=1e-6)


def pairs_of(*lengths):
    """Pairs whose chosen and rejected answers have these lengths, each of its own prompt."""
    return [
        Pair(f"p{n}", ("c" * first, "r" * second), ([0] * first, [0] * second))
        for n, (first, second) in enumerate(lengths)
    ]


def measure(pairs, score):
    """The result of measuring a reward `score(answer)`."""
    result = RewardModelResult(None, 0, 0, None, {}, [])
    measure_pairs(pairs, lambda prompts, answers: [score(answer) for answer in answers], result)
    return {name: found.value for name, found in result.measures.items()}, " ".join(result.warnings), result


def test_a_model_of_length_is_found_out():
    """A model that counts tokens is 75 % right where three of four preferences are for the longer answer."""
    found, warnings, result = measure(pairs_of(*[(5, 3)] * 30, *[(3, 5)] * 10, (4, 4)), lambda text: float(len(text)))
    assert found["accuracy"] == found["accuracy of length alone"] == pytest.approx(30.5 / 41)
    assert found["accuracy, chosen is longer"] == 1.0 and found["accuracy, chosen is shorter"] == 0.0
    assert found["rank correlation of score and length"] == 1.0
    assert found["margin, chosen - rejected"] == pytest.approx((30 * 2 - 10 * 2) / 41)
    assert result.measures["accuracy, chosen is shorter"].count == 10
    assert "length alone" in warnings and "shorter" in warnings and "reward_model.num_train_epochs" in warnings

    found, warnings, _ = measure(pairs_of(*[(5, 3)] * 20, *[(3, 5)] * 20), lambda text: float(text[0] == "c"))
    assert found["accuracy"] == 1.0 and found["rank correlation of score and length"] == 0.0 and not warnings
    found, warnings, _ = measure(pairs_of(*[(3, 5)] * 40), lambda text: -float(len(text)))
    assert found["accuracy of length alone"] == 1.0 and "length alone" in warnings, "the shorter one wins as well"


def test_pairs_of_a_prompt_are_one_sample():
    """Ten pairs of one prompt are no ten independent ones."""
    pairs = pairs_of(*[(5, 3)] * 8)
    repeated = [Pair(pairs[n // 4].prompt, pair.answers, pair.ids) for n, pair in enumerate(pairs)]
    _, _, result = measure(repeated, lambda text: float(text[0] == "c"))
    assert result.measures["accuracy"].ends == clustered([1.0, 1.0], 1).ends


def test_conversations_and_texts_are_the_same_pairs(load, tiny_tokenizer):
    """Data sets hold the prompt in a column, or the whole conversation in both answers, thoughts included."""
    rows = make_rows(12)
    talks = [
        {side: [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": f"x</think>{row[side]}"}]
         for side in ("chosen", "rejected")}
        for row in rows
    ]  # fmt: skip
    run, whole = load(rows=rows), load("reward_model.prompt_column=chosen", rows=talks)
    by_text = load_pairs(load(rows=rows), run.reward_model, tiny_tokenizer)
    load(rows=talks)
    by_talk = load_pairs(whole, whole.reward_model, tiny_tokenizer)
    assert by_text == by_talk
    trained, held_out = by_text
    assert len(trained) == 11 and len(held_out) == 1


def test_no_prompt_is_on_both_sides_and_what_is_left_out_is_counted(load, tiny_tokenizer, capsys):
    """Pairs of one prompt on both sides show what was learnt by heart; a cut pair decides by a part of an answer."""
    rows = [row | {"chosen": row["chosen"] + suffix} for row in make_rows(20) for suffix in ("", "u")]
    rows += [{"prompt": "a", "chosen": "x", "rejected": "x"}, {"prompt": "a", "chosen": "x", "rejected": " "}]
    rows += [{"prompt": "a", "chosen": "x", "rejected": "y" * 200}]
    run = load("reward_model.test_size=5", rows=rows)
    trained, held_out = load_pairs(run, run.reward_model, tiny_tokenizer)
    assert len(trained) == 30 and len(held_out) == 10
    assert not {pair.prompt for pair in trained} & {pair.prompt for pair in held_out}
    printed = capsys.readouterr().out
    for note in ("1 of 43 pairs, with equal answers", "with an empty answer", "of more than 128 tokens"):
        assert note in printed


BAD = [
    ((), [{"prompt": "a", "better": "x", "rejected": "y"}], DataError, "reward_model.chosen_column"),
    ((), [{"prompt": "a", "chosen": "x", "worse": "y"}], DataError, "columns found: prompt, chosen, worse"),
    ((), [{"question": "a", "chosen": "x", "rejected": "y"}], DataError, "reward_model.prompt_column"),
    ((), [{"prompt": "a", "chosen": "x", "rejected": "x"}] * 3, DataError, "3 of 3 pairs, with equal answers"),
    ((), [{"prompt": "a", "chosen": 4, "rejected": "x"}], DataError, "line 1: an answer is 4"),
    ((), [{"prompt": "a", "chosen": TALK, "rejected": "x"}], DataError, "line 1: a conversation ends with"),
    ((), [{"prompt": "a", "chosen": "y", "rejected": "x", "image": DOT}], DataError, "line 1: the prompt has an image"),
    (("reward_model.learning_rate=1e30",), None, NonFiniteError, "lower reward_model.learning_rate"),
    (("model.load_in_4bit=true", "reward_model.lora=null"), None, ConfigError, "reward_model.lora={}"),
]


@pytest.mark.parametrize(("overrides", "rows", "kind", "words"), BAD, ids=[case[3] for case in BAD])
def test_bad_input_is_named_with_its_key(load, overrides, rows, kind, words):
    """A user has to read which column or key to change, with the place; a model of NaN is never saved."""
    run = load("reward_model.num_train_epochs=3", "run.name=bad", *overrides, rows=rows)
    with pytest.raises(kind) as error:
        train_reward_model(run)
    assert words in str(error.value)
    assert not (run.folder.with_name("bad-reward-model") / "reward_model").exists()


def test_refusals_before_anything_is_written(load, write_config, monkeypatch):
    """Without the section; from a launcher; over a run that trained something else."""
    with pytest.raises(ConfigError, match="reward_model.source=preferences.jsonl"):
        train_reward_model(load_config(write_config()))
    run = load()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one process, and there are 2"):
        train_reward_model(run)
    monkeypatch.delenv("WORLD_SIZE")
    other = load("run.name=tiny-reward-model")
    with reward_model.RunDir.create(other) as run_dir:
        run_dir.set_status("finished", step=3)
    with pytest.raises(RunExistsError, match="no reward model's training"):
        train_reward_model(run, overwrite=True)
    assert not (other.folder / "reward_model").exists()


@pytest.fixture
def earlier(load):
    """The folder of an earlier training that took a night, and what is in it."""
    run_dir = open_folder(load(), method="reward_model")
    with run_dir:
        (run_dir / "reward_model").mkdir()
        for name in ("reward_model/model.safetensors", "result.json", "metrics.jsonl"):
            (run_dir / name).write_text("a night")
        run_dir.set_status("finished", step=9)
    return run_dir.folder


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


MISTAKES = {
    "a missing file": ("reward_model.source=missing.jsonl",),
    "a wrong column": ("reward_model.chosen_column=better",),
    "too few prompts": ("reward_model.test_size=40",),
    "an adapter as base": ("reward_model.model={adapter}",),
    "a folder that is no base": ("reward_model.model={empty}",),
    "a base whose weights cannot be read": ("reward_model.model={broken}",),
    "4-bit weights without an adapter": ("model.load_in_4bit=true", "reward_model.lora=null"),
    "targets that the base does not have": ("reward_model.lora={{target_modules: [q_prj]}}",),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_refused_deletes_nothing(load, earlier, mistake, tiny_folder, tmp_path):
    """A night's reward model was deleted for a misspelt column, which was read afterwards."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    record = {"base_model_name_or_path": str(tiny_folder), "peft_type": "LORA"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(record))
    shutil.copytree(tiny_folder, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    places = {name: tmp_path / name for name in ("empty", "adapter", "broken")}
    run, before = load(*(word.format(**places) for word in MISTAKES[mistake])), content(earlier)
    with pytest.raises(Exception) as caught:  # of a library, for weights that cannot be read
        train_reward_model(run, overwrite=True)
    assert isinstance(caught.value, RlooKitError) or mistake == "a base whose weights cannot be read"
    assert content(earlier) == before


@pytest.mark.slow
def test_an_earlier_reward_model_may_be_its_own_base(load):
    """`reward_model.model` named the folder that `overwrite` deletes: its weights were gone before they were read."""
    quick = ("reward_model.max_steps=1", "reward_model.lora=null")
    first = train_reward_model(load(*quick))
    again = train_reward_model(load(*quick, f"reward_model.model={first.folder}"), overwrite=True)
    assert again.folder == first.folder and (again.folder / "model.safetensors").is_file()
    assert load_config(again.folder.parent / "config.yaml").model.name != str(first.folder), "as the run has it"


def partial_of(folder):
    return functools.partial(RewardModel(folder), answer=None)


@pytest.mark.parametrize("make", [str, partial_of], ids=lambda make: make.__name__)
def test_a_resume_notices_another_reward_model(start, tiny_folder, tmp_path, make):
    """The verdict compared the held-out reward of one reward model with that of another in its folder."""

    def train_again(seed):
        torch.manual_seed(seed)
        AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=1).save_pretrained(tmp_path / "rm")
        AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path / "rm")

    def go(steps, **options):
        return start(f"rloo.max_steps={steps}", "rloo.save_steps=1", rewards=[make(str(tmp_path / "rm"))], **options)

    train_again(0)
    folder = go(1).folder
    inputs = json.loads((folder / "inputs.json").read_text())
    name = f"weights of the reward model {tmp_path / 'rm'}"
    assert go(2, resume=True).steps == 2 and name in inputs
    train_again(1)
    with pytest.raises(ConfigError, match=f"Changed: {name}[.].*--accept-changes"):
        go(3, resume=True)
    (folder / "before.json").write_text("{}")
    assert go(3, resume=True, accept_changes=True).steps == 3 and not (folder / "before.json").exists()
    assert f"from step 2 on other inputs: {name}" in status(folder)["changed"]


def test_ctrl_c_saves_and_measures_what_is_trained_so_far(load, monkeypatch):
    """Ctrl-C must not lose the training, and the trainer's own checkpoint would be a second copy of the weights."""
    presses = iter([signal.SIGINT])
    monkeypatch.setattr(reward_model._ProgressLine, "_line", lambda *_: list(map(signal.raise_signal, presses)))
    result = train_reward_model(load("reward_model.num_train_epochs=2"))
    assert (result.stopped, result.steps) == ("interrupted", 2) and "accuracy" in result.measures
    folder = result.folder.parent
    assert status(folder)["state"] == "interrupted" and {path.name for path in folder.glob("[!.]*")} == FILES


@pytest.mark.parametrize("four_bit", [False, True])
def test_the_merged_classifier_scores_like_the_trained_one(load, four_bit):
    """PEFT's merge into 4-bit layers is off by 0.2; the head is trained whole, and would be lost with the adapter."""
    run = load(f"model.load_in_4bit={str(four_bit).lower()}", "reward_model.lora={r: 4, alpha: 16}")
    model = load_classifier(run, find_source(run), run.reward_model.lora)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "score" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.config.get_text_config().pad_token_id = 256
    ids = torch.randint(0, 250, (3, 12))
    with torch.no_grad():
        before = model(ids).logits
        after = merge_adapter(model)(ids).logits
    torch.testing.assert_close(after, before, atol=2e-4, rtol=1e-3)
    assert before.std() > 0.01
