"""INTERIM until the data branch is merged."""

from dataclasses import dataclass
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.data import load
from rloo_kit.data.chat import resolve_family, thinks
from rloo_kit.data.sources import find_file


@dataclass
class Prepared:
    source: Any
    texts: list[str]
    answers: Any
    train_rows: list[int]
    test_rows: list[int]

    def row(self, index: int) -> dict[str, Any]:
        row = self.train_rows[index]
        found = {"prompt": self.texts[row]}
        if self.answers is not None:
            found["answer"] = self.answers[row]
        return found


def needs_stack(run: RunConfig) -> bool:
    if run.data.source.startswith("embedded/"):
        return False
    path = find_file(run.data.source, run.source)
    return path is None or path.suffix == ".parquet"


def prepare_data(run: RunConfig, tokenizer: Any) -> Prepared:
    family = resolve_family(tokenizer, run.model.name, run.model.family, run.model.enable_thinking)
    source = load._draw(load._read(run, None, thinks(family)), run.data.num_prompts, run.data.seed)
    texts = [load._render(run, tokenizer, family, source, row) for row in range(len(source.prompts))]
    answers = load._answers(run, source)
    notes: list[str] = []
    fitting = load._fitting_rows(run, tokenizer, source, texts, notes)
    return Prepared(source, texts, answers, *load._split(source, fitting, run.data, notes))
