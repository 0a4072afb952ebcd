"""A rollout of 8 rows by the native engine through the modules, by `generate`, and by the native engine's own decoder.

    python benchmarks/decoding.py [--out benchmarks/results/decoding.json]

Qwen3-0.6B in its true shape (random weights, bf16 and NF4, an adapter of rank 16 on all layers) on the CPU, in one
process and in turn: the same prompts of 33 to 40 tokens, the same number of new ones, no end token. Operations are
those of one token step. Then SmolLM2's shape and the embedded model's in float32.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from reporting import header, settle, target_of, write

ROWS, TOKENS, ROUNDS, FIRST = 8, 8, 5, 33
NEVER = 10**7
LORA = {"r": 16, "lora_alpha": 16, "task_type": "CAUSAL_LM"}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "SmolLM2's": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
    },
    "the embedded model's": {
        "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 320,
    },
}  # fmt: skip


def load(shape: str, kind: str, folder: Path) -> Any:
    """Random weights with an adapter that is not the identity. `kind`: float32, bf16 or nf4."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM

    from rloo_kit.models.transformers import keep_4bit_weights

    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[shape], tie_word_embeddings=True)).to(dtype)
    if kind == "nf4":
        model.save_pretrained(folder)
        form = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
        quantised = BitsAndBytesConfig(load_in_4bit=True, **form)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantised, dtype=dtype)
        keep_4bit_weights(model)
    model = get_peft_model(model, LoraConfig(**LORA, target_modules=TARGETS)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.01)
    return model


def make_sides(model: Any, decoders: list[Any]) -> dict[str, Any]:
    """Engines by name; the native ones with a decoder each."""
    from rloo_kit.rollout.choice import build_engine

    sides: dict[str, Any] = {}
    for decoder in decoders:
        engine: Any = build_engine(model, "native", temperature=1.0, end_ids=[NEVER], pad_id=0)
        engine.decoder = decoder
        sides[decoder.__name__] = engine
    sides["generate"] = build_engine(model, "generate", temperature=1.0, end_ids=[NEVER], pad_id=0)
    return sides


def count_operations(decoder: Any) -> int:
    """ATen operations of a token step of two rows."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from rloo_kit.rollout.decoders import SlotCache

    class Count(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.operations += 1
            return function(*args, **(kwargs or {}))

    cache, positions = SlotCache(2), torch.tensor([3, 2])
    with torch.no_grad():
        for is_counted in (False, True):
            cache.begin(positions, 4)
            with Count() if is_counted else nullcontext() as count:
                decoder.decode(torch.tensor([5, 6]), positions, cache)
    return int(count.operations)


def compare(sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, Any]:
    """Seconds of each side, the median of rounds in turn, and each side's over the first's, with its range."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            started = time.perf_counter()
            run()
            if number:  # the first call of each is slower
                times[name].append(time.perf_counter() - started)
    first = times[next(iter(times))]
    rows = {}
    for name, found in times.items():
        ratios = sorted(one / other for one, other in zip(found, first, strict=True))
        rows[name] = {
            "seconds": round(statistics.median(found), 4), "ratio": round(statistics.median(ratios), 3),
            "ratio_low": round(ratios[0], 3), "ratio_high": round(ratios[-1], 3),
        }  # fmt: skip
    return rows


def main() -> None:
    settle()
    import rloo_kit as kit

    kit.setup_environment("transformers")
    from rloo_kit._stack import load_stack

    load_stack()
    from rloo_kit.rollout.decoders import ModuleDecoder
    from rloo_kit.rollout.layers import DirectDecoder
    from rloo_kit.rollout.types import Limits

    cases = [("Qwen3-0.6B", "nf4", 8, ROUNDS), ("Qwen3-0.6B", "bf16", 8, ROUNDS)]
    cases += [("SmolLM2's", "float32", 64, 5), ("the embedded model's", "float32", 128, 15)]
    found = []
    for shape, kind, rows, rounds in cases:
        with tempfile.TemporaryDirectory() as folder:
            model = load(shape, kind, Path(folder))
        decoders = [DirectDecoder, ModuleDecoder]
        prompts = [[(13 * row + 7 * place) % 300 for place in range(FIRST + row % 8)] for row in range(rows)]
        sides = make_sides(model, decoders)

        def sampler(engine: Any, prompts: Any = prompts) -> Callable[[], None]:
            return lambda: engine.sample(prompts, Limits(TOKENS))

        result = compare({name: sampler(engine) for name, engine in sides.items()}, rounds)
        operations = {kind.__name__: count_operations(kind(model)) for kind in decoders}
        found.append({"model": shape, "weights": kind, "rows": rows, "operations": operations, "sides": result})
        print(found[-1], flush=True)
    shape = {"tokens": TOKENS, "prompts": f"{FIRST} to {FIRST + 7} tokens, all different"}
    write({**header("benchmarks/decoding.py"), **shape, "cases": found}, target_of("decoding.json"))


if __name__ == "__main__":
    main()
