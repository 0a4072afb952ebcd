"""The model card: `README.md` of an exported folder, as the hub shows it. It contains no local paths."""

from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from rloo_kit import __version__
from rloo_kit.config.checks import GYM_PREFIX, describe_method, name_method
from rloo_kit.config.model_names import EMBEDDED_PREFIX, SMOLLM2_PREFIX, is_family_file
from rloo_kit.config.run import RunConfig
from rloo_kit.gradient.objective import choose_ratio_form
from rloo_kit.results.changes import compare
from rloo_kit.results.verdict import load_evaluation
from rloo_kit.runs.files import read_object

LIBRARIES = {"adapter": "peft", "merged": "transformers", "vllm": "transformers", "gguf": "gguf"}


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


def write_card(run: RunConfig, target: str, base: str, verdict: list[str], loading: dict[str, Any]) -> str:
    """The text of the card.

    Args:
        run: as trained, with its folder. target: adapter, merged, gguf or vllm.
        base: name of the base model. verdict: lines of the certificate.
        loading: what the snippet of this target names, see `card.md.jinja`.
    """
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"cell": _cell, "quote": quote, "g": "{:g}".format}
    template = environment.from_string(Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8"))
    rloo, status = run.rloo, read_object(run.folder / "status.json")
    before, after = (load_evaluation(run, when) for when in ("before", "after"))
    sides = [one for one in (before, after) if one is not None]
    old, new = (dict(one.rows(*sides)) if one is not None else {} for one in (before, after))
    versions = read_object(run.folder / "versions.json").get("versions") or {}
    return template.render(
        front=_front_matter(run, target, base),
        run=run,
        rloo=rloo,
        lora=run.model.lora,
        base=base,
        method=describe_method(dict(rloo)),
        ratio=choose_ratio_form(rloo.ratio_form, rloo.kl_form, rloo.token_mean),
        sources=", ".join(public_name(source) for source in run.data.all_sources),
        rewards=", ".join(f"{public_name(one.name)} x {one.weight:g}" for one in run.rewards),
        results={name: (old.get(name, ""), new.get(name, "")) for name in old | new},
        change=compare(before, after) if before is not None and after is not None else None,
        status={"step": "?", "state": "unknown", "adapter_step": "?"} | status,
        trained_with=", ".join(f"{name} {found}" for name, found in versions.items() if found),
        exported_with=f"rloo-kit {__version__}, transformers {version('transformers')}",
        target=target,
        verdict=verdict,
        **loading,
    )


def _front_matter(run: RunConfig, target: str, base: str) -> str:
    found: dict[str, Any] = {"library_name": LIBRARIES[target], "pipeline_tag": "text-generation"}
    if hub_id(base):
        relation = {"adapter": "adapter", "gguf": "quantized"}.get(target, "finetune")
        found |= {"base_model": hub_id(base), "base_model_relation": relation}
    data = [name for source in run.data.all_sources if (name := hub_id(source))]
    if data:
        found["datasets"] = data
    method = (name_method(dict(run.rloo)) or "policy gradient").lower().replace(". ", "-").replace(" ", "-")
    found["tags"] = [method, "reinforcement-learning", "trl", "rloo-kit", *(["lora"] if run.model.lora else [])]
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True)


def _cell(value: Any) -> str:
    """A value escaped for a table cell."""
    return " ".join(str(value).replace("|", "\\|").split())
