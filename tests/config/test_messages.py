"""Refusals of a wrong configuration: the key, what was found, the limit and the fix."""

from pathlib import Path

import pytest

from rloo_kit.config.run import load_config
from rloo_kit.errors import ConfigError

TEXT = """\
model:
  name: embedded/thinking
  max_seq_length: 256
data:
  source: embedded/addition
  max_prompt_length: 64
rewards:
  - name: answer_reward
rloo:
  max_steps: 3
  max_completion_length: 64
"""

# What an override is refused with: parts of the message, separated by "|": the key, the value, the limit or the fix.
WRONG = {
    # unknown keys: dotted path and the nearest known name
    "rloo.num_generatons=4": "rloo.num_generatons: unknown|did you mean rloo.num_generations?",
    "rewards.0.wieght=1": "rewards.0.wieght: unknown|did you mean rewards.0.weight?",
    "data.max_completion_length=9": "data.max_completion_length: unknown|did you mean rloo.max_completion_length?",
    # overrides that do not reach a key, and must not create one
    "rloo.beta": "'rloo.beta' is not of the form section.key=value",
    "rloo..beta=3": "is not of the form",
    "model.name.x=3": "model.name is 'embedded/thinking', which has no keys below it",
    "rewards.1.weight=3": "rewards is a list of 1; use an index below that",
    "rewards.name=b": "rewards is a list of 1; use an index below that",
    "rewards[0].name=b": "rewards[0]: unknown key; did you mean rewards?",
    "rlo.beta=1": "rlo: unknown key; did you mean rloo?",
    "eval.pass_at_k.0=3": "set eval.pass_at_k=[...]",
    # wrong types
    "rloo.max_steps=many": "rloo.max_steps: is 'many'|valid integer",
    "rloo.max_steps=true": "rloo.max_steps: is true|number",
    "rloo.reward_clip_range=[1]": "rloo.reward_clip_range: is [1]|item 1 is missing",
    "rloo.beta=0.1 # high": "rloo.beta: is '0.1 # high'|valid number",
    "rloo.tools=[a.py:f # g]": "rloo.tools: is '[a.py:f # g]'|valid list; in YAML a # or a 007 in it needs quotes",
    "model.lora={r: 8, r: 16}": "model.lora: is '{r: 8, r: 16}'|a key is given once",
    "data.split=null": "data.split: is null|valid string",
    "rollout.engine=fast": "rollout.engine: is 'fast'|'auto', 'native', 'generate', 'vllm' or 'server'",
    # bounds
    "rloo={max_steps: 1, scale_rewards: group, normalize_advantages: true}": "set rloo.scale_rewards=none or "
    "rloo.normalize_advantages=false",
    "rloo={max_steps: 1, token_mean: batch, steps_per_generation: 2, gradient_accumulation_steps: 4}": "not a multiple "
    "of rloo.gradient_accumulation_steps (4)|set rloo.steps_per_generation=null",
    # sampled from one distribution, scored under another
    "rloo.top_p=0.9": "rloo.top_p is 0.9|Set rloo.top_p=1.0|rloo.temperature",
    # what has to hold together
    "rollout.engine=server": "rollout.server_url is null|set rollout.server_url=http://host:port",
    "rollout.server_url=localhost:8000": "rollout.server_url is 'localhost:8000'|http://host:port|no /v1",
    # vLLM: what it cannot sample
    "rollout.engine=vllm|model.lora=null": "model.lora is null|rollout.engine=auto|set model.lora={r: 16}",
    "rollout.engine=vllm|model.lora.r=1024": "model.lora.r is 1024|rank 512|set model.lora.r=512",
    "rollout.engine=vllm|rloo.temperature=2.5": "rloo.temperature is 2.5|0.01 to 2|set rloo.temperature=2 or lower, or "
    "rollout.engine=auto",
    "eval.thinking_budgets=[16,300]": "eval.thinking_budgets (300)|model.max_seq_length (256)|or a lower budget",
    "rollout.engine=vllm|rollout.server_url=http://h:1": "rollout.server_url is http://h:1|"
    "set rollout.engine=server or rollout.server_url=null",
    "rloo={max_steps: 1, kl_form: per_token, ratio_form: sum}": "rloo.ratio_form is sum|set rloo.ratio_form=per_token",
    "rloo.answer_budget=8": "rloo.answer_budget is 8|rloo.thinking_budget is null|rloo.answer_budget=null",
    "rloo={max_steps: 1, max_completion_length: 64, thinking_budget: 60, answer_budget: 8}": "thinking_budget (60)|"
    "closing (1)|rloo.answer_budget (8) = 69 tokens|rloo.max_completion_length (64)|raise it to 69",
    "rollout={difficulty_samples: 4, min_pass_rate: 0.5, max_pass_rate: 0.5}": "lower rollout.min_pass_rate",
    "rollout.min_pass_rate=0.1": "min_pass_rate (0.1)|set rollout.difficulty_samples=8",
    "rloo.max_steps=null": "set rloo.max_steps or rloo.num_train_epochs",
    "rloo.reward_clip_range=[1, -1]": "reward_clip_range is [1.0, -1.0]",
    "rloo.max_completion_length=300": "data.max_prompt_length (64)|rloo.max_completion_length (300) = 364 tokens|"
    "model.max_seq_length (256)|set rloo.max_completion_length=192 or model.max_seq_length=364",
    "rewards.0.weight=0": "rewards.0.weight=1",
    "data.test_size=0": "data.test_size is 0|run.evaluate=false",
    "data={source: embedded/addition, num_prompts: 9, test_size: 9}": "test_size (9)|num_prompts (9)|data.num_prompts",
    "eval.pass_at_k=[1, 8]": "8 completions|set eval.num_samples=8",
    "sft.thinking_column=completion": "sft.thinking_column=null",
    "data.source=some/set": "model.name is embedded/thinking|data.source is some/set|set data.source=embedded/addition",
    "model.name=embedded/x": "embedded/thinking, embedded/instruct",
    "model.name=smollm2/chat": "model: name is 'smollm2/chat'|smollm2/instruct and smollm2/thinking",
    # prompts that a built-in model does not know; files of task families were taken once
    "data.source=embedded/own/backward.py|model.name=embedded/thinking@own/backward.py": "model: name is 'embedded/"
    "thinking@own/backward.py', but 'own/backward.py' is a file, and task families are built in (addition,|"
    "data.source=rows.jsonl|model.name=smollm2/instruct|docs/embedded.md",
    "data.source=embedded/addition|model.name=embedded/thinking@chain_sum": "knows only chain_sum, but data.source is "
    "embedded/addition; set data.source=",
    "data.source=reasoning_gym/number_sorting": "data.source is reasoning_gym/number_sorting; set data.source=",
    "data.source=embedded/subtraction": "set data.source=|another model.name (embedded/thinking@subtraction)",
    "data.source=embedded/sortin": "data.source is embedded/sortin, but there is no task family 'sortin'",
    "sft.source=embedded/subtraction": "sft.source is embedded/subtraction; set sft.source=embedded/addition",
    "model={name: a/b, family: instruct, enable_thinking: true}": "set model.family=hybrid|model.enable_thinking=null",
    "rewards=[{name: a}, {name: missing_eos_penalty}]|rloo.missing_eos_penalty=1": "rloo.missing_eos_penalty and the "
    "reward missing_eos_penalty are both set|twice",
    "rewards=[{name: answer_reward}, {name: relative_length_penalty, params: {find: boxed}}]": "rewards: relative_"
    "length_penalty takes the reward answer_reward with equal params ({'find': 'boxed'})",
    # near misses of built-in names, for which the hub was asked for two minutes
    "model.name=embeded/thinking": "model.name: is embeded/thinking|did you mean embedded/thinking?",
    "model.name=SmolLM2-instruct": "did you mean smollm2/instruct?",
    "model.name=embeded/thinking@subtractio": "did you mean embedded/thinking@subtraction?",
    "data.source=embeded/addition": "data.source: is embeded/addition|did you mean embedded/addition?",
    "data={sources: [{source: reasoning-gym/gcd}]}": "data.sources.0.source: is|did you mean reasoning_gym/gcd?",
    "sft.source=embeded/subtraction": "sft.source: is embeded/subtraction|did you mean embedded/subtraction?",
    "reward_model={source: a.csv, model: smolm2/tools}": "reward_model.model: is|did you mean smollm2/tools?",
    "rloo.environment=verifers/gsm8k": "rloo.environment: is verifers/gsm8k|did you mean verifiers/gsm8k?",
    # values of the first drafts
    "health.stop=[all_none]": "is gone|health.stop=[reward_failures]",
    "rloo.normalize_rewards=running": "is gone: set true",
    # trackers
    "rloo.report_to=wandbb": "rloo.report_to.0: is 'wandbb'|'wandb'",
    "run.name=a/b": "name is 'a/b'|no slash",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(TEXT)
    return file


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, *overrides)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:.*old TRL name:FutureWarning")
@pytest.mark.parametrize("override", WRONG, ids=str)
def test_refusals_name_the_key_the_value_and_the_fix(path: Path, override: str) -> None:
    """`1 validation error for RunConfig` with a link to pydantic's site is no help to someone who mistyped."""
    message = refusal(path, *override.split("|"))
    assert not [part for part in WRONG[override].split("|") if part not in message], message
    assert override.split("|")[-1] in message and "pydantic" not in message and "validation error" not in message


def test_a_folder_of_that_name_is_no_near_miss(path: Path) -> None:
    """A built-in name comes close to many; what is there is meant. A hub id of another owner is looked up there."""
    (path.parent / "embeded" / "thinking").mkdir(parents=True)
    assert load_config(path, "model.name=embeded/thinking").model.name == str(path.parent / "embeded" / "thinking")
    for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "acme/embedded-thinking", "embeddings/thinker", "gpt2"):
        assert load_config(path, f"model.name={name}").model.name == name


def test_vllm_in_the_process_is_for_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would have built its own vLLM on one GPU."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refusal(path, "rollout.engine=vllm", "rloo.per_device_train_batch_size=8")
    assert "rollout.engine=vllm" in message and "there are 2" in message and "rollout.engine=server" in message


def test_what_vllm_samples_is_taken(path: Path) -> None:
    """Every config of a thinking model sets budgets, which TRL's vLLM refused after the weights were loaded."""
    budgets = "rloo={max_steps: 1, max_completion_length: 64, thinking_budget: 32, answer_budget: 16, temperature: 2}"
    run = load_config(path, "rollout.engine=vllm", budgets, "rollout.vllm.float8_kv_cache=true", "eval.temperature=2")
    assert run.rollout.vllm.float8_kv_cache and run.rloo.thinking_budget == 32


def test_all_faults_at_once_each_with_its_line(path: Path) -> None:
    """Ten mistakes should not take ten attempts; and a file of 80 lines should not have to be searched."""
    path.write_text(TEXT.replace("max_steps: 3", "max_stepz: 3\n  beta: -1").replace("64\nrew", "sixty\nrew"))
    lines = refusal(path, "rloo.top_p=7").splitlines()
    assert lines[0].startswith(f"{path}:6: data.max_prompt_length: is 'sixty'; input should be a valid integer")
    assert f"{path}:10: rloo.max_stepz: unknown key; did you mean rloo.max_steps?" in lines
    assert f"{path}:11: rloo.beta: is -1; input should be greater than or equal to 0" in lines
    assert "override rloo.top_p=7: rloo.top_p: is 7; input should be less than or equal to 1" in lines
    assert len(lines) == 4


def test_missing_keys_and_files(path: Path) -> None:
    """For a file without a model the error names the key; a typing error in a file's name ended in a traceback."""
    assert f"no configuration file at {path.parent / 'rum.yaml'}; there are {path}" in refusal(path.parent / "rum.yaml")
    path.write_text("rewards: [{weight: 2}]\nrloo: {max_steps: 1}\ndata: {source: x}\n")
    message = refusal(path)
    assert "model: required but missing; add it to the file, or to the command line as model=..." in message
    assert f"{path}:1: rewards.0.name: required" in message
    path.write_bytes(b"model: \xff\xfe")
    assert "cannot be read as UTF-8 text" in refusal(path)


def test_a_rollout_of_whole_groups_and_enough_prompts(path: Path) -> None:
    """TRL names no cause of its 8; a run of too few prompts loaded, evaluated, and ended after no step."""
    numbers = ["rloo.per_device_train_batch_size=8", "rloo.num_generations=4", "rloo.gradient_accumulation_steps=2"]
    passes = "2 passes (gradient_accumulation_steps)"
    found = f"8 completions a pass (per_device_train_batch_size) x 1 process x {passes} = 16"
    message = refusal(path, *numbers, "rloo.num_generations=5")
    assert found in message and "whole groups of 5 (num_generations)" in message
    with pytest.raises(ConfigError) as caught:
        load_config(path, *numbers, "data.num_prompts=5", "data.test_size=3").check_prompts()
    assert f"the training set has 2 prompts, but a rollout needs 4: it has {found}" in str(caught.value)
    run = load_config(path, *numbers, "data.num_prompts=7", "data.test_size=3")
    run.check_prompts()
    load_config(path, *numbers).check_prompts()
    with pytest.raises(ConfigError, match="the training set has 0 prompts.*Train on more prompts"):
        run.check_prompts(0)


@pytest.mark.parametrize("url", ["http://me:pass-word@h:1", "//a:pass-word@h", "http://h:1?key=pass-word"])
def test_a_password_in_an_address_is_not_printed(path: Path, url: str) -> None:
    """The override is repeated in front of every message, and the file's text would be copied into the run's folder."""
    found = refusal(path, f"rollout.server_url={url}")
    assert "pass-word" not in found and "VLLM_API_KEY" in found and "rollout.server_url=http://host:port" in found
    assert "pass-word" not in refusal(path, f"rollout.server_url={url}", "rollout.engine=none")
    assert "pass-word" not in refusal(path, f"rollout.server_urll={url}")
