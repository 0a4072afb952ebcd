"""What the tests of the engines share: prompts, a model with an adapter, log-probabilities without a cache."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rloo_kit.models.policy import Policy
from rloo_kit.rollout.choice import build_engine
from rloo_kit.rollout.types import Filters, Limits
from rloo_kit.think_tags import bind_think_tags

PAD, END_OF_TEXT, TURN_END, THINK_END = 256, 257, 258, 260
PROMPTS = [[5, 6, 7], [5, 6, 7], [9] * 20, [1], [3, 2, 1, 0, 4], [40, 41]]
BUDGET = Limits(20, 6, 4, (7, THINK_END, 8), THINK_END)  # three tokens close the thinking
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

FILTERS = {"top p": Filters(top_p=0.6), "top k": Filters(top_k=3), "all": Filters(top_p=0.8, top_k=12)}


def lean(model: Any, bias: dict[int, float]) -> Any:
    """The model with a head that leans towards some ids, so that a test has it end or close early, late or never."""
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
    with torch.no_grad():
        for token, value in bias.items():
            model.lm_head.bias[token] = value
    return model


def make_policy(model: Any, tokenizer: Any, bias: dict[int, float], family: str = "thinking") -> Policy:
    """The model as a policy, with a head that leans towards some ids."""
    return Policy(lean(model, bias), tokenizer, "transformers", "a test", bind_think_tags(tokenizer), family, {})


def shake(model: Any, seed: int = 1, scale: float = 0.2) -> None:
    """Another adapter, not the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.copy_(scale * torch.randn(value.shape, generator=generator))


def adapted(model: Any, scale: float = 0.2, **config: Any) -> Any:
    """The model with an adapter that is not the identity."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": MODULES, "task_type": "CAUSAL_LM"} | config
    model = get_peft_model(model, LoraConfig(**settings))
    shake(model, scale=scale)
    return model


def engine_for(model: Any, name: str = "native", temperature: float = 1.0, **options: Any) -> Any:
    options = {"end_ids": [TURN_END, END_OF_TEXT], "pad_id": PAD} | options
    return build_engine(model, name, temperature=temperature, **options)


def teacher_forced(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities of a completion by one unpadded pass through the whole model, without a cache."""
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    logps = (logits.float() / temperature).log_softmax(-1)
    return logps.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


def kept_logps(logits: torch.Tensor, filters: Filters, temperature: float) -> torch.Tensor:
    """Log-probabilities (V,) of what the filters leave, by their definitions and not by transformers' code."""
    logps = (logits.double() / temperature).log_softmax(-1)
    if filters.top_k:
        logps[logps < logps.topk(filters.top_k).values[-1]] = -torch.inf
        logps = logps.log_softmax(-1)
    order = logps.argsort(descending=True)
    ahead = logps[order].exp().cumsum(-1) - logps[order].exp()
    logps[order[ahead >= filters.top_p]] = -torch.inf
    return logps.log_softmax(-1)


def check_kept(model: Any, prompts: list[list[int]], found: Any, filters: Filters, temperature: float) -> None:
    """Every log-probability is that of what the filters leave of the model's distribution, and they cut something."""
    smaller = 0
    for prompt, ids, logps in zip(prompts, found.completion_ids, found.sampler_logps, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        rows = zip(logits, ids, strict=True)
        expected = [kept_logps(row, filters, temperature)[token].item() for row, token in rows]
        assert logps == pytest.approx(expected, abs=1e-4)  # -inf for a token that was filtered out
        whole = teacher_forced(model, prompt, ids, temperature)
        smaller += sum(abs(one - other) > 0.01 for one, other in zip(logps, whole, strict=True))
    assert smaller > 10, f"the filter cut {smaller} tokens only"


def check_logps(
    model: Any, prompts: list[list[int]], found: Any, temperature: float = 1.0, tolerance: float = 1e-5
) -> None:
    """Every log-probability is that of `model` as it scores, NaN where a token was forced or a tool's."""
    rows = zip(prompts, found.completion_ids, found.forced, found.context, found.sampler_logps, strict=True)
    for prompt, ids, forced, context, logps in rows:
        exact = teacher_forced(model, prompt, ids, temperature)
        for start, end in (*forced, *context):
            exact[start:end] = [float("nan")] * (end - start)
        assert logps == pytest.approx(exact, abs=tolerance, nan_ok=True)


def budget_kinds(found: Any, limits: Limits) -> set[str]:
    """How the completions' thinking ended; what was forced closes it at the budget, and answers keep theirs."""
    kinds, budget, answer = set(), limits.thinking_budget, limits.answer_budget
    assert budget is not None and answer is not None
    for ids, spans in zip(found.completion_ids, found.forced, strict=True):
        if spans:
            end = budget + len(limits.close_ids)
            assert spans == [(budget, end)] and tuple(ids[budget:end]) == limits.close_ids
        elif THINK_END in ids:
            end = ids.index(THINK_END) + 1
        else:
            end = len(ids)
        assert len(ids) - end <= answer
        kinds.add("forced" if spans else "closed" if THINK_END in ids else "ended")
    return kinds


def run_out_above(
    model: Any, rows: int, seen: list[int], patch: pytest.MonkeyPatch, on_cpu: bool = False, after: int = 3
) -> None:
    """Let the model's forward fail above so many rows, as a GPU does: in the middle of a rollout, not at its start."""
    base, forward = model.get_base_model(), model.get_base_model().forward

    def failing(*args: Any, **named: Any) -> Any:
        ids = args[0] if args else named["input_ids"]
        seen.append(ids.size(0))
        if ids.size(0) > rows and (ids.size(1) > 1 or len(seen) > after):
            if on_cpu:
                raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(*args, **named)

    patch.setattr(base, "forward", failing)
