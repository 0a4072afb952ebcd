"""From a config to reward functions: names, parameters, ids of the tokenizer, functions of the user's own."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rloo_kit import build_rewards, load_config
from rloo_kit.demo.cold_start import build_tokenizer
from rloo_kit.errors import ConfigError, TokenizerError
from rloo_kit.rewarding.registry import REGISTRY

END = 260  # </think> of the tiny tokenizer; <|im_end|> is 258, <|endoftext|> 256
Make = Callable[..., Any]


@pytest.fixture
def make_run(tmp_path: Path) -> Make:
    """A run with the given `rewards:` entries, read from a file in `tmp_path`."""

    def make(*rewards: dict[str, Any], **sections: Any) -> Any:
        file = tmp_path / "run.yaml"
        file.write_text(
            "model: {name: embedded/thinking}\ndata: {source: embedded/addition}\nrewards: [{name: thinking_reward}]\n"
            "rloo: {max_steps: 1, max_completion_length: 100}\n",
            encoding="utf-8",
        )
        return load_config(file, rewards=list(rewards), **sections)

    return make


@pytest.fixture
def plain_tokenizer(tiny_tokenizer: Any) -> Any:
    """A tokenizer that has end tokens but no thinking tags."""
    vocabulary = {token: number for token, number in tiny_tokenizer.get_vocab().items() if "think>" not in token}
    plain = copy.deepcopy(tiny_tokenizer)
    plain.get_vocab = lambda: vocabulary
    plain.chat_template = plain.chat_template.replace("<think>\n", "")
    return plain


def test_every_name_builds_and_is_bound_to_the_tokenizer(make_run: Make, tiny_tokenizer: Any) -> None:
    """Guards against 151668 in a run whose model has the tag elsewhere: every completion would score -1.0."""
    names = [name for name in REGISTRY if name not in ("reward_model", "judge_reward")]
    built = build_rewards(make_run(*({"name": name} for name in names)), tiny_tokenizer)
    assert [reward.__name__ for reward in built] == names
    inner = {reward.__name__: reward.reward for reward in built}
    assert {inner[name].think_end_id for name in names if hasattr(inner[name], "think_end_id")} == {END}
    assert inner["think_format_reward"].eos_token_ids == inner["missing_eos_penalty"].eos_token_ids == (258, 256)
    assert inner["answer_reward"].thinking is True
    assert inner["soft_overlong_penalty"].max_completion_length == 100


def test_bound_rewards_read_real_completions(make_run: Make, tiny_tokenizer: Any) -> None:
    """Guards against ids and text that do not belong together: tokenizer, text and reward meet here for real."""
    run = make_run({"name": "thinking_reward"}, {"name": "answer_reward"}, {"name": "think_format_reward"})
    rewards = build_rewards(run, tiny_tokenizer)
    text = "Is </think> spelled? yes</think>42"
    spelled = [i for part in ("Is </thi", "nk> spelled? yes") for i in tiny_tokenizer(part)["input_ids"]]
    ids = [*spelled, END, *tiny_tokenizer("42")["input_ids"], 258]
    assert tiny_tokenizer.decode(ids, skip_special_tokens=True) == text
    batch = {"prompts": ["p"], "completions": [text], "completion_ids": [ids], "answer": ["42"]}
    assert [reward(**batch) for reward in rewards] == [[0.8], [1.0], [1.0]]


def test_the_line_that_a_run_prints(make_run: Make, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a run whose log does not say which rewards, weights and tag it trained with."""
    run = make_run(
        {"name": "thinking_reward"},
        {"name": "length_reward", "weight": 0.25},
        {"name": "length_reward", "weight": 0.5, "params": {"max_words": 99}},
    )
    built = build_rewards(run, tiny_tokenizer)
    line = "rewards: thinking_reward x1.0, length_reward x0.25, length_reward_2 x0.5 (</think> = 260)\n"
    assert capsys.readouterr().out == line
    assert [reward.weight for reward in built] == [1.0, 0.25, 0.5]
    assert built[2].reward.max_words == 99


def test_a_tokenizer_without_the_tag_is_refused(make_run: Make, plain_tokenizer: Any) -> None:
    """Guards against -1.0 for everything, for ever, on a model that cannot close its thinking."""
    for name in ("thinking_reward", "thinking_budget_reward", "think_format_reward"):
        with pytest.raises(TokenizerError, match=f"rewards.0: {name} decides by the token </think>"):
            build_rewards(make_run({"name": name}), plain_tokenizer)


def test_a_model_that_never_thinks_is_judged_by_its_whole_completion(
    make_run: Make, plain_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against answer_reward waiting for a tag that never comes."""
    run = make_run({"name": "answer_reward"}, {"name": "length_reward"}, model={"name": "embedded/instruct"})
    for tokenizer, tag in ((plain_tokenizer, "none"), (build_tokenizer("instruct"), "260")):
        answer, _ = build_rewards(run, tokenizer)
        assert answer(prompts=["p"], completions=["42"], completion_ids=[[1, 2]], answer=["42"]) == [1.0]
        assert f"(</think> = {tag})" in capsys.readouterr().out


def test_an_id_that_the_tokenizer_contradicts_is_refused(make_run: Make, tiny_tokenizer: Any) -> None:
    """Guards against a config copied from a Qwen3 run: the id is the tokenizer's business."""
    run = make_run({"name": "length_reward"}, {"name": "thinking_reward", "params": {"think_end_id": 151668}})
    with pytest.raises(TokenizerError, match="rewards.1.params.think_end_id is 151668, .* </think> at 260"):
        build_rewards(run, tiny_tokenizer)
    agreeing = make_run({"name": "thinking_reward", "params": {"think_end_id": 260}})
    assert build_rewards(agreeing, tiny_tokenizer)[0].reward.think_end_id == END


OWN = """
def own(completions, completion_ids, think_end_id{}):
    return [float(think_end_id in ids) for ids in completion_ids]
"""


@pytest.mark.parametrize("default", ["", "=151668"])
def test_a_function_of_ones_own_gets_the_tokenizers_id(
    default: str, make_run: Make, tiny_tokenizer: Any, plain_tokenizer: Any, tmp_path: Path
) -> None:
    """`init` wrote 151668 for any model: with Qwen3.5 every completion "never closed" its thinking."""
    name = f"own_{len(default)}"
    (tmp_path / f"{name}.py").write_text(OWN.format(default))
    (reward,) = build_rewards(make_run({"name": f"{name}:own"}), tiny_tokenizer)
    assert reward(prompts=["p"] * 2, completions=["a", "b"], completion_ids=[[1, END], [1, 151668]]) == [1.0, 0.0]
    reward.reward.worker.close()
    contradicting = make_run({"name": f"{name}:own", "params": {"think_end_id": 151668}})
    with pytest.raises(TokenizerError, match="rewards.0.params.think_end_id is 151668, .* </think> at 260; leave"):
        build_rewards(contradicting, tiny_tokenizer)
    run = make_run({"name": f"{name}:own"}, model={"name": "my-model"})
    if default:  # a model that does not think: the function keeps its own
        (reward,) = build_rewards(run, plain_tokenizer)
        assert reward(prompts=["p"], completions=["a"], completion_ids=[[151668]]) == [1.0]
        reward.reward.worker.close()
    else:
        with pytest.raises(TokenizerError, match="own decides by the token </think>, and the tokenizer has none"):
            build_rewards(run, plain_tokenizer)
        mine = make_run({"name": f"{name}:own", "params": {"think_end_id": 33}}, model={"name": "my-model"})
        (reward,) = build_rewards(mine, plain_tokenizer)  # another mark, as Magistral's [/THINK]
        assert reward(prompts=["p"], completions=["a"], completion_ids=[[33]]) == [1.0]
        reward.reward.worker.close()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "thinking_reward", "params": {"full_tokens": 3}}, "rewards.0.params: .* full_tokens is 3; it must"),
        ({"name": "math_answer_reward", "params": {"timeout_s": 3}}, "timeout_s: .*; set timeout_s next to params"),
        ({"name": "reward_model"}, "rewards.0.params: reward_model cannot be built: .*missing 1 required .* 'model'"),
        ({"name": "length_reward", "env": ["PATH"]}, "rewards.0.env .* module:function"),
        ({"name": "m:f", "env": ["NO_SUCH_NAME"]}, "rewards.0.env names 'NO_SUCH_NAME'.* set it in .env"),
        ({"name": "reward_examples:"}, "rewards.0.name is 'reward_examples:'; .* module:function"),
        (
            {"name": "reward_examples:limited", "params": {"limitt": 3}},
            r"rewards.0.params.limitt: reward_examples:limited .*'limit'\? It takes limit",
        ),
    ],
)
def test_what_a_config_gets_wrong_is_said_with_its_key(
    entry: dict, words: str, make_run: Make, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """A typing error that trains with defaults, or fails in step 1 without naming the line to fix."""
    shutil.copy(Path(__file__).with_name("reward_examples.py"), tmp_path)
    with pytest.raises(ConfigError, match=words):
        build_rewards(make_run(entry), tiny_tokenizer)


@pytest.mark.parametrize("next_to_the_config", [True, False])
def test_a_function_of_ones_own_is_found(
    make_run: Make, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: Any, next_to_the_config: bool
) -> None:
    """A run found its rewards only when started from the right folder; shipped configs could use none of one's own."""
    here = tmp_path / "elsewhere"
    here.mkdir()
    monkeypatch.chdir(here)
    module = f"my_rewards_{next_to_the_config}"
    shutil.copy(
        Path(__file__).with_name("reward_examples.py"), (tmp_path if next_to_the_config else here) / f"{module}.py"
    )
    entry = {"name": f"{module}:by_length", "weight": 2.0, "params": {"scale": 10}, "timeout_s": 3.0, "env": ["PATH"]}
    (reward,) = build_rewards(make_run(entry), tiny_tokenizer)
    worker = reward.reward.worker
    assert (reward.__name__, reward.weight, reward.reward.timeout_s) == ("by_length", 2.0, 3.0)
    assert reward(prompts=["p"], completions=["abc"], completion_ids=[[1]]) == [30.0]
    worker.close()


@pytest.mark.parametrize("name", ["A=1", "", "\ud800"])
def test_env_holds_names_of_variables(make_run: Make, name: str) -> None:
    """Guards against a text that no environment can hold; what may be a secret in place of its name is not printed."""
    with pytest.raises(ConfigError, match=r"rewards.0.env.0: .* letters, digits and _") as found:
        make_run({"name": "m:f", "env": [name]})
    assert not name or repr(name) not in str(found.value)


def test_a_reward_of_a_file_by_its_path(make_run: Make, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """`configs/my_rewards.py:largest` was looked for as a module of that name; a types.py would be Python's own."""
    text = "from dataclasses import dataclass\n\n@dataclass\nclass Rule:\n    value: float = 3.0\n\n"
    text += "def own(completions, **columns):\n    return [Rule().value] * len(completions)\n"
    (tmp_path / "types.py").write_text(text)
    (reward,) = build_rewards(make_run({"name": f"{tmp_path}/types.py:own"}), tiny_tokenizer)
    assert reward.__name__ == "own"
    assert reward(prompts=["a"], completions=["b"], completion_ids=[[1]]) == [3.0]
    reward.reward.worker.close()
    (tmp_path / "types.py").write_text(text.replace("def own", "def math_answer_reward"))
    with pytest.raises(ConfigError, match="rewards.0.name .*'math_answer_reward' is a reward of the kit, .* rename"):
        build_rewards(make_run({"name": f"{tmp_path}/types.py:math_answer_reward"}), tiny_tokenizer)
    with pytest.raises(ConfigError, match=r"there is no file .*nowhere.py; .*; set rewards.0.name"):
        build_rewards(make_run({"name": f"{tmp_path}/nowhere.py:own"}), tiny_tokenizer)
