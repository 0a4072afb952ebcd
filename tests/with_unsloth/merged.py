"""What becomes of an adapter that was trained through Unsloth, in a process that has only transformers and PEFT.

python merged.py MODEL_FOLDER ADAPTER_FOLDER OUT.pt FOLDER_MERGED_BY_UNSLOTH
"""

import sys
from pathlib import Path
from typing import Any

PROMPT = "abc cab"


def logits(model: Any, tokenizer: Any) -> Any:
    """(T, V) of one prompt, in float32."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([tokenizer(PROMPT)["input_ids"]])).logits[0].float()


def main(model: str, adapter: str, out: str, by_unsloth: str) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(adapter)
    base = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    policy = PeftModel.from_pretrained(base, adapter).eval()
    inputs = tokenizer([PROMPT], return_tensors="pt")
    found = {"adapter": logits(policy, tokenizer)}
    with torch.no_grad():
        greedy = policy.generate(**inputs, max_new_tokens=8, do_sample=False)
    found["greedy"] = greedy[0, inputs["input_ids"].shape[1] :].tolist()
    merged = str(Path(out).parent / "merged")
    policy.merge_and_unload().save_pretrained(merged)
    tokenizer.save_pretrained(merged)
    for name, folder, dtype in (("by peft", merged, "float32"), ("by unsloth", by_unsloth, "auto")):
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        found[name], found[f"{name}, dtype"] = logits(whole, tokenizer), str(whole.dtype)
    assert "unsloth" not in sys.modules
    torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
