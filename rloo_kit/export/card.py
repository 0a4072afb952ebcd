"""The model card: `README.md` of an exported folder, as the hub shows it. It contains no local paths."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from rloo_kit import __version__
from rloo_kit.config.checks import GYM_PREFIX, describe_method, name_method
from rloo_kit.config.model_names import EMBEDDED_PREFIX, SMOLLM2_PREFIX, is_family_file
from rloo_kit.config.run import RunConfig
from rloo_kit.gradient.objective import choose_ratio_form
from rloo_kit.results.changes import compare
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.results.result import load_evaluation
from rloo_kit.runs.files import read_object

LIBRARIES = {"adapter": "peft", "merged": "transformers", "vllm": "transformers", "gguf": "gguf"}
KIT = "rloo-kit"


def hub_id(name: str) -> str | None:
    """The hub id of a model or dataset, given as the id or as a folder of the hub's cache; None for any other folder
    or file.

    >>> hub_id("Qwen/Qwen3-4B"), hub_id("/a/models--Qwen--Qwen3-4B/snapshots/0af"), hub_id("/a/b"), hub_id("./a")
    ('Qwen/Qwen3-4B', 'Qwen/Qwen3-4B', None, None)
    """
    cached = [part for part in Path(name).parts if part.startswith("models--")]
    if cached:
        return cached[-1].removeprefix("models--").replace("--", "/")
    made_here = (EMBEDDED_PREFIX, SMOLLM2_PREFIX, GYM_PREFIX)
    is_local = name.startswith((".", "/", "~", *made_here)) or name.count("/") != 1 or Path(name).exists()
    return None if is_local or Path(name).suffix in (".jsonl", ".csv", ".parquet") else name


def public_name(name: str) -> str:
    """A name without local paths: a hub id, `embedded/...`, the last part of a path, or the run for a run's weights.

    >>> public_name("outputs/sums-sft/adapter"), public_name("/models/mine")
    ('sums-sft', 'mine')
    >>> public_name("embedded/thinking@/data/mine/backward.py"), public_name("embedded//data/mine/backward.py")
    ('embedded/thinking@backward.py', 'embedded/backward.py')
    """
    if name.startswith(EMBEDDED_PREFIX):
        kind, at, family = name.removeprefix(EMBEDDED_PREFIX).rpartition("@")
        return f"{EMBEDDED_PREFIX}{kind}{at}{Path(family).name}" if is_family_file(family) else name
    path = Path(name)
    last = path.parent.name if path.name == "adapter" and path.parent.name else path.name
    return hub_id(name) or (name if name.startswith((SMOLLM2_PREFIX, GYM_PREFIX)) else last)


def write_card(run: RunConfig, target: str, base: str, verdict: list[str], loading: str) -> str:
    """The text of the card.

    Args:
        run: as trained, with its folder. target: adapter, merged, gguf or vllm.
        base: name of the base model. verdict: lines of the certificate. loading: how to load it, in Markdown.
    """
    before, after = (load_evaluation(run, when) for when in ("before", "after"))
    sections = [
        _front_matter(run, target, base),
        f"# {run.name}\n\n{_summary(run, base)}",
        f"## Results\n\n{_results(before, after)}",
        "## Is this what was trained?\n\n" + "\n".join(f"- {line}" for line in verdict) + "\n\n`certificate.json` has "
        "the figures, and the size and hash of every file.",
        f"## Load it\n\n{loading}",
        f"## How it was trained\n\n{_recipe(run, base)}",
        f"## Versions\n\n{_versions(run)}",
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(run: RunConfig, target: str, base: str) -> str:
    found: dict[str, Any] = {"library_name": LIBRARIES[target], "pipeline_tag": "text-generation"}
    if hub_id(base):
        relation = {"adapter": "adapter", "gguf": "quantized"}.get(target, "finetune")
        found |= {"base_model": hub_id(base), "base_model_relation": relation}
    data = [name for source in run.data.all_sources if (name := hub_id(source))]
    if data:
        found["datasets"] = data
    method = (name_method(dict(run.rloo)) or "policy gradient").lower().replace(". ", "-").replace(" ", "-")
    found["tags"] = [method, "reinforcement-learning", "trl", KIT]
    if run.model.lora is not None:
        found["tags"].append("lora")
    return f"---\n{yaml.safe_dump(found, sort_keys=False, allow_unicode=True)}---"


def _summary(run: RunConfig, base: str) -> str:
    sources = ", ".join(public_name(source) for source in run.data.all_sources)
    what = "a LoRA adapter" if run.model.lora is not None else "every parameter"
    return (
        f"{base} after reinforcement learning with {describe_method(dict(run.rloo))}, {run.rloo.num_generations} "
        f"completions per prompt, on {sources}. Trained: {what}."
    )


def _results(before: Evaluation | None, after: Evaluation | None) -> str:
    if before is None and after is None:
        return "The run was not evaluated."
    sides = [one for one in (before, after) if one is not None]
    old, new = (dict(one.rows(*sides)) if one is not None else {} for one in (before, after))
    lines = ["| held-out prompts, value [95 % interval] | before | after |", "|---|---|---|"]
    lines += [f"| {_cell(name)} | {_cell(old.get(name, ''))} | {_cell(new.get(name, ''))} |" for name in old | new]
    if before is not None and after is not None:
        lines += ["", f"After vs. before: {compare(before, after)}."]
    return "\n".join(lines)


def _recipe(run: RunConfig, base: str) -> str:
    rloo, data = run.rloo, run.data
    status = read_object(run.folder / "status.json")
    rewards = ", ".join(f"{public_name(one.name)} x {one.weight:g}" for one in run.rewards)
    ratio = choose_ratio_form(rloo.ratio_form, rloo.kl_form, rloo.token_mean)
    loss = f"clipped surrogate of the {ratio} ratio, epsilon {rloo.epsilon:g}, token_mean {rloo.token_mean}"
    advantage = f"baseline {rloo.baseline}, scale_rewards {rloo.scale_rewards}"
    advantage += ", normalize_advantages" if rloo.normalize_advantages else ""
    rows = {
        "base": base + (", in 4-bit (NF4 of bitsandbytes)" if run.model.load_in_4bit else ""),
        "data": ", ".join(public_name(source) for source in data.all_sources) + f", seed {data.seed}",
        "system prompt": data.system_prompt or "none",
        "rewards (weighted sum)": rewards,
        "steps": f"{status.get('step', '?')} ({status.get('state', 'unknown')}), weights of step "
        f"{status.get('adapter_step', '?')}",
        "completions per prompt (K)": rloo.num_generations,
        "completions per step": rloo.per_device_train_batch_size * rloo.gradient_accumulation_steps,
        "learning rate": f"{rloo.learning_rate:g}, {rloo.lr_scheduler_type}",
        "KL penalty (beta)": f"{rloo.beta:g}" + (f", {rloo.kl_form}" if rloo.beta else ""),
        "advantage": advantage,
        "loss": loss,
        "sampling": f"temperature {rloo.temperature:g}, at most {rloo.max_completion_length} tokens",
        "seed": run.run.seed,
    }
    if (lora := run.model.lora) is not None:
        rows["LoRA"] = f"r {lora.r}, alpha {lora.alpha:g}, {', '.join(lora.target_modules or ['all linear layers'])}"
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def _versions(run: RunConfig) -> str:
    recorded = read_object(run.folder / "versions.json")
    trained = {name: found for name, found in (recorded.get("versions") or {}).items() if found}
    text = ", ".join(f"{name} {found}" for name, found in trained.items()) or "not recorded"
    return f"Trained with {text}. Exported with {KIT} {__version__}, transformers {version('transformers')}."


def _cell(value: Any) -> str:
    """A value escaped for a table cell."""
    return " ".join(str(value).replace("|", "\\|").split())
