"""The embedded model: a tiny `Qwen3ForCausalLM` that thinks, built offline on the CPU and cached.

The cold start runs in a separate process, so the weights depend on the seed, not on what the caller imported, seeded or
patched. The cache is keyed by the model's name and its recipe version in `RECIPES`.
"""

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

from rloo_kit.config.model_names import DEFAULT_FAMILY, find_family_file, is_family_file, split_model_name
from rloo_kit.data.chat import (
    CHAT_TOKENS,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    TEMPLATES,
    TURN_END,
    check_names,
    token_ids,
)
from rloo_kit.data.families import addition
from rloo_kit.data.tasks import Habit, find_family
from rloo_kit.embedded import smollm2
from rloo_kit.embedded.cache import RECORD, build_once
from rloo_kit.embedded.cold_start import ColdStart, find_plan, train
from rloo_kit.errors import ConfigError, SetupError
from rloo_kit.system.environment import cache_folder

# Raise a kind's version with any change to its weights: plan, demonstrations, tokenizer, architecture.
# A test fingerprints each recipe and fails if one changes under the same number.
RECIPES = {"thinking": 2, "instruct": 1, "untaught": 1}
_LIBRARIES = ("torch", "transformers", "tokenizers")
_FOLDER_NAME = re.compile(
    r"(?P<name>(?P<kind>[a-z]+)(@[a-z]+)?)-(?P<vocabulary>[a-z0-9]+)-(?P<seed>\d+)-r(?P<recipe>\d+)"
    r"(-(?P<steps>\d+)steps)?"
)
_PROGRESS = "progress: "


def build(
    name: str = "thinking",
    vocabulary: str = "compact",
    seed: int = 0,
    *,
    steps: int | None = None,
    config_file: Path | None = None,
    report: Callable[[str], None] | None = None,
) -> Path:
    """The folder of the embedded model, from the cache or built on one core (thinking: about one minute, instruct:
    about two and a half minutes).

    Args:
        name: the part of `model.name` after `embedded/`: `thinking` (addition), `thinking@FAMILY` (of `data/tasks.py`),
            `instruct` (addition, answers at once) or `untaught`.
        vocabulary: `compact` (320 rows: the bytes, then the chat tokens) or `qwen3` (151936 rows, Qwen3's own ids).
        seed: of the cold start; another seed is another model.
        steps: of the cold start; None: as many as the model needs. A few give a quick model that solves nothing.
        config_file: the run's configuration file; see `find_family_file`.
        report: called with a line of text every 10 seconds; None prints it.
    Raises:
        ConfigError: unknown model, family or vocabulary, or steps below 1.
        SetupError: the cache cannot be written, or the cold start failed.
    """
    recipe = _recipe(name, vocabulary, seed, steps, config_file)
    say = report or (lambda line: print(line, flush=True))
    target = cache_folder() / _folder_name(recipe, steps)

    def fill(workspace: Path) -> None:
        say(f"building embedded/{name}, once; cached in {target.parent}")
        _run_cold_start(recipe, workspace, lambda line: say(f"building embedded/{name}: {line}"))

    return build_once(target, fill)


def build_tokenizer(name: str = "thinking", vocabulary: str = "compact") -> Any:
    """A `Qwen2Tokenizer` for the embedded model `name` (thinking, instruct, thinking@sorting) and `vocabulary` (compact
    or qwen3); raises ConfigError for any other.

    `<think>` and `</think>` are added tokens but not special, as in Qwen3: `skip_special_tokens=True` keeps them.
    """
    check_names(name, vocabulary)
    tokenizer = Qwen2Tokenizer(
        vocab=token_ids(vocabulary),
        merges=[],
        unk_token=None,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    for special in (True, False):
        chosen = [token for token in CHAT_TOKENS if (token in SPECIAL_TOKENS) is special]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in chosen])
    tokenizer.chat_template = TEMPLATES[split_model_name(name)[0]]
    return tokenizer


def name_built(folder: str) -> dict[str, Any] | None:
    """The keys of the config's `model` section that rebuild the model cached under the folder name `folder`; None for
    any other name, a different number of steps, or a user's family."""
    if (packaged := smollm2.name_of(folder)) is not None:
        return {"name": packaged}
    found = _FOLDER_NAME.fullmatch(folder)
    if found is None or int(found["recipe"]) != RECIPES.get(found["kind"]) or found["steps"] is not None:
        return None
    return {"name": f"embedded/{found['name']}", "vocabulary": found["vocabulary"], "build_seed": int(found["seed"])}


def rebuild(name: str) -> Path | None:
    """The model that `build` caches under the folder name `name`, built if missing; None for any other name. An adapter
    records its base as a path on the machine that trained it, so only the name identifies the model."""
    if (packaged := smollm2.name_of(name)) is not None:
        return smollm2.build(packaged)
    found = _FOLDER_NAME.fullmatch(name)
    if found is None or int(found["recipe"]) != RECIPES.get(found["kind"]):
        return None
    steps = found["steps"]
    return build(found["name"], found["vocabulary"], int(found["seed"]), steps=None if steps is None else int(steps))


def _folder_name(recipe: dict[str, Any], steps: int | None) -> str:
    """The cache key: name, vocabulary, seed and recipe; for a user's family also its file's name and content."""
    kind, family = recipe["kind"], recipe["family"]
    if is_family_file(family):
        digest = hashlib.sha256(Path(family).read_bytes()).hexdigest()[:8]
        family = f"{re.sub(r'[^A-Za-z0-9_]', '_', Path(family).stem)}.{digest}"
    name = kind if family == DEFAULT_FAMILY else f"{kind}@{family}"
    number = "" if steps is None else f"-{steps}steps"
    return f"{name}-{recipe['vocabulary']}-{recipe['seed']}-r{RECIPES[kind]}{number}"


def _recipe(name: str, vocabulary: str, seed: int, steps: int | None, config_file: Path | None) -> dict[str, Any]:
    """Everything that determines the weights, as JSON; raises ConfigError for invalid arguments."""
    check_names(name, vocabulary)
    kind, family = split_model_name(name)
    if steps is not None and steps < 1:
        raise ConfigError(f"steps={steps}: the cold start needs at least 1 step")
    if is_family_file(family):
        family = str(find_family_file(family, config_file))
    plan = find_plan(kind, find_family(family))
    plan = plan if steps is None else dataclasses.replace(plan, steps=steps)
    return {
        "kind": kind,
        "family": family,
        "vocabulary": vocabulary,
        "seed": seed,
        "recipe": RECIPES[kind],
        "plan": dataclasses.asdict(plan),
        "versions": {library: version(library) for library in _LIBRARIES},  # for readers; not part of the name
    }


def _run_cold_start(recipe: dict[str, Any], folder: Path, report: Callable[[str], None]) -> None:
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
    program = "from rloo_kit.embedded.model import run_as_program; run_as_program()"
    command = [sys.executable, "-P", "-c", program]  # -P: import nothing from the working directory
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [*command, json.dumps(recipe), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
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
            family = recipe["family"]
            name = recipe["kind"] if family == DEFAULT_FAMILY else f"{recipe['kind']}@{family}"
            first = f"check draw and work in {family}; " if is_family_file(family) else ""
            raise SetupError(
                f"the cold start of embedded/{name} ended with exit code {child.returncode}; {first}"
                f"`rloo-kit doctor` checks the installation. Its last output:\n{tail}"
            )


def run_as_program() -> None:
    """Entry point of the process that `build` starts: takes the recipe as JSON and the folder to fill."""
    recipe, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    plan = ColdStart(**recipe["plan"] | {"habit": Habit(**recipe["plan"]["habit"])})
    torch.set_num_threads(1)
    kind = recipe["kind"]
    tokenizer = build_tokenizer(kind, recipe["vocabulary"])
    model = train(
        tokenizer,
        kind,
        addition.IN_THE_HEAD if kind == "instruct" else find_family(recipe["family"]),
        recipe["vocabulary"],
        recipe["seed"],
        plan,
        lambda line: print(_PROGRESS + line, flush=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / RECORD).write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
