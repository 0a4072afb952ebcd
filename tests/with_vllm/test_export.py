"""The target vllm: exported, loaded by real vLLM in a separate process, and compared with the policy; then served."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

import rloo_kit as kit
from tests.with_vllm.conftest import VllmServer

pytest_plugins: list[str] = []
LARGEST = 1e-4  # nats, in float32


@pytest.fixture(scope="module")
def run_folder(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the embedded model with an adapter that is not the identity; nothing was trained."""
    import torch

    from rloo_kit.config.run import load_config

    kit.setup_environment("transformers")
    output = tmp_path_factory.mktemp("outputs")
    file = Path(__file__).resolve().parents[2] / "configs" / "arithmetic_thinking.yaml"
    words = [f"run.output_dir={output}", "run.name=sums", "data.test_size=64", "rollout.engine=native"]
    words += ["model.name=embedded/thinking@subtraction", "data.source=embedded/subtraction"]  # it always thinks
    run = load_config(file, *words)
    policy = kit.load_policy(run, check=False)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in policy.model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.02)
    kit.save_adapter(policy, run.folder / "adapter")
    (run.folder / "config.yaml").write_text(run.to_yaml(), encoding="utf-8")
    return run.folder


@pytest.fixture(scope="module")
def exported(run_folder: Path) -> "kit.export.export.Export":  # type: ignore[name-defined]
    return kit.export_model(run_folder, "vllm")


def test_vllm_says_what_the_policy_says(exported: object) -> None:
    """The certificate of the target vllm is vLLM's own."""
    record = json.loads((exported.folder / "certificate.json").read_text())  # type: ignore[attr-defined]
    assert record["verdict"] == "checked" and record["loader"] == "vllm"
    [check] = record["checks"]
    print(check)
    assert check["largest"] < LARGEST and check["equal"] == check["prompts"] == 20


def test_the_line_that_serves_it_splits_the_thinking(
    exported: object, tmp_path: Path, make_server: Callable[..., VllmServer]
) -> None:
    """`--reasoning-parser qwen3` has to know that the prompt opened the thinking: the completion holds `</think>`
    alone."""
    [line] = exported.usage  # type: ignore[attr-defined]
    words = line.split()
    assert words[:3] == ["vllm", "serve", str(exported.folder)]  # type: ignore[attr-defined]
    context, parser = words[words.index("--max-model-len") + 1], words[words.index("--reasoning-parser") + 1]
    server = make_server("--reasoning-parser", parser, context=int(context))
    server._command[server._command.index("--model") + 1] = words[2]
    server.start()
    asked = {
        "model": words[2],
        "messages": [{"role": "user", "content": "489-56="}],
        "temperature": 0,
        "max_tokens": 48,
    }
    found = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60, trust_env=False).json()
    message = found["choices"][0]["message"]
    server.stop()
    thinking = message.get("reasoning") or message.get("reasoning_content")
    assert thinking and thinking.strip().startswith("9-6=3"), message
    assert message["content"].strip() == "433", message
