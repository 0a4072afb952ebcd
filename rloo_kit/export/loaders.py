"""Get the log-probabilities and greedy texts of a few prompts from the program that an export is for.

Runs as a separate process (`python loaders.py REQUEST REPLY`) and imports nothing from the kit. So the export loads
as it does for a user without the kit or Unsloth's patches, and a file that crashes llama.cpp does not end the export.
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

CANDIDATES = 20  # likeliest tokens per position of llama.cpp's answer; the policy's token is looked up among them


def main(request: dict[str, Any]) -> dict[str, Any]:
    """The reply to a request.

    Args:
        request: `loader` (a key of `LOADERS`), `model` (what it loads), `adapter` and `four_bit` for PEFT, `compute`
            (dtype), `device`, `limit` (tokens), `end_ids`, `pad_id`, and `rows`: text, ids and completion of each.

    Returns:
        `version` of the loader; `rows` with `prompt_tokens` (ids, or their number if the loader does not give ids),
        `logps` of the completion's tokens (None: not among the candidates) and `greedy` ids.
    """
    return LOADERS[request["loader"]](request)


def _ask_transformers(request: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    dtype = getattr(torch, request["compute"])
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    model = AutoModelForCausalLM.from_pretrained(
        request["model"],
        dtype=dtype,
        device_map={"": request["device"]},
        quantization_config=four_bit if request.get("four_bit") else None,
    )
    for module in model.modules():  # see rloo_kit/models/transformers.py: it would repack the weights in place
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    folder = request["model"]
    if request["loader"] == "peft":
        from peft import PeftModel

        folder = request["adapter"]
        model = PeftModel.from_pretrained(model, folder)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [row["text"] for row in request["rows"]]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logps = [_score(model, row["ids"], row["completion"]) for row in request["rows"]]
        greedy = _generate(model, request)
    rows = [
        {"prompt_tokens": ids, "logps": found, "greedy": chosen}
        for ids, found, chosen in zip(prompts, logps, greedy, strict=True)
    ]
    return {"version": version(request["loader"]), "rows": rows}


def _score(model: Any, prompt: list[int], completion: list[int]) -> list[float]:
    import torch

    ids = torch.tensor([prompt + completion], device=model.device)
    logits = model(input_ids=ids, logits_to_keep=len(completion) + 1).logits[0, :-1].float()
    targets = torch.tensor(completion, device=model.device)
    return torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0].tolist()


def _generate(model: Any, request: dict[str, Any]) -> list[list[int]]:
    import torch

    prompts = [row["ids"] for row in request["rows"]]
    width = max(map(len, prompts))
    ids = torch.tensor([[request["pad_id"]] * (width - len(one)) + one for one in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts], device=model.device)
    made = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        max_new_tokens=request["limit"],
        eos_token_id=request["end_ids"],
        pad_token_id=request["pad_id"],
    )
    return [_cut(row, request["end_ids"]) for row in made[:, width:].tolist()]


def _cut(ids: list[int], end_ids: list[int]) -> list[int]:
    """Up to and including the first end token."""
    return ids[: 1 + next((place for place, one in enumerate(ids) if one in end_ids), len(ids))]


def _ask_vllm(request: dict[str, Any]) -> dict[str, Any]:
    on_cpu = request["device"] == "cpu"
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    import torch
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt

    free, total = (1, 1) if on_cpu else torch.cuda.mem_get_info()
    longest = max(len(row["ids"]) for row in request["rows"]) + request["limit"] + 1
    llm = LLM(
        model=request["model"],
        dtype=request["compute"],
        max_model_len=longest,
        max_num_batched_tokens=max(longest, 8192),
        enforce_eager=True,
        **({"enable_chunked_prefill": False} if on_cpu else {"gpu_memory_utilization": 0.9 * free / total}),
    )
    tokenizer = llm.get_tokenizer()
    given = [TokensPrompt(prompt_token_ids=row["ids"]) for row in request["rows"]]
    whole = [TokensPrompt(prompt_token_ids=row["ids"] + row["completion"]) for row in request["rows"]]
    greedy = SamplingParams(temperature=0, max_tokens=request["limit"], stop_token_ids=request["end_ids"])
    made = llm.generate(given, greedy, use_tqdm=False)
    scored = llm.generate(whole, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    rows = []
    for row, answer, score in zip(request["rows"], made, scored, strict=True):
        places = score.prompt_logprobs[len(row["ids"]) :]
        logps = [place[token].logprob for place, token in zip(places, row["completion"], strict=True)]
        ids = tokenizer(row["text"], add_special_tokens=False)["input_ids"]
        rows.append({"prompt_tokens": list(ids), "logps": logps, "greedy": list(answer.outputs[0].token_ids)})
    return {"version": vllm.__version__, "rows": rows}


def _ask_llama_cpp(request: dict[str, Any]) -> dict[str, Any]:
    import xllamacpp

    longest = max(len(row["ids"]) for row in request["rows"]) + request["limit"] + 8
    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    params.n_ctx, params.n_parallel, params.warmup, params.fit_params, params.verbosity = longest, 1, False, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(os.environ.get("OMP_NUM_THREADS") or 0) or (
        os.cpu_count() or 1
    )
    # The defaults, a float16 cache and flash attention, would hide the error of the file itself.
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)

    def ask(prompt: str | list[int], tokens: int) -> tuple[int, list[dict[str, Any]]]:
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "n_probs": CANDIDATES, "cache_prompt": False}
        answer = server.handle_completions(asked)
        if "choices" not in answer:
            raise RuntimeError(f"llama.cpp: {answer}")
        return answer["usage"]["prompt_tokens"], (answer["choices"][0]["logprobs"] or {}).get("content", [])

    rows = []
    for row in request["rows"]:
        num_tokens, steps = ask(row["text"], request["limit"])
        greedy = [step["id"] for step in steps]
        logps: list[float | None] = []
        completion = row["completion"]
        while len(logps) < len(completion):
            for step, token in zip(steps, completion[len(logps) :], strict=False):
                among = {one["id"]: one["logprob"] for one in step["top_logprobs"]}
                logps.append(among.get(token))
                if step["id"] != token:  # continue from here with the policy's token
                    break
            left = len(completion) - len(logps)
            steps = ask(row["ids"] + completion[: len(logps)], left)[1] if left else []
            if left and not steps:
                raise RuntimeError("llama.cpp gave no token although the policy's completion continues")
        rows.append({"prompt_tokens": num_tokens, "logps": logps, "greedy": greedy})
    return {"version": version("xllamacpp"), "rows": rows}


LOADERS = {"transformers": _ask_transformers, "peft": _ask_transformers, "vllm": _ask_vllm, "llama.cpp": _ask_llama_cpp}

if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(main(asked)), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # done: an engine's threads or clean-up must not block the caller
