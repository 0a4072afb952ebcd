"""What both backends have to agree on, computed for one policy; as a program: by the transformers backend.

python reference.py MODEL_FOLDER ADAPTER_FOLDER OUT.pt
"""

import sys
from pathlib import Path
from typing import Any

PROMPTS = ["ab", "abc cab"]
COMPLETIONS = ["de</think>f<|im_end|>", "hgfe"]


def numbers(policy: Any) -> dict[str, Any]:
    """Log-probabilities, entropies, their gradients, logits of left-padded rows, and greedy completions."""
    import torch

    from rloo_kit.gradient.packing import Group
    from rloo_kit.gradient.scorer import Scorer
    from rloo_kit.rollout.engine import generate_completions

    model, tokenizer = policy.model, policy.tokenizer
    rows = tokenizer([prompt + answer for prompt, answer in zip(PROMPTS, COMPLETIONS, strict=True)], padding=True)
    mask = torch.tensor(rows["attention_mask"])
    padded = {}
    for mode in (True, False):  # training first: what Unsloth does with the mask depends on the calls before
        model.train(mode)
        with torch.no_grad():
            base = model.get_base_model().model(input_ids=torch.tensor(rows["input_ids"]), attention_mask=mask)
            logits = model(input_ids=torch.tensor(rows["input_ids"]), attention_mask=mask).logits
        padded[f"states, training={mode}"] = base.last_hidden_state[mask.bool()].clone()
        padded[f"logits, training={mode}"] = logits[mask.bool()].clone()
    generated = generate_completions(policy, PROMPTS, max_completion_length=6, temperature=0.0)
    scorer = Scorer(model, 1.0, tokenizer.pad_token_id, layout="padded")
    ids = [[torch.tensor(tokenizer(text)["input_ids"]) for text in texts] for texts in (PROMPTS, COMPLETIONS)]
    model.train()
    scores = scorer.score(model, [Group(prompt, [completion]) for prompt, completion in zip(*ids, strict=True)])
    scores.logps.sum().backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    return {
        "logps": scores.logps.detach(),
        "entropies": scores.entropies,
        "gradients": gradients,
        "greedy": [completion.ids for completion in generated],
        **padded,
    }


def main(model: str, adapter: str, out: str) -> None:
    import torch

    from rloo_kit import load_config, load_policy

    run = Path(out).with_suffix(".yaml")
    run.write_text(
        f'model: {{name: "{model}", adapter: "{adapter}"}}\n'
        "data: {source: embedded/addition, max_prompt_length: 32}\n"
        "rewards: [{name: thinking_reward}]\n"
        "rloo: {max_steps: 1, max_completion_length: 8}\n"
    )
    policy = load_policy(load_config(run))
    assert policy.backend == "transformers" and "unsloth" not in sys.modules
    torch.save(numbers(policy), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
