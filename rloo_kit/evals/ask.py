"""Asks a trained model a question, rendered like the run's training prompts and sampled by the run's engine."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import Message, render_prompt, thinks
from rloo_kit.errors import ConfigError, QuestionTooLongError
from rloo_kit.evals.printed import BASE, Printed
from rloo_kit.models.policy import Policy, find_vllm
from rloo_kit.rollout.completions import Completion, generate_completions
from rloo_kit.rollout.text_stream import TextStream
from rloo_kit.rollout.thinking_budget import close_ids_for
from rloo_kit.system.console import picture_controls, plain_prompt
from rloo_kit.think_tags import opens_thinking, split_thinking

OnText = Callable[[str, str], None]
NO_BASE = (
    "this policy has no separate base (every parameter was trained, or the adapter is merged): load the base with "
    "base = kit.load_policy(...) and its model.name, and pass base=base"
)


@dataclass(frozen=True)
class Answer:
    """A model's answer.

    Attributes:
        question: the last message. thinking, answer: texts, without thinking tags and special tokens.
        tokens: of the completion. thinking_tokens: those before `</think>`, or all if it never closed; 0 without any.
        ended: whether the model ended it; False if it reached the limit.
        closed: whether it contains `</think>`. forced: whether the thinking budget put it there.
        seconds: from the question to the last token.
        base: the base model's answer, if it was asked too.
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
        parts = [self.thinking and f"thinking:\n{self.thinking}\n\nanswer:", self.answer, f"({self.summary})"]
        own = picture_controls("\n".join(filter(None, parts)))
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
    stream: bool | OnText = True,
) -> Answer:
    """Ask a policy one question: `kit.ask(run, policy, "58+67=")`, with both of `kit.load_trained("outputs/NAME")`.

    Args:
        run: reads `model`, `data.system_prompt`, `rollout`, `eval` and `rloo`'s limits.
        policy: from `load_trained` or `load_policy`.
        question: a text; messages `{"role", "content"}`, the last of which is the question; or a row of `load_data`.
        base: ask the base model first: True for this policy without its adapter, or another policy.
        budget: tokens after which open thinking is closed; None for no budget. The answer gets the rest of
            `max_tokens`, and at least `eval.answer_budget` unless `max_tokens` is given.
        temperature: None: `eval.temperature`; 0 is greedy.
        max_tokens: of the completion; None: the limit of the run's evaluation.
        seed: of the sampling. system: overrides `data.system_prompt`; "" for none.
        stream: True prints while sampling; a function is called with "thinking" or "answer" ("base thinking", "base
            answer") and a piece of text; False does neither.

    Raises:
        ConfigError: a budget for a model that does not think, or one that leaves nothing of `max_tokens`; no base.
        QuestionTooLongError: the question leaves too little of `model.max_seq_length`.
        DataError: the question cannot be rendered.
    """
    if budget is not None and not thinks(policy.family, run.model.enable_thinking):
        raise ConfigError(f"this model does not think (family {policy.family}): drop --budget (budget={budget})")
    plan = _Plan(run, budget, run.eval.temperature if temperature is None else temperature, max_tokens, seed, system)
    first = None
    if base is not False:
        first = plan.answer(policy if base is True else base, question, stream, BASE, without_adapter=base is True)
    return plan.answer(policy, question, stream, "trained" if first else "", first)


def count_room(run: RunConfig, policy: Policy) -> int:
    """Maximum tokens of a prompt and its completion together."""
    vllm = find_vllm(policy.model) if run.rollout.engine in ("auto", "vllm") else None
    others = [getattr(policy.model.config, "max_position_embeddings", None), vllm and vllm.max_tokens]
    return min(limit for limit in [run.model.max_seq_length, *others] if limit)


@dataclass(frozen=True)
class _Plan:
    """The settings of one `ask` call."""

    run: RunConfig
    budget: int | None
    temperature: float
    max_tokens: int | None
    seed: int
    system: str | None

    def answer(
        self,
        policy: Policy,
        question: str | list[Message] | dict[str, Any],
        stream: bool | OnText,
        title: str,
        base: Answer | None = None,
        without_adapter: bool = False,
    ) -> Answer:
        """Ask one model; `title` names it if two are asked."""
        run = self.run
        system = run.data.system_prompt if self.system is None else self.system or None
        if isinstance(question, dict):  # rendered already
            prompt, asked = question["prompt"], plain_prompt(question["prompt"])
        else:
            prompt = render_prompt(policy.tokenizer, question, policy.family, run.model.enable_thinking, system)
            asked = question if isinstance(question, str) else str(question[-1]["content"])
        limits = self._limits(policy, len(policy.tokenizer(prompt)["input_ids"]))
        opened = opens_thinking(prompt)
        with _shown(stream, title) as on_text, _base_of(policy) if without_adapter else nullcontext():
            started = time.monotonic()
            found = self._sample(policy, prompt, limits, opened, on_text)
            given = _read(policy, found, opened, asked, time.monotonic() - started, base)
            if isinstance(on_text, Printed):
                on_text.close(given.summary)
        return given

    def _sample(
        self, policy: Policy, prompt: str, limits: dict[str, Any], opened: bool, on_text: OnText | None
    ) -> Completion:
        """Sample a completion and stream its text to `on_text`."""
        text = None if on_text is None else TextStream(policy.tokenizer, policy.tags, opened, on_text)
        (found,) = generate_completions(
            policy,
            [prompt],
            temperature=self.temperature,
            seed=self.seed,
            engine=self.run.rollout,
            on_tokens=None if text is None else lambda _, ids: text.feed(ids),
            **limits,
        )
        if text is not None:
            text.feed(found.ids)
            text.close()
        return found

    def _limits(self, policy: Policy, prompt_tokens: int) -> dict[str, Any]:
        """The length limits for `generate_completions`; refuses a prompt that leaves no room for them."""
        run = self.run
        length = self.max_tokens or run.eval.max_completion_length or run.rloo.max_completion_length
        limits: dict[str, Any] = {"max_completion_length": length}
        needed = length
        if self.budget is not None:
            close = run.rloo.thinking_close
            left = length - self.budget - len(close_ids_for(policy.tokenizer, policy.tags, close))
            if self.max_tokens and left < 1:
                raise ConfigError(
                    f"a thinking budget of {self.budget} leaves no token of {length} for the answer: raise "
                    f"--max-tokens (max_tokens) above {length - left} or lower --budget (budget)"
                )
            answer = left if self.max_tokens else max(left, run.eval.answer_budget)
            limits |= {"thinking_budget": self.budget, "answer_budget": answer, "thinking_close": close}
            needed = length - left + answer
        room = count_room(run, policy)
        if prompt_tokens + needed > room:
            raise QuestionTooLongError(
                f"the question has {prompt_tokens} tokens with its template, and the completion may take {needed}, but "
                f"the model has room for {room} in all: shorten it, lower --max-tokens (max_tokens) or --budget, or "
                f"raise model.max_seq_length (now {run.model.max_seq_length})"
            )
        return limits


def _read(
    policy: Policy, found: Completion, opened: bool, question: str, seconds: float, base: Answer | None
) -> Answer:
    """A completion as an answer; `opened`: whether the prompt opened the thinking."""
    thinking, answer = split_thinking(found.ids, policy.tokenizer, policy.tags, opened)
    is_open = opened or policy.tags.start_id in found.ids[:1]
    unclosed = len(found.ids) - found.ended if is_open else 0
    return Answer(
        question=question,
        thinking=thinking,
        answer=answer,
        tokens=len(found.ids),
        thinking_tokens=unclosed if found.thinking_tokens is None else found.thinking_tokens,
        ended=found.ended,
        closed=found.closed,
        forced=found.forced,
        seconds=seconds,
        base=base,
    )


@contextmanager
def _shown(stream: bool | OnText, title: str) -> Iterator[OnText | None]:
    """The receiver of the pieces of text. An unfinished line is ended on exit, even on Ctrl-C."""
    if stream is False:
        yield None
        return
    if stream is not True:
        name = f"{title} " if title == BASE else ""
        yield lambda part, text: stream(name + part, text)
        return
    printed = Printed(title)
    try:
        yield printed
    finally:
        printed.end_line()


def _base_of(policy: Policy) -> AbstractContextManager[Any]:
    """A context in which the policy's adapter is disabled."""
    if not hasattr(policy.model, "peft_config"):
        raise ConfigError(NO_BASE)
    return policy.model.disable_adapter()
