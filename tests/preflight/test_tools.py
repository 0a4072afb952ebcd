"""The preflight of a run with tools: what each tool does, and what the model does with them."""

from pathlib import Path
from typing import Any

import pytest

import rloo_kit as kit
from rloo_kit.checks.preflight_result import Measures
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.preflight.probe import describe_probe, draw_rows, find_rollout_faults, roll_out
from rloo_kit.preflight.trial_steps import make_trainer
from rloo_kit.tools.toolbox import _open
from tests.episodes import Scripted, call

WORLD = Path(__file__).parent / "world.py"
RUN = {
    "model": {"name": "embedded/untaught", "max_seq_length": 640},
    "data": {"source": "embedded/addition", "num_prompts": 100, "test_size": 20, "max_prompt_length": 128},
    "rewards": [{"name": "length_reward", "params": {"min_words": 3}}],
}


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLOO_KIT_BACKEND", "transformers")


def prepare(folder: Path, *tools: str, **keys: Any) -> tuple[Any, Any, Any, Any]:
    rloo = {"max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 500}
    rloo |= {"tools": [f"{WORLD}:{name}" for name in tools], "tool_result_tokens": 40, "tool_timeout_s": 1.0}
    run = RunConfig.model_validate(
        RUN | {"rloo": rloo | keys, "run": {"name": "tools", "output_dir": str(folder), "evaluate": False}}
    )
    policy = kit.load_policy(run)
    data = kit.load_data(run, policy.tokenizer)
    return run, policy, data, kit.build_rewards(run, policy.tokenizer)


def test_a_model_that_calls_nothing_is_named(tmp_path):
    """It was found after hours."""
    run, policy, data, rewards = prepare(tmp_path, "add", environment=f"{WORLD}:World", max_completion_length=90)
    found = kit.check_preflight(run, policy, data, rewards)
    (text,) = [fault.text for fault in found.warnings if fault.name == "tools"]
    assert found.go and "none of" in text and "rloo-kit sft" in text
    assert found.to_dict()["measures"]["episodes"]["call_frequency"] == 0
    assert "World" in found.measures.rewards, "its own reward is judged"


SCRIPT = [
    ["I add." + call("add", a=2, b=3), "So</think>\n\n5"],
    ["</think>\n\n4"],
    [call("look_up", word="two"), "</think>\n\n5"],
    [call("add", a="x"), call("add", a=1), call("add", a=1), "</think>\n\n5"],
]


def test_an_episode_is_shown_and_its_calls_are_counted(tmp_path):
    """Whether calls arrive as the model means them shows in the first episodes, or after hours in the report."""
    run, policy, data, rewards = prepare(tmp_path, "add", "look_up", max_turns=3)
    measures = Measures()
    with make_trainer(policy, run, rewards, data.train) as trainer:
        trainer.rloo.sampler.engine = Scripted(policy.tokenizer, SCRIPT)
        probe = roll_out(trainer, draw_rows(run, data.train), run, lambda line: None)
        describe_probe(run, policy, probe, measures)
        faults = list(find_rollout_faults(run, policy, trainer, probe, measures))
    found = measures.episodes
    shares = {"failure_frequency": 0.25, "invalid_frequency": 0.25}
    assert found == shares | {"call_frequency": 1.0, "turns": 2.0}
    thought = ["thinking: I add.", "call: add(a=2, b=3)", "result: 5", "thinking: So", "text: 5"]
    assert measures.episode == thought
    texts = [fault.text for fault in faults if fault.name == "tools"]
    assert len(texts) == 1 and "25% of 32 calls of tools failed" in texts[0] and "KeyError: 'two'" in texts[0]
    shown = dict(measures.lines())
    assert shown["an episode"] == "\n".join(thought)
    assert "2 turns and 1 calls each; 25% of them failed" in shown["episodes"]


def test_an_environment_without_tools_is_not_to_be_called(tmp_path):
    """A warning sent people to demonstrations of calls that nothing answers."""
    run, policy, data, rewards = prepare(tmp_path, environment=f"{WORLD}:Quiz", max_turns=3)
    measures = Measures()
    with make_trainer(policy, run, rewards, data.train) as trainer:
        trainer.rloo.sampler.engine = Scripted(policy.tokenizer, [["</think>\n\n5", "</think>\n\n4"]])
        probe = roll_out(trainer, draw_rows(run, data.train), run, lambda line: None)
        describe_probe(run, policy, probe, measures)
        faults = list(find_rollout_faults(run, policy, trainer, probe, measures))
    assert measures.episodes["turns"] == 2 and "tools" not in [fault.name for fault in faults]


def test_an_edited_tool_is_noticed_by_a_resumed_run(tmp_path):
    """The same file name and another program: the second half of a run would be trained in another world."""
    file = tmp_path / "own_tools.py"
    file.write_text(WORLD.read_text(encoding="utf-8"), encoding="utf-8")
    keys = {"tools": [f"{file}:add"], "max_completion_length": 90, "save_steps": 1}
    run, policy, data, rewards = prepare(tmp_path, **keys, max_steps=1)
    kit.train(run, policy, data, rewards)
    file.write_text(file.read_text(encoding="utf-8").replace("return a + b", "return a - b"), encoding="utf-8")
    _open.cache_clear()  # as in another process
    run, policy, data, rewards = prepare(tmp_path, **keys, max_steps=2)
    with pytest.raises(ConfigError, match="Changed: tools in own_tools.py"):
        kit.train(run, policy, data, rewards, resume=True)
    assert kit.train(run, policy, data, rewards, resume=True, accept_changes=True).steps == 2
