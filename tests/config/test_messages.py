"""What a wrong configuration says: what was found, what the limit is, and the key that mends it."""

from pathlib import Path

import pytest

from rloo_kit.config.checks import check_generation_batch
from rloo_kit.config.run import load_config
from rloo_kit.errors import ConfigError
from rloo_kit.system.processes import count_processes

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

WRONG = {
    # unknown keys: dotted path and the nearest known name
    "rloo.num_generatons=4": "rloo.num_generatons: unknown key; did you mean rloo.num_generations?",
    "rlo.beta=1": "rlo: unknown key; did you mean rloo?",
    "rewards.0.wieght=1": "rewards.0.wieght: unknown key; did you mean rewards.0.weight?",
    "model.lora.rr=4": "model.lora.rr: unknown key; did you mean model.lora.r?",
    "model.lora.xyz=4": "model.lora.xyz: unknown key; known here: alpha, dropout, r, target_modules",
    "beta=0.1": "beta: unknown key; did you mean rloo.beta?",
    "kl_coef=0.1": "kl_coef: unknown key; did you mean rloo.beta?",
    "data.max_completion_length=9": "data.max_completion_length: unknown key; did you mean rloo.max_completion_length?",
    # wrong types
    "rloo.max_steps=many": "rloo.max_steps: is 'many'; it takes a whole number or null",
    "rloo.max_steps=true": "max_steps is true; it takes a whole number or null",
    "rloo.max_steps=1.5": "rloo.max_steps: is 1.5; it takes a whole number or null",
    "model.lora=3": "model.lora: is 3; it takes a mapping or null",
    "rewards=answer_reward": "rewards: is 'answer_reward'; it takes a list",
    "rloo.reward_clip_range=[1]": "rloo.reward_clip_range: is [1]; it takes a list of 2 (a number, a number) or null",
    "model.gradient_checkpointing=maybe": "is 'maybe'; it takes true or false or 'unsloth'",
    "model.backend=vllm": "model.backend: is 'vllm'; it takes 'auto', 'unsloth', 'transformers'",
    "rloo=null": "rloo: is null; it takes a mapping",
    "rewards.0=answer_reward": "rewards.0: is 'answer_reward'; it takes a mapping",
    "eval.thinking_budgets=[8, a]": "eval.thinking_budgets.1: is 'a'; it takes a whole number",
    "rloo.reward_clip_range=[1, b]": "rloo.reward_clip_range.1: is 'b'; it takes a number",
    "rloo.report_to=tensorbord": "rloo.report_to.0: is 'tensorbord'; it takes 'tensorboard', 'trackio', 'wandb'",
    "data.split=5": "data.split: is 5; it takes text (put it in quotes)",
    # bounds
    "rloo.num_generations=1": "rloo.num_generations: is 1; it must be at least 2",
    "rloo.num_generations=99999999999": "rloo.num_generations: is 99999999999; it must be below 2147483648",
    "rloo.max_steps=99999999999": "rloo.max_steps: is 99999999999; it must be below 2147483648",
    "rloo.kl_coef=-0.1": "override rloo.kl_coef=-0.1: rloo.beta: is -0.1; it must be at least 0",
    "rloo.top_p=0": "rloo.top_p: is 0; it must be above 0",
    "rloo.top_p=1.1": "rloo.top_p: is 1.1; it must be at most 1",
    "rloo.min_p=-0.1": "rloo.min_p: is -0.1; it must be at least 0",
    "rloo.temperature=0": "rloo.temperature: is 0; it must be above 0",
    "rloo.beta=-1": "rloo.beta: is -1; it must be at least 0",
    "rloo.beta=.nan": "rloo.beta: is nan; it must be a finite number",
    "rloo.epsilon=1": "rloo.epsilon: is 1; it must be below 1",
    "rloo.missing_eos_penalty=-1": "rloo.missing_eos_penalty: is -1; it must be above 0",
    "run.max_reward_failure_share=2": "run.max_reward_failure_share: is 2; it must be at most 1",
    "run.seed=-1": "run.seed: is -1; it must be at least 0",
    "rewards=[]": "rewards: is empty; it needs at least 1",
    "model.lora.target_modules=[]": "model.lora.target_modules: is empty; it needs at least 1",
    "rewards.0.timeout_s=0": "rewards.0.timeout_s: is 0; it must be above 0",
    "rloo.delta=1": "rloo.delta: is 1; it must be above 1",
    "rloo.baseline=mean": "rloo.baseline: is 'mean'; it takes 'leave_one_out', 'group_mean', 'none'",
    "rloo.memory=tiny": "rloo.memory: is 'tiny'; it takes 'fast', 'balanced', 'low'",
    "rloo.normalize_rewards=always": "rloo.normalize_rewards: is 'always'; it takes true or false or 'running'",
    "rloo.sampler_correction_cap=0.5": "rloo.sampler_correction_cap: is 0.5; it must be at least 1",
    "rloo.thinking_budget=0": "rloo.thinking_budget: is 0; it must be at least 1",
    "run.max_skipped_steps=0": "run.max_skipped_steps: is 0; it must be at least 1",
    "rollout.engine=fast": "rollout.engine: is 'fast'; it takes 'auto', 'native', 'generate', 'vllm', 'server'",
    "rollout.engine=continuous": "rollout.engine: is 'continuous', an engine that was removed",
    "rollout.engine=server": "rollout.engine is server, but rollout.server_url is null; set "
    "rollout.server_url=http://host:port, where vllm serve listens",
    "rollout.server_url=localhost:8000": "rollout.server_url is 'localhost:8000'; it takes http://host:port, without a "
    "path (no /v1)",
    "rollout.rows=0": "rollout.rows: is 0; it must be at least 1",
    "rollout.resample_rounds=-1": "rollout.resample_rounds: is -1; it must be at least 0",
    # sampled from one distribution, scored under another
    "rloo.top_p=0.9": "rloo.top_p is 0.9: tokens would be drawn from a filtered distribution, but scored under the "
    "whole one, so the gradient would be that of another policy. Set rloo.top_p=1.0; to sample more sharply lower "
    "rloo.temperature, which is scored too",
    "rloo.top_k=20": "Set rloo.top_k=0;",
    "rloo.min_p=0.05": "Set rloo.min_p=null;",
    "rloo.repetition_penalty=1.1": "Set rloo.repetition_penalty=1.0;",
    # what has to hold together
    "rloo={max_steps: 1, delta: 1.2}": "rloo.delta is 1.2; it bounds the ratio above the clip, so it must be above 1 + "
    "rloo.epsilon = 1.2",
    "rloo={max_steps: 1, delta: 1.3, epsilon_high: 0.4}": "above 1 + rloo.epsilon_high = 1.4",
    "rloo={max_steps: 1, kl_form: per_token, ratio_form: sum}": "rloo.ratio_form is sum, one ratio for a whole "
    "completion; set rloo.ratio_form=per_token (or null), or another rloo.kl_form",
    "rloo={max_steps: 1, kl_form: per_token, ratio_form: length_normalized}": "ratio_form is length_normalized, one",
    "rloo.answer_budget=8": "rloo.answer_budget is 8, but rloo.thinking_budget is null",
    "rloo={max_steps: 1, max_completion_length: 64, thinking_budget: 60, answer_budget: 8}": "rloo.thinking_budget "
    "(60) + its closing (1) + rloo.answer_budget (8) = 69 tokens, more than rloo.max_completion_length (64); raise it "
    "to 69",
    "rloo={max_steps: 1, max_completion_length: 64, thinking_budget: 63}": "+ an answer of 1 token = 65 tokens",
    "rloo={max_steps: 1, max_completion_length: 64, thinking_budget: 40, thinking_close: sentence}": "its closing (24)",
    "rollout={difficulty_samples: 4, min_pass_rate: 0.5, max_pass_rate: 0.5}": "every prompt would be skipped",
    "rollout.min_pass_rate=0.1": "by a pass rate that is not measured; set rollout.difficulty_samples=8",
    "rloo.max_steps=null": "the length of training is open; set rloo.max_steps or rloo.num_train_epochs",
    "rloo.reward_clip_range=[1, -1]": "reward_clip_range is [1.0, -1.0]; the first number must be below the second",
    "rloo.max_completion_length=300": "data.max_prompt_length (64) + rloo.max_completion_length (300) = 364 tokens, "
    "more than model.max_seq_length (256); set rloo.max_completion_length=192 or model.max_seq_length=364",
    "eval.max_completion_length=300": "set eval.max_completion_length=192 or model.max_seq_length=364",
    "data.max_prompt_length=256": "= 320 tokens, more than model.max_seq_length (256); set model.max_seq_length=320",
    "rewards.0.weight=0": "every reward has weight 0",
    "data.test_size=0": "run.evaluate is true, but data.test_size is 0: there is nothing to measure on",
    "data.test_size=1.5": "test_size is 1.5; a share is below 1, a number of prompts is whole",
    "data={source: embedded/addition, num_prompts: 9, test_size: 9}": "test_size (9) leaves none of num_prompts (9) to "
    "train on; lower data.test_size or raise data.num_prompts",
    "rloo={max_steps: 1, bf16: true, fp16: true}": "bf16 and fp16 are both true; set one of them to null or false",
    "eval.pass_at_k=[1, 8]": "8 completions of a prompt, num_samples gives 1; set eval.num_samples=8",
    "data.source=some/set": "model.name is embedded/thinking, which knows only addition, but data.source is some/set",
    "model.name=embedded/x": "the embedded models are embedded/thinking and embedded/instruct",
    "model={name: a/b, family: instruct, enable_thinking: true}": "only hybrid models take it: set model.family=hybrid",
    "run.name=a/b": "name is 'a/b'; it names a folder, so it has letters or digits and no slash",
    "run.name=..": "name is '..'; it names a folder",
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
def test_refusals_say_what_mends_them(path: Path, override: str) -> None:
    """`1 validation error for RunConfig` with a link to pydantic's site is no help to someone who mistyped."""
    message = refusal(path, override)
    assert WRONG[override] in message
    assert override in message and "pydantic" not in message and "validation error" not in message


def test_all_faults_at_once_each_with_its_line(path: Path) -> None:
    """Ten mistakes should not take ten attempts; and a file of 80 lines should not have to be searched."""
    path.write_text(
        TEXT.replace("  max_steps: 3", "  max_stepz: 3\n  beta: -1").replace("64\nrewards", "sixty\nrewards")
    )
    lines = refusal(path, "rloo.top_p=7").splitlines()
    assert f"{path}:6: data.max_prompt_length: is 'sixty'; it takes a whole number" in lines
    assert f"{path}:10: rloo.max_stepz: unknown key; did you mean rloo.max_steps?" in lines
    assert f"{path}:11: rloo.beta: is -1; it must be at least 0" in lines
    assert "override rloo.top_p=7: rloo.top_p: is 7; it must be at most 1" in lines
    assert len(lines) == 4


def test_missing_keys(tmp_path: Path) -> None:
    """A file without a model is told which key, not that an object has no attribute."""
    path = tmp_path / "run.yaml"
    path.write_text("rewards: [{weight: 2}]\nrloo: {max_steps: 1}\ndata: {source: x}\n")
    message = refusal(path)
    assert "model: required, and not there; add it to the file, or to the command line as model=..." in message
    assert f"{path}:1: rewards.0.name: required" in message


@pytest.mark.parametrize(
    ("text", "place", "found"),
    [
        ("rloo:\n  beta: 1\n  beta: 2\n", "run.yaml:3:", 'duplicate key "beta"'),
        ("rloo: [1\n", "run.yaml:2:", ""),
        ("- a\n- b\n", "run.yaml:", "holds a list; a mapping of sections"),
        ("a: 1\n\tb: 2\n", "run.yaml:2:", ""),
        ("a: 1\n---\nb: 2\n", "run.yaml:2:", "another document"),
        ("a: &x\n  b: [*x]\n", "run.yaml:", "an alias (*name) inside the value that it names"),
        ("a: " + "[" * 5000, "run.yaml:", "nested too deeply"),
        ("a:\n  b: " + "9" * 5000, "run.yaml:2:", "5000 digits"),
        ("a: +_", "run.yaml:1:", "invalid literal"),
        ("a: !name x", "run.yaml:1:", "!name"),
        ("a: \0", "run.yaml:", "#x0000"),
    ],
)
def test_broken_yaml_says_where(tmp_path: Path, text: str, place: str, found: str) -> None:
    """PyYAML keeps the last of two equal keys in silence: the run used a beta that nobody looked at."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert place in refusal(path) and found in refusal(path)


def test_no_such_file_names_the_ones_there_are(path: Path) -> None:
    """A typing error in a file's name ended in a traceback of `open`."""
    assert f"no configuration file at {path.parent / 'rum.yaml'}; there are {path}" in refusal(path.parent / "rum.yaml")
    path.write_bytes(b"model: \xff\xfe")
    assert "cannot be read as UTF-8 text" in refusal(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rloo.beta", "the override 'rloo.beta' is not of the form section.key=value, for example rloo.beta=0.0"),
        ("=3", "is not of the form"),
        ("rloo..beta=3", "is not of the form"),
        ("model.name.x=3", "model.name is 'embedded/thinking', which has no keys below it"),
        ("rewards.1.weight=3", "rewards is a list of 1; use an index below that"),
        ("rewards.weight=3", "rewards is a list of 1; use an index below that"),
        ("eval.pass_at_k.0=3", "there is no eval.pass_at_k to take an item of; set eval.pass_at_k=[...]"),
    ],
)
def test_overrides_that_lead_nowhere(path: Path, override: str, message: str) -> None:
    """An override that does not reach its key must not make a key of its own."""
    assert message in refusal(path, override)


def test_missing_eos_penalty_twice(path: Path) -> None:
    """The option and the reward of that name together punished a truncated completion twice."""
    message = refusal(
        path, "rewards=[{name: answer_reward}, {name: missing_eos_penalty}]", "rloo.missing_eos_penalty=1"
    )
    assert "rloo.missing_eos_penalty and the reward missing_eos_penalty are both set" in message


def test_whole_groups_in_plain_words() -> None:
    """TRL's `generation_batch_size (8) must be divisible by num_generations (3)` does not say what to change."""
    with pytest.raises(ConfigError) as caught:
        check_generation_batch(8, 1, 3)
    assert str(caught.value) == (
        "a rollout has 8 completions a pass (per_device_train_batch_size) x 1 process x 1 pass (steps_per_generation) "
        "= 8 completions, which does not divide into whole groups of 3 (num_generations). The nearest that work: "
        "num_generations=2 or num_generations=4 or steps_per_generation=3 or per_device_train_batch_size=6 or "
        "per_device_train_batch_size=9"
    )


def test_every_number_that_the_refusal_names_works() -> None:
    """Advice that is refused in turn is worse than none."""
    for per_device in range(1, 13):
        for passes in range(1, 7):
            for generations in range(2, 13):
                start = {"per_device_train_batch_size": per_device, "steps_per_generation": passes}
                start["num_generations"] = generations
                try:
                    check_generation_batch(per_device, passes, generations)
                except ConfigError as error:
                    for advice in str(error).partition("that work: ")[2].split(" or "):
                        key, value = advice.split("=")
                        fixed = start | {key: int(value)}
                        check_generation_batch(*fixed.values())
                        assert fixed["num_generations"] >= 2


@pytest.mark.parametrize("numbers", [(128, 1, 10**9), (10**9 + 7, 1, 8), (2**31 - 1, 2**31 - 1, 2**31 - 2)])
def test_huge_numbers_are_refused_at_once(numbers: tuple[int, int, int]) -> None:
    """The nearest numbers that work were searched for one by one: a slip of the keyboard hung the command."""
    with pytest.raises(ConfigError, match="does not divide into whole groups"):
        check_generation_batch(*numbers)


def test_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable, as `.env` files and CI leave them, is no number of processes and no mistake."""
    monkeypatch.setenv("WORLD_SIZE", "")
    assert count_processes() == 1
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="the environment's WORLD_SIZE is 'two'; a launcher sets it to a whole numb"):
        count_processes()


def test_assignments_name_the_whole_key(path: Path) -> None:
    """`beta: unknown key` in a notebook left open which of six sections was meant."""
    run = load_config(path)
    for section, key, message in (
        (run.rloo, "bta", "rloo.bta: unknown key; did you mean rloo.beta?"),
        (run.rloo, "num_generations", "rloo: a rollout has 8 completions"),
        (run.model.lora, "r", "model.lora.r: is 7.5; it takes a whole number"),
    ):
        with pytest.raises(ConfigError) as caught:
            setattr(section, key, 3 if key != "r" else 7.5)
        assert str(caught.value).startswith(message)
