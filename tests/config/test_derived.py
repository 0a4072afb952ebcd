"""Defaults that follow other keys: what a short file gets, and that no subset of the keys is made to contradict."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.config.checks import CLOSE_TOKENS
from rloo_kit.config.model_names import always_thinks, thinks_by_keys
from rloo_kit.config.run import RunConfig, fill_defaults
from rloo_kit.config.schema import FULL_LEARNING_RATE, LORA_LEARNING_RATE
from rloo_kit.config.supervised import FULL_SFT_RATE, LORA_SFT_RATE

THINKING = "Qwen/Qwen3-4B-Thinking-2507"


def build(model: dict[str, Any] | str, **sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": {"name": model} if isinstance(model, str) else model,
        "data": {"source": "sums.csv"},
        "rewards": [{"name": "answer_reward"}],
        "rloo": {"max_steps": 1},
    }
    for name, keys in sections.items():
        values[name] = values.get(name, {}) | keys
    return RunConfig.model_validate(values)


def lengths(run: RunConfig) -> tuple[int, int, int, int | None]:
    rloo = run.rloo
    return run.model.max_seq_length, run.data.max_prompt_length, rloo.max_completion_length, rloo.thinking_budget


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("some/model", (2048, 512, 1536, None)),
        (THINKING, (6144, 1536, 4608, 4095)),
        ("unsloth/Qwen3-0.6B-unsloth-bnb-4bit", (6144, 1536, 4608, 4095)),
        ({"name": "some/model", "family": "thinking"}, (6144, 1536, 4608, 4095)),
        ({"name": "some/model", "family": "hybrid", "enable_thinking": False}, (2048, 512, 1536, None)),
        ({"name": THINKING, "max_seq_length": 12800}, (12800, 3200, 9600, 9087)),
        ("embedded/thinking", (160, 40, 120, None)),
        ("embedded/instruct", (160, 40, 120, None)),
    ],
    ids=str,
)
def test_a_short_file_has_room_to_think_and_learns_from_four_prompts(model: Any, expected: tuple[Any, ...]) -> None:
    """A short file got K = 2, one group, the summed KL, and 512 tokens for a model that thinks for thousands."""
    run = build(model)
    assert lengths(run) == expected
    assert (run.rloo.num_generations, run.rloo.prompts_per_generation) == (8, 4)
    assert (run.rloo.beta, run.rloo.kl_form, run.rloo.learning_rate) == (0.0, "length_normalized", LORA_LEARNING_RATE)
    assert RunConfig.model_validate(run.model_dump()) == run


# Values of the four keys that agree with each other, in a small and a large run.
KEYS = {
    "max_seq_length": "model",
    "max_prompt_length": "data",
    "max_completion_length": "rloo",
    "thinking_budget": "rloo",
}
SANE = [(1024, 64, 700, 600), (20000, 3000, 16000, 12000), (600, 300, 300, 200)]
SUBSETS = [names for size in range(5) for names in itertools.combinations(KEYS, size)]


@pytest.mark.parametrize("model", ["some/model", THINKING, "embedded/thinking"])
@pytest.mark.parametrize("with_all", [False, True])
def test_no_subset_of_the_lengths_is_made_to_contradict(model: str, with_all: bool) -> None:
    """A derived prompt of 512 tokens turned `max_completion_length: 1900` into an error about a key not set."""
    for values, names in itertools.product(SANE, SUBSETS):
        sections: dict[str, dict[str, Any]] = {"model": {"name": model}, "data": {}, "rloo": {}, "eval": {}}
        given = {name: value for name, value in zip(KEYS, values, strict=True) if name in names}
        for name, value in given.items():
            sections[KEYS[name]][name] = value
        if with_all:
            sections["rloo"]["thinking_close"] = "sentence"
            if "thinking_budget" in names or model == THINKING:
                sections["rloo"]["answer_budget"] = 20
            sections["eval"] |= {"max_completion_length": 250, "thinking_budgets": [8, 200]}
        run = build(sections.pop("model"), **sections)
        longest = 200 + CLOSE_TOKENS["sentence"] + run.forced_answer if with_all else 0  # of eval.thinking_budgets
        assert run.data.max_prompt_length + longest <= run.model.max_seq_length
        assert all(getattr(getattr(run, KEYS[name]), name) == value for name, value in given.items())


def test_a_null_and_what_is_no_number_stay_what_they_are() -> None:
    """A budget that is off stays off; and a wrong length is refused by its own key, not by one that follows."""
    assert build(THINKING, rloo={"thinking_budget": None}).rloo.thinking_budget is None
    for wrong in ("many", True, -4, 1.5, [1], float("inf")):
        with pytest.raises(ValueError, match="max_seq_length") as caught:
            build({"name": THINKING, "max_seq_length": wrong})
        assert "max_prompt_length" not in str(caught.value)
    assert fill_defaults(3) == 3 and fill_defaults({"model": None}) == {"model": None}


def test_the_rate_follows_what_is_trained_and_the_batch_follows_k() -> None:
    """1e-5 moved no adapter in 40 steps; the rate of an adapter is too large for all parameters."""
    assert LORA_LEARNING_RATE == 10 * FULL_LEARNING_RATE
    full = {"name": "some/model", "lora": None}
    assert build(full).rloo.learning_rate == FULL_LEARNING_RATE
    assert build(full, rloo={"learning_rate": 3e-6}).rloo.learning_rate == 3e-6
    assert build("some/model").sft.learning_rate == LORA_SFT_RATE
    assert build(full, sft={"max_steps": 3}).sft.learning_rate == FULL_SFT_RATE
    assert build(full, sft={"learning_rate": 1e-3}).sft.learning_rate == 1e-3
    for k in (2, 3, 6, 16):
        rloo = build("some/model", rloo={"num_generations": k}).rloo
        assert rloo.generation_batch_size == 4 * k == 4 * rloo.num_generations
    with pytest.raises(ValueError, match="whole groups of 5"):
        build("some/model", rloo={"num_generations": 5, "per_device_train_batch_size": 8})


ALWAYS = (
    "DeepSeek-R1-Distill-Qwen-7B", "unsloth/DeepSeek-R1-Distill-Llama-8B-unsloth-bnb-4bit", "OpenR1-Distill-7B",
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "Qwen/QwQ-32B", "microsoft/Phi-4-reasoning-plus", "x/Olmo-3-7B-Think",
    "/models/Qwen3-8B-Thinking/",
)  # fmt: skip
BY_DEFAULT = (
    "Qwen/Qwen3.5-4B", "unsloth/Qwen3.5-27B-unsloth-bnb-4bit", "Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3-0.6B",
    "HuggingFaceTB/SmolLM3-3B", "unsloth/SmolLM3-3B-bnb-4bit",
)  # fmt: skip
OFF = (
    "Qwen/Qwen3.5-0.8B", "unsloth/Qwen3.5-2B-bnb-4bit", "Qwen/Qwen3.5-4B-Base", "HuggingFaceTB/SmolLM3-3B-Base",
    "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-Embedding-0.6B", "thinking/llama", "openai/gpt-oss-20b",
    "Qwen/QwQ-32B-Preview", "outputs/reasoning_gym_sums", "my/llama-r1", "meta/Llama-3.2-1B-Instruct",
)  # fmt: skip


def test_what_thinks_by_its_name() -> None:
    """R1, SmolLM3 and others got 2,048 tokens and no budget; a folder called thinking does not think."""
    for name in (*ALWAYS, *BY_DEFAULT, *OFF):
        thinks = name not in OFF
        assert always_thinks(name) is (name in ALWAYS), name
        assert thinks_by_keys({"name": name}) is thinks, name
        assert name in ALWAYS or thinks_by_keys({"name": name, "enable_thinking": not thinks}) is not thinks, name
    assert not thinks_by_keys({"name": THINKING, "family": "plain"})


def test_a_folder_is_known_by_its_path_or_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An R1 distillation was an instruct model once its folder was called checkpoint-100."""
    adapter = tmp_path / "outputs" / "run" / "adapter"
    snapshot = tmp_path / "models--deepseek-ai--DeepSeek-R1-Distill-Qwen-7B" / "snapshots" / "0a1b"
    for folder in (adapter, snapshot, tmp_path / "plain", tmp_path / "org-non-reasoning", tmp_path / "rethinking-x"):
        folder.mkdir(parents=True)
    settings = {"base_model_name_or_path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    assert always_thinks(str(adapter)) and always_thinks(str(snapshot)) and thinks_by_keys({"name": str(adapter)})
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-4B"}))
    assert not always_thinks(str(adapter)) and thinks_by_keys({"name": str(adapter)})
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "org-non-reasoning", "rethinking-x"):
        assert not always_thinks(name), name
