"""Reading a run: overrides, names, assignments, and a resolved file that is the same run again."""

import re
from pathlib import Path

import pytest

from rloo_kit import plan_vram
from rloo_kit.config.run import RunConfig, load_config
from rloo_kit.config.yaml_files import read_yaml
from rloo_kit.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[2] / "configs"
DEMO = FOLDER / "arithmetic_thinking.yaml"
MINIMAL = """
model: {name: embedded/thinking, max_seq_length: 256}
data: {source: embedded/addition, max_prompt_length: 64}
rewards: [{name: answer_reward}]
rloo: {max_steps: 3, max_completion_length: 64}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "try_one.yaml"
    path.write_text(MINIMAL)
    return path


def test_overrides_win_over_sections_and_these_over_the_file(minimal: Path) -> None:
    """Three places can say the same thing; the nearest to the user counts."""
    run = load_config(
        minimal, "rloo.beta=0.3", "eval.thinking_budgets=[8, 16]", rloo={"beta": 0.2, "num_iterations": 2}
    )
    assert (run.rloo.beta, run.rloo.num_iterations, run.rloo.max_steps) == (0.3, 2, 3)
    assert run.eval.thinking_budgets == [8, 16]
    run = load_config(minimal, "model.lora=null", "rewards.0.weight=0.5", "rewards.0.params.find=boxed")
    assert run.model.lora is None and run.rewards[0].weight == 0.5 and run.rewards[0].params == {"find": "boxed"}
    run = load_config(minimal, "--rloo.beta = 0.1", "model.lora.r=4", "run.name=2026-11-21", "run.report=off")
    assert (run.rloo.beta, run.model.lora.r, run.name, run.run.report) == (0.1, 4, "2026-11-21", False)


def test_name_and_folder(minimal: Path) -> None:
    """Two configs that both call themselves `run` would write into one folder; the stem keeps them apart."""
    run = load_config(minimal)
    assert (run.name, run.folder, run.source) == ("try_one", Path("outputs/try_one"), minimal)
    assert load_config(minimal, "run.name=7", "run.output_dir=/x").folder == Path("/x/7")
    assert load_config(minimal, "run.output_dir=~/runs").folder == Path.home() / "runs" / "try_one", "no folder named ~"
    values = read_yaml(MINIMAL)[0]  # a run that is built in Python has no stem, and would write into a folder `None`
    with pytest.raises(ConfigError, match=r"the run has no name; set run\.name"):
        _ = RunConfig(**values).folder
    assert RunConfig(**values, run={"name": "x"}).folder == Path("outputs/x")


@pytest.mark.parametrize("stem", ["arithmetic_thinking", "qwen3_4b_thinking_12gb", "smollm2_sums"])
def test_resolved_file_loads_back_to_an_equal_run(stem: str, tmp_path: Path) -> None:
    """The copy in the run's folder is what a resume and a report read; a key that changes on the way is another run."""
    run = load_config(FOLDER / f"{stem}.yaml")
    run.data.system_prompt, run.rloo.reward_clip_range = "no", (-1.0, 1.0)
    copy = tmp_path / "config.yaml"
    copy.write_text(run.to_yaml())
    again = load_config(copy)
    assert again == run and again.name == stem and again.source == copy
    again.rloo.beta = 0.123
    assert again != run


def test_assignment_is_checked_and_a_refused_one_changes_nothing(minimal: Path) -> None:
    """`run.rloo.num_generations = 3` passed, and the trainer failed later; `beta: unknown key` had no section."""
    run = load_config(minimal)
    for section, key, value, message in (
        (run.rloo, "num_generations", 3, "rloo: a rollout has 32 completions"),
        (run.rloo, "top_p", 1.5, "rloo.top_p: is 1.5"),
        (run.rloo, "bta", 3, "rloo.bta: unknown key; did you mean rloo.beta?"),
        (run.model.lora, "r", 7.5, "model.lora.r: is 7.5"),
        (run, "rloo", run.rloo.model_copy(update={"max_completion_length": 500}), "data.max_prompt_length (64) + "),
    ):
        with pytest.raises(ConfigError) as caught:
            setattr(section, key, value)
        assert str(caught.value).startswith(message)
    assert (run.rloo.num_generations, run.rloo.top_p, run.rloo.max_completion_length) == (8, 1.0, 64)
    run.rloo.learning_rate = "1e-4"
    assert run.rloo.learning_rate == 1e-4


def test_contradicting_assignments_are_found_before_the_run_is_written(minimal: Path) -> None:
    """Two assignments in two sections are each fine; the run's folder then held a file that no command could read."""
    run = load_config(minimal)
    run.rloo.max_completion_length = 5000
    for use in (run.check, run.to_yaml):
        with pytest.raises(ConfigError, match="= 5064 tokens, more than model.max_seq_length"):
            use()
    run.model.max_seq_length = 5064
    assert "max_completion_length: 5000" in run.to_yaml()


def test_batch_arithmetic_counts_processes(minimal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two processes a rollout is twice as large; a config that divided on one GPU failed on two, or the reverse."""
    wanted = ["rloo.per_device_train_batch_size=3", "rloo.steps_per_generation=2", "rloo.num_generations=4"]
    with pytest.raises(ConfigError, match="= 6 completions"):
        load_config(minimal, *wanted)
    monkeypatch.setenv("WORLD_SIZE", "2")
    rloo = load_config(minimal, *wanted).rloo
    assert (rloo.generation_batch_size, rloo.prompts_per_generation) == (12, 3)
    monkeypatch.setenv("WORLD_SIZE", "")  # as `.env` files and CI leave it
    assert rloo.generation_batch_size == 6
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'two'"):
        load_config(minimal)


def test_arguments_for_the_trainer_leave_out_what_is_not_set(minimal: Path) -> None:
    """TRL reads `max_steps=None` as a crash and `bf16=None` as true; a key that is null must not reach it."""
    arguments = load_config(minimal).rloo.to_arguments()
    assert arguments["max_steps"] == 3 and arguments["report_to"] == "none"
    assert not {"num_train_epochs", "bf16", "fp16", "steps_per_generation", "missing_eos_penalty"} & set(arguments)
    assert load_config(minimal, "rloo.report_to=tensorboard").rloo.to_arguments()["report_to"] == ["tensorboard"]


def test_a_model_of_one_family_takes_its_prompts_and_files(minimal: Path) -> None:
    """A model that knows sums was trained on prompts that it cannot read; test_messages.py has those refusals."""
    for source in ("embedded/chain_sum", "reasoning_gym/chain_sum", "sums.jsonl", "./saved"):
        run = load_config(minimal, "model.name=embedded/thinking@chain_sum", f"data.source={source}")
        assert run.data.source == source


# ------------------------------------------------------------------------------------------ the files that ship

IMAGES = FOLDER / "qwen3_vl_4b_thinking.yaml"
EVENINGS = sorted({*FOLDER.glob("evening*.yaml"), IMAGES} - {FOLDER / "evening_cpu.yaml"})
LONG = sorted({*FOLDER.glob("qwen3*.yaml")} - {IMAGES})


@pytest.mark.parametrize("path", EVENINGS, ids=lambda path: path.stem)
def test_an_evening_is_one(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 43 to 70 hours, their evaluations left out, were the only ones that shipped for a GPU."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    run = load_config(path)
    (gpu,) = re.findall(r"one NVIDIA GPU with (\d+) GB", path.read_text(encoding="utf-8"))
    plan = plan_vram(run, int(gpu) * 1e9 / 2**30)
    assert plan.verdict == "fits" and plan.rows == plan.completions == run.eval.batch_size
    assert path.stem.endswith(f"_{gpu}gb") or not path.stem.endswith("gb")
    assert plan.step is not None and plan.step.hours is not None and 1.2 < plan.step.hours < 3.5
    assert plan.step.evaluation_s / 3600 < 0.3
    slower = plan_vram(load_config(path, "rollout.engine=generate"), int(gpu) * 1e9 / 2**30).step
    assert slower is not None and slower.hours is not None and slower.hours < 5, "where the kit's decoder is not used"


@pytest.mark.parametrize("path", LONG, ids=lambda path: path.stem)
def test_models_that_think_have_room_for_it(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 tokens for a model that thinks for thousands: every reward was equal."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # which layers a checkpoint keeps in 16 bit is not known
    run = load_config(path)
    (gpu,) = re.findall(r"one NVIDIA GPU with (\d+) GB", path.read_text(encoding="utf-8"))
    plan = plan_vram(run, int(gpu) * 1e9 / 2**30)
    assert plan.fits and (path.stem.endswith(f"_{gpu}gb") or not path.stem.endswith("gb"))
    assert run.eval.batch_size <= plan.completions, "the evaluation holds more rows in the cache than training"
    assert run.rloo.max_completion_length >= (2048 if run.model.family == "instruct" else 4096)
    assert run.model.family == {"4B-T": "thinking", "4B-I": "instruct"}.get(run.model.name[14:18], "hybrid")
    assert run.model.enable_thinking is (True if run.model.family == "hybrid" else None)
    assert run.model.name.startswith("unsloth/Qwen3-") and run.model.name.endswith("-unsloth-bnb-4bit")
