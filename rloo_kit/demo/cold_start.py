"""The embedded model's tokenizer and its supervised cold start.

The cold start imitates noisy demonstrations, deterministic, on one CPU thread.
Only the rows of the table whose tokens occur are trained individually. The n others share one vector u with the joint
logit u.h + ln n, so the softmax over the used rows and u equals the softmax over the whole table. At the end u is
written into every unused row.
The model of a family with pictures is a Qwen3-VL: the same decoder behind a vision tower, trained with it.
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tokenizers import AddedToken, pre_tokenizers
from torch.nn import functional
from transformers import (
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rloo_kit.config.model_names import find_embedded_problem, split_model_name
from rloo_kit.errors import ConfigError
from rloo_kit.tasks import families
from rloo_kit.tasks.families import NO_HABIT, Family, Habit, demonstration, draw_problem, find_family
from rloo_kit.think_tags import THINK_END, THINK_START

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, THINK_START, THINK_END)
SPECIAL_TOKENS = CHAT_TOKENS[:3]  # the thinking tags are added tokens, but not special, as in Qwen3
IMAGE_START, IMAGE_END, IMAGE_PAD, VIDEO_PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
IMAGE_TOKENS = (IMAGE_START, IMAGE_END, IMAGE_PAD, VIDEO_PAD)  # special, of the models that see
PATCH, MERGED = 8, 2  # pixels of a patch's side; 2 x 2 patches become a token
ROWS = 320  # of the embedding: a multiple of 64, for the kernels

_TURNS = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
)
TEMPLATES = {
    "thinking": _TURNS + "{{- '<think>\\n' }}{%- endif %}",  # the completion has only </think>, as with Thinking-2507
    "instruct": _TURNS + "{%- endif %}",
}
# The text of `thinking`; a message may be a list of images and texts, as with Qwen3-VL.
TEMPLATES["seeing"] = TEMPLATES["thinking"].replace(
    " + message.content + '<|im_end|>",
    " }}{%- for part in ([message.content] if message.content is string else message.content) %}"
    "{{- part if part is string else part.text if part.type == 'text' "
    f"else '{IMAGE_START}{IMAGE_PAD}{IMAGE_END}' }}}}"
    "{%- endfor %}{{- '<|im_end|>",
)
# Turns after the system's, with thoughts, calls as Qwen3 writes them, and results as turns of their own.
TOOL_TURNS = (
    "{%- for message in messages[1 if messages[0].role == 'system' else 0:] %}"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.reasoning_content is string %}"
    "{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}"
    "{%- endif %}"
    "{{- message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '\n' if message.content or not loop.first else '' }}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson + '}\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Without tools the text of `thinking`; with them, their names.
TEMPLATES["untaught"] = (
    "{%- set system = [messages[0].content] if messages[0].role == 'system' else [] %}"
    "{%- if tools %}"
    "{%- set system = system + ['tools: ' + tools | map(attribute='function.name') | join(', ')] %}"
    "{%- endif %}"
    "{%- if system %}{{- '<|im_start|>system\n' + system | join('\n') + '<|im_end|>\n' }}{%- endif %}"
    + TOOL_TURNS
    + "{%- if add_generation_prompt %}{{- '<think>\n' }}{%- endif %}"
)

IGNORED = -100  # target of a position without loss
SECONDS_BETWEEN_REPORTS = 10.0


def check_name(name: str) -> None:
    """Raises ConfigError if there is no such embedded model (`thinking`, `thinking@subtraction`)."""
    if problem := find_embedded_problem(name):
        raise ConfigError(problem)


def token_ids(added: Sequence[str] = CHAT_TOKENS) -> dict[str, int]:
    """Text of every token -> id: Qwen3's single bytes with Qwen3's ids, then its chat tokens; there are no merges."""
    return {token: index for index, token in enumerate((*sorted(pre_tokenizers.ByteLevel.alphabet()), *added))}


def build_tokenizer(name: str = "thinking") -> Any:
    """A `Qwen2Tokenizer` for the embedded model `name` (thinking, thinking@subtraction, ...); raises ConfigError for
    any other.

    `<think>` and `</think>` are added tokens but not special, as in Qwen3: `skip_special_tokens=True` keeps them.
    """
    check_name(name)
    kind, family = split_model_name(name)
    sees = find_family(family).picture_tokens > 0
    added = (*CHAT_TOKENS, *IMAGE_TOKENS) if sees else CHAT_TOKENS
    tokenizer = Qwen2Tokenizer(
        vocab=token_ids(added),
        merges=[],
        unk_token=None,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    for special in (True, False):
        chosen = [token for token in added if (token in (*SPECIAL_TOKENS, *IMAGE_TOKENS)) is special]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in chosen])
    tokenizer.chat_template = TEMPLATES["seeing" if sees else kind]
    return tokenizer


def build_image_processor() -> Any:
    """What turns a picture into patches, on Pillow; pictures of 16 x 16 to 256 x 256 pixels keep their size."""
    size = {"shortest_edge": (PATCH * MERGED) ** 2, "longest_edge": 2**16}  # in pixels of the whole picture
    return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGED, size=size)


def image_ids(tokenizer: Any) -> dict[str, int]:
    """The ids of the tokens around images and in their place; empty for a model that does not see."""
    vocabulary = tokenizer.get_vocab()
    return {token: vocabulary[token] for token in IMAGE_TOKENS if token in vocabulary}


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
    plan: ColdStart,
    report: Callable[[str], None] = print,
) -> Any:
    """A `Qwen3ForCausalLM` (float32, CPU) with `ROWS` rows, trained on the demonstrations of `kind` with problems of
    `family`; with pictures a `Qwen3VLForConditionalGeneration`. `report` gets a line every `SECONDS_BETWEEN_REPORTS`.
    Seeds torch's global generator, so it runs in a separate process (`embedded.build`)."""
    torch.manual_seed(0)
    rng = random.Random("cold-start-0")
    used = used_ids(tokenizer, family.alphabet)
    slots = {token: slot for slot, token in enumerate(used)}
    images = {token: slots[index] for token, index in image_ids(tokenizer).items()}
    processor = build_image_processor()
    # The last row is the shared one.
    model = (Qwen3VLForConditionalGeneration if images else Qwen3ForCausalLM)(model_config(plan, len(used) + 1, images))
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started = reported = time.monotonic()
    for step in range(plan.steps):
        left = (plan.steps - step) / (plan.steps * plan.decay_share)  # warm-up, plateau, linear decay to nearly 0
        optimizer.param_groups[0]["lr"] = plan.learning_rate * min(1.0, (step + 1) / plan.warmup_steps, max(0.02, left))
        habit = plan.habit if step >= plan.clean_share * plan.steps else NO_HABIT
        source = families.EASY if step < plan.easy_share * plan.steps else family
        problems = [draw_problem(source, rng, reserved=True) for _ in range(plan.batch_size)]
        tokens, targets = demonstrate(tokenizer, slots, kind, family, problems, habit, rng)
        seen: dict[str, torch.Tensor] = {}
        if images:
            seen = {**processor([family.picture(problem) for problem in problems], return_tensors="pt")}
            seen["mm_token_type_ids"] = (tokens == images[IMAGE_PAD]).int()
        loss = imitation_loss(model, tokens, targets, ROWS - len(used), seen)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if time.monotonic() - reported > SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            seconds = (reported - started) / (step + 1) * (plan.steps - step - 1)
            report(f"{(step + 1) / plan.steps:.0%}, {seconds:.0f} s left")
    return with_full_table(model, plan, used, ROWS, tokenizer)


def model_config(plan: ColdStart, num_rows: int, images: Mapping[str, int] | None = None, **token_ids: Any) -> Any:
    """The model's `Qwen3Config` with an embedding table of `num_rows` rows; with rows for `IMAGE_TOKENS`, `images`, the
    `Qwen3VLConfig` of a model that sees."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    decoder: dict[str, Any] = {
        "vocab_size": num_rows,
        "hidden_size": plan.hidden_size,
        "intermediate_size": plan.intermediate_size,
        "num_hidden_layers": plan.num_layers,
        "num_attention_heads": plan.num_heads,
        "num_key_value_heads": plan.num_kv_heads,
        "head_dim": plan.head_dim,
        "max_position_embeddings": 4096,
        "rope_parameters": rope,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "dtype": "float32",
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | token_ids,
    }
    if not images:
        return Qwen3Config(**decoder)
    rope |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}  # of half of head_dim: time, height, width
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGED,
        "out_hidden_size": plan.hidden_size,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.05,
    }
    return Qwen3VLConfig(
        text_config=decoder,
        vision_config=tower,
        vision_start_token_id=images[IMAGE_START],
        vision_end_token_id=images[IMAGE_END],
        image_token_id=images[IMAGE_PAD],
        video_token_id=images[VIDEO_PAD],
        tie_word_embeddings=True,
        dtype="float32",
    )


def used_ids(tokenizer: Any, alphabet: str) -> list[int]:
    """The ids that occur in prompts and completions with characters of `alphabet`, sorted."""
    turns = [{"role": "user", "content": alphabet}, {"role": "assistant", "content": "\n</think>"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False) + f"{TURN_START}assistant\n<think>\n</think>{TURN_END}"
    return sorted({*tokenizer(text)["input_ids"], *image_ids(tokenizer).values()})


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
    prompts = []
    for problem in problems:
        question: Any = family.question(problem)
        if family.picture_tokens:
            question = [{"type": "image"}, {"type": "text", "text": question}]
        talk = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        prompts.append(text.replace(IMAGE_PAD, IMAGE_PAD * family.picture_tokens))
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


def imitation_loss(
    model: Any, tokens: torch.Tensor, targets: torch.Tensor, num_shared: int, seen: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Mean cross-entropy of the full table at the targets; right padding needs no mask under causal attention. `seen`:
    the model's inputs for pictures."""
    hidden = model.model(input_ids=tokens, **seen).last_hidden_state[:, :-1]  # (B, T - 1, H)
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
    full = type(model)(model_config(plan, num_rows, image_ids(tokenizer), eos_token_id=end, pad_token_id=pad))
    weights = model.state_dict()
    name = next(name for name in weights if name.endswith("embed_tokens.weight"))
    small = weights[name]
    table = small[-1].repeat(num_rows, 1)
    table[used] = small[:-1]
    full.load_state_dict({**weights, name: table, "lm_head.weight": table})
    full.generation_config.update(eos_token_id=[end, pad], pad_token_id=pad, do_sample=True)
    full.generation_config._from_model_config = False  # else loading rebuilds it with one end token only
    return full.eval()
