"""A decoding step of the native engine, with grouped heads vs. transformers' attention; `results/decode_step.json`.

    python benchmarks/decode_step.py

Two layers in the shape of Qwen3-4B's (32 query heads, 8 key-value heads of 128, hidden size 2560) with random weights
in bfloat16, and 8 rows with full caches of random keys and values. Both sides take the same step in turn in one
process: cache, modules and tokens are the same, and only the attention differs (`ModuleDecoder.groups_heads`). The
first step of each is discarded. Each pair gives a ratio; the median is reported with the smallest and the largest. One
thread; seconds are processor time. Rows of a rollout differ in length: here from half of the longest to all of it
(`unequal`), or all equal (`equal`, the K completions of a prompt before one ends).

The operations that a step dispatches, from the token to the draw, are counted separately: in 36 small layers with
4-bit weights and a LoRA adapter on the seven projections, without views. The count does not depend on the sizes.

Left out: the model's other 34 layers (the same again), a large vocabulary, 4-bit weights, a GPU
(`first_hour.py`).
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import reporting

RESULT = reporting.RESULTS / "decode_step.json"
TOKENS, ROWS = (512, 2048, 8192), 8
LAYERS = 36  # of Qwen3-4B
SHAPE = {
    "hidden_size": 2560, "num_hidden_layers": 2, "intermediate_size": 9728, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 2048, "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}  # fmt: skip


def build_decoder(shape: dict[str, Any]) -> Any:
    """The native engine's decoder over a Qwen3 of that shape with random weights in bfloat16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rloo_kit.rollout.decoders import ModuleDecoder

    torch.manual_seed(0)
    return ModuleDecoder(Qwen3ForCausalLM(Qwen3Config(**shape)).to(torch.bfloat16).eval())


def row_lengths(tokens: int, kind: str) -> list[int]:
    """Tokens of each row, the new one included.

    >>> row_lengths(512, "equal")[:2], row_lengths(512, "unequal")
    ([512, 512], [512, 480, 448, 416, 384, 352, 320, 288])
    """
    return [tokens - (row * tokens // (2 * ROWS) if kind == "unequal" else 0) for row in range(ROWS)]


def fill_cache(shape: dict[str, Any], lengths: list[int]) -> Any:
    """A cache with all tokens of each row except its new one."""
    import torch

    from rloo_kit.rollout.kv_cache import SlotCache

    cache = SlotCache(len(lengths), block_tokens=max(lengths))
    for layer in range(shape["num_hidden_layers"]):
        for row, length in enumerate(lengths):
            size = (2, shape["num_key_value_heads"], length - 1, shape["head_dim"])
            keys, values = torch.randn(size, dtype=torch.bfloat16)
            cache.insert(layer, row, 1, keys, values)
    return cache


def measure(decoder: Any, shape: dict[str, Any], tokens: int, kind: str, repeats: int) -> dict[str, Any]:
    """Seconds of `repeats` pairs of steps, their ratios, and the difference between the logits of the two sides."""
    import torch

    lengths = row_lengths(tokens, kind)
    cache, fed = fill_cache(shape, lengths), torch.arange(ROWS)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    wall: dict[bool, list[float]] = {False: [], True: []}
    logits = {}
    for turn in range(repeats + 1):
        for grouped in (False, True) if turn % 2 else (True, False):
            decoder.groups_heads = grouped
            started, began = time.process_time(), time.perf_counter()
            positions = cache.begin([length - 1 for length in lengths], decoder.device)
            logits[grouped] = decoder.decode(fed, positions, cache).float()
            if turn:
                seconds[grouped].append(round(time.process_time() - started, 4))
                wall[grouped].append(round(time.perf_counter() - began, 4))
    ratios = [before / after for before, after in zip(seconds[False], seconds[True], strict=True)]
    return {
        "tokens": tokens, "rows": kind, "cache_mib": round(cache.nbytes / 2**20),
        "before_cpu_s": seconds[False], "after_cpu_s": seconds[True],
        "before_wall_s": wall[False], "after_wall_s": wall[True],
        "ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios),
        "logits_apart": ((logits[True] - logits[False]).abs().max() / logits[False].abs().max()).item(),
    }  # fmt: skip


def count_operations(layers: int = LAYERS) -> dict[str, int]:
    """Operations of one step with rows of unequal length, 4-bit weights and an adapter, by kind of attention."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from rloo_kit.rollout.decoders import ModuleDecoder
    from rloo_kit.rollout.native import draw

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
            self.count += not is_view and func is not torch.ops.aten._unsafe_view.default
            return func(*args, **(kwargs or {}))

    shape = SHAPE | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64, "num_hidden_layers": layers}
    decoder, lengths, found = ModuleDecoder(build_4bit(shape)), row_lengths(64, "unequal"), {}
    cache, fed = fill_cache(shape, lengths), torch.arange(ROWS)
    for name, decoder.groups_heads in (("before", False), ("after", True)):
        with Counter() as counter:
            positions = cache.begin([length - 1 for length in lengths], decoder.device)
            draw(decoder.decode(fed, positions, cache), 1.0)
        found[name] = counter.count
    return {"layers": layers} | found


def build_4bit(shape: dict[str, Any]) -> Any:
    """A Qwen3 of that shape as a run loads it: NF4, computing in bfloat16, with an adapter in float32."""
    import torch
    from peft import LoraConfig, get_peft_model
    from step_workload import LORA
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM

    from rloo_kit.models.transformers import keep_4bit_weights

    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=bits)
    keep_4bit_weights(model)
    return get_peft_model(model, LoraConfig(**LORA)).eval()


def main() -> int:
    """Measure every length, equal and unequal rows, count the operations, and write the results."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="pairs of steps after the discarded one")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="of the longest row")
    parser.add_argument("--results", type=Path, default=RESULT)
    options = parser.parse_args()
    import torch

    from rloo_kit._stack import load_stack

    load_stack()
    torch.set_num_threads(1)
    started, rows = time.monotonic(), []
    head = reporting.header("benchmarks/decode_step.py") | {"shape": SHAPE, "rows_at_once": ROWS, "threads": 1}
    with torch.no_grad():
        decoder = build_decoder(SHAPE)
        for tokens in options.tokens:
            for kind in ("unequal", "equal"):
                rows.append(measure(decoder, SHAPE, tokens, kind, options.repeats))
                print(reporting.decode_line(rows[-1]), flush=True)
        del decoder
        operations = count_operations()
    print(f"operations of a step: {operations}", flush=True)
    seconds = round(time.monotonic() - started)
    reporting.write(head | {"seconds": seconds, "rows": rows, "operations": operations}, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
