"""Rewards that need a library or a checkpoint: math-verify, reasoning-gym's verifiers, trained reward models.

A verifier can hang on a completion, and math-verify returns 0 outside the main thread, so both run in a `Worker` with a
time limit.
"""

import logging
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from rloo_kit._stack import load_stack
from rloo_kit.data.answers import GYM_REWARD
from rloo_kit.data.gym import GYM_COLUMN, INSTALL, load_library, score
from rloo_kit.errors import RewardError, RlooKitError, WholeBatchError, describe_error, excerpt
from rloo_kit.plan.shapes import digest_weights, find_in_cache
from rloo_kit.rewards._binding import check_int, check_positive
from rloo_kit.rewards.answer import BOX, answers_agree, find_boxed, has_no_answer, parse_number
from rloo_kit.rewards.text import THINK_END_ID, Decode, answer_text, as_ids, as_text, cut_turns, refuse_assumed
from rloo_kit.runs.files import read_object
from rloo_kit.system.isolation import Worker
from rloo_kit.system.processes import say

NEEDS_MATH_VERIFY = "math_answer_reward needs math-verify: pip install 'rloo-kit[math]'"
WARM_UP = ("$\\frac{1}{2}$", "0.5")  # equal: shows that the worker works, and loads its modules
START_TIMEOUT_S = 120.0  # to start the worker and load math-verify, or reasoning-gym

TRAINS = "rloo-kit reward-model trains one and prints its folder"
TEXT_ENDS = "reward_text_ends"  # key of a checkpoint's config: texts without a chat template have an end token
_OPENED = re.compile(r"<think>\s*(</think>\s*)?\Z")  # by the chat template, at the end of a prompt
_FORMULA = re.compile(r"(?<!\\)\$[^$]+\$|\\[(\[]")
# Words, which it would multiply by their letters, so that TTH is HTT; but xyz, abc and inf are what it reads in them.
_WORDS = r"(?!(?:[a-d]+|[b-df-hj-np-tv-z]+|inf(?:inity)?)(?![A-Za-z ]))[A-Za-z]{3}[A-Za-z ]*"
_UNREAD = (  # by math-verify: a number's base, separators of thousands, i after it, degrees, primes, a full stop, words
    (r"(?<=\d)_\{? ?(\d+) ?\}?", r" b_{\1}"),
    (r"(?<=\d)(?:\{,\}|,?\\! ?|\\,)(?=\d{3}(?!\d))", ""),
    (r"(?<=\d)i\b", " i"),
    ("°", r"^\\circ"),
    ("'", r"^{\\prime}"),
    (r"\.(?=\s*(?:\$|\\[)\]]))", ""),
    (rf"(?<=\\boxed\{{){_WORDS}(?=\}})|(?<=\$){_WORDS}(?=\$)|\A{_WORDS}\Z", r"\\text{\g<0>}"),
)


@dataclass
class AnswerReader:
    """A reward that reads answers, without the thinking before them.

    Args:
        think_end_id, thinking, decode: as for `rewards.AnswerReward`.
    """

    __name__: ClassVar[str] = "answer_reader"
    think_end_id: int = THINK_END_ID
    thinking: bool = True
    decode: Decode | None = field(default=None, repr=False, compare=False)

    def _answers(self, completions: Sequence[Any], completion_ids: Sequence[Any], masks: Any) -> list[str]:
        """What follows the thinking of each completion, with `masks` (None without tools) of its last turn; empty if it
        was never closed."""
        if self.thinking:
            refuse_assumed(self.__name__, self.think_end_id, completions, completion_ids)
        options: dict[str, Any] = {"think_end_id": self.think_end_id, "thinking": self.thinking, "decode": self.decode}
        return [
            answer_text(as_text(text, last=mask is not None), cut_turns(as_ids(ids), mask)[-1], **options) or ""
            for text, ids, mask in zip(completions, completion_ids, masks or [None] * len(completions), strict=True)
        ]


@dataclass
class Verifier(AnswerReader):
    """A reward that asks a library in a `Worker`, within two time limits.

    If the library takes longer than `answer_timeout_s`, the answer counts as wrong. If its process dies, or the batch
    has taken `timeout_s`, the sample counts as failed (NaN, which the guard reports).

    Args:
        answer_timeout_s: limit for one answer, in seconds. timeout_s: limit for a batch.

    Raises:
        RewardError: the library is not installed or does not work.
    """

    caught: ClassVar[type[RlooKitError]] = WholeBatchError  # the guard asks again, sample by sample, after any other

    __name__: ClassVar[str] = "verifier"
    answer_timeout_s: float = 5.0
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        check_positive("answer_timeout_s", self.answer_timeout_s)
        check_positive("timeout_s", self.timeout_s)

    def _ask(self, worker: Worker, ends_at: float, function: Callable[..., Any], *arguments: str) -> Any:
        """What the library says of one answer: 0.0 after its limit, NaN if it cannot say."""
        started = time.monotonic()
        if (left_s := ends_at - started) <= 0:
            return math.nan
        try:
            return worker.call(function, *arguments, timeout_s=min(left_s, self.answer_timeout_s))
        except self.caught:
            return 0.0 if time.monotonic() - started >= self.answer_timeout_s else math.nan


@dataclass
class MathAnswerReward(Verifier):
    """1.0 if math-verify finds the answer equal to the `answer` column, else 0.0; None without a reference answer.

    The answer is the last box after the last closing tag, else the number that the last line ends with, else the last
    formula, else the end of the last line; all of it has to be equal. `Verifier` describes arguments and limits.
    """

    __name__: ClassVar[str] = "math_answer_reward"

    @cached_property
    def worker(self) -> Worker:
        """The process that math-verify runs in; started and checked on first use."""
        worker = Worker("math-verify")
        try:
            works = worker.call(verify_answer, *WARM_UP, timeout_s=START_TIMEOUT_S)
        except RewardError as error:
            raise WholeBatchError(f"{NEEDS_MATH_VERIFY} ({error})") from None
        if not works:
            raise WholeBatchError(f"math-verify does not find {WARM_UP[0]} equal to {WARM_UP[1]}; reinstall it")
        return worker

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] = (),
        completion_ids: Sequence[Any] = (),
        answer: Sequence[Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        if answer is None:
            raise ValueError(
                "math_answer_reward needs a column 'answer' next to the prompts (data.answer_column names its source); "
                f"columns found: {', '.join(sorted(columns)) or 'none'}"
            )
        answers = self._answers(completions, completion_ids, columns.get("completion_mask"))
        worker, scores = self.worker, list[float | None]()
        ends_at = time.monotonic() + self.timeout_s
        for given, gold in zip(answers, answer, strict=True):
            final, expected = find_boxed(given) or (given and _ending(given)), str(gold)
            if has_no_answer(gold) or not given:
                scores.append(None if has_no_answer(gold) else 0.0)
            elif answers_agree(given, expected) or answers_agree(final, expected):
                scores.append(1.0)
            else:
                if not worker.running:  # after an answer that took too long: the next one's limit is not for the import
                    worker.call(verify_answer, *WARM_UP, timeout_s=START_TIMEOUT_S)
                verdict = self._ask(worker, ends_at, verify_answer, expected, final)
                scores.append(None if verdict is None else float(verdict))
        return scores


def _ending(text: str) -> str:
    """What the last line of `text` says after `is`, a colon or the like; `text` if that is no number, but a formula is
    marked."""
    mark = r"\b(?<!which )(?:is|are|be|equals)\b:?|\b(?i:therefore|thus|hence|so),?\s|[A-Za-z]:\**\s"
    end = re.split(mark, text.splitlines()[-1])[-1].strip(" *").rstrip(".*")
    return text if _FORMULA.search(text) and parse_number(end) is None else end


def verify_answer(expected: str, given: str) -> bool | None:
    """Whether math-verify finds `given` equal to `expected`; None if it cannot parse `expected`.

    Runs in the worker. math-verify's own time limits are off: they need the main thread and miss hangs in C code.
    """
    from math_verify import verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns that its limits are off
    gold = _parse(expected)
    return bool(verify(gold, _parse(given), float_rounding=12, timeout_seconds=None)) if gold else None


def _parse(text: str) -> list[Any]:
    """What math-verify reads in `text`: the last box, else the last formula, else all of it. In text without markup it
    would take a part of the answer, as the 2 of `(1, 2)`."""
    from math_verify import LatexExtractionConfig, parse

    for pattern, to in _UNREAD:
        text = re.sub(pattern, to, text)
    box = find_boxed(text)
    if box or not _FORMULA.search(text):
        text = f"{BOX}{box or text}}}"
    return parse(text, [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=None)


class TextForm:
    """The text that a reward model reads, as TRL's RewardTrainer writes it: a conversation through the chat template.

    A run passes its prompts rendered. By the model's own template, the text becomes that of the conversation; by
    another one, the question is the user's message. Any other text is followed by the completion and, with `ends`, the
    end token.
    """

    def __init__(self, tokenizer: Any, ends: bool = False) -> None:
        self.tokenizer, self.ends, self.bos, self.header = tokenizer, ends, "", ""
        if not tokenizer.chat_template:
            return
        asked = [{"role": "user", "content": "Q?"}]
        prompt = _OPENED.sub("", tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
        whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": "A."}], tokenize=False)
        before, _, self.end = whole.rpartition("A.")
        if before.startswith(prompt):
            self.header, self.opening = prompt.rpartition("Q?")[2], before.removeprefix(prompt)
            self.bos = tokenizer.bos_token if tokenizer.bos_token and whole.startswith(tokenizer.bos_token) else ""

    def encode(self, prompt: Any, completion: Any, question: str | None = None) -> list[int]:
        """The ids of a prompt with its completion, each a text or messages."""
        stem = _OPENED.sub("", prompt) if isinstance(prompt, str) and self.header else ""
        if stem and stem.endswith(self.header):
            text = f"{self.bos}{stem.removeprefix(self.bos)}{self.opening}{as_text(completion).strip()}{self.end}"
        elif isinstance(prompt, str) and (question is None or not self.header):
            text, end = prompt + as_text(completion), self.ends and self.tokenizer.eos_token or ""
            text = text if text.endswith(end) else text + end
            return list(self.tokenizer(text, add_special_tokens=self.ends)["input_ids"])
        else:
            asked = [{"role": "user", "content": question}] if isinstance(prompt, str) else prompt
            reply = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
            text = self.tokenizer.apply_chat_template([*asked, *reply], tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def find_model_fault(model: str) -> str:
    """Why a folder, or a hub id in the cache, is no reward model, and what to do; "" if its files do not say so."""
    folder = Path(os.path.expanduser(model))
    is_folder, names = folder.is_dir(), " ".join(path.name for path in folder.glob("*"))
    if (file := folder / "config.json" if is_folder else find_in_cache(model)) is None:
        return f"{model}: there is no such folder; {TRAINS}" if re.match(r"[./~]|.*/.*/", model) else ""
    config, inner, head = read_object(file), folder / "reward_model", "ForSequenceClassification"
    labels, made = config.get("id2label"), str(config.get("architectures") or head)
    outputs = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)  # two are not stored
    faults = {
        "is an adapter: merge it, PEFT's merge_and_unload()": not config and "adapter_config.json" in names,
        f"has no config.json; the reward model in it is {inner}": not config and inner.is_dir(),
        "has no config.json that can be read": not config,
        f"has the head of {made}; a reward model has that of a ...{head}": head not in made,
        f"has {outputs} outputs; a reward model has one (num_labels=1)": outputs != 1,
        "has no tokenizer; add its own": is_folder and not re.search(r"token|vocab|tekken|\.(model|spm)\b", names),
        "has no model.safetensors": is_folder and not re.search(r"\b(model\.safetensors|pytorch_model\.bin)", names),
    }
    return next((f"{model} {fault}; {TRAINS}" for fault, is_wrong in faults.items() if is_wrong), "")


class RewardModel(AnswerReader):
    """A trained reward model: a sequence-classification checkpoint with one output, loaded on first use.

    It scores prompt and completion together, in the form of `TextForm`. Of a model that thinks it reads the answer
    alone; a completion without one (its thinking was never closed, or nothing follows it) gets the lowest score of the
    others in the call, so that it escapes no penalty, and None if no completion of the call has an answer.

    Args:
        model: hub id or folder of the checkpoint; `rloo-kit reward-model` trains one.
        batch_size: texts scored at a time.
        max_length: tokens; a longer text is not scored (None), never cut.
        device: "cuda", "cpu", ...; by default a GPU if there is one.
        dtype: the weights' precision by torch's name, "auto" for the checkpoint's own.
        think_end_id, thinking, decode: as for `rewards.AnswerReward`, bound by a run; thinking: false scores thought
            and answer together.
    """

    __name__: ClassVar[str] = "reward_model"
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(
        self,
        model: str,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        device: str | None = None,
        dtype: str = "auto",
        think_end_id: int = THINK_END_ID,
        thinking: bool = False,
        decode: Decode | None = None,
    ) -> None:
        check_int("batch_size", batch_size, 1)
        check_int("max_length", max_length, 1, none_allowed=True)
        if not isinstance(model, str) or not model:
            raise ValueError(f"model is {model!r}; it must be the id or folder of a sequence-classification checkpoint")
        self.model, self.batch_size, self.max_length = os.path.expanduser(model), batch_size, max_length
        self.device, self.dtype, self._failure = device, dtype, ""
        super().__init__(think_end_id, thinking, decode)

    def __repr__(self) -> str:
        return f"RewardModel({self.model!r})"

    @cached_property
    def loaded(self) -> tuple[Any, TextForm]:
        """The model, in evaluation mode, and the form of its texts; raises WholeBatchError, but tries it only once."""
        if not (fault := self._failure or find_model_fault(self.model)):
            stack, more = load_stack(), {"dtype": self.dtype, "output_loading_info": True}
            try:
                tokenizer = stack.transformers.AutoTokenizer.from_pretrained(self.model)
                model, info = stack.transformers.AutoModelForSequenceClassification.from_pretrained(self.model, **more)
                fault = info["missing_keys"] and f"{self.model} lacks {excerpt(info['missing_keys'])}; {TRAINS}"
                if not (fault := find_model_fault(self.model) or fault):  # of a hub id, which is in the cache now
                    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
                    model.config.pad_token_id = tokenizer.pad_token_id  # it scores the last token that is not padding
                    device = self.device or ("cuda" if stack.torch.cuda.is_available() else "cpu")
                    return model.to(device).eval(), TextForm(tokenizer, getattr(model.config, TEXT_ENDS, False))
            except Exception as error:  # of any library
                fault = f"the reward model {self.model} cannot be loaded: {describe_error(error)}"
            self._failure = fault
        raise WholeBatchError(fault)

    @cached_property
    def source_digests(self) -> dict[str, str]:
        """The digest of its weights, an input of the run; a hub id is loaded first if it is not in the cache."""
        digest, fault = digest_weights(self.model), self._failure or find_model_fault(self.model)
        digest = digest or (digest_weights(self.model) if not fault and self.loaded else "")
        return {f"weights of the reward model {self.model}": digest} if digest else {}

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any] | None = None,
        completion_mask: Sequence[Any] | None = None,
        question: Sequence[Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """The scores of a batch; `get_rewards(prompts, completions)`, as published recipes have it, is the same call.

        Raises:
            ValueError: the model thinks, and there are no completion_ids. WholeBatchError: as `loaded`.
        """
        (model, form), answers = self.loaded, list(completions)
        if self.thinking:
            if completion_ids is None:
                raise ValueError("reward_model reads the answer after the thinking, for which it needs completion_ids")
            answers = self._answers(completions, completion_ids, completion_mask)
        asked = columns.get("user_message", question) if self.decode is not None else None
        ids = [form.encode(*row) for row in zip(prompts, answers, asked or [None] * len(answers), strict=True)]
        unanswered = [i for i, answer in enumerate(answers) if self.thinking and not answer]
        longest = self.max_length or max(map(len, ids), default=0)
        fits = [i for i, row in enumerate(ids) if len(row) <= longest and i not in unanswered]
        rewards: list[float | None] = [None] * len(ids)
        for start in range(0, len(fits), self.batch_size):
            rows = fits[start : start + self.batch_size]
            batch = {"input_ids": [ids[i] for i in rows]}
            padded = form.tokenizer.pad(batch, padding_side="right", return_tensors="pt")
            with load_stack().torch.inference_mode():
                scores = model(**padded.to(model.device)).logits[:, 0]  # (rows,)
            for i, value in zip(rows, scores.float().tolist(), strict=True):
                rewards[i] = value
        for i in unanswered:
            rewards[i] = min((value for value in rewards if value is not None), default=None)
        return rewards

    get_rewards = __call__


NEEDS_GYM = f"{GYM_REWARD} needs the library reasoning-gym, which is not installed or does not work: {INSTALL}"
FINDERS = ("whole", "boxed", "answer_tag")
BUILD_TIMEOUT_S = 60.0  # to make a task's verifier


@dataclass
class ReasoningGymScore(Verifier):
    """The verifier's score of the answer, 0.0 to 1.0; None for a row that is not from reasoning-gym.

    0.0 if the thinking was never closed, there is no answer, or the verifier raises on it; failed if the verifier
    cannot be built (for a refused task, for example). `Verifier` describes the other arguments and limits.

    Args:
        threshold: above 0, at most 1; 1.0 if the score reaches it, else 0.0. None: the score itself, partial credit
            included.
        find: `whole` (everything after the tag), `boxed` (the content of its last \\boxed{}),
            `answer_tag` (the content of its last <answer></answer>, as the library's own prompts ask for it).
    """

    __name__: ClassVar[str] = GYM_REWARD
    caught = RlooKitError

    threshold: float | None = None
    find: str = "whole"
    _made: dict[str, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            check_positive("threshold", self.threshold)
            if self.threshold > 1:
                raise ValueError(f"threshold is {self.threshold!r}; it must be above 0 and at most 1, or null")
        if self.find not in FINDERS:
            raise ValueError(f"find is {self.find!r}; it must be one of {', '.join(FINDERS)}")

    @cached_property
    def worker(self) -> Worker:
        """The process the verifiers run in."""
        return Worker(GYM_REWARD)

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] = (),
        completion_ids: Sequence[Any] = (),
        reasoning_gym: Sequence[Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        if reasoning_gym is None:
            raise ValueError(
                f"{GYM_REWARD} needs the column '{GYM_COLUMN}', which the rows of data.source=reasoning_gym/TASK have; "
                f"columns found: {', '.join(sorted(columns)) or 'none'}"
            )
        answers = self._answers(completions, completion_ids, columns.get("completion_mask"))
        rows = [None if row is None or row != row else str(row) for row in reasoning_gym]
        for row in filter(None, rows):
            self._prepare(row)
        ends_at = time.monotonic() + self.timeout_s
        pairs = zip(answers, rows, strict=True)
        return [None if row is None else self._score(answer, row, ends_at) for answer, row in pairs]

    def _score(self, answer: str, row: str, ends_at: float) -> float:
        if self.find == "boxed":
            answer = find_boxed(answer)
        elif self.find == "answer_tag":
            before, closed, _ = answer.rpartition("</answer>")
            answer = before.rpartition("<answer>")[2] if closed and "<answer>" in before else ""
        if not (answer := answer.strip()):
            return 0.0
        value = self._ask(self.worker, ends_at, score, row, answer) if self._prepare(row) else math.nan
        return float(value) if self.threshold is None or math.isnan(value) else float(value >= self.threshold)

    def _prepare(self, row: str) -> bool:
        """Load the library and make the row's verifier before a time limit counts, also after an answer that took too
        long. False if it cannot be made, which is attempted and reported once."""
        if not self.worker.running:
            self._made = {settings: False for settings, works in self._made.items() if not works}
            try:
                self.worker.call(load_library, timeout_s=START_TIMEOUT_S)
            except RlooKitError as error:
                raise WholeBatchError(f"{NEEDS_GYM} ({error})") from None
        settings = row.partition(', "entry": ')[0]  # one verifier scores all rows of these
        if settings not in self._made:
            self._made[settings] = True
            try:
                self.worker.call(score, row, None, timeout_s=BUILD_TIMEOUT_S)
            except RlooKitError as error:
                say(f"WARNING: {GYM_REWARD} cannot score rows of {settings}}}: {error}")
                self._made[settings] = False
        return self._made[settings]
