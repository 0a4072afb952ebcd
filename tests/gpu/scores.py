"""Log-probabilities of fixed completions on the card; as a program: by the transformers backend.

python scores.py MODEL_FOLDER ADAPTER_FOLDER OUT.pt        (4-bit, in a process without Unsloth)
"""

import sys
from pathlib import Path
from typing import Any


def scores(policy: Any) -> Any:
    """(2, 32) log-probabilities in nats, 0 behind the shorter completion's end; the model's own precision."""
    import torch

    from rloo_kit import environment
    from rloo_kit.logprobs import attach_token_scoring, completion_scores

    base = policy.model.get_base_model()
    if "forward" not in vars(base):
        attach_token_scoring(base, temperature=1.0)
    prompts = [torch.arange(5, 25, device="cuda"), torch.arange(40, 47, device="cuda")]
    completions = [torch.arange(60, 92, device="cuda"), torch.arange(30, 39, device="cuda")]
    dtype = getattr(torch, environment.current().dtype_name)
    with policy.inference_mode(), torch.autocast("cuda", dtype=dtype):
        logps, _ = completion_scores(policy.model, prompts, completions, width=32, pad_id=policy.tokenizer.pad_token_id)
    return logps.clone()


def main(model: str, adapter: str, out: str) -> None:
    import torch

    from rloo_kit import load_config, load_policy

    run = Path(out).with_suffix(".yaml")
    run.write_text(
        f'model: {{name: "{model}", adapter: "{adapter}", load_in_4bit: true, max_seq_length: 1024}}\n'
        "data: {source: embedded/addition, max_prompt_length: 128}\n"
        "rewards: [{name: thinking_reward}]\n"
        "rloo: {max_steps: 1, max_completion_length: 64}\n"
    )
    policy = load_policy(load_config(run))
    assert policy.backend == "transformers" and "unsloth" not in sys.modules
    torch.save(scores(policy).cpu(), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
