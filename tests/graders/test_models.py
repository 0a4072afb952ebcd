"""math-verify in its process, and trained reward models."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from rloo_kit.errors import WholeBatchError
from rloo_kit.graders.scoring_model import RewardModel, find_model_fault
from rloo_kit.graders.verifier import MathAnswerReward, ReasoningGymScore
from rloo_kit.rewarding.guard import NamedReward, guard
from rloo_kit.rewarding.worker import read_sources
from rloo_kit.runs.find import digest_weights

END = 151668
HERE = Path(__file__).parent
FORMS = (
    r"\boxed{%s}",
    r"Therefore, the answer is $\boxed{%s}$.",
    "**Answer**\n\\[\n\\boxed{%s}.\n\\]",
    "So it is $%s$.",
    "x = 2\n\n**Answer:** %s",
)


@pytest.fixture(scope="module")
def math_reward() -> Any:
    """One reward, and so one process, for all tests here."""
    pytest.importorskip("math_verify", reason="the extra 'math' is not installed")
    reward = MathAnswerReward(answer_timeout_s=5.0)  # a worker that restarts after a hang has to import first
    yield reward
    reward.worker.close()


def judge(reward: MathAnswerReward, *pairs: tuple[str, Any]) -> list[float | None]:
    return reward(
        prompts=["p"] * len(pairs),
        completions=[f"so</think>{given}" for given, _ in pairs],
        completion_ids=[[7, END, 19, 151645]] * len(pairs),
        answer=[expected for _, expected in pairs],
    )


def check_all(reward: MathAnswerReward, asked: list[tuple[str, str, float]]) -> None:
    """Each answer, in one of the forms in turn, scores what it should against its gold answer."""
    pairs = [(FORMS[place % len(FORMS)] % text, gold) for place, (text, gold, _) in enumerate(asked)]
    found = [score for start in range(0, len(pairs), 50) for score in judge(reward, *pairs[start : start + 50])]
    assert [one for one, score, row in zip(pairs, found, asked, strict=True) if score != row[2]] == []


@pytest.mark.slow
def test_mathematics_is_compared_as_mathematics(math_reward: MathAnswerReward) -> None:
    """LaTeX compared as text; and math-verify's own limits use a POSIX signal: in a thread every answer was wrong."""
    pairs = [
        (r"It is \boxed{\frac{1}{2}}.", "0.5"),
        ("$1+x^2$", "x^2+1"),
        (r"\boxed{\sqrt2}", r"\sqrt{2}"),
        ("so it must be 42.", "42"),
        ("So with $x=3$, the answer is 42.", "42"),
        (r"Therefore, $x = \frac{1}{3}$, which is 0.333.", r"\frac{1}{3}"),
        ("It costs $5 for one, so the total is $40.", "40"),
        ("Therefore, x = 42", "42"),
        ("Steps: 7, 8.\n\n**Final answer:**\n42 eggs", "42"),
        (r"\boxed{43}", "42"),
        ("", "42"),
    ]
    found = [judge(math_reward, *pairs)]
    thread = threading.Thread(target=lambda: found.append(judge(math_reward, *pairs)))
    thread.start()
    thread.join()
    assert found == [[1.0] * 9 + [0.0, 0.0]] * 2


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_an_answer_is_right_as_a_whole_and_never_by_a_part_of_it(math_reward: MathAnswerReward, every: int) -> None:
    """math-verify took a part of a gold answer without `$`: `(1, 2)` was 2. Each row of the file is an answer of
    MATH-500 (MIT licence), three respellings of it, and a wrong answer that shares a part with it."""
    rows = [json.loads(line) for line in (HERE / "math_answers.jsonl").read_text(encoding="utf-8").splitlines()][
        ::every
    ]
    asked = [(text, row["answer"], 1.0) for row in rows for text in (row["answer"], *row["right"])]
    asked += [(row["wrong"], row["answer"], 0.0) for row in rows] + [(row["answer"], row["wrong"], 0.0) for row in rows]
    assert len(asked) == 6 * len(rows)
    check_all(math_reward, asked)


PARTS = [
    ("(1, 2)", r"(1,2) | \left(1,2\right)", "1 | 2 | (2,1) | [1,2] | 1, 3 | 12"),
    (r"x \in [-2,7]", "[-2,7] | x\\in[-2, 7]", "7 | (-2,7) | -2"),
    (r"\frac{1}{2}, -3", r"-3, 1/2 | -3 \text{ and } \frac12", r"-3 | \frac{1}{2} | 1/2"),
    ("5", r"x = 5 | 5\text{ cm} | 5.0", r"5 or 6 | x = 5 or x = 6 | 5\pi | \foo{5 | \pm 5 | [5, 6] | 4 < 5 | twice 5"),
    ("2516_8", "2516_{8}", "2516 | 2516_9 | 8"),
    ("10:30", "10:30", "10 | 30 | 10:31"),
    (r"\frac{1}{3}", "1/3 | 2/6", "0.333333 | 3 | 1"),  # an approximation is another number
    ("$x^2+1$", "1+x^2", "x^2 | 1 | 2"),
    (r"11,\! 111,\! 100", "11111100 | 11,111,100", "11 | 111 | 100 | 111100"),
    (r"864 \mbox{ inches}^2", r"864 | 864\text{ inches}^2", r"864^2 | 2"),
    ("0", "0.0", r"0.0000001 | x"),
    ("HTT", r"HTT | \text{HTT}", "TTH | HTTH | HT"),  # words, not products
    (r"\text{East}", r"East | \text{east}", r"seat | \text{West}"),
    (r"\text{Yes}", "yes", "no"),
    ("silent", "Silent", "listen"),
    ("der", "der", "red"),
    ("abc", "bac", "abd | ab"),  # products, not words
    ("xyz", "zyx", "xy | xyzz"),
    ("pmn", "mnp", "mn"),
    ("f'(x)", r"f^{\prime}(x)", "f(x) | f''(x)"),
    ("90", "90.0", "90'"),
    (r"\infty", r"infinity | inf | \infty", r"-\infty | infinitely"),
    ("infinity", r"\infty", "-infinity"),
]  # gold, right, wrong


@pytest.mark.slow
def test_neither_gold_nor_answer_is_read_in_part(math_reward: MathAnswerReward) -> None:
    """The same for kinds of answers that the file lacks; a judge that takes parts pays for guessing one of two."""
    check_all(math_reward, [
        (text, gold, expected)
        for gold, *both in PARTS
        for texts, expected in zip(both, (1.0, 0.0), strict=True)
        for text in texts.split(" | ")
    ])  # fmt: skip


@pytest.mark.parametrize("reward", [MathAnswerReward(), ReasoningGymScore()], ids=["math", "gym"])
def test_a_default_id_that_no_completion_has_is_refused(reward: Any) -> None:
    """In a bare TRL trainer with Qwen3.5 or an R1 distillation every answer scored 0: the thinking never closed."""
    batch = {"completions": ["x</think>4", "y</think>4"], "completion_ids": [[1, 248069, 2]] * 2}
    with pytest.raises(ValueError, match="think_end_id is 151668, the default"):
        reward(**batch, answer=["4", "4"], reasoning_gym=[None, None])


def test_unclosed_and_unanswerable_samples(math_reward: MathAnswerReward) -> None:
    """Guards against judging thinking as an answer, and a prompt without a gold answer as wrong."""
    batch = {"completions": ["so 42", "a</think>42"], "completion_ids": [[7, 8], [7, END, 19]]}
    assert math_reward(**batch, answer=["42", None]) == [0.0, None]
    with pytest.raises(ValueError, match="math_answer_reward needs a column 'answer'.*columns found: solution"):
        math_reward(**batch, solution=["42", "42"])
    with pytest.raises(ValueError, match="answer_timeout_s is 0; it must be a finite number above 0"):
        MathAnswerReward(answer_timeout_s=0)


def test_the_answer_of_an_episode_is_in_its_last_turn(math_reward: MathAnswerReward) -> None:
    """Guards against an answer taken from a tool's result or an earlier turn, and thinking that a result closes."""
    talk = [{"role": "assistant", "content": "a</think>41"}, {"role": "tool", "content": "b</think>41"}]
    last = {"role": "assistant", "reasoning_content": "so", "content": "42"}
    batch: dict[str, Any] = {
        "completions": ["so</think>42", [*talk, last], [*talk, last], "42"],
        "completion_ids": [[7, END, 8, 6, END, 9, 7, END, 19]] * 3 + [[7, END, 8, 6, END, 9, 7, 19]],
        "completion_mask": [[1, 1, 1, 0, 0, 0, 1, 1, 1]] * 3 + [[1, 1, 1, 0, 0, 0, 1, 1]],
    }
    assert math_reward(**batch, answer=["42", "42", "41", "42"]) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.slow
def test_an_answer_that_hangs_costs_itself_alone(math_reward: MathAnswerReward) -> None:
    """A tower of powers stopped the run; what the batch had no time for was called wrong, and never checked."""
    quick, hurried = MathAnswerReward(answer_timeout_s=0.5), MathAnswerReward(timeout_s=0.3)
    quick.__dict__["worker"] = hurried.__dict__["worker"] = math_reward.worker
    pairs = [("$9^{9^{9^9}}$", "42"), (r"\boxed{\sqrt{4}}", "2"), ("42", "42")]
    assert judge(quick, *pairs) == [0.0, 1.0, 1.0]
    found = guard(hurried).score(
        completions=[f"so</think>{given}" for given, _ in pairs],
        completion_ids=[[7, END, 19]] * 3,
        answer=[expected for _, expected in pairs],
    )
    assert found.values == [None, None, 1.0] and found.failed == [True, True, False]
    assert "reward 'math_answer_reward' failed on sample 1" in found.failures[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """A sequence-classification checkpoint with one output and random weights."""
    return save_classifier(tmp_path_factory.mktemp("reward_model"), tiny_tokenizer, num_labels=1)


def save_classifier(folder: Path, tokenizer: Any, num_labels: int) -> Path:
    config = Qwen3Config(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=256, num_labels=num_labels,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


PROMPTS = ["2+2=", "a longer prompt: ", "x"]
COMPLETIONS = ["4", "no</think>yes, and more of it", "y"]


def test_a_checkpoint_scores_prompt_and_completion(checkpoint: Path) -> None:
    """Guards against scores that depend on the batch: padding must not reach the last token that is read."""
    reward = RewardModel(str(checkpoint), batch_size=2, device="cpu")
    scores = reward(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=[[1]] * 3)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with torch.inference_mode():
        for prompt, completion, score in zip(PROMPTS, COMPLETIONS, scores, strict=True):
            alone = model(**tokenizer(prompt + completion, return_tensors="pt")).logits[0, 0].item()
            assert score == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 4) for score in scores}) == 3


def test_conversations_go_through_the_models_own_template(checkpoint: Path) -> None:
    """Guards against joining dictionaries as text."""
    reward = RewardModel(str(checkpoint), device="cpu")
    prompt = [{"role": "user", "content": "2+2="}]
    completion = [{"role": "assistant", "content": "4"}]
    written = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert reward(prompts=[prompt], completions=[completion]) == pytest.approx(
        reward(prompts=[written], completions=[""])
    )


def test_a_prompt_of_another_template_becomes_the_user_s_message(checkpoint: Path) -> None:
    """A column `question` of the file's own stood in for it: a SQuAD prompt lost its passage."""
    reward = RewardModel(str(checkpoint), device="cpu", decode=lambda ids: "")
    wanted = reward(prompts=[[{"role": "user", "content": "Normans. Where from?"}]], completions=["Norway"])
    row = {"prompts": ["[INST] Normans. Where from? [/INST]"], "completions": ["Norway"], "question": ["Where from?"]}
    assert reward(**row, user_message=["Normans. Where from?"]) == wanted != reward(**row)


def test_texts_beyond_the_limit_are_not_scored(checkpoint: Path) -> None:
    """Guards against silently scoring half of a completion."""
    reward = RewardModel(str(checkpoint), max_length=10, device="cpu")
    scores = reward(prompts=PROMPTS, completions=COMPLETIONS)
    assert [score is None for score in scores] == [False, True, False]
    with pytest.raises(ValueError, match="batch_size is 0"):
        RewardModel("rm", batch_size=0)


def test_a_folder_at_home_is_loaded(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~/rm` passed the check, and transformers took it for a hub id."""
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    assert None not in RewardModel(f"~/{checkpoint.name}", device="cpu")(prompts=["a"], completions=["b"])


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    """The files of a reward model, as far as they are looked at; a config of `changes`, without what is None in it."""
    folder.mkdir(parents=True)
    config = {"architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3", "id2label": {"0": "LABEL_0"}}
    kept = {name: value for name, value in (config | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def shard(folder: Path, kind: str = "model.safetensors") -> None:
    """Weights in two files."""
    (folder / "model.safetensors").unlink()
    stem, _, ending = kind.rpartition(".")
    parts = [f"{stem}-0000{number}-of-00002.{ending}" for number in (1, 2)]
    (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": dict(zip("ab", parts, strict=True))}))
    for part in parts:
        (folder / part).touch()


def as_run(folder: Path) -> None:
    """The checkpoint lies in the folder of the training that made it."""
    inner = folder / "reward_model"
    inner.mkdir()
    for file in folder.glob("*.*"):
        file.rename(inner / file.name)


def as_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


TRAINS = "rloo-kit reward-model"
REFUSED: dict[str, tuple[dict[str, Any], Callable[[Path], object] | None, tuple[str, ...]]] = {
    "two labels, which transformers does not store": ({"id2label": None}, None, ("2 outputs", TRAINS)),
    "three labels by number": ({"id2label": None, "num_labels": 3}, None, ("3 outputs", TRAINS)),
    "two names and a number": ({"id2label": {"0": "a", "1": "b"}, "num_labels": 1}, None, ("2 outputs", TRAINS)),
    "names in a list": ({"id2label": ["a"]}, None, ("2 outputs",)),
    "a causal head": ({"architectures": ["Qwen3ForCausalLM"], "id2label": None}, None, ("Qwen3ForCausalLM", TRAINS)),
    "one label on a causal head": ({"architectures": ["Qwen3ForCausalLM"]}, None, ("Qwen3ForCausalLM", TRAINS)),
    "a head of its own code": ({"architectures": ["Qwen2ForRewardModel"]}, None, ("Qwen2ForRewardModel", TRAINS)),
    "a head that is no list": ({"architectures": "Qwen3"}, None, ("the head of Qwen3",)),
    "an adapter": ({}, as_adapter, ("adapter", "merge_and_unload", TRAINS)),
    "the folder of a training": ({}, as_run, ("config.json", "/rm/reward_model")),
    "no tokenizer": ({}, lambda folder: (folder / "tokenizer.json").unlink(), ("no tokenizer", "add")),
    "no weights": ({}, lambda folder: (folder / "model.safetensors").unlink(), ("no model.safetensors", TRAINS)),
    "no config.json": ({}, lambda folder: (folder / "config.json").unlink(), ("config.json", TRAINS)),
    "half a config.json": ({}, lambda folder: (folder / "config.json").write_text('{"architec'), ("config.json",)),
    "a config.json that is a list": ({}, lambda folder: (folder / "config.json").write_text("[1]"), ("config.json",)),
    "nothing there": ({}, shutil.rmtree, ("no such folder", TRAINS)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_reward_model_is_known_by_its_files(tmp_path: Path, case: str) -> None:
    """A run evaluated, trained and evaluated again with a reward that could not be loaded, or had a random head."""
    changes, change, words = REFUSED[case]
    folder = write_checkpoint(tmp_path / "rm", **changes)
    if change is not None:
        change(folder)
    found = find_model_fault(str(folder))
    assert str(folder) in found and all(word in found for word in words)
    with pytest.raises(WholeBatchError) as caught:
        _ = RewardModel(str(folder)).loaded
    assert str(caught.value) == found, "the same words for who skips the checks"


SOUND: dict[str, tuple[dict[str, Any], Callable[[Path], object] | None]] = {
    "one label": ({}, None),
    "one label by number": ({"id2label": None, "num_labels": 1}, None),
    "no architectures": ({"architectures": None}, None),
    "several files": ({}, shard),
    "several files of pickles": ({}, lambda folder: shard(folder, kind="pytorch_model.bin")),
    "a pickle": ({}, lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin")),
    "a vocabulary in the old form": ({}, lambda folder: (folder / "tokenizer.json").rename(folder / "vocab.txt")),
    "a tokenizer of SentencePiece": ({}, lambda folder: (folder / "tokenizer.json").rename(folder / "spiece.model")),
    "whole weights with an adapter": ({}, lambda folder: (folder / "adapter_config.json").write_text("{}")),
}


@pytest.mark.parametrize("case", SOUND)
def test_a_sound_reward_model_has_no_fault(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A false alarm keeps a run from starting; also through a link, from home, and by a relative path."""
    changes, change = SOUND[case]
    folder = write_checkpoint(tmp_path / "rm", **changes)
    if change is not None:
        change(folder)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for written in (folder, tmp_path / "link", "~/rm", "rm", "./link"):
        assert find_model_fault(str(written)) == ""


def test_a_hub_id_is_read_in_the_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the network, an id is known only from the cache, where only config.json may be."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name, changes in (("me/one", {}), ("me/two", {"id2label": None}), ("me/chat", {"architectures": ["OPTModel"]})):
        folder = write_checkpoint(tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "0a1b", **changes)
        for file in ("tokenizer.json", "model.safetensors"):
            (folder / file).unlink()
    assert find_model_fault("me/one") == find_model_fault("me/never-seen") == ""
    assert "me/two has 2 outputs" in find_model_fault("me/two") and "OPTModel" in find_model_fault("me/chat")


def test_files_are_read_without_a_heavy_library(tmp_path: Path, run_fresh: Any) -> None:
    """It is one of the checks before the stack loads: importing torch takes longer than all of them."""
    folder = write_checkpoint(tmp_path / "rm", id2label=None)
    code = (
        f"from rloo_kit.graders.scoring_model import find_model_fault\nprint(find_model_fault({str(folder)!r}))\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))\n"
    )
    done = run_fresh(code)
    assert "2 outputs" in done.stdout and done.stdout.endswith("[]\n"), done.stdout + done.stderr


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each loading of weights, by its arguments."""
    seen, load = list[Any](), AutoModelForSequenceClassification.from_pretrained

    def counted(*args: Any, **options: Any) -> Any:
        seen.append(args)
        return load(*args, **options)

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", counted)
    return seen


BATCH: dict[str, Any] = {"prompts": ["a"] * 32, "completions": ["b"] * 32, "completion_ids": [[1]] * 32}


@pytest.mark.parametrize("damage", ["weights", "a file of them", "tokenizer", "another size", "nothing"])
def test_a_loading_that_fails_is_tried_once(
    checkpoint: Path, tmp_path: Path, tiny_tokenizer: Any, loads: list[Any], damage: str
) -> None:
    """The guard scores each sample of a failed batch alone: 32 completions were 33 loadings of all weights."""
    folder = shutil.copytree(checkpoint, tmp_path / "rm")
    if damage == "weights":  # a pointer of git-lfs
        (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    elif damage == "a file of them":
        AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
        loads.clear()
        max(folder.glob("model-*.safetensors")).unlink()
        (folder / "model.safetensors").unlink(missing_ok=True)
    elif damage == "tokenizer":
        (folder / "tokenizer.json").write_text("{")
    elif damage == "another size":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    guarded = guard(RewardModel(str(folder), device="cpu"))
    found, again = guarded.score(**BATCH), guarded.score(**BATCH)
    assert len(loads) == (damage != "tokenizer")
    assert all(found.failed) == all(again.failed) == (damage != "nothing")
    assert found.failures == again.failures and len(found.failures) == (damage != "nothing")
    assert damage == "nothing" or str(folder) in found.failures[0]


def test_a_random_head_is_refused(checkpoint: Path, tmp_path: Path, tiny_model: Any) -> None:
    """transformers makes up what a checkpoint lacks: its config says one output, and every score is noise."""
    folder = shutil.copytree(checkpoint, tmp_path / "rm")
    config = json.loads((folder / "config.json").read_text())
    tiny_model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": None}))
    with pytest.raises(WholeBatchError, match=r"score\.weight.*rloo-kit reward-model"):
        _ = RewardModel(str(folder), device="cpu").loaded


def test_the_weights_of_a_reward_model_are_a_source_of_the_run(
    checkpoint: Path, tmp_path: Path, tiny_tokenizer: Any, loads: list[Any]
) -> None:
    """A reward model that was trained again in its folder went on unnoticed, and the verdict compared two scales."""

    class Halved(RewardModel):
        """A user's, which has a source too."""

    folder = shutil.copytree(checkpoint, tmp_path / "rm")
    name = f"weights of the reward model {folder}"
    reward = RewardModel(str(folder))
    then = read_sources([NamedReward(guard(reward), "quality", 1.0)])
    assert then.keys() == {name} and read_sources([RewardModel(str(folder))]) == then and not loads
    assert read_sources([Halved(str(folder))]).keys() == {name, Path(__file__).name}
    two = save_classifier(tmp_path / "two", tiny_tokenizer, num_labels=1)
    assert read_sources([reward, RewardModel(str(two))]).keys() == {name, f"weights of the reward model {two}"}
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert read_sources([reward]) == then, "what it was made with; it may be loaded already"
    assert read_sources([RewardModel(str(folder))]) != then
    assert digest_weights(str(tmp_path)) == digest_weights("me/never-seen") == ""


def test_a_hub_id_is_known_once_it_is_loaded(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: list[Any]
) -> None:
    """With an empty cache there is nothing to compare, and a resumed run was refused for weights that had not
    changed."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    reward = RewardModel("me/rm")
    with pytest.raises(WholeBatchError, match="me/rm"):
        read_sources([reward])
    assert read_sources([reward]) == {}, "it was tried, and an evaluation goes on without"
    monkeypatch.setattr(RewardModel, "loaded", property(lambda self: shutil.copytree(checkpoint, cached)))
    cached = tmp_path / "models--me--rm" / "snapshots" / "0a1b"
    assert read_sources([RewardModel("me/rm")]).keys() == {"weights of the reward model me/rm"}
