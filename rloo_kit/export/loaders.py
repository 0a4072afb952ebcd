"""Score given completions in the program that an export is for: transformers, PEFT or llama.cpp.

Runs as a separate process (`python loaders.py REQUEST REPLY`) and imports nothing from the kit. So the export loads
as it does for a user without the kit or Unsloth's patches, and a file that crashes llama.cpp does not end the export.
"""

import base64
import io
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

CANDIDATES = 20  # likeliest tokens per position of llama.cpp's answer; the policy's token is looked up among them


def score_completion(
    model: Any, prompt: list[int], completion: list[int], **images: Any
) -> tuple[list[float], list[int]]:
    """The log-probability of each token of a completion, and the likeliest token at each of their places; `images`: see
    `read_images`."""
    import torch

    ids = torch.tensor([prompt + completion], device=model.device)
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), **images)
    logits = output.logits[0, len(prompt) - 1 : -1].float()
    targets = torch.tensor(completion, device=model.device)
    logps = torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0]
    return logps.tolist(), logits.argmax(dim=-1).tolist()


def read_images(row: dict[str, Any], processor: Any, model: Any) -> dict[str, Any]:
    """The model's inputs for the images of a row's prompt, whose ids have the model's placeholders for them."""
    import torch
    from PIL import Image

    images = [Image.open(io.BytesIO(base64.b64decode(image))) for image in row["images"]]
    read = dict(processor(images=images, return_tensors="pt"))
    ids = torch.tensor([row["ids"] + [0] * len(row["completion"])])
    names = ["pixel_values", "image_grid_thw"] if "image_grid_thw" in read else ["pixel_values"]
    kinds = "mm_token_type_ids" if "image_grid_thw" in read else "token_type_ids"
    found = {name: read[name] for name in names} | {kinds: (ids == model.config.image_token_id).long()}
    return {name: value.to(model.device) for name, value in found.items()}


def ask_transformers(request: dict[str, Any]) -> dict[str, Any]:
    """The reply of transformers; with `adapter`, of PEFT.

    Args:
        request: `loader`, `model` (its folder), `auto` (the class that loads it), `adapter` and `four_bit` for PEFT,
            `compute` (dtype), `device`, and `rows`: text, ids, completion and, if there are any, images of each (PNG in
            base64).

    Returns:
        `version` of the loader; `rows` with `prompt_tokens`, `logps` and `greedy` (the likeliest ids).
    """
    import torch
    import transformers
    from transformers import AutoTokenizer, BitsAndBytesConfig
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    dtype, folder = getattr(torch, request["compute"]), request["model"]
    nf4: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **nf4)
    model = getattr(transformers, request["auto"]).from_pretrained(
        folder,
        dtype=dtype,
        device_map={"": request["device"]},
        quantization_config=four_bit if request.get("four_bit") else None,
    )
    for module in model.modules():  # see rloo_kit/models/transformers.py: it would repack the weights in place
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    if request["loader"] == "peft":
        from peft import PeftModel

        folder = request["adapter"]
        model = PeftModel.from_pretrained(model, folder)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows, processor = [], None
    for row in request["rows"]:
        prompt = tokenizer(row["text"])["input_ids"]
        if row["images"] and processor is None:
            processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        images = read_images(row, processor, model) if row["images"] else {}
        logps, greedy = score_completion(model, row["ids"], row["completion"], **images)
        rows.append({"prompt_tokens": prompt, "logps": logps, "greedy": greedy})
    return {"version": version(request["loader"]), "rows": rows}


def ask_llama_cpp(request: dict[str, Any]) -> dict[str, Any]:
    """The reply of llama.cpp, as of `ask_transformers`: `prompt_tokens` is only their number, and a token outside the
    `CANDIDATES` has no log-probability (None)."""
    import xllamacpp

    limit = request["limit"]
    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    params.n_ctx = max(len(row["ids"]) for row in request["rows"]) + limit + 8
    params.n_parallel, params.warmup, params.fit_params, params.verbosity = 1, False, False, 0
    threads = int(os.environ.get("OMP_NUM_THREADS") or 0) or os.cpu_count() or 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    # The defaults, a float16 cache and flash attention, would hide the error of the file itself.
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    rows = []
    for row in request["rows"]:
        completion, prompt_tokens = row["completion"], None
        logps: list[float | None] = []
        greedy: list[int] = []
        while len(logps) < len(completion):
            asked = {
                "prompt": row["ids"] + completion[: len(logps)] if logps else row["text"],
                "n_predict": limit - len(logps),
                "temperature": 0,
                "n_probs": CANDIDATES,
                "cache_prompt": False,
            }
            answer = server.handle_completions(asked)
            if "choices" not in answer or not (answer["choices"][0]["logprobs"] or {}).get("content"):
                raise RuntimeError(f"llama.cpp does not continue the policy's completion: {answer}")
            prompt_tokens = prompt_tokens or answer["usage"]["prompt_tokens"]
            steps = answer["choices"][0]["logprobs"]["content"]
            for step, token in zip(steps, completion[len(logps) :], strict=False):
                among = {one["id"]: one["logprob"] for one in step["top_logprobs"]}
                logps.append(among.get(token))
                greedy.append(step["id"])
                if step["id"] != token:  # continue from here with the policy's token
                    break
        greedy += [step["id"] for step in steps[len(completion) :]]  # beyond the policy's end
        rows.append({"prompt_tokens": prompt_tokens, "logps": logps, "greedy": greedy})
    return {"version": version("xllamacpp"), "rows": rows}


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    reply = ask_llama_cpp(asked) if asked["loader"] == "llama.cpp" else ask_transformers(asked)
    Path(sys.argv[2]).write_text(json.dumps(reply), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # done: an engine's threads or clean-up must not block the caller
