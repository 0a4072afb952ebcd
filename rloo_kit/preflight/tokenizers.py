"""The tokenizer of a run's model from files on this machine, without transformers."""

from pathlib import Path

from rloo_kit.config.embedded import SMOLLM2, smollm2_folder
from rloo_kit.config.run import RunConfig
from rloo_kit.data.light_tokenizer import LightTokenizer, embedded_tokenizer, read_tokenizer
from rloo_kit.plan.shapes import find_in_cache, read_adapter


def find_tokenizer(run: RunConfig) -> LightTokenizer | None:
    """From the embedded model, a folder or the Hugging Face cache; None if only transformers can load it, or if it has
    to be downloaded. Raises ConfigError if there is no such embedded model."""
    if run.model.is_embedded:
        return embedded_tokenizer(run.model.name.removeprefix("embedded/"), run.model.vocabulary)
    return _find(str(smollm2_folder(run.model.name)) if run.model.name in SMOLLM2 else run.model.name)


def _find(name: str, depth: int = 0) -> LightTokenizer | None:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        config = find_in_cache(name)
        return None if config is None else read_tokenizer(config.parent)
    base = read_adapter(folder).get("base_model_name_or_path")
    if base and not depth and not (folder / "config.json").is_file():
        return _find(str(base), depth + 1)
    return read_tokenizer(folder)
