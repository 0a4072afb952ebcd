"""Asks a trained model a question, rendered like the run's training prompts and sampled by the run's engine."""

import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rloo_kit.config.model_names import RECORD
from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import Message, render_prompt, thinks
from rloo_kit.errors import ConfigError, QuestionTooLongError, RlooKitError
from rloo_kit.evals.evaluate import begins_thinking, open_tools
from rloo_kit.models.backends import find_vllm
from rloo_kit.models.policy import Policy, load_base, load_trained
from rloo_kit.results.samples import list_steps
from rloo_kit.rollout.completions import generate_completions
from rloo_kit.rollout.thinking_budget import close_ids_for, make_budget_limits
from rloo_kit.rollout.types import Limits
from rloo_kit.runs.find import origin_of
from rloo_kit.system.console import fill_text, picture_controls, plain_prompt, print_text
from rloo_kit.think_tags import split_thinking
from rloo_kit.tools.toolbox import open_toolbox


@dataclass(frozen=True)
class Answer:
    """A model's answer.

    Attributes:
        question: the last message. thinking, answer: texts, without thinking tags and special tokens; of the last turn.
        tokens: of the completion, without tools' results. thinking_tokens: those before `</think>` of each turn, or all
            if it never closed; 0 without any.
        ended: whether the model ended it; False if it reached the limit.
        closed: whether it contains `</think>`. forced: whether the thinking budget put it there.
        seconds: from the question to the last token.
        base: the base model's answer, if it was asked too.
        turns: messages of all turns, with calls and their results, in a run with tools.
    """

    question: str
    thinking: str
    answer: str
    tokens: int
    thinking_tokens: int
    ended: bool
    closed: bool
    forced: bool
    seconds: float
    base: "Answer | None" = None
    turns: list[Message] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """One line: tokens, how it ended, seconds."""
        thinking = f", {self.thinking_tokens} of thinking" if self.thinking_tokens else ""
        close = ["closed by the budget"] if self.forced else []
        close += ["not closed"] if self.thinking_tokens and not self.closed else []
        end = "ended" if self.ended else "truncated"
        speed = f"{self.tokens / max(self.seconds, 1e-9):.0f} tokens/s"
        return "; ".join([f"{self.tokens} tokens{thinking}", *close, end, f"{self.seconds:.1f} s, {speed}"])

    def __str__(self) -> str:
        steps = [text if kind == "text" else f"{kind} {text}" for kind, text in list_steps(self.turns)]
        parts = [self.thinking and f"thinking:\n{self.thinking}\n\nanswer:", self.answer, f"({self.summary})"]
        own = picture_controls("\n".join(filter(None, [*steps, *parts])))
        return own if self.base is None else f"base:\n{self.base}\n\ntrained:\n{own}"


def ask(
    run: RunConfig,
    policy: Policy,
    question: str | list[Message] | dict[str, Any],
    *,
    base: bool | Policy = False,
    budget: int | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    system: str | None = None,
    stream: bool = True,
) -> Answer:
    """Ask a policy one question: `kit.ask(run, policy, "58+67=")`, with both of `kit.load_trained("outputs/NAME")`.

    Args:
        run: reads `model`, `data.system_prompt`, `rollout`, `eval`, and `rloo`'s limits and tools, which are called.
        policy: from `load_trained` or `load_policy`.
        question: a text; messages `{"role", "content"}`, the last of which is the question; or a row of `load_data`.
        base: ask the base model first: True for this policy without its adapter, or another policy.
        budget: tokens after which open thinking is closed; None for no budget. The answer gets the rest of
            `max_tokens`, and at least `run.forced_answer` unless `max_tokens` is given.
        temperature: None: `eval.temperature`; 0 is greedy.
        max_tokens: of the completion; None: the limit of the run's evaluation.
        seed: of the sampling. system: overrides `data.system_prompt`; "" for none.
        stream: print, to a terminal the whole text while it is sampled, elsewhere the answer once it is done.

    Raises:
        ConfigError: a budget that the model or `max_tokens` has no room for; no base; an environment that needs a row.
        QuestionTooLongError: the question leaves too little of `model.max_seq_length`.
        DataError: the question cannot be rendered.
    """
    if budget is not None and not thinks(policy.family, run.model.enable_thinking):
        raise ConfigError(f"this model does not think (family {policy.family}): drop --budget (budget={budget})")
    if base is True and not hasattr(policy.model, "peft_config"):
        raise ConfigError(
            "this policy has no separate base (every parameter was trained, or the adapter is merged): load the base "
            "with base = kit.load_policy(...) and its model.name, and pass base=base"
        )
    options = {"temperature": run.eval.temperature if temperature is None else temperature, "seed": seed}
    system = run.data.system_prompt if system is None else system or None

    def answer(policy: Policy, title: str, base: Answer | None = None) -> Answer:
        if isinstance(question, dict):  # rendered already
            prompt, asked = question["prompt"], plain_prompt(question["prompt"])
        else:
            toolbox = open_toolbox(run)
            rendering = run.model.enable_thinking, system, toolbox.schemas if toolbox else None
            prompt = render_prompt(policy.tokenizer, question, policy.family, *rendering)
            asked = question if isinstance(question, str) else str(question[-1]["content"])
            for start in toolbox.reset([0], [{"question": asked}]) if toolbox else ():
                if start.kind == "failed":
                    raise ConfigError(f"{start.detail}. A question has no row: give the arguments of reset defaults")
        limits = _find_limits(run, policy, len(policy.tokenizer(prompt)["input_ids"]), budget, max_tokens)
        row = question if isinstance(question, dict) else {"prompt": prompt, "question": asked}  # for an environment
        live = LiveText(policy.tokenizer) if stream and sys.stdout.isatty() else None
        if stream and title:
            print(f"{title}:")
        try:
            given = replace(_sample(run, policy, row, limits, live, **options), question=asked)
        finally:  # also on Ctrl-C
            if live is not None:
                print()
        if stream:
            print_text(str(given) if live is None else f"({given.summary})", "\n\n" if title == "base" else "\n")
        return replace(given, base=base)

    if base is False:
        return answer(policy, "")
    with policy.model.disable_adapter() if base is True else nullcontext():
        first = answer(policy if base is True else base, "base")
    return answer(policy, "trained", first)


class LiveText:
    """Prints a completion while it is sampled, tags and calls included; half a character waits for its rest."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._start = self._shown = 0  # ids from `_start` on are the context of those from `_shown` on

    def feed(self, ids: list[int], is_last: bool = False) -> None:
        """Print what is new of the completion's ids so far."""
        before, text = (
            str(self._tokenizer.decode(part, skip_special_tokens=True)) if part else ""
            for part in (ids[self._start : self._shown], ids[self._start :])
        )
        if is_last or not text.endswith("\ufffd"):
            self._start, self._shown = self._shown, len(ids)
            print_text(picture_controls(text[len(before) :]), end="")


def _sample(
    run: RunConfig, policy: Policy, row: dict[str, Any], limits: Limits, live: LiveText | None, **options: Any
) -> Answer:
    """The answer to a row's rendered prompt."""
    started = time.monotonic()
    on_tokens = None if live is None else lambda _, ids: live.feed(ids)
    tools = open_tools(run, policy)
    (completion,) = generate_completions(
        policy, [row], limits, engine=run.rollout, tools=tools, on_tokens=on_tokens, **options
    )
    if live is not None:
        live.feed(completion.ids, is_last=True)
    for failure in () if completion.episode is None else completion.episode.failures:
        print(fill_text(f"failed: {picture_controls(failure)}"), file=sys.stderr)
    last, opened = completion.turns[-1], begins_thinking(completion, policy.tokenizer)
    thinking, answer = split_thinking(last, policy.tokenizer, policy.tags, opened)
    thought = completion.thinking_tokens
    if not completion.closed:  # the end token is no thought, and a model that never began has none
        thought = thought - completion.ended if opened or policy.tags.start_id in last[:1] else 0
    return Answer(
        question=row["prompt"],
        thinking=thinking,
        answer=answer,
        tokens=completion.tokens,
        thinking_tokens=thought,
        ended=completion.ended,
        closed=completion.closed,
        forced=bool(completion.forced),
        seconds=time.monotonic() - started,
        turns=[] if completion.episode is None else completion.episode.messages,
    )


def _find_limits(
    run: RunConfig, policy: Policy, prompt_tokens: int, budget: int | None, max_tokens: int | None
) -> Limits:
    """The limits of a completion; refuses a prompt that leaves no room for them."""
    length = max_tokens or run.eval.max_completion_length or run.rloo.max_completion_length
    limits, needed = Limits(length), length
    if budget is not None:
        close = run.rloo.thinking_close
        left = length - budget - len(close_ids_for(policy.tokenizer, policy.tags, close))
        if max_tokens and left < 1:
            raise ConfigError(
                f"a thinking budget of {budget} leaves no token of {length} for the answer: raise --max-tokens "
                f"(max_tokens) above {length - left} or lower --budget (budget)"
            )
        answer = left if max_tokens else max(left, run.forced_answer)
        has_turns = run.rloo.has_tools
        limits = make_budget_limits(policy.tokenizer, policy.tags, length, budget, answer, close, has_turns)
        needed = length - left + answer
    vllm = find_vllm(policy.model) if run.rollout.engine in ("auto", "vllm") else None
    others = [getattr(policy.model.config, "max_position_embeddings", None), vllm and vllm.max_tokens]
    room = min(filter(None, [run.model.max_seq_length, *others]))
    if prompt_tokens + needed > room:
        raise QuestionTooLongError(
            f"the question has {prompt_tokens} tokens with its template, and the completion may take {needed}, but "
            f"the model has room for {room} in all: shorten it, lower --max-tokens (max_tokens) or --budget, or "
            f"raise model.max_seq_length (now {run.model.max_seq_length})"
        )
    return limits


class TrainedModel:
    """A run's trained model, or exported weights; raises like `load_trained`. Its base is loaded when it is asked.

    Attributes:
        single: why each question is asked alone by default; "" if earlier turns are kept.
    """

    def __init__(self, source: Path, *overrides: str) -> None:
        self._source, self._overrides = source, overrides
        self.run, self.policy = load_trained(source, *overrides)
        self._base: Policy | None = None
        self.single = ""
        if self.policy.family == "plain":
            self.single = "the model has no chat template"
        elif origin_of(source).model.is_embedded or (Path(self.policy.model.config.name_or_path) / RECORD).is_file():
            self.single = "the embedded model was trained on single questions only"

    def ask(self, question: str | list[Message], *, base: bool = False, **options: Any) -> Answer:
        """`evals.ask.ask` of this model."""
        if base and self._base is None:  # None: the policy without its adapter
            self._base = load_base(self._source, *self._overrides)
        return ask(self.run, self.policy, question, base=base and (self._base or True), **options)


def hold_dialogue(asked: TrainedModel, options: dict[str, Any], history: bool | None) -> None:
    """Read and answer lines until Ctrl-D; Ctrl-C stops an answer.

    Args:
        options: those of `evals.ask.ask`.
        history: whether earlier turns are in the prompt, with their answers, without their thinking. None: unless the
            model takes single questions only (`TrainedModel.single`).
    """
    if history is None and asked.single:
        print(fill_text(f"(each question is asked alone: {asked.single}; --history keeps earlier turns)"))
    keeps = not asked.single if history is None else history
    print("(Ctrl-D ends, Ctrl-C stops an answer)")
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() a line editor
    turns: list[dict[str, str]] = []  # question, answer, question, answer
    while True:
        try:
            if not (question := input("> ").strip()):
                continue
            new = {"role": "user", "content": question}
            try:
                answer = asked.ask([*turns, new] if turns else question, **options)
            except QuestionTooLongError:
                if not turns:
                    raise
                print("(the turns exceed the model's context: the earlier ones are dropped)")
                turns.clear()
                answer = asked.ask(question, **options)
            options["seed"] += 1
            if keeps and answer.answer:  # a template takes no empty turn
                turns += [new, {"role": "assistant", "content": answer.answer}]
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("(stopped; Ctrl-D ends)")
        except RlooKitError as error:
            print(fill_text(f"rloo-kit: {error}"), file=sys.stderr)
