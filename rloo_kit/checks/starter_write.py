"""`rloo-kit init`: writes a config that fits this machine, a reward and its test; replaces nothing unless asked to."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rloo_kit.checks.starter_fit import fit
from rloo_kit.checks.starter_table import Table
from rloo_kit.checks.starter_texts import make_reward, make_test
from rloo_kit.errors import ConfigError
from rloo_kit.plan.result import VramPlan
from rloo_kit.system.versions import is_importable

ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class Starter:
    """What `write_starter` wrote. Prints as a summary with the next commands.

    Attributes:
        config, reward, test: the files. plan: the memory plan. time: of a step, in words; empty if unknown.
    """

    config: Path
    reward: Path
    test: Path
    table: Table
    plan: VramPlan
    time: str

    @property
    def commands(self) -> list[str]:
        """The next commands, to run from the current folder."""
        pytest = "pytest" if is_importable("pytest") else "pip install pytest && pytest"
        steps = (shlex.join(["rloo-kit", step, str(self.config)]) for step in ("preflight", "train"))
        return [f"{pytest} {shlex.quote(str(self.test))}", *steps]

    def __str__(self) -> str:
        plan, table = self.plan, self.table
        return "\n".join(
            [
                f"{table.source}: {len(table.rows)} rows, prompts in '{table.prompt_column}', answers in "
                f"'{table.answer_column}'",
                f"{plan.model}: {plan.peak_gib:.1f} of {plan.machine.usable_gib:.1f} GiB on {plan.machine.name} "
                "(computed, not measured)",
                *self._notes(),
                f"wrote {self.config}, {self.reward} and {self.test}",
                "next:",
                *(f"  {command}" for command in self.commands),
            ]
        )

    def _notes(self) -> Iterator[str]:
        if self.table.other_columns:
            yield f"other columns: {', '.join(self.table.other_columns)}; --prompt-column and --answer-column choose"
        if self.time:
            yield self.time
        if self.plan.no_gpu is not None:
            yield "--gpu-gib 8 writes the file for a GPU with 8 GiB"


def name_output(output: Path | None, source: str) -> Path:
    """Path of the config: `output`, a file or a folder; by default NAME.yaml here, named after the data file."""
    name = f"{_as_module(Path(source).stem)}.yaml"
    if output is None:
        return Path(name)
    if output.is_dir():
        return output / name
    if output.suffix not in ENDINGS:
        raise ConfigError(f"--output {output}: a config file must end in .yaml; use --output {output}.yaml")
    return output


def write_starter(
    model: str, table: Table, output: Path | None = None, gpu_gib: float | None = None, overwrite: bool = False
) -> Starter:
    """Write the config of a run, its reward and the reward's test.

    Args:
        model: hub id, folder or embedded model. table: the data (`read_table`).
        output: the config, or a folder for it. gpu_gib: memory of another GPU; None: this machine.
        overwrite: replace existing files.

    Raises:
        ConfigError: one of the files exists already; see also `fit`.
    """
    config = name_output(output, table.source)
    module = f"{_as_module(config.stem)}_rewards"
    reward, test = config.with_name(f"{module}.py"), config.with_name(f"test_{module}.py")
    there = [str(path) for path in (config, reward, test) if path.exists()]
    if there and not overwrite:
        raise ConfigError(
            f"{', '.join(there)}: there already; --overwrite replaces, --output OTHER.yaml writes elsewhere"
        )
    fitted = fit(model, config, module, table, gpu_gib)
    texts = {config: fitted.text, reward: make_reward(fitted.settings), test: make_test(fitted.settings)}
    config.parent.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return Starter(config, reward, test, table, fitted.plan, fitted.time)


def _as_module(stem: str) -> str:
    """A file's stem as an importable module name.

    >>> _as_module("my data-2"), _as_module("2024")
    ('my_data_2', 'data_2024')
    """
    name = re.sub(r"\W+", "_", stem).strip("_")
    return name if name.isidentifier() else f"data_{name}".rstrip("_")
