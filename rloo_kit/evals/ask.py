"""Asks a trained model a question, rendered like the run's training prompts and sampled by the run's engine."""

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import Message, render_prompt, thinks
from rloo_kit.errors import ConfigError, RlooKitError
from rloo_kit.evals.evaluate import begins_thinking, open_tools
from rloo_kit.images.rows import write_prompt
from rloo_kit.models.backends import find_vllm
from rloo_kit.models.policy import Policy
from rloo_kit.results.samples import join_parts, list_steps, plain
from rloo_kit.rollout.completions import generate_completions
from rloo_kit.rollout.thinking_budget import close_ids_for, make_budget_limits
from rloo_kit.rollout.types import Limits
from rloo_kit.system.console import fill_text, picture_controls, print_text
from rloo_kit.think_tags import split_thinking
from rloo_kit.tools.toolbox import open_toolbox


@dataclass(frozen=True)
class Answer:
    """A model's answer. Texts are without thinking tags and special tokens."""

    question: str  # the last message
    thinking: str  # of the last turn
    answer: str
    tokens: int  # of the completion, without tools' results
    thinking_tokens: int  # before `</think>` of each turn, or all if it never closed; 0 without any
    ended: bool  # by the model; False if it reached the limit
    closed: bool  # it contains `</think>`
    forced: bool  # the thinking budget put it there
    seconds: float  # from the question to the last token
    base: "Answer | None" = None  # the base model's, if it was asked too
    turns: list[Message] = field(default_factory=list)  # all messages, with calls and results, in a run with tools

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
    images: Sequence[Any] = (),
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
        images: of the question, as `read_picture` takes them: files, bytes or PIL images. They go before the first
            message of the user, or where its text has `<image>`.

    Raises:
        ConfigError: a budget that the model or `max_tokens` has no room for; a question that leaves too little of
            `model.max_seq_length`; no base; an environment that needs a row; images for a model that reads none.
        DataError: the question cannot be rendered, or an image cannot be read.
    """
    if budget is not None and not thinks(policy.family, run.model.enable_thinking):
        raise ConfigError(f"this model does not think (family {policy.family}): drop --budget (budget={budget})")
    if base is True and not hasattr(policy.model, "peft_config"):
        raise ConfigError(
            "this policy has no separate base (every parameter was trained, or the adapter is merged): load the base "
            "with base = kit.load_policy(...) and its model.name, and pass base=base"
        )
    if images and isinstance(question, dict):
        raise ConfigError("the question is a row of data, whose prompt has its images: drop images, or ask a text")
    options = {"temperature": run.eval.temperature if temperature is None else temperature, "seed": seed}

    def answer(policy: Policy) -> Answer:
        row = question if isinstance(question, dict) else _render(run, policy, question, system, images)
        limits = _find_limits(run, policy, len(policy.tokenizer(row["prompt"])["input_ids"]), budget, max_tokens)
        asked = plain(row["prompt"]) if isinstance(question, dict) else row["question"]
        return replace(_sample(run, policy, row, limits, options), question=asked)

    if base is False:
        return answer(policy)
    with policy.model.disable_adapter() if base is True else nullcontext():
        first = answer(policy if base is True else base)
    return replace(answer(policy), base=first)


def _sample(run: RunConfig, policy: Policy, row: dict[str, Any], limits: Limits, options: dict[str, Any]) -> Answer:
    """The answer to a row's rendered prompt."""
    started = time.monotonic()
    tools = open_tools(run, policy)
    (completion,) = generate_completions(policy, [row], limits, engine=run.rollout, tools=tools, **options)
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


def _render(
    run: RunConfig, policy: Policy, question: str | list[Message], system: str | None, images: Sequence[Any]
) -> dict[str, Any]:
    """A question as a row of data; refused if the run's environment cannot be reset with it."""
    given: Any = question
    if images or any(isinstance(message, dict) and isinstance(message.get("content"), list) for message in question):
        if not hasattr(policy.tokenizer, "vision"):
            raise ConfigError(
                f"{run.model.name} is loaded without a vision tower, so it reads no --image (images): ask a run of a "
                "vision model, such as Qwen3-VL, or set model.vision=true (Qwen3.5, Gemma 3)"
            )
        given = write_prompt(question, list(images), Path())
    toolbox = open_toolbox(run)
    system = run.data.system_prompt if system is None else system or None
    rendering = run.model.enable_thinking, system, toolbox.schemas if toolbox else None
    prompt = render_prompt(policy.tokenizer, given, policy.family, *rendering)
    asked = question if isinstance(question, str) else plain(join_parts(given[-1]["content"]))
    for start in toolbox.reset([0], [{"question": asked}]) if toolbox else ():
        if start.kind == "failed":
            raise ConfigError(f"{start.detail}. A question has no row: give the arguments of reset defaults")
    return {"prompt": prompt, "question": asked}


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
        raise ConfigError(
            f"the question has {prompt_tokens} tokens with its template, and the completion may take {needed}, but "
            f"the model has room for {room} in all: shorten it, lower --max-tokens (max_tokens) or --budget, or "
            f"raise model.max_seq_length (now {run.model.max_seq_length})"
        )
    return limits


def ask_in_turn(run: RunConfig, policy: Policy, options: dict[str, Any]) -> None:
    """Read and answer lines until Ctrl-D, each alone, with the `options` of `ask`; Ctrl-C stops an answer."""
    print("(each question is asked alone; Ctrl-D ends, Ctrl-C stops an answer)")
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() a line editor
    while True:
        try:
            if question := input("> ").strip():
                print_text(str(ask(run, policy, question, **options)))
                options["seed"] += 1
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("(stopped; Ctrl-D ends)")
        except RlooKitError as error:
            print(fill_text(f"rloo-kit: {error}"), file=sys.stderr)
