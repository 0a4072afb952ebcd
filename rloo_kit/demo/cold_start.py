"""The embedded model's supervised cold start: imitates noisy demonstrations, deterministic, on one CPU thread.

Only the rows of the table whose tokens occur are trained individually. The n others share one vector u with the joint
logit u.h + ln n, so the softmax over the used rows and u equals the softmax over the whole table. At the end u is
written into every unused row.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from rloo_kit.data.light_tokenizer import ROWS, TURN_END, TURN_START
from rloo_kit.tasks import families
from rloo_kit.tasks.families import NO_HABIT, Family, Habit, demonstration, draw_problem

IGNORED = -100  # target of a position without loss
SECONDS_BETWEEN_REPORTS = 10.0


@dataclass(frozen=True)
class ColdStart:
    """Everything that determines the weights, apart from the seed, the code and the libraries.

    steps, batch_size: optimizer steps, and demonstrations per step. clean_share, easy_share: shares of the steps, from
    the first, with demonstrations without mistakes and with easy problems (`families.EASY`). habit: of the
    demonstrations after the clean ones. The kernels of Unsloth and bitsandbytes require head_dim to be a power of two
    and hidden_size a multiple of 64.
    """

    steps: int = 640
    batch_size: int = 24
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    decay_share: float = 0.6
    clean_share: float = 0.65
    easy_share: float = 0.0
    habit: Habit = NO_HABIT
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32


PLANS = {
    "thinking": ColdStart(),
    "instruct": ColdStart(steps=600, batch_size=64, clean_share=0.7, easy_share=0.37, habit=Habit(guess=0.35)),
    "untaught": ColdStart(steps=0),
}


def find_plan(kind: str, family: Family) -> ColdStart:
    """The plan of a model of `kind`; a thinking model also learns its family's habit."""
    return replace(PLANS[kind], steps=family.steps, habit=family.habit) if kind == "thinking" else PLANS[kind]


def train_embedded(
    tokenizer: Any,
    kind: str,
    family: Family,
    vocabulary: str,
    seed: int,
    plan: ColdStart,
    report: Callable[[str], None] = print,
) -> Any:
    """A `Qwen3ForCausalLM` (float32, CPU) with `ROWS[vocabulary]` rows, trained on the demonstrations of `kind` with
    problems of `family`; `report` gets a line every `SECONDS_BETWEEN_REPORTS`. Seeds torch's global generator, so it
    runs in a separate process (`embedded.build`)."""
    torch.manual_seed(seed)
    rng = random.Random(f"cold-start-{seed}")
    used = used_ids(tokenizer, family.alphabet)
    slots = {token: slot for slot, token in enumerate(used)}
    model = Qwen3ForCausalLM(model_config(plan, len(used) + 1))  # the last row is the shared one
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started = reported = time.monotonic()
    for step in range(plan.steps):
        left = (plan.steps - step) / (plan.steps * plan.decay_share)  # warm-up, plateau, linear decay to nearly 0
        optimizer.param_groups[0]["lr"] = plan.learning_rate * min(1.0, (step + 1) / plan.warmup_steps, max(0.02, left))
        habit = plan.habit if step >= plan.clean_share * plan.steps else NO_HABIT
        source = families.EASY if step < plan.easy_share * plan.steps else family
        problems = [draw_problem(source, rng, reserved=True) for _ in range(plan.batch_size)]
        tokens, targets = demonstrate(tokenizer, slots, kind, family, problems, habit, rng)
        loss = imitation_loss(model, tokens, targets, ROWS[vocabulary] - len(used))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if time.monotonic() - reported > SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            seconds = (reported - started) / (step + 1) * (plan.steps - step - 1)
            report(f"{(step + 1) / plan.steps:.0%}, {seconds:.0f} s left")
    return with_full_table(model, plan, used, ROWS[vocabulary], tokenizer)


def model_config(plan: ColdStart, num_rows: int, **token_ids: Any) -> Any:
    """The model's `Qwen3Config` with an embedding table of `num_rows` rows."""
    return Qwen3Config(
        vocab_size=num_rows,
        hidden_size=plan.hidden_size,
        intermediate_size=plan.intermediate_size,
        num_hidden_layers=plan.num_layers,
        num_attention_heads=plan.num_heads,
        num_key_value_heads=plan.num_kv_heads,
        head_dim=plan.head_dim,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.05,
        tie_word_embeddings=True,
        dtype="float32",
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | token_ids,
    )


def used_ids(tokenizer: Any, alphabet: str) -> list[int]:
    """The ids that occur in prompts and completions with characters of `alphabet`, sorted."""
    turns = [{"role": "user", "content": alphabet}, {"role": "assistant", "content": "\n</think>"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False) + f"{TURN_START}assistant\n<think>\n</think>{TURN_END}"
    return sorted(set(tokenizer(text)["input_ids"]))


def demonstrate(
    tokenizer: Any,
    slots: dict[int, int],
    kind: str,
    family: Family,
    problems: Sequence[Any],
    habit: Habit,
    rng: random.Random,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One demonstration per problem as a row of `slots`, right-padded: tokens (B, T) and targets (B, T - 1). Prompt and
    padding have the target IGNORED."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": family.question(problem)}], add_generation_prompt=True, tokenize=False
        )
        for problem in problems
    ]
    completions = [demonstration(family, one, rng, habit, kind != "instruct") + TURN_END for one in problems]
    prompt_rows = _encode(tokenizer, slots, prompts)
    rows = [prompt + rest for prompt, rest in zip(prompt_rows, _encode(tokenizer, slots, completions), strict=True)]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    targets = torch.full(tokens.shape, IGNORED)
    for index, (prompt, row) in enumerate(zip(prompt_rows, rows, strict=True)):
        targets[index, len(prompt) : len(row)] = tokens[index, len(prompt) : len(row)]
    return tokens, targets[:, 1:]


def _encode(tokenizer: Any, slots: dict[int, int], texts: Sequence[str]) -> list[list[int]]:
    return [[slots[token] for token in row] for row in tokenizer(list(texts))["input_ids"]]


def imitation_loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor, num_shared: int) -> torch.Tensor:
    """Mean cross-entropy of the full table at the targets; right padding needs no mask under causal attention."""
    hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]  # (B, T - 1, H)
    table = model.get_input_embeddings().weight  # (U + 1, H)
    kept = targets != IGNORED
    logits = joint_logits(hidden[kept], table[:-1], table[-1], num_shared)
    return functional.cross_entropy(logits, targets[kept])


def joint_logits(hidden: torch.Tensor, rows: torch.Tensor, shared: torch.Tensor, num_shared: int) -> torch.Tensor:
    """Logits (N, U + 1) of hidden (N, H): the used rows (U, H), then the joint logit of `num_shared` >= 1 further rows
    that all equal `shared` (H,). The log-softmax at a used row equals that of the whole table."""
    joint = hidden @ shared + math.log(num_shared)
    return torch.cat([hidden @ rows.T, joint[:, None]], dim=1)


def with_full_table(model: Any, plan: ColdStart, used: list[int], num_rows: int, tokenizer: Any) -> Any:
    """The model with the full table: the used rows at their ids, the shared vector elsewhere."""
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    full = type(model)(model_config(plan, num_rows, eos_token_id=end, pad_token_id=pad))
    weights = model.state_dict()
    small = weights["model.embed_tokens.weight"]
    table = small[-1].repeat(num_rows, 1)
    table[used] = small[:-1]
    full.load_state_dict({**weights, "model.embed_tokens.weight": table, "lm_head.weight": table})
    full.generation_config.update(eos_token_id=[end, pad], pad_token_id=pad, do_sample=True)
    full.generation_config._from_model_config = False  # else loading rebuilds it with one end token only
    return full.eval()
