"""A judge: a language model at an OpenAI-compatible endpoint that scores, ranks or compares answers.

`Judge` asks, with retries, a cache on disk and a budget; `JudgeReward` is the reward, `evals/win_rate.py` compares.
"""

import asyncio
import hashlib
import json
import os
import random
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, groupby
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import httpx
from jinja2 import Environment, StrictUndefined, TemplateError

from rloo_kit.errors import RewardError, describe_error, excerpt, printable
from rloo_kit.rewarding.verifiers import AnswerReader
from rloo_kit.rewards._binding import check_int, check_positive
from rloo_kit.rewards.text import THINK_END
from rloo_kit.system.environment import is_exposed, is_sendable
from rloo_kit.system.processes import say
from rloo_kit.system.user_code import digest_texts

CACHE = "judge.sqlite"  # in `run.output_dir`: the runs of a project share replies
KEY = "OPENAI_API_KEY"
RETRIES = 4  # of a request, after pauses that double
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
CHECK_TIMEOUT_S = 10.0
MODES = ("score", "rank")
BASE = "base"  # what `eval.judge.against` names, or a column
NO_COLUMN = "eval.judge.against is {}, and the prompts have the columns {}: name one of them, or " + BASE
RUBRIC = "A good answer does what the task asks: it is correct, complete, clear and no longer than it needs to be."

_Value = TypeVar("_Value")
_JITTER = random.Random()  # the module's own numbers are the run's


@dataclass
class Judge:
    """A language model that answers questions about answers. `ask` and `compare` belong to one event loop.

    Args:
        url: of the endpoint, up to /v1. model: its name there.
        rubric: what makes an answer good, for the kit's templates.
        template: file with a Jinja template of the request, see rewarding/prompts/; None: the kit's. It gets task,
            rubric, row (the dataset's columns), and answer, low and high ("score") or answers ("rank", "compare").
        key_env: environment variable with the API key; None: OPENAI_API_KEY if it is set.
        concurrency: requests at a time. request_timeout_s: for a whole reply.
        max_calls, max_tokens: of the run, None: no limit. Nothing is scored beyond them. Calls under way may exceed
            max_tokens.
        options: further fields of the request, such as {max_tokens: 500}; null drops one.
        folder: of the cache. run: whose budget it is.

    Attributes:
        counts: calls, cached, failed, retries, tokens and seconds so far.

    Raises:
        ValueError: a parameter that cannot be used.
    """

    url: str
    model: str
    rubric: str = RUBRIC
    template: str | None = None
    key_env: str | None = None
    concurrency: int = 8
    request_timeout_s: float = 60.0
    max_calls: int | None = None
    max_tokens: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    folder: Path = field(default=Path("outputs"), repr=False)
    run: str = field(default="", repr=False)
    mode: str = field(default="compare", repr=False)

    def __post_init__(self) -> None:
        check_int("concurrency", self.concurrency, 1)
        check_int("max_calls", self.max_calls, 1, none_allowed=True)
        check_int("max_tokens", self.max_tokens, 1, none_allowed=True)
        check_positive("request_timeout_s", self.request_timeout_s)
        if set("@?#") & set(self.url):  # not printed: it may contain a password or a key
            raise ValueError("url has more than a host, a port and a path; an API key is read from key_env")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url is {excerpt(self.url)}; it takes http://host:port/v1")
        if self.key_env is not None and not str(self.key_env).isidentifier():  # not printed: it may be the key itself
            raise ValueError(f"key_env takes the name of an environment variable, such as {KEY}")
        if self.key_env is not None and self.key_env not in os.environ:
            raise ValueError(
                f"key_env is {self.key_env}, and there is no such variable: set it in .env, or leave it out"
            )
        if not is_sendable(self._key):
            raise ValueError(f"{self.key_env or KEY} has a line break or another character that no key has")
        try:
            self._render(task="", answer="", answers=["", ""], low=0, high=1, row=defaultdict(str))
        except (TemplateError, OSError, UnicodeError) as error:
            raise ValueError(f"template is {self.template}: {describe_error(error)}") from None
        if self.template is not None:  # an edited one is noticed at --resume, see `read_sources`
            text = Path(self.template).read_text(encoding="utf-8")
            self.source_digests = {f"template {Path(self.template).name}": digest_texts([text])}
        self.url, self.counts, self._gives_up = self.url.rstrip("/"), defaultdict[str, float](float), False

    @cached_property
    def _template(self) -> Any:
        file = self.template or Path(__file__).with_name("prompts") / f"{self.mode}.jinja"
        text = Path(file).read_text(encoding="utf-8")
        return Environment(undefined=StrictUndefined, trim_blocks=True).from_string(text)

    def _render(self, **values: Any) -> str:
        return str(self._template.render(rubric=self.rubric, **values))

    @cached_property
    def _slots(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self.concurrency)

    @cached_property
    def _http(self) -> httpx.AsyncClient:
        if self._key and is_exposed(self.url):
            say(f"{self.key_env or KEY} and the answers go to {self.url} unencrypted; https hides them")
        return httpx.AsyncClient(timeout=httpx.Timeout(self.request_timeout_s), headers=self._headers)

    @property
    def _key(self) -> str:
        return os.environ.get(self.key_env or KEY, "")

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    @cached_property
    def _calls(self) -> sqlite3.Connection:
        """One row a call; `reply` is empty if it had none that could be read."""
        self.folder.mkdir(parents=True, exist_ok=True)
        found = sqlite3.connect(self.folder / CACHE, timeout=LONGEST_PAUSE_S, isolation_level=None)
        found.execute("PRAGMA synchronous = OFF")  # a killed process loses nothing, a power cut may
        found.execute("CREATE TABLE IF NOT EXISTS calls (run TEXT, request TEXT, reply TEXT, tokens INTEGER)")
        found.execute("CREATE INDEX IF NOT EXISTS by_request ON calls (request)")
        return found

    def find_fault(self) -> str:
        """Why the endpoint cannot be used, in words; "" if it can, or does not list its models."""
        try:
            found = httpx.get(f"{self.url}/models", headers=self._headers, timeout=CHECK_TIMEOUT_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"there is no answer from {self.url}, start the judge or set url: {describe_error(error)}"
        if found.status_code in (401, 403):
            return f"{self.url} refuses the API key (HTTP {found.status_code}): set {self.key_env or KEY} in .env"
        try:
            served = [str(one["id"]) for one in found.json()["data"]]
        except (ValueError, KeyError, TypeError):
            return ""
        return "" if self.model in served else f"{self.url} serves {', '.join(served)}, not {self.model}"

    async def ask(self, text: str, read: Callable[[str], _Value]) -> _Value:
        """What `read` makes of the reply to `text`; if it raises ValueError, the judge is asked again.

        Raises:
            RewardError: no usable reply after all retries, a refused request, or the budget is used up.
        """
        request = {"model": self.model, "messages": [{"role": "user", "content": text}], "temperature": 0.0}
        request = {name: value for name, value in (request | self.options).items() if value is not None}
        known = hashlib.sha256(json.dumps([self.url, request], sort_keys=True).encode()).hexdigest()
        async with self._slots:
            found = self._calls.execute(
                "SELECT reply FROM calls WHERE request = ? AND reply != ''", (known,)
            ).fetchone()
            if found:
                self.counts["cached"] += 1
                return read(found[0])
            try:
                for tries in range(RETRIES + 1):
                    pause_s = FIRST_PAUSE_S * 2.0**tries * _JITTER.uniform(0.8, 1.2)
                    try:
                        return await self._call(request, known, read)
                    except TimeoutError:  # also of a server that sends a byte now and then
                        problem = f"no whole reply in {self.request_timeout_s:g} s"
                    except httpx.HTTPError as error:
                        problem = describe_error(error)
                        if isinstance(error, httpx.HTTPStatusError):
                            wanted = error.response.headers.get("Retry-After", "")
                            pause_s = max(pause_s, float(wanted)) if wanted.isdecimal() else pause_s
                    except ValueError as error:
                        problem, pause_s = f"its reply cannot be used: {error}", 0.0
                    if self._gives_up or tries == RETRIES:
                        break
                    self.counts["retries"] += 1
                    await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))
                self._gives_up |= pause_s > 0  # it is down: the rest of this batch is asked once
                raise RewardError(f"no verdict from {self.model} at {self.url}: {problem}")
            except RewardError:
                self.counts["failed"] += 1
                raise

    async def _call(self, request: dict[str, Any], known: str, read: Callable[[str], _Value]) -> _Value:
        """One call; raises httpx.HTTPError, TimeoutError or ValueError if it may be repeated, else RewardError."""
        for name, sum_of, limit in (("calls", "1", self.max_calls), ("tokens", "tokens", self.max_tokens)):
            if limit is not None:
                found = self._calls.execute(f"SELECT sum({sum_of}) FROM calls WHERE run = ?", (self.run,)).fetchone()
                if (used := found[0] or 0) >= limit:
                    raise RewardError(f"the judge's budget is used up: {used:,} {name}, and max_{name} is {limit:,}")
        row = self._calls.execute("INSERT INTO calls VALUES (?, ?, '', 0)", (self.run, known)).lastrowid
        self.counts["calls"] += 1
        started = time.monotonic()
        try:
            posted = self._http.post(f"{self.url}/chat/completions", json=request)
            response = await asyncio.wait_for(posted, self.request_timeout_s)
        finally:
            self.counts["seconds"] += time.monotonic() - started
        body = response.text.replace(self._key, "***") if self._key else response.text
        shown = f"HTTP {response.status_code}: {printable(body, 300)}"
        if response.status_code in (408, 409, 429) or response.status_code >= 500:
            raise httpx.HTTPStatusError(shown, request=response.request, response=response)
        if not response.is_success:
            raise RewardError(f"{self.url} refuses the request: {shown}")
        try:
            found = json.loads(body)
            reply, tokens = found["choices"][0]["message"]["content"], (found.get("usage") or {}).get("total_tokens")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise ValueError(f"it is no chat completion: {shown}") from None
        self.counts["tokens"] += tokens or 0
        self._calls.execute("UPDATE calls SET tokens = ? WHERE rowid = ?", (tokens or 0, row))
        value = read(str(reply))
        self._calls.execute("UPDATE calls SET reply = ? WHERE rowid = ?", (reply, row))
        return value

    async def compare(self, task: str, answers: Sequence[str], row: dict[str, Any]) -> tuple[float, bool]:
        """How much better the first of two answers is, the mean of both orders (each is 1.0, 0.0, or 0.5 for a tie),
        and whether they agree."""
        asked = [
            self.ask(self._render(task=task, answers=two, row=row), _read_better) for two in (answers, answers[::-1])
        ]
        first, second = await asyncio.gather(*asked)
        return (first + 1.0 - second) / 2, first == 1.0 - second


@dataclass
class JudgeReward(AnswerReader, Judge):
    """The judge's opinion of the answer, 0.0 to 1.0; 0.0 without one. Without a verdict, a completion is not scored.

    Args:
        mode: "score": the judge grades each answer by itself on `scale`. "rank": it ranks the answers of a prompt,
            shown in random order and again in the reverse one; the reward is the mean rank, 1.0 for the best.
        scale: lowest and highest score.
    """

    __name__: ClassVar[str] = "judge_reward"
    mode: str = "score"
    scale: Sequence[float] = (1, 10)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}; it must be one of {', '.join(MODES)}")
        if len(self.scale) != 2 or not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale is {self.scale!r}; it takes the lowest and the highest score, such as [1, 10]")
        super().__post_init__()

    @property
    def is_relative(self) -> bool:
        """Whether it compares the completions of a prompt: its mean is one half whatever the policy does."""
        return self.mode == "rank"

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any],
        log_metric: Callable[[str, float], None] = lambda name, value: None,
        **columns: Any,
    ) -> list[Any]:
        answers = self._answers(completions, completion_ids, columns.get("completion_mask"))
        size, is_score = len(answers), self.mode == "score"
        lists = {name: one for name, one in columns.items() if isinstance(one, list) and len(one) == size}
        rows = [{name: one[i] for name, one in lists.items()} for i in range(size)]
        same = groupby(range(size), key=lambda i: i if is_score else str(prompts[i]))
        groups = [list(members) for _, members in same]
        self._gives_up, self.counts = False, defaultdict(float)
        judge = self._score if is_score else self._rank

        async def judged(group: list[int]) -> tuple[list[Any], float | None]:
            task, row = task_text(prompts[group[0]], rows[group[0]]), rows[group[0]]
            try:
                return await judge(task, [answers[i] for i in group], row)
            except RewardError as error:
                return [error] * len(group), None

        found = await asyncio.gather(*map(judged, groups))
        self._log(log_metric, [agreement for _, agreement in found if agreement is not None])
        return [reward for rewards, _ in found for reward in rewards]

    async def _score(self, task: str, answers: list[str], row: dict[str, Any]) -> tuple[list[float], None]:
        low, high = self.scale
        if not answers[0]:
            return [0.0], None
        text = self._render(task=task, answer=answers[0], low=low, high=high, row=row)
        return [await self.ask(text, lambda reply: (_read_score(reply, low, high) - low) / (high - low))], None

    async def _rank(self, task: str, answers: list[str], row: dict[str, Any]) -> tuple[list[Any], float | None]:
        """The mean ranks, and the share of pairs that both orders rank alike."""
        shown = [i for i, answer in enumerate(answers) if answer]
        random.Random("\0".join(answers)).shuffle(shown)
        if len(shown) < 2:
            return [None] if len(answers) == 1 else [float(bool(answer)) for answer in answers], None
        places = []
        for order in (shown, shown[::-1]):
            text = self._render(task=task, answers=[answers[i] for i in order], row=row)
            ranking = await self.ask(text, lambda reply: _read_ranking(reply, len(shown)))
            places.append({order[number - 1]: place for place, number in enumerate(ranking)})
        first, second = places
        worst = 2 * (len(answers) - 1)
        pairs = [(first[i] < first[j]) == (second[i] < second[j]) for i, j in combinations(shown, 2)]
        ranks = [1.0 - (first[i] + second[i]) / worst if i in first else 0.0 for i in range(len(answers))]
        return ranks, sum(pairs) / len(pairs)

    def _log(self, log_metric: Callable[[str, float], None], agreements: list[float]) -> None:
        found: dict[str, float] = {
            f"judge/{name}": self.counts[name] for name in ("calls", "tokens", "retries", "failed")
        }
        if asked := self.counts["calls"] + self.counts["cached"]:
            found["judge/cached_ratio"] = self.counts["cached"] / asked
        if self.counts["calls"]:
            found["judge/latency_s"] = self.counts["seconds"] / self.counts["calls"]
        if agreements:
            found["judge/agreement"] = sum(agreements) / len(agreements)
        for name, value in found.items():
            log_metric(name, value)


def task_text(prompt: Any, row: dict[str, Any]) -> str:
    """What the user asked, for a judge: the column `question` of a rendered prompt, else the messages."""
    if isinstance(prompt, str):
        return str(row.get("question") or prompt)
    texts = [str(message["content"]) for message in prompt]
    return texts[0] if len(texts) == 1 else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


def find_value(reply: str, name: str) -> Any:
    """The value of `name` in the last JSON object of a reply that has it; raises ValueError without one.

    >>> find_value('<think>{"score": 1}</think>Good. {"score": 7}', "score")
    7
    """
    text, decoder = reply.rpartition(THINK_END)[2], json.JSONDecoder()
    for start in (place for place in reversed(range(len(text))) if text[place] == "{"):
        try:
            found = decoder.raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            continue
        if name in found:
            return found[name]
    raise ValueError(f"it does not end with JSON that has {name!r}: {excerpt(text[-200:], 200)}")


def _read_score(reply: str, low: float, high: float) -> float:
    score = find_value(reply, "score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not low <= score <= high:
        raise ValueError(f"the score is {excerpt(score)}, and the scale is {low:g} to {high:g}")
    return float(score)


def _read_ranking(reply: str, size: int) -> list[int]:
    ranking = find_value(reply, "ranking")
    if not isinstance(ranking, list) or sorted(map(str, ranking)) != sorted(str(one + 1) for one in range(size)):
        raise ValueError(f"the ranking is {excerpt(ranking)}, and not each of 1 to {size} once")
    return [int(number) for number in ranking]


def _read_better(reply: str) -> float:
    """1.0 if the first answer is better, 0.0 if the second is, 0.5 if neither."""
    better = str(find_value(reply, "better"))
    if better not in ("0", "1", "2"):
        raise ValueError(f"better is {excerpt(better)}, and not 1, 2 or 0")
    return {"0": 0.5, "1": 1.0, "2": 0.0}[better]
