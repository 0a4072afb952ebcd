"""The models that `rloo-kit ask` opens, by folder or file."""

from pathlib import Path
from typing import Any, Protocol

from transformers import AutoTokenizer

from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import Message, resolve_family
from rloo_kit.embedded.model import RECORD
from rloo_kit.errors import BackendError
from rloo_kit.evals.ask import Answer, ask
from rloo_kit.models.checkpoint import find_source
from rloo_kit.models.policy import Policy, load_policy
from rloo_kit.models.trained import load_base, load_trained
from rloo_kit.rollout.llama import LlamaModel
from rloo_kit.runs.exported import find_gguf, origin_of
from rloo_kit.think_tags import bind_think_tags


class Asked(Protocol):
    """A model that answers questions.

    Attributes:
        single: why each question is asked alone by default; "" if earlier turns are kept.
    """

    single: str

    def ask(self, question: str | list[Message], *, base: bool = False, **options: Any) -> Answer:
        """`evals.ask.ask` with the same options and errors."""
        ...


class TrainedModel:
    """A run's trained model, or exported weights; raises like `load_trained`."""

    def __init__(self, source: Path, *overrides: str) -> None:
        self._source, self._overrides = source, overrides
        self.run, self.policy = self._load()
        self._base: Policy | None = None
        self.single = ""
        if self.policy.family == "plain":
            self.single = "the model has no chat template"
        elif self._is_embedded():
            self.single = "the embedded model was trained on single questions only"

    def ask(self, question: str | list[Message], *, base: bool = False, **options: Any) -> Answer:
        """`evals.ask.ask`; a separate base model is loaded on first use."""
        if base and self._base is None:
            self._base = self._load_base()
        return ask(self.run, self.policy, question, base=base and (self._base or True), **options)

    def _load(self) -> tuple[RunConfig, Policy]:
        return load_trained(self._source, *self._overrides)

    def _load_base(self) -> Policy | None:
        """The base model; None means the policy without its adapter."""
        return load_base(self._source, *self._overrides)

    def _is_embedded(self) -> bool:
        base = Path(self.policy.model.config.name_or_path)
        return origin_of(self._source).model.is_embedded or (base / RECORD).is_file()


class GgufModel(TrainedModel):
    """A GGUF file, with the tokenizer and the prompts of the run that exported it."""

    def _load(self) -> tuple[RunConfig, Policy]:
        run = origin_of(self._source, *self._overrides)
        file = find_gguf(self._source)
        assert file is not None
        base = find_source(run).base
        try:
            tokenizer = AutoTokenizer.from_pretrained(base)
        except OSError as error:
            raise BackendError(
                f"{file} needs the tokenizer of its base, {base}, which was not found: name the base's folder with "
                f"--set model.name=FOLDER ({str(error).splitlines()[0]})"
            ) from error
        family = resolve_family(tokenizer, run.model.name, run.model.family, run.model.enable_thinking)
        model = LlamaModel(file, run.model.max_seq_length)
        return run, Policy(model, tokenizer, "transformers", "llama.cpp", bind_think_tags(tokenizer), family, {})

    def _load_base(self) -> Policy | None:
        return load_policy(origin_of(self._source, *self._overrides), check=False)


def open_model(source: Path, *overrides: str) -> Asked:
    """The model of a run's folder or config, a folder of weights or a GGUF file; raises like `load_trained`."""
    return TrainedModel(source, *overrides) if find_gguf(source) is None else GgufModel(source, *overrides)
