#!/usr/bin/env python3
"""RLOO in plain torch, to read top to bottom: a tiny thinking Qwen3 learns column addition on the CPU.

    python scripts/minimal_rloo.py --steps 50 --seed 0

The step equals that of rloo_kit.RLOOTrainer and of TRL's: tests/contracts/test_minimal_rloo.py compares advantages,
loss and gradient. docs/loop.md walks through it and says what the kit adds and why. The choices:

- policy: a frozen model with a LoRA adapter. Reference: the same model with the adapter off, so one set of weights.
- on-policy: one update per rollout, so the importance ratio is 1 and the clip is inactive. UPDATES = 2 activates it.
- reward: 1 for the right number after `</think>`, found by its token id, else 0. No reward model, no value model.
- advantage: the reward minus the mean reward of the prompt's K - 1 other completions, not divided by a deviation.
- KL: beta times the log-ratio of the whole completion (k1), subtracted from the reward. With beta 0, no reference pass.
- loss: the ratio of the whole completion times its advantage, clipped as in PPO, a mean over completions.
- sampling: temperature 1 and the whole vocabulary, because that is the distribution that is scored.

The kit provides the model (built offline on first use, about a minute, then cached) and the problems. Importing them
imports TRL, but none of its code runs. Shapes: B completions = prompts x K, P prompt, C completion, V vocabulary.
"""

import argparse
import os
import random
import time

os.environ.setdefault("RLOO_KIT_BACKEND", "transformers")  # even if Unsloth is installed

from rloo_kit.demo.embedded import build
from rloo_kit.tasks import families
from rloo_kit.tasks.families import make_rows

# isort: split
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS, K = 16, 8  # prompts per step, completions per prompt: B = 128
MAX_TOKENS = 48  # of a completion
LEARNING_RATE = 2e-3  # decays linearly to 0; a model with billions of parameters wants 1/100 of it
EPSILON = 0.2  # the ratio is clipped to 1 - EPSILON and 1 + EPSILON
UPDATES = 1  # optimizer steps per rollout
HELD_OUT = 1000  # problems for the accuracy, never trained on


def pad(rows, side):
    """Padded token ids, and a mask with 1 for real tokens: (B, longest) each."""
    width = max(map(len, rows))
    gaps = [[0] * (width - len(row)) for row in rows]
    fit = (lambda row, gap: gap + row) if side == "left" else (lambda row, gap: row + gap)
    ids = torch.tensor([fit(row, gap) for row, gap in zip(rows, gaps, strict=True)])
    mask = torch.tensor([fit([1] * len(row), gap) for row, gap in zip(rows, gaps, strict=True)])
    return ids, mask


def positions(mask):
    """Position of each token among the real ones of its row: (B, T) -> (B, T)."""
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


@torch.no_grad()
def sample(model, prompts, ends):
    """A completion of each prompt, as a list of token ids: up to an end token, which is kept, or MAX_TOKENS."""
    tokens, mask = pad(prompts, "left")  # (B, P)
    place, cache, drawn = positions(mask), None, []
    alive = torch.ones(len(prompts), dtype=torch.bool)  # (B,)
    while alive.any() and len(drawn) < MAX_TOKENS:
        out = model(tokens, attention_mask=mask, position_ids=place, past_key_values=cache, logits_to_keep=1)
        cache = out.past_key_values
        tokens = out.logits[:, -1].softmax(dim=-1).multinomial(1)  # (B, V) -> (B, 1)
        drawn.append(tokens)
        alive &= ~torch.isin(tokens[:, 0], torch.tensor(ends))
        mask, place = torch.cat([mask, torch.ones_like(tokens)], dim=1), place[:, -1:] + 1
    rows = torch.cat(drawn, dim=1).tolist()  # (B, C); tokens after a row's end are cut off below
    return [row[: next((n + 1 for n, token in enumerate(row) if token in ends), len(row))] for row in rows]


def answer_reward(completion, answer, tokenizer):
    """1.0 if the text after the last `</think>` is the answer, else 0.0; without that token there is no answer."""
    think_end = tokenizer.convert_tokens_to_ids("</think>")
    if think_end not in completion:
        return 0.0
    start = len(completion) - completion[::-1].index(think_end)
    return float(tokenizer.decode(completion[start:], skip_special_tokens=True).strip() == answer)


def token_logps(model, prompts, completions):
    """Log-probability of every completion token, 0 after a completion's end: (B, C)."""
    (prompt_ids, prompt_mask), (ids, kept) = pad(prompts, "left"), pad(completions, "right")  # (B, P), (B, C)
    mask = torch.cat([prompt_mask, kept], dim=1)  # (B, P + C)
    tokens = torch.cat([prompt_ids, ids], dim=1)
    length = ids.shape[1] + 1  # logits at the last prompt token predict the first of the completion
    out = model(tokens, attention_mask=mask, position_ids=positions(mask), logits_to_keep=length)
    logps = out.logits[:, :-1].log_softmax(dim=-1)  # (B, C, V)
    return logps.gather(2, ids.unsqueeze(2)).squeeze(2) * kept


def leave_one_out(rewards, num_generations):
    """Each reward minus the mean of its siblings' rewards: (B,) -> (B,)."""
    groups = rewards.view(-1, num_generations)  # (prompts, K)
    siblings = (groups.sum(dim=1, keepdim=True) - groups) / (num_generations - 1)
    return (groups - siblings).view(-1)


def charge_kl(rewards, policy, old_logps, prompts, completions, beta):
    """The rewards minus beta times each completion's log-ratio to the reference: (B,) -> (B,)."""
    if beta == 0:
        return rewards
    with torch.no_grad(), policy.disable_adapter():
        reference_logps = token_logps(policy, prompts, completions)  # (B, C)
    return rewards - beta * (old_logps - reference_logps).sum(dim=1)


def clipped_loss(logps, old_logps, advantages, epsilon):
    """Minus the objective, a mean over completions: (B, C), (B, C), (B,) -> ()."""
    ratio = (logps - old_logps).sum(dim=1).exp()  # (B,)
    bounded = ratio.clamp(1 - epsilon, 1 + epsilon)
    return -torch.minimum(ratio * advantages, bounded * advantages).mean()


def measure(name, policy, tokenizer, problems, ends):
    """Print the accuracy at temperature 1, and the first completion."""
    completions = sample(policy, [prompt for prompt, _ in problems], ends)
    scores = [answer_reward(row, answer, tokenizer) for row, (_, answer) in zip(completions, problems, strict=True)]
    print(f"{name}: accuracy {sum(scores) / len(scores):.3f} on {len(scores)} held-out problems", flush=True)
    print(f"{tokenizer.decode(problems[0][0])}{tokenizer.decode(completions[0])}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50, help="rollouts, each with UPDATES optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of the problems, the adapter and the sampling")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL penalty; 0: none")
    parser.add_argument("--model", help="folder of another Qwen3 with a Thinking template; default: the embedded one")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="problems that are measured")
    options = parser.parse_args()
    started = time.monotonic()
    torch.set_num_threads(1)  # the model is so small that two threads only wait for each other
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)

    folder = options.model or build("thinking")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = get_peft_model(base, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]

    problems = []  # (prompt ids, answer)
    for row in make_rows(families.ADDITION, options.held_out + 5000, options.seed):
        turns = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)  # ends in <think>
        problems.append((tokenizer(text)["input_ids"], row["answer"]))
    held_out, problems = problems[: options.held_out], problems[options.held_out :]

    measure("before", policy, tokenizer, held_out, ends)
    for step in range(options.steps):
        batch = [problem for problem in rng.sample(problems, PROMPTS) for _ in range(K)]  # B, prompt by prompt
        prompts = [prompt for prompt, _ in batch]
        completions = sample(policy, prompts, ends)
        scored = zip(completions, batch, strict=True)
        rewards = torch.tensor([answer_reward(row, answer, tokenizer) for row, (_, answer) in scored])  # (B,)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / options.steps)
        for update in range(UPDATES):
            logps = token_logps(policy, prompts, completions)  # (B, C)
            if update == 0:
                old_logps = logps.detach()  # the policy that sampled is still this one
                charged = charge_kl(rewards, policy, old_logps, prompts, completions, options.beta)
                advantages = leave_one_out(charged, K)  # (B,)
            loss = clipped_loss(logps, old_logps, advantages, EPSILON)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
        if step % 5 == 4 or step + 1 == options.steps:
            tokens = sum(map(len, completions)) / len(completions)
            print(f"step {step + 1}/{options.steps}: reward {rewards.mean():.3f}, {tokens:.1f} tokens", flush=True)
    measure("after", policy, tokenizer, held_out, ends)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
