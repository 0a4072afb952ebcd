"""A run: one YAML file, read into strict models; the resolved run prints as YAML that loads back to an equal object."""

import os
import warnings
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, ValidationError, ValidationInfo, model_validator

from rloo_kit.config.checks import (
    CLOSE_TOKENS,
    FILE_KINDS,
    GYM_PREFIX,
    find_option_problems,
    find_prompt_problem,
    find_temperature_problems,
    usual_batch,
)
from rloo_kit.config.model_names import EMBEDDED_PREFIX, find_family_problem, split_model_name, thinks_by_keys
from rloo_kit.config.old_names import translate_file
from rloo_kit.config.schema import (
    FULL_LEARNING_RATE,
    DataSection,
    EvalSection,
    HealthSection,
    ModelSection,
    RewardSection,
    RLOOSection,
    RolloutSection,
    RunSection,
    VllmSection,
)
from rloo_kit.config.section import Section, apply_override, declared, explain_errors
from rloo_kit.config.supervised import FULL_SFT_RATE, RewardModelSection, SftSection
from rloo_kit.config.yaml_files import dump_yaml, merge, read_file, read_yaml
from rloo_kit.errors import ConfigError
from rloo_kit.sizes import VLLM_RANKS
from rloo_kit.system.environment import prepare_standby
from rloo_kit.system.input_files import expand_user, from_here, places_of, working_folder
from rloo_kit.system.processes import count_processes

Keys = dict[str, Any]  # keys of a section, as in the file

PROMPT_SHARE = 4  # a prompt gets 1 / PROMPT_SHARE of model.max_seq_length
LEAST_TO_THINK = 64  # tokens of a completion below which no thinking budget is proposed
ANSWER_SHARE, ANSWER = 4, 512  # a forced answer gets 1 / ANSWER_SHARE of a completion, at most ANSWER tokens
FORCED_ANSWER = 32  # tokens after a close that only an evaluation forces, without rloo.answer_budget
THINKING_LENGTH, EMBEDDED_LENGTH = 6144, 160  # model.max_seq_length by kind of model


class RunConfig(Section):
    """The whole configuration of a run; equality compares keys, not files."""

    run: RunSection = Field(default_factory=RunSection, description="files, printing, stopping")
    model: ModelSection = Field(description="the policy")
    data: DataSection = Field(description="the prompts")
    rewards: list[RewardSection] = Field(
        [], description="the rewards, summed by weight; an environment may have its own"
    )
    rloo: RLOOSection = Field(description="the loop")
    rollout: RolloutSection = Field(default_factory=RolloutSection, description="the sampling")
    eval: EvalSection = Field(default_factory=EvalSection, description="the evaluation")
    sft: SftSection = Field(default_factory=SftSection, description="the supervised start")
    reward_model: RewardModelSection | None = Field(None, description="the training of a reward model")
    health: HealthSection = Field(default_factory=HealthSection, description="what a finding leads to")
    _source: Path | None = PrivateAttr(None)

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
    def outputs(self) -> Path:
        """`run.output_dir`, in the folder in which the user started the program."""
        return working_folder() / expand_user(self.run.output_dir, "run.output_dir")

    @property
    def folder(self) -> Path:
        """The run's folder: output_dir/name."""
        return self.outputs / self.name

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of each reward, by the name it is logged under."""
        return {entry.name.rpartition(":")[2]: entry.weight for entry in self.rewards}

    @property
    def forced_answer(self) -> int:
        """Tokens for the answer after a close that only an evaluation forces."""
        return self.rloo.answer_budget or FORCED_ANSWER

    def check(self) -> None:
        """Check across sections, which an assignment does not; raises ConfigError on contradictions."""
        try:
            type(self).model_validate(self.model_dump(), context=self._source)
        except ValidationError as error:
            raise ConfigError(explain_errors(error, RunConfig)) from None

    def check_prompts(self, prompts: int | None = None) -> None:
        """Refuse, with ConfigError, `prompts` that do not fill one rollout; None (not read yet): the most possible."""
        if prompts is None:
            if self.data.num_prompts is None:
                return
            size = 0 if self.data.separate_test else self.data.test_size
            prompts = self.data.num_prompts - (int(size) if size >= 1 else size > 0)
        if problem := find_prompt_problem(prompts, dict(self.rloo)):
            raise ConfigError(problem)

    def to_yaml(self) -> str:
        """The resolved run with every key; `load_config` reads it back to an equal object. Raises as `check`."""
        self.check()
        return dump_yaml(self.model_dump(mode="json"))

    def with_absolute_files(self) -> "RunConfig":
        """A copy for the run's folder: data, rewards and tools found only next to the config file are absolute."""
        copy = self.model_copy(deep=True)

        def absolute(name: str | None, key: str) -> str | None:
            file, colon, function = (name or "").partition(":")
            file += ".py" if colon and not file.endswith(".py") else ""
            near = (self.source or Path()).parent / file
            is_near = file and os.path.exists(near) and not any(map(os.path.exists, places_of(file, key)))
            return f"{near.absolute()}{colon}{function}" if is_near else name

        files: list[tuple[Any, str]] = [(copy.data, "source"), (copy.data, "test_source"), (copy.sft, "source")]
        files += [(copy.reward_model, "source")] if copy.reward_model else []
        files += [(one, "source") for one in copy.data.sources or ()] + [(one, "name") for one in copy.rewards]
        for owner, key in [*files, (copy.rloo, "environment")]:
            setattr(owner, key, absolute(getattr(owner, key), key))
        copy.rloo.tools = [str(absolute(one, "rloo.tools")) for one in copy.rloo.tools]
        for params in [one.params for one in copy.rewards] + ([copy.eval.judge.params] if copy.eval.judge else []):
            if isinstance(params.get("template"), str):
                params["template"] = absolute(params["template"], "template")
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
        problems = self._find_length_problems()
        if self.rloo.missing_eos_penalty is not None and any(one.name == "missing_eos_penalty" for one in self.rewards):
            problems.append(
                "rloo.missing_eos_penalty and the reward missing_eos_penalty are both set, so a truncated completion "
                "would be punished twice; remove one of them"
            )
        if not self.rewards and self.rloo.environment is None:
            problems.append("rewards is empty; a run needs at least one, for example - {name: answer_reward}")
        elif self.rewards and all(reward.weight == 0 for reward in self.rewards):
            problems.append(
                "every reward has weight 0, so nothing can be learned; give one a weight: rewards.0.weight=1"
            )
        params = {one.name: one.params for one in self.rewards}
        if (own := params.get("relative_length_penalty")) is not None and own != params.get("answer_reward"):
            problems.append(
                "rewards: relative_length_penalty takes the reward answer_reward with equal params "
                f"({own or 'none'}) next to it, whose right answers it compares; set them alike"
            )
        problems += self._find_source_problems()
        problems += find_option_problems(self.to_arguments())
        problems += self.find_vllm_problems(self.rollout.engine)
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
            raise ValueError("\n".join(dict.fromkeys(problems)))
        return self

    def _find_source_problems(self) -> list[str]:
        """Prompts that the embedded model cannot read: it knows the characters and problems of one family."""
        kind, family = split_model_name(self.model.name)
        if not self.model.is_embedded or kind == "untaught":
            return []
        known = f"{EMBEDDED_PREFIX}{family}"
        said = "data.sources has" if self.data.sources else "data.source is"
        given = [("data.source", said, name) for name in self.data.all_sources]
        given += [("sft.source", "sft.source is", self.sft.source)] if self.sft.source else []
        problems = []
        for key, said, name in given:
            task = name.removeprefix(EMBEDDED_PREFIX)
            is_own = name.lower().endswith(FILE_KINDS) or name.startswith((".", "/", "~"))  # may have such problems
            if task != name and (problem := find_family_problem(task)):
                problems.append(f"{key} is {name}, but {problem}")
            elif name not in (known, f"{GYM_PREFIX}{family}") and not is_own:
                builds = f" ({EMBEDDED_PREFIX}thinking@{task})" if task != name else ""
                problems.append(
                    f"model.name is {self.model.name}, which knows only {family}, but {said} {name}; set {key}={known}"
                    f", a file or folder (./name) with such problems, or set another model.name{builds}"
                )
        return problems

    def _find_length_problems(self) -> list[str]:
        prompt, limit = self.data.max_prompt_length, self.model.max_seq_length
        problems = []
        for section in (self.rloo, self.eval):
            key, completion = f"{section.prefix}max_completion_length", section.max_completion_length
            if completion is not None and prompt + completion > limit:
                room = f"{key}={limit - prompt} or " if limit > prompt else ""
                problems.append(
                    f"data.max_prompt_length ({prompt}) + {key} ({completion}) = {prompt + completion} tokens, more "
                    f"than model.max_seq_length ({limit}); set {room}model.max_seq_length={prompt + completion}"
                )
        if budgets := self.eval.thinking_budgets:
            forced = CLOSE_TOKENS.get(self.rloo.thinking_close, 1) + self.forced_answer
            if (needed := prompt + max(budgets) + forced) > limit:
                problems.append(
                    f"data.max_prompt_length ({prompt}) + the largest of eval.thinking_budgets ({max(budgets)}) + "
                    f"{forced} to close it and answer = {needed} tokens, more than model.max_seq_length ({limit}); set "
                    f"model.max_seq_length={needed} or a lower budget"
                )
        return problems

    def find_vllm_problems(self, engine: str) -> list[str]:
        """What vLLM cannot sample if `engine` is "vllm" or "server"; checked before any weights are loaded."""
        if engine not in ("vllm", "server"):
            return []
        temperatures = {"rloo.temperature": self.rloo.temperature, "eval.temperature": self.eval.temperature}
        problems = find_temperature_problems(engine, temperatures)
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
        if engine == "server":
            return problems
        if count_processes() > 1:
            problems.append(
                f"there are {count_processes()} processes, but vLLM in the trainer's process (rollout.engine=vllm) is "
                "for one; set rollout.engine=server, or start one process"
            )
        if self.rollout.server_url is not None:
            problems.append(
                f"rollout.server_url is {self.rollout.server_url}, but vLLM would sample in the trainer's process; set "
                "rollout.engine=server or rollout.server_url=null"
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
    messages = translate_file(values)
    for section, changes in sections.items():
        merge(values, section, changes)
    changed = {apply_override(values, override, RunConfig): override for override in overrides}
    for message in messages + translate_file(values):
        warnings.warn(f"{path}: {message}", FutureWarning, stacklevel=2)
    values["run"] = {} if values.get("run") is None else values["run"]
    if isinstance(values["run"], dict) and values["run"].get("name") is None:
        values["run"]["name"] = path.stem
    try:
        config = RunConfig.model_validate(values, context=path)
    except ValidationError as error:
        raise ConfigError(explain_errors(error, RunConfig, file=path, lines=lines, changed=changed)) from None
    for key in ("adapter",) if config.model.is_embedded else ("adapter", "name"):
        if (folder := getattr(config.model, key)) and not os.path.isdir(os.path.expanduser(folder)):
            found = next(filter(os.path.isdir, places_of(folder, f"model.{key}", path.parent)), folder)
            setattr(config.model, key, str(found))
    prepare_standby(config.rollout.engine, config.model.backend)
    return config


# ------------------------------------------------------------------------------------------------ derived defaults


def fill_defaults(values: Any) -> Any:
    """A run's values with the missing keys that follow others filled in, before they are checked: lengths, a thinking
    budget, the batch, the learning rate.

    A section given as an object has all its keys, so nothing is filled in. If a value is invalid, the keys that follow
    it keep their own defaults.
    """
    needed = ("model", "data", "rloo")
    if not isinstance(values, dict) or not all(isinstance(values.get(name), dict) for name in needed):
        return values
    values = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in values.items()}
    model, data, rloo = (values[name] for name in needed)
    if "lora" in model and model["lora"] is None:
        rloo.setdefault("learning_rate", FULL_LEARNING_RATE)
        if isinstance(values.setdefault("sft", {}), dict):
            values["sft"].setdefault("learning_rate", FULL_SFT_RATE)
    with suppress(ValueError, TypeError, OverflowError):  # an invalid number, which the key's own check refuses
        rloo.setdefault("per_device_train_batch_size", usual_batch(_number(rloo, "num_generations")))
    with suppress(ValueError, TypeError, OverflowError):
        _fill_lengths(model, data, rloo, values["eval"] if isinstance(values.get("eval"), dict) else {})
    return values


def _number(keys: Keys, name: str) -> int | None:
    """A whole number of at least 1, or None if not set; raises ValueError, TypeError or OverflowError otherwise."""
    value = keys.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or int(value) != float(value) or int(value) < 1:
        raise ValueError(name)
    return int(value)


def _fill_lengths(model: Keys, data: Keys, rloo: Keys, evaluated: Keys) -> None:
    """Prompt and completion within `model.max_seq_length`, and the thinking within the completion."""
    prompt, completion = _number(data, "max_prompt_length"), _number(rloo, "max_completion_length")
    thinking, answer = _number(rloo, "thinking_budget"), _number(rloo, "answer_budget")
    closing = CLOSE_TOKENS.get(str(rloo.get("thinking_close")), CLOSE_TOKENS["tag"])
    least = (thinking + closing if thinking else 0) + (answer or 1)  # of a completion, for its budgets
    longest = max(int(budget) for budget in evaluated.get("thinking_budgets") or [0])
    if longest:
        longest += closing + (answer or FORCED_ANSWER)
    needed = max(completion or least, longest, _number(evaluated, "max_completion_length") or 0)

    is_embedded, thinks = str(model.get("name")).startswith(EMBEDDED_PREFIX), thinks_by_keys(model)
    whole = _number(model, "max_seq_length")
    if whole is None:
        usual = THINKING_LENGTH if thinks else ModelSection.model_fields["max_seq_length"].default
        usual = EMBEDDED_LENGTH if is_embedded else usual
        share = usual // PROMPT_SHARE
        whole = max(usual, (prompt or share) + (needed if completion else max(needed, usual - share)))
        model.setdefault("max_seq_length", whole)
    if prompt is None:
        prompt = max(min(whole // PROMPT_SHARE, whole - needed), 1)
        data.setdefault("max_prompt_length", prompt)
    if completion is None:
        completion = max(whole - prompt, 1)
        rloo.setdefault("max_completion_length", completion)
    budget = completion - (answer or min(completion // ANSWER_SHARE, ANSWER)) - closing
    if thinks and not is_embedded and completion >= LEAST_TO_THINK and budget > 0:
        rloo.setdefault("thinking_budget", budget)


# ------------------------------------------------------------------------------------------------ resuming

COMPARED_ON_RESUME = ("model", "data", "rewards", "rloo", "rollout")
ON_RESUME: dict[str, str | None] = {  # how a key may change, if it may
    f"{section.prefix}{name}": "free" if section is VllmSection else declared(field, "resume")
    for section in (RLOOSection, RolloutSection, VllmSection)
    for name, field in section.model_fields.items()
}


def changed_keys(saved: Keys, now: Keys) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with the saved and the new value.

    >>> changed_keys({"rewards": [{"weight": 1.0}]}, {"rewards": [{"weight": 2.0}, {"name": "c"}]})
    {'rewards.0.weight': (1.0, 2.0), 'rewards.1.name': (None, 'c')}
    """
    left, right = _flatten(saved), _flatten(now)
    return {key: pair for key in left | right if (pair := (left.get(key), right.get(key)))[0] != pair[1]}


def refuse_changes(trained: str, resolved: str, folder: Path, by_content: Collection[str] = ()) -> None:
    """Raise ConfigError, listing old and new values, if resuming the run in `folder` would train differently.

    `run.*` except the seed and `eval.*` may differ, and so may the keys whose declaration says so. In the sections
    `by_content`, whose files are compared later, a file may have moved.
    """
    saved, now = read_yaml(trained, f"the configuration of {folder}")[0], read_yaml(resolved)[0]
    translate_file(saved)
    with suppress(ValidationError):  # else compared as they are; with the defaults of keys newer than the saved run
        saved, now = (RunConfig.model_validate(values).model_dump(mode="json") for values in (saved, now))
    lines = []
    for key, (old, new) in changed_keys(saved, now).items():
        section = key.partition(".")[0]
        if section not in COMPARED_ON_RESUME and key != "run.seed":  # the seed orders the prompts
            continue
        rule = ON_RESUME.get(key)
        if rule == "free" or (rule == "may grow" and (None in (old, new) or new > old)):
            continue
        if section in by_content and ".params" not in key and _file_name(old) == _file_name(new) is not None:
            continue
        lines.append(f"  {key}: {old!r} then, {new!r} now")
    if lines:
        raise ConfigError(
            f"the run in {folder} cannot be resumed with a different configuration. These keys differ:\n"
            + "\n".join(lines)
            + "\nrestore them (max_steps may grow, other run.* may change), or start over: --overwrite or run.name=..."
        )


def _file_name(value: Any) -> str | None:
    """The last part of a path; a module may have its file's ending."""
    return Path(value).name.replace(".py:", ":") if isinstance(value, str) else None


def _flatten(value: Any, prefix: str = "") -> Keys:
    if isinstance(value, dict):
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        pairs = enumerate(value)
    else:
        return {prefix: value}
    flat: Keys = {}
    for key, item in pairs:
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat
