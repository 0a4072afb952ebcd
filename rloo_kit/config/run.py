"""A run: one YAML file, read into strict models; the resolved run prints as YAML that loads back to an equal object."""

import os
import warnings
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, ValidationError, ValidationInfo, model_validator

from rloo_kit.config.batches import check_prompt_count
from rloo_kit.config.checks import FILE_KINDS, VLLM_RANKS, find_resample_problems, find_temperature_problems
from rloo_kit.config.derived import fill_defaults
from rloo_kit.config.embedded import (
    EMBEDDED_PREFIX,
    find_family_file,
    find_family_problem,
    is_family_file,
    is_same_family,
    split_model_name,
)
from rloo_kit.config.messages import explain_error, explain_errors
from rloo_kit.config.old_names import CONFIG_NAMES, forget_overruled, translate_file
from rloo_kit.config.schema import (
    DataSection,
    EvalSection,
    HealthSection,
    ModelSection,
    RewardSection,
    RLOOSection,
    RolloutSection,
    RunSection,
)
from rloo_kit.config.section import Section
from rloo_kit.config.sft import SftSection
from rloo_kit.config.yaml_files import apply_override, dump_yaml, merge, read_file
from rloo_kit.errors import ConfigError
from rloo_kit.system.environment import prepare_standby
from rloo_kit.system.input_files import expand_user, from_here, places_of, working_folder
from rloo_kit.system.processes import count_processes


class RunConfig(Section):
    """The whole configuration of a run; equality compares keys, not files."""

    run: RunSection = Field(default_factory=lambda: RunSection(), description="files, printing, stopping")
    model: ModelSection = Field(description="the policy")
    data: DataSection = Field(description="the prompts")
    rewards: list[RewardSection] = Field(min_length=1, description="the rewards, summed by weight")
    rloo: RLOOSection = Field(description="the loop")
    rollout: RolloutSection = Field(default_factory=lambda: RolloutSection(), description="the sampling")
    eval: EvalSection = Field(default_factory=lambda: EvalSection(), description="the evaluation")
    sft: SftSection = Field(default_factory=lambda: SftSection(), description="the supervised start")
    health: HealthSection = Field(default_factory=lambda: HealthSection(), description="what a finding leads to")
    _source: Path | None = PrivateAttr(None)
    _checked: str = PrivateAttr("")  # the state that last passed preflight.refuse_faults

    @property
    def source(self) -> Path | None:
        """The file; None for a run built in Python."""
        return self._source

    @property
    def name(self) -> str:
        """The run's name, which is also its folder's."""
        if self.run.name is None:
            raise ConfigError("the run has no name; set run.name (a config file's stem is its default)")
        return self.run.name

    @property
    def folder(self) -> Path:
        """The run's folder: output_dir/name, in the folder in which the user started the program."""
        return working_folder() / expand_user(self.run.output_dir, "run.output_dir") / self.name

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of each reward, by the name it is logged under."""
        return {entry.name.rpartition(":")[2]: entry.weight for entry in self.rewards}

    @property
    def family_files(self) -> list[Path]:
        """Files of the user's task families that the model and its prompts use; raises ConfigError if one is
        missing."""
        sources = [*self.data.all_sources, *([self.sft.source] if self.sft.source else [])]
        names = [name.removeprefix(EMBEDDED_PREFIX) for name in sources if name.startswith(EMBEDDED_PREFIX)]
        if self.model.is_embedded:
            names.insert(0, split_model_name(self.model.name)[1])
        return list(dict.fromkeys(find_family_file(name, self.source) for name in names if is_family_file(name)))

    def check(self) -> None:
        """Check across sections, which an assignment does not; raises ConfigError on contradictions."""
        try:
            type(self).model_validate(self.model_dump(), context=self._source)
        except ValidationError as error:
            raise ConfigError("\n".join(explain_error(entry, RunConfig) for entry in error.errors())) from None

    def check_prompts(self, prompts: int | None = None) -> None:
        """Refuse, with ConfigError, a training set of `prompts` that does not fill one rollout; without a number (not
        read yet), the largest possible one."""
        if prompts is None:
            if self.data.num_prompts is None:
                return
            size = 0 if self.data.separate_test else self.data.test_size
            prompts = self.data.num_prompts - (int(size) if size >= 1 else size > 0)
        rloo = self.rloo
        passes_key = "steps_per_generation" if rloo.steps_per_generation else "gradient_accumulation_steps"
        passes = rloo.steps_per_generation or rloo.gradient_accumulation_steps
        check_prompt_count(prompts, rloo.per_device_train_batch_size, passes, rloo.num_generations, passes_key)

    def to_yaml(self) -> str:
        """The resolved run with every key; `load_config` reads it back to an equal object. Raises as `check`."""
        self.check()
        return dump_yaml(self.model_dump(mode="json"))

    def with_absolute_files(self) -> "RunConfig":
        """A copy for the run's folder: data and rewards that are found only next to the config file are absolute."""
        copy = self.model_copy(deep=True)
        files: list[tuple[Any, str]] = [(copy.data, "source"), (copy.data, "test_source"), (copy.sft, "source")]
        files += [(one, "source") for one in copy.data.sources or ()] + [(one, "name") for one in copy.rewards]
        for owner, key in files:
            file, colon, function = (getattr(owner, key) or "").partition(":")
            file += ".py" if colon and not file.endswith(".py") else ""
            near = (self.source or Path()).parent / file
            if file and os.path.exists(near) and not any(map(os.path.exists, places_of(file, key))):
                setattr(owner, key, f"{near.absolute()}{colon}{function}")
        return copy

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunConfig) and self.model_dump() == other.model_dump()

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        """Fill in keys that follow others; an assignment and `check` already have all of them."""
        return fill_defaults(values)

    @model_validator(mode="after")
    def _check_sections_together(self, info: ValidationInfo) -> "RunConfig":
        self._source = info.context
        problems = [*self._find_length_problems(), *self._find_reward_problems()]
        problems += self.find_vllm_problems(self.rollout.engine)
        rounds = self.rollout.resample_rounds
        problems += find_resample_problems(rounds, self.rloo.baseline, "rollout.resample_rounds", "rloo.baseline")
        problems += self._find_source_problems()
        if self.run.evaluate and self.data.test_size == 0 and not self.data.separate_test:
            problems.append(
                "run.evaluate is true, but data.test_size is 0: there is nothing to measure on; set data.test_size "
                "above 0 or run.evaluate=false"
            )
        if self.eval.every_steps and self.data.test_size == 0:
            problems.append(
                f"eval.every_steps is {self.eval.every_steps}, but data.test_size is 0: there is nothing to measure "
                "on; set data.test_size above 0 or eval.every_steps=0"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _find_source_problems(self) -> list[str]:
        """Prompts that the embedded model cannot read: it knows the characters and problems of one family."""
        kind, family = split_model_name(self.model.name)
        if not self.model.is_embedded or kind == "untaught":
            return []
        known = f"{EMBEDDED_PREFIX}{family}"

        def may_fit(source: str) -> bool:  # a user's file or folder may contain such problems
            if source.startswith(EMBEDDED_PREFIX):
                return is_same_family(family, source.removeprefix(EMBEDDED_PREFIX), self._source)
            is_own = source.lower().endswith(FILE_KINDS) or source.startswith((".", "/", "~"))
            return is_own or is_family_file(family)

        def builds(source: str) -> str:
            task = source.removeprefix(EMBEDDED_PREFIX)
            return f" ({EMBEDDED_PREFIX}thinking@{task})" if task != source and not find_family_problem(task) else ""

        said = "data.sources has" if self.data.sources else "data.source is"
        given = [("data.source", said, name) for name in self.data.all_sources]
        given += [("sft.source", "sft.source is", self.sft.source)] if self.sft.source else []
        return [
            f"model.name is {self.model.name}, which knows only {family}, but {said} {name}; set {key}={known}, a file "
            f"or folder (./name) with such problems, or set another model.name{builds(name)}"
            for key, said, name in given
            if not may_fit(name)
        ]

    def _find_length_problems(self) -> list[str]:
        prompt, limit = self.data.max_prompt_length, self.model.max_seq_length
        problems = []
        for key, completion in (
            ("rloo.max_completion_length", self.rloo.max_completion_length),
            ("eval.max_completion_length", self.eval.max_completion_length),
        ):
            if completion is not None and prompt + completion > limit:
                room = f"{key}={limit - prompt} or " if limit > prompt else ""
                problems.append(
                    f"data.max_prompt_length ({prompt}) + {key} ({completion}) = {prompt + completion} tokens, more "
                    f"than model.max_seq_length ({limit}); set {room}model.max_seq_length={prompt + completion}"
                )
        return problems

    def find_vllm_problems(self, engine: str) -> list[str]:
        """What vLLM cannot sample if `engine` is "vllm" or "server"; checked before any weights are loaded."""
        if engine not in ("vllm", "server"):
            return []
        temperatures = {"rloo.temperature": self.rloo.temperature, "eval.temperature": self.eval.temperature}
        problems = find_temperature_problems(engine, temperatures, "rollout.engine")
        if self.model.lora is None:
            problems.append(
                "model.lora is null, but vLLM (rollout.engine) gets what was trained as an adapter; set "
                "model.lora={r: 16} or rollout.engine=auto"
            )
        elif self.model.lora.r > VLLM_RANKS[-1]:
            problems.append(
                f"model.lora.r is {self.model.lora.r}, but vLLM (rollout.engine) takes adapters up to rank "
                f"{VLLM_RANKS[-1]}; set model.lora.r={VLLM_RANKS[-1]} or rollout.engine=auto"
            )
        if engine == "vllm" and count_processes() > 1:
            problems.append(
                f"there are {count_processes()} processes, but vLLM in the trainer's process (rollout.engine=vllm) is "
                "for one; set rollout.engine=server, or start one process"
            )
        return problems

    def _find_reward_problems(self) -> list[str]:
        names = [reward.name for reward in self.rewards]
        problems = []
        if self.rloo.missing_eos_penalty is not None and "missing_eos_penalty" in names:
            problems.append(
                "rloo.missing_eos_penalty and the reward missing_eos_penalty are both set, so a truncated completion "
                "would be punished twice; remove one of them"
            )
        if all(reward.weight == 0 for reward in self.rewards):
            problems.append(
                "every reward has weight 0, so nothing can be learned; give one a weight: rewards.0.weight=1"
            )
        return problems


def load_config(path: str | Path, *overrides: str, **sections: Any) -> RunConfig:
    """Read and check the run that a YAML file describes. Old TRL names are translated with a warning.

    Args:
        path: the file; its stem is the run's name unless `run.name` is set. Relative paths in it are looked up in the
            working folder, then next to it.
        overrides: `section.key=value`, as on the command line: "rloo.beta=0.0", "eval.thinking_budgets=[64, 128]",
            "model.lora=null". They win over everything else.
        sections: changes by section, as Python values: `rloo={"beta": 0.0}`. They win over the file.

    If the run may sample through vLLM on a GPU, the environment variable UNSLOTH_VLLM_STANDBY is set to 1, which
    Unsloth reads when it is imported.

    Raises:
        ConfigError: all errors, each with its dotted key and, if known, its line.
    """
    path = from_here(path)
    values, lines = read_file(path)
    if values.keys() & {"grid", "runs"} and not values.keys() & {"model", "rloo"}:
        raise ConfigError(f"{path} describes a batch of runs, not one run; use: rloo-kit batch {path}")
    messages = translate_file(values, count_processes())
    for section, changes in sections.items():
        merge(values, section, changes)
    changed = {apply_override(values, override): override for override in overrides}
    loop_keys = {str(key[1]): override for key, override in changed.items() if key[0] == "rloo" and len(key) > 1}
    if isinstance(values.get("rloo"), dict):
        forget_overruled(values["rloo"], {*sections.get("rloo", {}), *loop_keys})
    for name, override in loop_keys.items():  # an override by an old name counts for the new key
        if name in CONFIG_NAMES and CONFIG_NAMES[name].new is not None:
            changed[("rloo", str(CONFIG_NAMES[name].new))] = override
    for message in messages + translate_file(values, count_processes()):
        warnings.warn(f"{path}: {message}", FutureWarning, stacklevel=2)
    values["run"] = {} if values.get("run") is None else values["run"]
    if isinstance(values["run"], dict) and values["run"].get("name") is None:
        values["run"]["name"] = path.stem
    try:
        config = RunConfig.model_validate(values, context=path)
    except ValidationError as error:
        raise ConfigError(explain_errors(error, RunConfig, path, lines, changed)) from None
    for key in ("adapter",) if config.model.is_embedded else ("adapter", "name"):
        if (folder := getattr(config.model, key)) and not os.path.isdir(os.path.expanduser(folder)):
            found = next(filter(os.path.isdir, places_of(folder, f"model.{key}", path.parent)), folder)
            setattr(config.model, key, str(found))
    prepare_standby(config.rollout.engine, config.model.backend)
    return config
