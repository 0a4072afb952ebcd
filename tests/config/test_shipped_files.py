"""The configurations that ship: they load, and what their headers say agrees with what they hold."""

import re
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from rloo_kit import plan_vram
from rloo_kit.config.run import load_config

FOLDER = Path(__file__).resolve().parents[2] / "configs"
# Batches are in test_batch.py.
FILES = sorted(path for path in FOLDER.glob("*.yaml") if not path.stem.startswith("batch_"))
ON_GPU = [path for path in FILES if path.stem.startswith("qwen3")]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def header(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in lines), f"{path.name} does not start with a header"
    return "\n".join(lines)


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers where `pattern` matches in `text`, once; `@` being a number, `s?` a plural."""
    found = re.findall(re.escape(pattern).replace("@", r"(\d+(?:\.\d+)?)").replace(r"s\?", "s?"), text)
    assert len(found) == 1, f"{pattern!r} occurs {len(found)} times in:\n{text}"
    return [float(number) for number in ([found[0]] if isinstance(found[0], str) else found[0])]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_header_says_how_to_run_it_and_its_arithmetic(path: Path) -> None:
    """Someone halves the batch and leaves the header: from then on the first thing a reader sees is wrong."""
    run, text = load_config(path), header(path)
    rloo = run.rloo
    assert f"rloo-kit train configs/{path.name}" in text and "# Needs: " in text
    prompts, generations, completions = numbers("# Rollout: @ prompts? x @ generations = @ completions", text)
    assert (prompts, generations) == (rloo.prompts_per_generation, rloo.num_generations)
    assert completions == rloo.generation_batch_size == prompts * generations

    step = rloo.per_device_train_batch_size * rloo.gradient_accumulation_steps
    pattern = "@ rollouts? = @ prompts x @ generations = @ completions x at most @ tokens = at most @ tokens"
    rollouts, prompts, generations, completions, length, tokens = numbers(pattern, text)
    assert rollouts == step / rloo.generation_batch_size
    assert (prompts * generations, completions) == (step, step) and generations == rloo.num_generations
    assert length == rloo.max_completion_length and tokens == step * length


@pytest.mark.parametrize("path", ON_GPU, ids=lambda path: path.stem)
def test_memory_is_that_of_the_plan_and_fits_the_gpu(path: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A config for 8 GB that needs 9 fails after ten minutes; a header that was not changed with the keys hides it."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # which layers a checkpoint keeps in 16 bit is not known
    run, text = load_config(path), header(path)
    (gpu,) = numbers("one NVIDIA GPU with @ GB", text)
    plan = plan_vram(run, gpu * 1e9 / 2**30)
    rollout, training, total = numbers("@ GiB in a rollout, @ GiB in training, of @ GiB (computed", text)
    assert (rollout, training) == (round(plan.rollout_gib, 1), round(plan.training_gib, 1))
    assert plan.fits and total == round(gpu * 1e9 / 2**30, 1)
    completions, rows = numbers("= @ completions, @ of them at once", text)
    assert (completions, rows) == (plan.completions, plan.rows)
    assert f"rloo-kit plan configs/{path.name}" in text
    assert run.eval.batch_size <= completions, "the evaluation holds more rows in the cache than training"
    if (named := re.search(r"_(\d+)gb$", path.stem)) is not None:
        assert gpu == int(named[1])


@pytest.mark.parametrize("path", ON_GPU, ids=lambda path: path.stem)
def test_models_that_think_have_room_for_it(path: Path) -> None:
    """The published recipe gave 128 tokens to a model that thinks for thousands: every reward was equal, and it
    trained nothing."""
    run = load_config(path)
    assert run.rloo.max_completion_length >= (2048 if run.model.family == "instruct" else 4096)
    assert run.model.family == {"4B-T": "thinking", "4B-I": "instruct"}.get(run.model.name[14:18], "hybrid")
    assert run.model.enable_thinking is (True if run.model.family == "hybrid" else None)
    assert run.model.name.startswith("unsloth/Qwen3-") and run.model.name.endswith("-unsloth-bnb-4bit")
