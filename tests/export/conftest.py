"""Runs whose training is left out: a configuration, and an adapter that is not the identity."""

from collections.abc import Callable
from pathlib import Path

import pytest

ROWS = 151936  # of Qwen3's embedding
TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich; 1234 + 5678 = 6912, it's 10:45 o'clock.\n\tdef f(x):"


@pytest.fixture(scope="session", autouse=True)
def no_unsloth() -> None:
    """The environment, settled as a command settles it."""
    import rloo_kit as kit

    kit.setup_environment("transformers")


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_run(name, *overrides, scale=0.02)`: a run's folder; `scale`: standard deviation of the adapter's B."""
    import torch

    import rloo_kit as kit
    from rloo_kit.config.run import load_config

    root = Path(__file__).resolve().parents[2]

    def make(name: str, *overrides: str, scale: float = 0.02) -> Path:
        output = tmp_path_factory.mktemp("outputs")
        file = root / "configs" / "arithmetic_thinking.yaml"
        run = load_config(file, f"run.output_dir={output}", f"run.name={name}", "data.test_size=64", *overrides)
        policy = kit.load_policy(run)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter_name, value in policy.model.named_parameters():
                if "lora_B" in parameter_name:
                    value.normal_(std=scale)
        kit.save_adapter(policy, run.folder / "adapter")
        (run.folder / "config.yaml").write_text(run.to_yaml(), encoding="utf-8")
        return run.folder

    return make


@pytest.fixture(scope="session")
def embedded_run(make_run: Callable[..., Path]) -> Path:
    """A run of the embedded model that thinks; read it, never write into it."""
    return make_run("sums")


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory, qwen3_folder: Path) -> Path:
    """A random tiny Qwen3 with the true number of rows, in bfloat16 as checkpoints are, and the real tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from rloo_kit.demo.cold_start import TEMPLATES

    folder = tmp_path_factory.mktemp("wide")
    tokenizer = AutoTokenizer.from_pretrained(qwen3_folder)
    tokenizer.chat_template = TEMPLATES["thinking"]
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=ROWS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=4096, tie_word_embeddings=False,
        bos_token_id=151643, eos_token_id=151645, pad_token_id=151643, initializer_range=0.2,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def wide_run(make_run: Callable[..., Path], wide_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of that model on questions with digits, umlauts, tabs and apostrophes."""
    import json

    file = tmp_path_factory.mktemp("data") / "questions.jsonl"
    rows = [{"prompt": f"{number}: {TEXT[number:]}", "answer": str(number)} for number in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return make_run(
        "wide", f"model.name={wide_folder}", f"data.source={file}", "data.num_prompts=null", "data.test_size=8",
        "data.max_prompt_length=160", "model.max_seq_length=256", "rloo.max_completion_length=24", scale=0.05,
    )  # fmt: skip
