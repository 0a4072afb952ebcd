"""Asks a trained model a question, rendered like the run's training prompts and sampled by the run's engine."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rloo_kit.config.model_names import RECORD
from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import Message, render_prompt, thinks
from rloo_kit.data.tools import tool_schemas
from rloo_kit.errors import ConfigError, QuestionTooLongError, RlooKitError
from rloo_kit.evals.evaluate import last_turn, open_tools
from rloo_kit.models.policy import Policy, find_vllm, load_base, load_trained
from rloo_kit.results.samples import describe_call, list_steps
from rloo_kit.rollout.completions import generate_completions
from rloo_kit.rollout.episodes import Episodes, ToolUse
from rloo_kit.rollout.thinking_budget import close_ids_for
from rloo_kit.rollout.types import split_turns
from rloo_kit.runs.find import origin_of
from rloo_kit.system.console import fill_text, picture_controls, plain_prompt
from rloo_kit.think_tags import ThinkTags, count_thinking, opens_thinking, split_thinking

OnText = Callable[[str, str], None]
THINKING, ANSWER = "thinking", "answer"
MOST_HELD = 64  # tokens held back while the text ends in an incomplete character, which has up to four bytes
BASE = "base"  # title of the base model's answer, which comes first
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


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
    stream: bool | OnText = True,
) -> Answer:
    """Ask a policy one question: `kit.ask(run, policy, "58+67=")`, with both of `kit.load_trained("outputs/NAME")`.

    Args:
        run: reads `model`, `data.system_prompt`, `rollout`, `eval`, and `rloo`'s limits and tools, which are called.
        policy: from `load_trained` or `load_policy`.
        question: a text; messages `{"role", "content"}`, the last of which is the question; or a row of `load_data`.
        base: ask the base model first: True for this policy without its adapter, or another policy.
        budget: tokens after which open thinking is closed; None for no budget. The answer gets the rest of
            `max_tokens`, and at least `eval.answer_budget` unless `max_tokens` is given.
        temperature: None: `eval.temperature`; 0 is greedy.
        max_tokens: of the completion; None: the limit of the run's evaluation.
        seed: of the sampling. system: overrides `data.system_prompt`; "" for none.
        stream: True prints while sampling; a function is called with "thinking" or "answer" ("base thinking", "base
            answer") and a piece of text, and with tools with "call", "result" or "reply" and a whole one; False does
            neither.

    Raises:
        ConfigError: a budget for a model that does not think, or one that leaves nothing of `max_tokens`; no base.
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
            rendering = run.model.enable_thinking, system, tool_schemas(run)
            prompt = render_prompt(policy.tokenizer, question, policy.family, *rendering)
            asked = question if isinstance(question, str) else str(question[-1]["content"])
        limits = _find_limits(run, policy, len(policy.tokenizer(prompt)["input_ids"]), budget, max_tokens)
        printed, on_text = Printed(title) if stream is True else None, None
        if callable(stream):
            name = f"{title} " if title == BASE else ""
            on_text = lambda part, text: stream(name + part, text)  # noqa: E731
        try:
            row = question if isinstance(question, dict) else {"question": asked}  # for an environment
            given = _sample(run, policy, prompt, row, printed or on_text, **options, **limits)
            if printed is not None:
                printed.close(given.summary)
        finally:  # also on Ctrl-C
            if printed is not None:
                printed.end_line()
        return replace(given, question=asked, base=base)

    if base is False:
        return answer(policy, "")
    with policy.model.disable_adapter() if base is True else nullcontext():
        first = answer(policy if base is True else base, BASE)
    return answer(policy, "trained", first)


def _sample(
    run: RunConfig, policy: Policy, prompt: str, row: dict[str, Any], on_text: OnText | None, **options: Any
) -> Answer:
    """The answer to a rendered prompt."""
    tags, use, started = policy.tags, open_tools(run, policy), time.monotonic()
    text = None if on_text is None else TextStream(policy.tokenizer, tags, opens_thinking(prompt), on_text)
    tools = use if use is None or text is None else _ShownEpisode(use, text)
    on_tokens = None if text is None else lambda _, ids: text.feed(ids)
    options |= {"on_tokens": on_tokens, "tools": tools, "rows": [row]}
    (found,) = generate_completions(policy, [prompt], engine=run.rollout, **options)
    if text is not None:
        text.feed(found.ids)
        text.close()
    turns, (last, opened) = split_turns(found.ids, found.context), last_turn(found, prompt, policy.tokenizer)
    thinking, answer = split_thinking(last, policy.tokenizer, tags, opened)
    thought, count = found.thinking_tokens, sum(map(len, turns))
    if thought is None:
        thought = count_thinking(turns, tags.end_id) - found.ended if opened or tags.start_id in last[:1] else 0
    return Answer(
        question=prompt,
        thinking=thinking,
        answer=answer,
        tokens=count,
        thinking_tokens=thought,
        ended=found.ended,
        closed=found.closed,
        forced=found.forced,
        seconds=time.monotonic() - started,
        turns=[] if found.episode is None else found.episode.messages,
    )


def _find_limits(
    run: RunConfig, policy: Policy, prompt_tokens: int, budget: int | None, max_tokens: int | None
) -> dict[str, Any]:
    """The length limits for `generate_completions`; refuses a prompt that leaves no room for them."""
    length = max_tokens or run.eval.max_completion_length or run.rloo.max_completion_length
    limits: dict[str, Any] = {"max_completion_length": length}
    needed = length
    if budget is not None:
        close = run.rloo.thinking_close
        left = length - budget - len(close_ids_for(policy.tokenizer, policy.tags, close))
        if max_tokens and left < 1:
            raise ConfigError(
                f"a thinking budget of {budget} leaves no token of {length} for the answer: raise --max-tokens "
                f"(max_tokens) above {length - left} or lower --budget (budget)"
            )
        answer = left if max_tokens else max(left, run.eval.answer_budget)
        limits |= {"thinking_budget": budget, "answer_budget": answer, "thinking_close": close}
        needed = length - left + answer
    room = count_room(run, policy)
    if prompt_tokens + needed > room:
        raise QuestionTooLongError(
            f"the question has {prompt_tokens} tokens with its template, and the completion may take {needed}, but "
            f"the model has room for {room} in all: shorten it, lower --max-tokens (max_tokens) or --budget, or "
            f"raise model.max_seq_length (now {run.model.max_seq_length})"
        )
    return limits


def count_room(run: RunConfig, policy: Policy) -> int:
    """Maximum tokens of a prompt and its completion together."""
    vllm = find_vllm(policy.model) if run.rollout.engine in ("auto", "vllm") else None
    others = [getattr(policy.model.config, "max_position_embeddings", None), vllm and vllm.max_tokens]
    return min(filter(None, [run.model.max_seq_length, *others]))


class TextStream:
    """Calls `on_text(part, text)` as soon as a text is final; `part` is "thinking" or "answer".

    The joined texts of a part equal what `split_thinking` gives for the whole completion, unless the completion closes
    its thinking twice (here the part changes at the first `</think>`) or has `MOST_HELD` tokens in a row that form no
    character.

    Args:
        opened: whether the prompt has opened the thinking.
    """

    def __init__(self, tokenizer: Any, tags: ThinkTags, opened: bool, on_text: OnText) -> None:
        self._tokenizer, self._tags, self.on_text = tokenizer, tags, on_text
        self.call_mark = ""  # with tools: what calls begin with; from there on an answer is held back until `close`
        self.begin_turn(0, opened)

    def begin_turn(self, place: int, opened: bool) -> None:
        """A turn begins at token `place` of the completion."""
        self._start = self._taken = place  # ids of the completion that were taken
        self._part, self._is_closed = THINKING if opened else ANSWER, False
        self._begin_part()

    def feed(self, ids: list[int]) -> None:
        """Take the completion's ids so far."""
        for place in range(self._taken, len(ids)):
            token = ids[place]
            ends, starts = token == self._tags.end_id, token == self._tags.start_id
            if not self._is_closed and (ends or (starts and (place == self._start or self._part == ANSWER))):
                self._is_closed = ends
                self.close()
                self._part = ANSWER if ends else THINKING
                self._begin_part()
            else:
                self._ids.append(token)
                self._decode(is_last=False)
        self._taken = max(self._taken, len(ids))

    def close(self, has_calls: bool = False) -> None:
        """Emit what was held back: bytes that never became a character, and what looked like a call, unless it is."""
        self._decode(is_last=True, has_calls=has_calls)

    def _begin_part(self) -> None:
        self._ids: list[int] = []  # of the part; decoded with context, because a tokenizer drops leading blanks
        self._known = 0  # the first of them, already emitted
        self._shown = False
        self._held = ""  # trailing whitespace, emitted once something follows, and what may be a call

    def _decode(self, is_last: bool, has_calls: bool = False) -> None:
        before, text = (
            str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""
            for ids in (self._ids[: self._known], self._ids)
        )
        is_whole = not text.endswith("\ufffd") or len(self._ids) - self._known >= MOST_HELD
        if not is_last and not is_whole:
            return
        self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
        text = self._held + text[len(before) :]
        text = text if self._shown else text.lstrip()
        rest = (text if is_last and not has_calls else text[: self._find_call(text)]).rstrip()
        self._held = text[len(rest) :]
        if rest:
            self._shown = True
            self.on_text(self._part, rest)

    def _find_call(self, text: str) -> int:
        """Where a call begins, or may begin at the end of the text; its length if nowhere."""
        mark = self.call_mark if self._part == ANSWER else ""
        begun = next((count for count in range(len(mark), 0, -1) if text.endswith(mark[:count])), 0)
        return text.index(mark) if mark and mark in text else len(text) - begun


class _ShownEpisode(Episodes):
    """The episode of one completion: the rest of a turn and its calls are shown when it has ended, then the results."""

    def __init__(self, use: ToolUse, text: TextStream) -> None:
        self._use, self._text, self._ids = use, text, list[int]()
        text.call_mark = "".join(use.parser.form.render_calls(use.parser.form.example[1], "").split()[:1])

    def begin(self, rows: Sequence[dict[str, Any]]) -> "_ShownEpisode":
        """In the place of `ToolUse.begin`."""
        super().__init__(self._use, rows)
        for failure in self.episodes[0].failures:
            self._text.on_text("failed", failure)
        return self

    def ask(self, number: int, turn: list[int], turns: int) -> Any:
        reply = super().ask(number, turn, turns)
        if reply is not None:
            self._ids += turn
            self._text.feed(self._ids)
            calls = self.episodes[0].messages[-1].get("tool_calls") or []
            self._text.close(has_calls=bool(calls))
            for call in calls:
                self._text.on_text("call", describe_call(call))
        return reply

    def read(self, number: int, reply: Any, room: int) -> list[int]:
        known, ids = len(self.episodes[0].messages), super().read(number, reply, room)
        for message in self.episodes[0].messages[known:]:
            self._text.on_text("result" if message["role"] == "tool" else "reply", str(message["content"]))
        self._ids += ids
        self._text.begin_turn(len(self._ids), opens_thinking(self.parser.tokenizer.decode(ids)))
        return ids


class Printed:
    """Prints pieces of text to stdout as they arrive. In a kernel nothing is flushed, because each flush would be a
    separate output.

    Args:
        title: printed first if two models are asked.
    """

    def __init__(self, title: str = "") -> None:
        self._file = sys.stdout
        self._dims = self._file.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._part, self._is_mid_line, self._title = "", False, title
        if title:
            self._write(f"{title}:\n")

    def __call__(self, part: str, text: str) -> None:
        """Print a piece of `part`, "thinking" or "answer", or a whole "call" or "result" on its own line."""
        if part not in (THINKING, ANSWER):
            self.end_line()
            text = f"{part} {text}\n"
        elif part != self._part:
            self.end_line()
            if not self._dims and (part == THINKING or self._part):
                self._write(f"{part}:\n")
        self._part = part
        self._write(picture_controls(text), dim=part != ANSWER)

    def close(self, summary: str) -> None:
        """Print the summary line."""
        self.end_line()
        self._write(f"{summary if self._dims else f'({summary})'}\n", dim=True)
        if self._title == BASE:
            self._write("\n")

    def end_line(self) -> None:
        """Start a new line, unless the current one is empty."""
        if self._is_mid_line:
            self._write("\n")

    def _write(self, text: str, dim: bool = False) -> None:
        self._is_mid_line = not text.endswith("\n")
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        if dim and self._dims:
            line = text.rstrip("\n")
            text = f"{DIM}{line}{PLAIN}{text[len(line) :]}"
        self._file.write(text)
        if "ipykernel" not in sys.modules:
            self._file.flush()


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


COMMANDS = (
    "(/base toggles the base model, /budget N closes thinking after N tokens, /reset forgets earlier turns, /quit or "
    "Ctrl-D ends; Ctrl-C stops an answer)"
)


class Dialogue:
    """A conversation with a model.

    Args:
        options: those of `evals.ask.ask`; the commands change them.
        history: whether earlier turns are in the prompt, with their answers, without their thinking. None: unless the
            model takes single questions only (`TrainedModel.single`).
    """

    def __init__(self, asked: TrainedModel, options: dict[str, Any], history: bool | None) -> None:
        self._asked, self._options = asked, options
        self._history = not asked.single if history is None else history
        self._turns: list[dict[str, str]] = []  # question, answer, question, answer
        if history is None and asked.single:
            print(fill_text(f"(each question is asked alone: {asked.single}; --history keeps earlier turns)"))

    def hold(self) -> None:
        """Read and answer lines until Ctrl-D or /quit; Ctrl-C stops an answer."""
        print(fill_text(COMMANDS))
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() a line editor
        while True:
            try:
                if not self.take(input("> ").strip()):
                    return
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("(stopped; Ctrl-D ends)")
            except RlooKitError as error:
                print(fill_text(f"rloo-kit: {error}"), file=sys.stderr)

    def take(self, line: str) -> bool:
        """Answer a line or run a command; False if it ends the dialogue."""
        command, _, value = line.partition(" ")
        if command in ("/quit", "/exit"):
            return False
        if command == "/reset":
            self._turns.clear()
        elif command == "/base":
            self._options["base"] = not self._options["base"]
            print(f"(the base model is {'asked too' if self._options['base'] else 'no longer asked'})")
        elif command == "/budget":
            if value.strip() and not value.strip().isdecimal():
                raise ConfigError(f"/budget takes a number of tokens, for example /budget 64; got {value.strip()!r}")
            self._options["budget"] = int(value) if value.strip() else None
            print(f"(thinking {f'is closed after {int(value)} tokens' if value.strip() else 'has no budget'})")
        elif line.startswith("/"):
            print(fill_text(COMMANDS))
        elif line:
            self._answer(line)
        return True

    def _answer(self, question: str) -> None:
        asked = {"role": "user", "content": question}
        while True:
            try:
                answer = self._asked.ask([*self._turns, asked] if self._turns else question, **self._options)
                break
            except QuestionTooLongError:
                if not self._turns:
                    raise
                del self._turns[:2]
                print("(the turns exceed the model's context: the oldest is dropped)")
        self._options["seed"] += 1
        if self._history and answer.answer:  # a template takes no empty turn
            self._turns += [asked, {"role": "assistant", "content": answer.answer}]
