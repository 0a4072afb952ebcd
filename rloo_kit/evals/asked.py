"""What `rloo-kit ask` asks, by its folder or file."""

from pathlib import Path
from typing import Any, Protocol

from rloo_kit.data.chat import Message
from rloo_kit.embedded.model import RECORD
from rloo_kit.evals.ask import Answer, ask
from rloo_kit.models.policy import Policy
from rloo_kit.models.trained import load_base, load_trained
from rloo_kit.runs.exported import origin_of


class Asked(Protocol):
    """A model that is open for questions.

    Attributes:
        single: why each question stands alone unless the user says otherwise; "" where turns are kept.
    """

    single: str

    def ask(self, question: str | list[Message], *, base: bool = False, **options: Any) -> Answer:
        """`evals.ask.ask` with the same options and errors."""
        ...


class TrainedModel:
    """What a run has trained, or exported weights; raises as `load_trained`."""

    def __init__(self, source: Path, *overrides: str) -> None:
        self._source, self._overrides = source, overrides
        self.run, self.policy = load_trained(source, *overrides)
        self._base: Policy | None = None
        self.single = ""
        if self.policy.family == "plain":
            self.single = "the model has no chat template"
        elif self._is_embedded():
            self.single = "the embedded model has learnt single questions only"

    def ask(self, question: str | list[Message], *, base: bool = False, **options: Any) -> Answer:
        """`evals.ask.ask`; a base of its own is loaded when it is asked first."""
        named: bool | Policy = base
        if base and not self._has_adapter():
            self._base = self._base or load_base(self._source, *self._overrides)
            named = self._base or True
        return ask(self.run, self.policy, question, base=named, **options)

    def _has_adapter(self) -> bool:
        return self.run.model.adapter is not None

    def _is_embedded(self) -> bool:
        base = Path(self.policy.model.config.name_or_path)
        return origin_of(self._source).model.is_embedded or (base / RECORD).is_file()


def open_model(source: Path, *overrides: str) -> Asked:
    """The model of a run's folder or file, or of a folder of weights; raises as `load_trained`."""
    return TrainedModel(source, *overrides)
