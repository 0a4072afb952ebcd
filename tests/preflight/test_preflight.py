"""The whole preflight: what it refuses and why, what it lets pass, and that it leaves the run as it was."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import rloo_kit as kit
from rloo_kit._stack import load_stack
from rloo_kit.checks.preflight_result import Measures, RewardFound
from rloo_kit.loop.step import RLOOStep
from rloo_kit.preflight.preflight import leave_untouched
from rloo_kit.preflight.probe import draw_rows, find_form_fault, find_logp_faults
from rloo_kit.preflight.trial_steps import find_step_faults, load_of, rows_of_a_pass, take_steps
from rloo_kit.rollout.native import NativeEngine
from rloo_kit.system import environment
from tests.test_cli import call

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "arithmetic_thinking.yaml"


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLOO_KIT_BACKEND", "transformers")
    load_stack()


@pytest.fixture
def prepare(tmp_path: Path) -> Any:
    """`prepare(file, "rloo.beta=0.1")`: run, policy, data and rewards of a config, in a folder of the test."""

    def make(file: Path, *overrides: str, small: bool = True) -> tuple[Any, Any, Any, Any]:
        few = ["data.num_prompts=300", "data.test_size=50", f"run.output_dir={tmp_path / 'outputs'}"]
        few += ["rloo.per_device_train_batch_size=32"] if small else []
        run = kit.load_config(file, *few, *overrides)
        policy = kit.load_policy(run)
        data = kit.load_data(run, policy.tokenizer)
        return run, policy, data, kit.build_rewards(run, policy.tokenizer)

    return make


def made_to_think(data: Any) -> None:
    """The demo's model solves every sum that it thinks about: the prompts open its thinking with the first digit."""
    data.train = data.train.map(lambda row: {"prompt": row["prompt"] + row["question"].partition("+")[0][-1]})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["arithmetic_thinking", "arithmetic_instruct"])
def test_a_shipped_config_goes(prepare, name):
    """A preflight that refuses what works is switched off by the second user."""
    found = kit.check_preflight(*prepare(ROOT / "configs" / f"{name}.yaml", small=False))
    assert found.go and str(found).endswith("\nGO"), found
    measures = found.measures
    assert measures.prompts * measures.generations >= 32 and measures.signal > 0
    assert 0 < measures.pass_rate < 1 and measures.pass_low < measures.pass_rate < measures.pass_high
    assert measures.logp_gap < 1e-4 and measures.grad_norm > 0
    assert measures.step_s > 0 and measures.hours * 3600 > measures.steps * measures.step_s
    assert max(map(len, str(found).splitlines())) <= 80


def test_hours_read_like_hours():
    """A run of hours, of minutes, of seconds."""
    found = [dict(Measures(step_s=2.0, steps=9, hours=hours).lines())["speed"] for hours in (2.671, 0.2, 0.01)]
    assert [text.partition("about ")[2].partition(" on")[0] for text in found] == ["2 h 40 min", "12 min", "36 s"]
    assert all(text.endswith("on this CPU, evaluations included") for text in found)


# ------------------------------------------------------------------------------------------------ what is refused


def test_the_published_recipe_is_refused_with_its_reason(prepare):
    """128 tokens and -1 for a missing </think> used up hours of a GPU; the embedded model thinks in 20, so 8 stand for
    128. The value that the message recommends is then tried."""
    words = ["rloo.max_completion_length=8", "rloo.temperature=0.1", "rewards=[{name: thinking_reward}]"]
    run, policy, data, rewards = prepare(DEMO, *words)
    made_to_think(data)
    found = kit.check_preflight(run, policy, data, rewards)
    assert not found.go and "NO-GO: 1 problem" in str(found)
    (fault,) = found.errors
    assert fault.name == "rollout" and fault.key == "rloo.max_completion_length"
    reason = "max_completion_length=8 with a reward of -1.0 for a missing </think> gives every completion the same "
    assert f"{reason}reward, all advantages are zero, the run trains nothing" in fault.text
    assert found.measures.closed == 0 and found.measures.truncated == 1 and found.measures.signal == 0
    value = fault.text.rpartition("set ")[2]
    # Its thoughts differ by a few tokens, all in one band of that reward: another one shows that the length suffices.
    again = kit.load_config(DEMO, *words, value, "rloo.temperature=1.0", "rewards=[{name: answer_reward}]")
    assert kit.check_preflight(again, policy, data, kit.build_rewards(again, policy.tokenizer)).go


@pytest.mark.slow
def test_thoughts_that_never_end_are_given_a_budget(prepare, monkeypatch):
    """The length that is named must be one that was seen to be enough; where none is, the budget closes the thought."""
    monkeypatch.setattr("rloo_kit.preflight.probe.LONG_TOKENS", 12)
    words = ["rloo.max_completion_length=8", "rloo.temperature=0.1"]
    run, policy, data, rewards = prepare(DEMO, *words)
    made_to_think(data)
    (fault,) = kit.check_preflight(run, policy, data, rewards).errors
    assert "few end within 12 tokens" in fault.text and "set rloo.thinking_budget=4" in fault.text
    kit.load_config(DEMO, *words, "rloo.thinking_budget=4")


def paying(level: float) -> Any:
    """A reward of one's own that is the same for everything."""

    def pay(completions: list[str], **_columns: Any) -> list[float]:
        return [level] * len(completions)

    return pay


def failing(completions: list[str], **_columns: Any) -> list[float]:
    raise ValueError("no judge is listening")


# A reward of one's own (None: greedy answers, of which all or none are right), and the fault: its name, key and words.
NOTHING_TO_LEARN: dict[str, tuple[Any, str, str, str]] = {
    "never solved": (None, "rollout", "data.source", "easier prompts"),
    "always solved": (None, "rollout", "data.source", "harder prompts"),
    "a reward that always pays": (paying(1.0), "rollout", "data.source", "harder prompts"),
    "a reward that never pays": (paying(0.0), "rollout", "rloo.temperature", "graded reward"),
    "a reward that fails": (failing, "rewards", "run.max_reward_failure_share", "no judge is listening"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTHING_TO_LEARN)
def test_a_run_that_has_nothing_to_learn_is_refused(prepare, name):
    """A reward that failed for every sample was found an hour later; one that always pays got wrong advice."""
    reward, fault_name, key, fix = NOTHING_TO_LEARN[name]
    greedy = [] if reward else ["rloo.temperature=0.01", "data.num_prompts=1000"]
    run, policy, data, rewards = prepare(DEMO, *greedy)
    if name == "always solved":  # nothing is carried
        data.train = data.train.filter(lambda row: re.fullmatch(r"[0-4]+\+[0-4]+=", row["question"]))
        made_to_think(data)
        limits = {"limits": 48, "temperature": 0}
        texts = [done.text for done in kit.generate_completions(policy, data.train["prompt"][:], **limits)]
        right = [text.endswith(f"</think>\n\n{gold}") for text, gold in zip(texts, data.train["answer"], strict=True)]
        data.train = data.train.filter(lambda row, place: right[place], with_indices=True)  # all but one, by processor
    elif name == "never solved":
        data.train = data.train.map(lambda row: {"answer": f"{row['answer']}7"})
    found = kit.check_preflight(run, policy, data, [reward] if reward else rewards)
    (fault,) = found.errors
    assert (fault.name, fault.key) == (fault_name, key) and fix in fault.text, fault
    if not reward:
        rate = float(name == "always solved")
        assert found.measures.pass_rate == rate and ("rloo-kit sft" in fault.text) == (rate == 0)
        assert found.measures.prompts == 16, "drawn again before it is refused"
    assert name != "a reward that fails" or found.measures.rewards["failing"].failed == 32


# Share of right answers, by reward (weight, mean, groups in which it differs), and what the warning says, or None.
ONLY_FORM: dict[str, tuple[float | None, dict[str, tuple[float, float, int]], str | None]] = {
    "a format": (
        0.0, {"answer_reward": (1, 0, 0), "think_format_reward": (0.2, 0.4, 3)}, "and think_format_reward alone"),
    "two": (
        0.0, {"answer_reward": (1, 0, 0), "length_reward": (1, 1, 2), "thinking_reward": (1, 0, 1)},
        "length_reward and thinking_reward alone"),
    "one's own": (0.0, {"score": (1, 0.05, 4), "answer_reward": (0, 0, 0)}, "score alone .* unless score grades"),
    "its own answers": (None, {"score": (1, 0, 0), "missing_eos_penalty": (1, -0.5, 4)}, "missing_eos_penalty alone"),
    "some are right": (0.1, {"answer_reward": (1, 0.1, 0), "think_format_reward": (0.2, 0.4, 3)}, None),
    "weight 0": (0.0, {"answer_reward": (1, 0, 0), "think_format_reward": (0, 0.4, 3)}, None),
    "a graded verifier": (0.0, {"reasoning_gym_score": (1, 0.3, 4), "think_format_reward": (1, 0.4, 4)}, None),
    "unknown": (None, {"score": (1, 0.4, 4), "think_format_reward": (0.2, 0.4, 3)}, None),
    "lengths alone": (None, {"length_reward": (1, 0.4, 4)}, None),
    "at its mean": (None, {"score": (1, 0.3, 0), "length_reward": (1, 0.4, 4)}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", ONLY_FORM)
def test_a_form_that_alone_is_paid_for_is_named(name):
    """A bonus for any number in the answer gave a signal in every group at a pass rate of 0, and the verdict was GO."""
    rate, rewards, expected = ONLY_FORM[name]
    found = {one: RewardFound(mean, differs, 0) for one, (_, mean, differs) in rewards.items()}
    run = SimpleNamespace(reward_weights={one: weight for one, (weight, _, _) in rewards.items()})
    fault = find_form_fault(run, Measures(rewards=found, pass_rate=rate))
    assert (fault is None) == (expected is None)
    if fault:
        assert fault.level == "warning" and fault.key == "data.source" and re.search(expected, fault.text), fault


@pytest.mark.slow
def test_a_run_that_begins_low_is_not_refused_by_chance(prepare, capsys):
    """32 wrong answers of 32 refused arithmetic_instruct with two seeds of four, which begins at 8 % and learns."""
    run, policy, data, rewards = prepare(DEMO)
    drawn = {row["prompt"] for row in draw_rows(run, data.train)}
    data.train = data.train.map(lambda row: {"answer": "never" if row["prompt"] in drawn else row["answer"]})
    found = kit.check_preflight(run, policy, data, rewards)
    assert found.go and found.measures.prompts == 16 and found.measures.signal > 0, found
    assert "4 prompts x 8 completions (16 prompts if" in capsys.readouterr().out, "both draws are announced"


@pytest.mark.slow
def test_few_completions_refuse_nothing(prepare):
    """A model that is right half of the time gets two of two wrong one time in four: too few samples for a NO-GO."""
    run, policy, data, rewards = prepare(DEMO, "rloo.per_device_train_batch_size=16")
    data.train = data.train.select(range(3)).map(lambda row: {"answer": "never"})
    found = kit.check_preflight(run, policy, data, rewards)
    assert found.go and [fault.level for fault in found.faults] == ["warning"]
    assert "data.source" in found.faults[0].text


# ------------------------------------------------------------------------------------------------ the step


def test_a_step_that_cannot_learn_is_named():
    """NaN, no gradient, a rate of 0 and 1e-6 in bfloat16 (0.01 - 1e-6 is 0.01) are four faults with their keys; 2e-5
    moves some weights, and was refused."""
    nan, whole, rate = float("nan"), ["model.lora=null", "model.dtype=bfloat16"], "rloo.learning_rate"
    for norm, words, key, level, fix in (
        (nan, [], "model.dtype", "error", "float32"), (0.0, [], "model.lora.target_modules", "error", "lora=null"),
        (1.0, [f"{rate}=0"], rate, "error", f"set {rate}="),
        (1.0, [*whole, f"{rate}=1e-6"], rate, "error", f"float32 or {rate}=3e-05"),
        (1.0, [*whole, f"{rate}=2e-5"], rate, "warning", f"float32 or {rate}=3e-05"),
    ):  # fmt: skip
        (fault,) = find_step_faults(kit.load_config(DEMO, *words), norm)
        assert (fault.name, fault.key, fault.level) == ("gradient", key, level) and fix in fault.text
    assert find_step_faults(kit.load_config(DEMO), 1.0) == []
    assert find_step_faults(kit.load_config(DEMO, *whole, f"{rate}=3e-5"), 1.0) == []


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_steps_are_taken_in_the_largest_pass(beta, tiny_folder, monkeypatch):
    """With a KL penalty a pass is a whole group; two steps, for the optimizer's state, and nothing is left of them."""
    words = ["data.max_prompt_length=16", "rloo.max_completion_length=112", "model.max_seq_length=128"]
    words += ["rloo.num_generations=4", "rloo.per_device_train_batch_size=8", "rloo.tokens_per_pass=300"]
    run = kit.load_config(DEMO, *words, f"model.name={tiny_folder}", "model.family=auto", f"rloo.beta={beta}")
    policy = kit.load_policy(run)
    generations, completions = rows_of_a_pass(load_of(run, policy))
    assert (generations, completions) == ((4, 4) if beta else (3, 3))
    backbone = policy.model.get_base_model().model
    plain, tokens = backbone.forward, []

    def counted(*args: Any, **named: Any) -> Any:
        tokens.append((args[0] if args else named["input_ids"]).numel())
        return plain(*args, **named)

    monkeypatch.setattr(backbone, "forward", counted)
    before = {name: value.detach().clone() for name, value in policy.model.named_parameters() if value.requires_grad}
    engines: list[str] = []
    take_steps(policy, run, lambda engine: engines.append(engine.name))
    assert engines == ["native", "native"], "each step is in the place of one with a rollout"
    group = 16 + generations * 112  # the prompt once for all
    assert max(tokens) == (group if beta else 16 + 2 * 112)
    now = dict(policy.model.named_parameters())
    assert any(not now[name].equal(value) for name, value in before.items())
    assert all(value.grad is None for value in now.values())
    assert list(policy.model.peft_config) == ["default"] and not policy.model.training


@pytest.mark.slow
def test_out_of_memory_is_a_fault_with_keys(prepare, monkeypatch):
    """Without this check the first step at full length comes hours into a run, with the first long completions."""
    run, policy, data, rewards = prepare(DEMO)
    before = {name: value.detach().clone() for name, value in policy.model.named_parameters()}

    def full(*_arguments: Any, **_more: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(RLOOStep, "loss", full)
    found = kit.check_preflight(run, policy, data, rewards)
    (fault,) = found.errors
    assert fault.name == "memory" and fault.key == "rloo.memory" and "rloo.memory=low" in fault.text
    assert found.measures.signal and found.measures.training_gib is None
    assert all(value.equal(before[name]) for name, value in policy.model.named_parameters())


@pytest.mark.slow
def test_what_a_cpu_cannot_hold_is_not_tried(prepare, monkeypatch):
    """A CPU has no allocator that refuses: trying out what does not fit would get other programs killed."""
    run, policy, data, rewards = prepare(DEMO)
    monkeypatch.setattr("rloo_kit.plan.planner.available_gib", lambda: 0.5)
    monkeypatch.setattr("rloo_kit.preflight.trial_steps.take_steps", None)
    (fault,) = kit.check_preflight(run, policy, data, rewards).errors
    assert fault.name == "memory" and "was not run" in fault.text and fault.key


# ------------------------------------------------------------------------------------------------ log-probabilities


@pytest.mark.slow
def test_sampler_and_trainer_agree_at_first(prepare, monkeypatch):
    """A sampler that is off by more than rounding samples from another policy."""
    run, policy, data, rewards = prepare(DEMO, "rloo.beta=0.05")
    found = kit.check_preflight(run, policy, data, rewards)
    assert found.go and found.measures.logp_gap < 1e-5
    plain = NativeEngine.sample

    def off(self: Any, *arguments: Any, **more: Any) -> Any:
        made = plain(self, *arguments, **more)
        for row in made.sampler_logps:
            row[:] = [logp - 0.01 for logp in row]
        return made

    monkeypatch.setattr(NativeEngine, "sample", off)
    (fault,) = kit.check_preflight(run, policy, data, rewards).errors
    assert fault.name == "log-probs" and fault.key == "rloo.sampler_correction" and "0.01 nats" in fault.text
    run.rloo.sampler_correction = "token"
    again = kit.check_preflight(run, policy, data, rewards)
    assert again.go and "log-probs" in [fault.name for fault in again.warnings]


@pytest.mark.slow
def test_a_model_that_thinks_after_all_is_said_before_the_run(prepare):
    """A merged R1 distillation was taken for an instruct model, and preflight said GO."""
    run, policy, data, rewards = prepare(DEMO)
    policy.family = "instruct"
    found = kit.check_preflight(run, policy, data, rewards)
    assert [one.key for one in found.warnings if "close a thought" in one.text] == ["model.family"]


# ------------------------------------------------------------------------------------------------ nothing is changed


COUNTER = """
calls = 0

def counted(completions, **_columns):
    global calls
    calls += 1
    return [(len(text) * calls) % 7 / 7 for text in completions]
"""


@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
def test_training_afterwards_is_training_without(prepare, tmp_path, precision, monkeypatch):
    """`train` gives bit for bit the weights that it gives without one, whatever it starts from."""
    (tmp_path / "my_rewards.py").write_text(COUNTER)
    file = tmp_path / "counted.yaml"
    file.write_text(DEMO.read_text())
    usual = ["rloo.max_steps=2", "rloo.per_device_train_batch_size=32"]
    usual += ["rewards=[{name: my_rewards:counted}]", "run.report=false"]
    first = prepare(file, *usual, "run.name=start")
    kit.train(*first)
    usual.append(f"model.adapter={first[0].folder / 'adapter'}")
    monkeypatch.setattr(environment, "mixed_precision", lambda dtype: precision)
    words = ["rloo.beta=0.05"] if precision == "no" else []
    made = []
    for name, checked in (("without", False), ("with", True)):
        run, policy, data, rewards = prepare(file, *usual, *words, f"run.name={name}")
        if checked:
            torch.manual_seed(5)
            random.seed(5)
            state, numbers, draws = torch.get_rng_state(), numpy.random.get_state()[1].copy(), random.getstate()
            settings, attributes = policy.model.config.to_dict(), set(vars(policy.model))
            found = kit.check_preflight(run, policy, data, rewards)
            assert found.measures.grad_norm > 0
            assert state.equal(torch.get_rng_state()) and random.getstate() == draws
            assert (numbers == numpy.random.get_state()[1]).all()
            assert not run.folder.exists() and policy.model.config.to_dict() == settings
            assert list(policy.model.peft_config) == ["default"] and not policy.model.training
            assert set(vars(policy.model)) == attributes
            assert all(value.grad is None for value in policy.model.parameters())
        result = kit.train(run, policy, data, rewards)
        made.append((policy.model.state_dict(), [row.get("loss") for row in result.metrics]))
    (without, losses), (with_check, other) = made
    assert losses == other and without.keys() == with_check.keys()
    assert all(value.equal(with_check[name]) for name, value in without.items())


def test_an_error_leaves_the_policy_as_it_was(prepare):
    """Ctrl-C inside a reward during the preflight must not leave its trial steps in the adapter."""
    _, policy, *_ = prepare(DEMO)
    before = {name: value.detach().clone() for name, value in policy.model.named_parameters()}
    with pytest.raises(KeyboardInterrupt), leave_untouched(policy):
        policy.model.train()
        with torch.no_grad():
            for value in policy.model.parameters():
                if value.requires_grad:
                    value.add_(1.0)
        raise KeyboardInterrupt
    assert all(value.equal(before[name]) for name, value in policy.model.named_parameters())
    assert not policy.model.training


# ------------------------------------------------------------------------------------------------ before training


SMALL = ["data.num_prompts=100", "data.test_size=20", "rloo.per_device_train_batch_size=32"]
HOPELESS = ["rloo.learning_rate=0", "run.preflight=true"]


def test_the_command_and_its_exit_codes(tmp_path):
    """Scripts go by the exit code: 0 GO, 1 NO-GO, 2 refused; and JSON is nothing but JSON."""
    output = f"run.output_dir={tmp_path}"
    code, printed, _ = call("preflight", DEMO, output, *SMALL)
    assert code == 0 and printed.endswith("GO\n") and "NO-GO" not in printed
    code, printed, noise = call("preflight", DEMO, output, *SMALL, *HOPELESS, "--json")
    found = json.loads(printed)
    assert code == 1 and found["go"] is False and "policy:" in noise
    assert found["faults"][0]["key"] == "rloo.learning_rate"
    code, _, noise = call("preflight", DEMO, output, "rloo.beta=-1")
    assert code == 2 and "rloo.beta" in noise
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_train_stops_at_a_no_go(tmp_path):
    """Exit code 2 before the first evaluation, and the folder is free for the corrected run."""
    words = [f"run.output_dir={tmp_path}", *SMALL, *HOPELESS]
    code, printed, noise = call("train", DEMO, *words)
    assert code == 2 and "rloo.learning_rate is 0" in noise and "NO-GO" in printed
    folder = tmp_path / "arithmetic_thinking"
    assert not (folder / "before.json").exists() and not (folder / "metrics.jsonl").exists()
    fixed = ["rloo.learning_rate=1e-3", "rloo.max_steps=1", "run.evaluate=false"]
    code, printed, noise = call("train", DEMO, *words, *fixed, "run.report=false")
    assert code == 0 and printed.count("\nGO\n") == 1, noise


@pytest.mark.slow
def test_a_launched_run_checks_what_needs_no_model(tmp_path):
    """The probe is for one process; two of them would each take the other's place in a collective call."""
    launch_file = str(ROOT / "configs" / "accelerate" / "cpu_two.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", launch_file]
    command += ["--main_process_port", "0", "-m", "rloo_kit.cli", "train", str(DEMO), f"run.output_dir={tmp_path}"]
    command += ["run.preflight=true", "run.evaluate=false", "run.report=false", "rloo.max_steps=1"]
    command += ["data.num_prompts=300", "data.test_size=20", "rloo.per_device_train_batch_size=16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stdout.split()).count("preflight without a launcher") == 1 and "1 steps" in done.stdout


# Engine, number format, correction and gap; the level, key and words of the fault, or None.
F16, F32 = torch.float16, torch.float32
GAPS: dict[str, tuple[str, torch.dtype, str, float, tuple[str, str, str] | None]] = {
    "nan": ("native", F32, "token", float("nan"), ("error", "model.dtype", "set model.dtype=float32")),
    "float16": ("native", F16, "none", 0.05, ("error", "rloo.sampler_correction", "or rollout.engine=generate")),
    "rounding": ("native", F16, "none", 0.02, None),
    "bfloat16": ("native", torch.bfloat16, "none", 0.05, None),
    "generate": ("generate", F16, "none", 0.05, ("error", "rloo.sampler_correction", "or model.dtype=float32")),
    "corrected": ("generate", F32, "token", 0.01, ("warning", "rloo.sampler_correction", "model.dtype=float32 avoids")),
}


@pytest.mark.parametrize("name", GAPS)
def test_a_gap_above_the_rounding_of_its_format_is_a_fault(name):
    """NaN is not above any limit; float16 had bfloat16's, and the fix of `generate` was `rollout.engine=generate`."""
    engine, dtype, correction, gap, expected = GAPS[name]
    model = SimpleNamespace(dtype=dtype)
    settings = SimpleNamespace(sampler_correction=correction, filters=SimpleNamespace(active=False))
    rloo = SimpleNamespace(settings=settings, sampler=SimpleNamespace(engine=SimpleNamespace(name=engine)))
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    args = SimpleNamespace(bf16=False, fp16=False)
    trainer = SimpleNamespace(model=model, rloo=rloo, accelerator=accelerator, args=args)
    faults = list(find_logp_faults(trainer, gap))
    assert len(faults) == (expected is not None)
    for fault in faults:
        assert (fault.level, fault.key) == expected[:2] and expected[2] in fault.text, fault
