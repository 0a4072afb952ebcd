"""The target vllm, served by real vLLM with the line that the export prints: its answers are the policy's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import rloo_kit as kit
from tests.with_vllm.conftest import VllmServer

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
    policy = kit.load_policy(run)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in policy.model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.02)
    kit.save_adapter(policy, run.folder / "adapter")
    (run.folder / "config.yaml").write_text(run.to_yaml(), encoding="utf-8")
    return run.folder


def test_the_printed_line_serves_the_policy(
    run_folder: Path, tmp_path: Path, make_server: Callable[..., VllmServer]
) -> None:
    """Token by token; and the parser has to know that the completion holds `</think>` alone."""
    from rloo_kit.export.parity import measure_reference

    exported = kit.export_model(run_folder, "vllm")
    run, policy = kit.load_trained(run_folder)
    reference = measure_reference(run, policy, list(kit.load_data(run, policy.tokenizer).test["prompt"][:20]))
    [line] = exported.usage
    words = line.split()
    assert words[:3] == ["vllm", "serve", str(exported.folder)]
    context, parser = words[words.index("--max-model-len") + 1], words[words.index("--reasoning-parser") + 1]
    server = make_server("--reasoning-parser", parser, context=int(context))
    server._command[server._command.index("--model") + 1] = words[2]
    server.start()

    def ask(path: str, **asked: Any) -> Any:
        asked |= {"model": words[2], "temperature": 0, "max_tokens": reference.limit}
        return httpx.post(f"{server.url}/v1/{path}", json=asked, timeout=60, trust_env=False).json()["choices"][0]

    message = ask("chat/completions", messages=[{"role": "user", "content": "489-56="}])["message"]
    thinking = message.get("reasoning") or message.get("reasoning_content")
    assert thinking and thinking.strip().startswith("9-6=3"), message
    assert message["content"].strip() == "433", message
    for row in reference.rows:
        found = ask("completions", prompt=row["ids"], logprobs=0, return_tokens_as_token_ids=True)["logprobs"]
        assert [int(token.removeprefix("token_id:")) for token in found["tokens"]] == row["completion"]
        assert found["token_logprobs"] == pytest.approx(row["logps"], abs=LARGEST)
    server.stop()
