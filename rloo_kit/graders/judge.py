"""A judge: a language model at an OpenAI-compatible endpoint that scores, ranks or compares answers.

`Judge` asks, with retries, a cache on disk and a budget; `JudgeReward` is the reward, `evals/win_rate.py` compares.
"""

import asyncio
import hashlib
import inspect
import json
import os
import random
import re
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, combinations, groupby
from pathlib import Path
from typing import Any, ClassVar, cast
from urllib.parse import urlsplit

import httpx
from jinja2 import Environment, StrictUndefined

from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import RewardSection
from rloo_kit.data.sources import QUESTION, USER_MESSAGE
from rloo_kit.errors import RewardError, describe_error, excerpt, hide, printable
from rloo_kit.graders.replies import (
    contains,
    count_billed,
    find_key,
    find_verdict,
    read_better,
    read_ranking,
    read_reply,
    read_score,
)
from rloo_kit.graders.verifier import AnswerReader
from rloo_kit.rewarding.guard import run_async
from rloo_kit.rewarding.registry import BOUND_ONLY, check_params, construct
from rloo_kit.rewards._binding import check_int, check_positive
from rloo_kit.system.console import chat_messages
from rloo_kit.system.environment import is_exposed, is_loopback, is_sendable
from rloo_kit.system.processes import say
from rloo_kit.system.user_code import digest_texts

CACHE = "judge.sqlite"  # in `run.output_dir`: the runs of a project share verdicts
KEY = "OPENAI_API_KEY"
RETRIES = 4  # of a request, after pauses that double; a reply that cannot be read is asked again once
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
CONNECT_TIMEOUT_S = 10.0
MODES = ("score", "rank")  # of the reward
VERDICTS = {"score": "score", "rank": "ranking", "compare": "better"}  # by mode: the name of the verdict in the reply
BASE = "base"  # what `eval.judge.against` names, or a column
NO_COLUMN = "eval.judge.against is {}, and the prompts have the columns {}: name one of them, or " + BASE
RUBRIC = "A good answer does what the task asks: it is correct, complete, clear and no longer than it needs to be."
MADE_UP = ("About 4711", "About 4712")  # answers for the check before a run
REFUSES = "refuses the request"
SENT = ("model", "messages", "stream", "n")  # fields of a request that are no options

_JITTER = random.Random()  # the module's own numbers are the run's
_TAGS = ("task", "reference", "answer")  # of the kit's templates
_INVISIBLE = "\\s/\xad\u200b-\u200f\u2060-\u2064\ufeff"


class _Templates(Environment):
    """Templates in which a column of a row comes before a dict's method of that name, such as items."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        return obj[attribute] if isinstance(obj, dict) and attribute in obj else super().getattr(obj, attribute)


_TEMPLATES = _Templates(undefined=StrictUndefined, trim_blocks=True)


@dataclass
class Judge:
    """A language model that answers questions about answers. Raises ValueError for a parameter that cannot be used.

    Args:
        url: of the endpoint, up to /v1. model: its name there.
        rubric: what makes an answer good, for the kit's templates.
        template: file with a Jinja template of the request, see graders/prompts/; None: the kit's. It gets task,
            rubric, row (the dataset's columns), and answer, low and high ("score") or answers ("rank", "compare").
        key_env: environment variable with the API key; None: OPENAI_API_KEY if it is set.
        concurrency: requests at a time. request_timeout_s: for a whole reply.
        max_calls, max_tokens: of the run, None: no limit. Nothing is scored beyond them; calls under way may exceed
            max_tokens.
        options: further fields of the request, such as {max_tokens: 500}; null drops one.
        folder: of the cache. run: whose budget it is.
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
    scale: Sequence[float] = field(default=(1, 10), repr=False)

    def __post_init__(self) -> None:
        check_int("concurrency", self.concurrency, 1)
        check_int("max_calls", self.max_calls, 1, none_allowed=True)
        check_int("max_tokens", self.max_tokens, 1, none_allowed=True)
        check_positive("request_timeout_s", self.request_timeout_s)
        self.options = self.options or {}
        if reserved := [name for name in SENT if name in self.options]:
            raise ValueError(f"options has {reserved[0]}, which the judge sets itself; template is the request's text")
        for name in ("model", "rubric"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name).strip():
                raise ValueError(f"{name} is {excerpt(getattr(self, name))}; it is a text")
        if set("@?#") & set(self.url):  # not printed: it may contain a password or a key
            raise ValueError("url has more than a host, a port and a path; an API key is read from key_env")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(f"url is {excerpt(self.url)}; it takes http://host:port/v1")
        if self.key_env is not None and not str(self.key_env).isidentifier():  # not printed: it may be the key itself
            raise ValueError(f"key_env takes the name of an environment variable, such as {KEY}")
        if self.key_env is not None and self.key_env not in os.environ:
            raise ValueError(
                f"key_env is {self.key_env}, and there is no such variable: set it in .env, or leave it out"
            )
        if not is_sendable(self._key):
            raise ValueError(f"{self.key_env or KEY} has a line break or another character that no key has")
        hide([self._key] if len(self._key) > 3 else [])  # a local server takes any
        if self.template is not None:  # an edited one is noticed at --resume, see `read_sources`
            self.source_digests = {f"template {Path(self.template).name}": digest_texts([self._template])}
        self.url = self.url.rstrip("/").removesuffix("/chat/completions")
        self.counts, self._gives_up, self._base = defaultdict[str, float](float), False, self.url

    @cached_property
    def _template(self) -> str:
        file = self.template or Path(__file__).with_name("prompts") / f"{self.mode}.jinja"
        try:
            return Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ValueError(f"template is {self.template}: {describe_error(error)}") from None

    @cached_property
    def identity(self) -> str:
        """A digest of what its verdicts depend on: a budget, a cached verdict and a win rate are of one identity."""
        settings = [self.url, self.model, self.mode, self.rubric, self._template, self.options, self.scale]
        return digest_texts([json.dumps(settings, sort_keys=True, default=str)])

    @cached_property
    def _compiled(self) -> tuple[Any, Any, Any]:
        """The template, and what finds its tags and the verdict's key in answers."""
        names = "|".join(map(re.escape, {*_TAGS, *re.findall(r"<\s*/?\s*([^\W\d_][\w:.-]*)", self._template)}))
        tag = re.compile(rf"<(?=[{_INVISIBLE}]*(?:{names})(?![^\W\d_]))", re.IGNORECASE)
        return _TEMPLATES.from_string(self._template), tag, find_key(VERDICTS[self.mode])

    def _render(self, task: str, row: dict[str, Any], answers: Sequence[str]) -> str:
        """The request. In the answers, tags of the template and the verdict's key are made harmless."""
        template, tag, key = self._compiled
        shown: dict[str, Any] = {"answers": [key.sub(r"&quot;\1&quot;", tag.sub("&lt;", answer)) for answer in answers]}
        if self.mode == "score":
            shown = {"answer": shown["answers"][0], "low": self.scale[0], "high": self.scale[1]}
        return str(template.render(rubric=self.rubric, task=task, row=row, **shown))

    def _made_up(self, task: str, row: dict[str, Any]) -> tuple[str, Sequence[str]]:
        """A request about made-up answers, and these; ValueError if the template fails or does not show them."""
        answers = MADE_UP[: 1 if self.mode == "score" else 2]
        try:
            text = self._render(task, row, answers)
        except Exception as error:  # a template is a program
            raise ValueError(f"template is {self.template}: {describe_error(error)}") from None
        if not all(answer.lower() in text.lower() for answer in answers):
            name = "{{ answer }}" if len(answers) == 1 else "each of {{ answers }}"
            raise ValueError(f"template is {self.template}, which does not show the answer: write {name} into it")
        return text, answers

    def _of_loop(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore, dict[str, Any]]:
        """The client, the slots and the requests under way, which belong to the running event loop."""
        loop = asyncio.get_running_loop()
        if self.__dict__.get("_held", (None,))[0] is not loop:
            if self._key and is_exposed(self.url):
                say(f"{self.key_env or KEY} and the answers go to {self.url} unencrypted; https hides them")
            timeout = httpx.Timeout(self.request_timeout_s, connect=min(CONNECT_TIMEOUT_S, self.request_timeout_s))
            client = httpx.AsyncClient(timeout=timeout, **self._options)
            self._held = loop, client, asyncio.Semaphore(self.concurrency), dict[str, Any]()
        return self._held[1:]

    @property
    def _has_version(self) -> bool:
        return re.search(r"/v\d", urlsplit(self._base).path) is not None

    @property
    def _options(self) -> dict[str, Any]:
        """Of an HTTP client: no proxy stands in front of this machine, whatever the environment says."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        return {"headers": headers, "trust_env": not is_loopback(self.url)}

    @property
    def _key(self) -> str:
        return os.environ.get(self.key_env or KEY, "")

    @cached_property
    def _calls(self) -> sqlite3.Connection:
        """One row a call; `reply` has the verdict, or is empty if there was none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, options = self.folder / CACHE, {"timeout": LONGEST_PAUSE_S, "isolation_level": None}
        connection = sqlite3.connect(path, check_same_thread=False, **options)  # type: ignore[call-overload]
        connection.execute("PRAGMA synchronous = OFF")  # a killed process loses nothing, a power cut may
        connection.execute("CREATE TABLE IF NOT EXISTS calls (run TEXT, request TEXT, reply TEXT, tokens INTEGER)")
        connection.execute("CREATE INDEX IF NOT EXISTS by_request ON calls (request)")
        return connection

    def find_fault(self, row: dict[str, Any] | None = None, task: str = "Say hello.") -> str:
        """Why the judge cannot be used; "" if it can. Asks it once for a verdict on made-up answers to `task`, in its
        own template with the columns of `row`; without a row in the kit's."""
        judge = self if row is not None or self.template is None else replace(self, template=None)
        judge.counts, judge._gives_up = defaultdict(float), False
        try:
            run_async(judge.ask(*judge._made_up(task, row or {}), is_check=True))
        except Exception as error:
            known = isinstance(error, ValueError | RewardError)
            return (str(error) if known else describe_error(error)) + self._name_served(error)
        if self.max_tokens is not None and not judge.counts["tokens"]:
            return f"max_tokens is {self.max_tokens:,}, and {self.url} does not report tokens (usage): set max_calls"
        return ""

    def _name_served(self, error: Exception) -> str:
        """The models that are served, if a request for another one was refused."""
        with suppress(Exception):
            served = httpx.get(f"{self._base}/models", timeout=CONNECT_TIMEOUT_S, **self._options).json()["data"]
            names = [str(entry["id"]) for entry in served]
            if REFUSES in str(error) and self.model not in names:
                return f"; {self.url} serves {', '.join(names)}, not {self.model}"
        return ""

    async def ask(self, text: str, answers: Sequence[str], *, is_check: bool = False) -> Any:
        """The verdict of the judge on `answers` that `text` shows, or RewardError. Equal requests are one call.

        `is_check`: ask whatever is cached and spent, and do not try again if nobody answers."""
        request = {"model": self.model, "messages": [{"role": "user", "content": text}], "temperature": 0.0}
        request = {name: value for name, value in (request | self.options).items() if value is not None}
        digest = hashlib.sha256(json.dumps([self.identity, self._key, request], sort_keys=True).encode()).hexdigest()
        asked = self._of_loop()[2]
        if digest in asked:
            self.counts["cached"] += 1
        else:
            asked[digest] = asyncio.ensure_future(self._ask(request, digest, answers, is_check))
            asked[digest].add_done_callback(lambda _: asked.pop(digest))
        return await asyncio.shield(asked[digest])

    async def _ask(self, request: dict[str, Any], digest: str, answers: Sequence[str], is_check: bool) -> Any:
        try:
            async with self._of_loop()[1]:
                query = "SELECT reply FROM calls WHERE request = ? AND reply != ''"
                if not is_check and (cached := self._calls.execute(query, (digest,)).fetchone()):
                    self.counts["cached"] += 1
                    return self._read(json.loads(cached[0]), len(answers))
                return await self._try(request, digest, answers, is_check)
        except (RewardError, sqlite3.Error) as error:
            self.counts["failed"] += 1
            if isinstance(error, RewardError):
                raise
            fix = "another process holds it" if "locked" in str(error) else "delete it, or make room on its disk"
            raise RewardError(f"{self.folder / CACHE} cannot be used ({error}): {fix}") from None

    async def _try(self, request: dict[str, Any], digest: str, answers: Sequence[str], is_check: bool) -> Any:
        unread, is_busy, problem = False, False, ""
        for tries in range(RETRIES + 1):
            pause_s, is_over = FIRST_PAUSE_S * 2.0**tries * _JITTER.uniform(0.8, 1.2), is_check or self._gives_up
            try:
                return await self._call(request, digest, answers, is_check)
            except TimeoutError:  # also of a server that sends a byte now and then
                problem = f"no whole reply in {self.request_timeout_s:g} s (request_timeout_s)"
            except httpx.HTTPStatusError as error:
                problem, wanted = describe_error(error), error.response.headers.get("Retry-After", "")
                pause_s = max(pause_s, float(wanted)) if re.fullmatch(r"\d+(\.\d+)?", wanted) else pause_s
                is_over, is_busy = self._gives_up, error.response.status_code == 429
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = f"no answer, start the judge or set url: {describe_error(error)}"
            except ValueError as error:
                problem, pause_s, is_over, unread = f"its reply cannot be used: {error}", 0.0, unread, True
                request = request | ({"temperature": 0.0} if "temperature" in request else {})
            if is_over or tries == RETRIES:
                break
            self.counts["retries"] += 1
            await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))
        self._gives_up |= pause_s > 0 and not is_busy  # it is down: the rest of this batch is asked once
        raise RewardError(f"no verdict from {self.model} at {self.url}: {problem}")

    async def _call(self, request: dict[str, Any], digest: str, answers: Sequence[str], is_check: bool) -> Any:
        """One call; raises httpx.HTTPError, TimeoutError or ValueError if it may be repeated, else RewardError."""
        first = self.run
        with suppress(OSError), open(self.folder / self.run / "config.yaml", errors="replace") as config:
            first = config.readline()  # with the run's id; a run that starts over has another
        spender = "" if is_check else digest_texts([first, self.identity])
        for name, sum_of, limit in (("calls", "1", self.max_calls), ("tokens", "tokens", self.max_tokens)):
            if limit is not None and not is_check:
                spent = self._calls.execute(f"SELECT sum({sum_of}) FROM calls WHERE run = ?", (spender,)).fetchone()
                if (used := spent[0] or 0) >= limit:
                    raise RewardError(f"the judge's budget is used up: {used:,} {name}, and max_{name} is {limit:,}")
        row = self._calls.execute("INSERT INTO calls VALUES (?, ?, '', 0)", (spender, digest)).lastrowid
        self.counts["calls"] += 1
        started = time.monotonic()
        try:
            response = await asyncio.wait_for(self._post(request), self.request_timeout_s)
        finally:
            self.counts["seconds"] += time.monotonic() - started
        status, shown = response.status_code, f"HTTP {response.status_code}: {printable(response.text, 300)}"
        if status in (408, 409, 429) or status >= 500:
            raise httpx.HTTPStatusError(shown, request=response.request, response=response)
        if response.has_redirect_location:
            target = str(response.request.url.join(response.headers["Location"])).removesuffix("/chat/completions")
            raise RewardError(f"{self.url} redirects to another address (HTTP {status}): set url to {target}")
        if status in (401, 403):
            raise RewardError(f"{self.url} refuses the API key: set {self.key_env or KEY} in .env ({shown})")
        if not response.is_success:
            fix = ", does url end in /v1?" if status in (404, 405) and not self._has_version else ""
            raise RewardError(f"{self.url} {REFUSES}{fix}: {shown}")
        try:
            body = response.json()
            choice = body["choices"][0]
            choice["message"].get, choice.get  # both are objects
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            problem = f"no chat completion: {shown}"
            raise httpx.HTTPStatusError(problem, request=response.request, response=response) from None
        tokens = count_billed(body)
        self.counts["tokens"] += tokens
        self._calls.execute("UPDATE calls SET tokens = ? WHERE rowid = ?", (tokens, row))
        name, size = VERDICTS[self.mode], len(answers)
        value = find_verdict(read_reply(choice, request), name)
        verdict = self._read(value, size)
        is_high = self.mode == "score" and verdict > sum(self.scale) / 2
        if is_high and contains(answers[0], name, verdict, lambda quoted: self._read(quoted, size)):
            raise ValueError(f"{name} is {excerpt(value)}, which the answer contains: the judge may quote it")
        self._calls.execute("UPDATE calls SET reply = ? WHERE rowid = ?", (json.dumps(value), row))
        return verdict

    async def _post(self, request: dict[str, Any]) -> httpx.Response:
        """The response; at first also from the address with /v1, if `url` has no version and is not found."""
        client, statuses = self._of_loop()[0], (200, 404, 405)
        response = await client.post(f"{self._base}/chat/completions", json=request)
        is_unknown = response.status_code in statuses and "choices" not in response.text
        if is_unknown and self._base == self.url and not self._has_version:
            versioned = await client.post(f"{self.url}/v1/chat/completions", json=request)
            if versioned.status_code not in statuses[1:]:
                self._base, response = f"{self.url}/v1", versioned
        return response

    def _read(self, value: Any, size: int) -> Any:
        """The verdict on so many answers; raises ValueError for a value that is none."""
        if self.mode == "score":
            return read_score(value, *self.scale)
        return read_ranking(value, size) if self.mode == "rank" else read_better(value)

    async def compare(self, task: str, answers: Sequence[str], row: dict[str, Any]) -> tuple[float, bool]:
        """How much better the first of two answers is, the mean of both orders (each is 1.0, 0.0, or 0.5 for a tie),
        and whether they agree."""
        asked = [self.ask(self._render(task, row, pair), pair) for pair in (answers, answers[::-1])]
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
        numbers = [number for number in self.scale if isinstance(number, int | float)]
        if len(self.scale) != 2 or len(numbers) != 2 or not numbers[0] < numbers[1]:
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
        lists = {name: values for name, values in columns.items() if isinstance(values, list) and len(values) == size}
        rows = [{"prompt": prompts[i], **{name: values[i] for name, values in lists.items()}} for i in range(size)]
        same = groupby(range(size), key=lambda i: i if is_score else str(prompts[i]))
        groups = [list(members) for _, members in same]
        self._gives_up, self.counts = False, defaultdict(float)
        judge = self._score if is_score else self._rank

        async def judged(group: list[int]) -> tuple[list[Any], float | None]:
            row = rows[group[0]]
            try:
                known = row if self.decode is not None else {}  # outside a run, a column `question` may be anything
                return await judge(task_text(prompts[group[0]], known), [answers[i] for i in group], row)
            except Exception as error:  # also of a template, on this row
                failure = error if isinstance(error, RewardError) else RewardError(describe_error(error))
                return [failure] * len(group), None

        outcomes = await asyncio.gather(*map(judged, groups))
        metrics = {name: self.counts[name] for name in ("calls", "tokens", "retries", "failed")}
        if asked := self.counts["calls"] + self.counts["cached"]:
            metrics["cached_ratio"] = self.counts["cached"] / asked
        if self.counts["calls"]:
            metrics["latency_s"] = self.counts["seconds"] / self.counts["calls"]
        if agreements := [agreement for _, agreement in outcomes if agreement is not None]:
            metrics["agreement"] = sum(agreements) / len(agreements)
        for name, value in metrics.items():
            log_metric(f"judge/{name}", value)
        return [reward for rewards, _ in outcomes for reward in rewards]

    async def _score(self, task: str, answers: list[str], row: dict[str, Any]) -> tuple[list[float], None]:
        low, high = self.scale
        score = await self.ask(self._render(task, row, answers), answers) if answers[0] else low
        return [(score - low) / (high - low)], None

    async def _rank(self, task: str, answers: list[str], row: dict[str, Any]) -> tuple[list[Any], float | None]:
        """The mean ranks, which equal answers share, and the share of pairs of others that both orders rank alike."""
        if len(answers) == 1:
            return [None], None
        copies = Counter(filter(None, answers))
        shown = list(copies)
        random.Random("\0".join(answers)).shuffle(shown)
        places = []
        for order in (shown, shown[::-1]):
            ranking = range(1, len(order) + 1)
            if len(order) > 1:
                ranking = await self.ask(self._render(task, row, order), order)
            best_first = [order[number - 1] for number in ranking]
            ends = accumulate(copies[answer] for answer in best_first)  # each takes as many places as it has copies
            places.append({text: end - (copies[text] + 1) / 2 for text, end in zip(best_first, ends, strict=True)})
        first, second = places
        worst = 2 * (len(answers) - 1)
        pairs = [(first[a] < first[b]) == (second[a] < second[b]) for a, b in combinations(shown, 2)]
        ranks = [1.0 - (first[answer] + second[answer]) / worst if answer else 0.0 for answer in answers]
        return ranks, sum(pairs) / len(pairs) if pairs else None


def task_text(prompt: Any, row: dict[str, Any]) -> str:
    """What the user asked, for a judge: a prompt's messages, of a rendered ChatML one without the system's; of another
    one the row's `user_message` or `question`, else the text itself."""
    if isinstance(prompt, str):
        messages = [turn for turn in chat_messages(prompt) if turn[0] != "system"]
    else:
        messages = [(turn["role"], turn["content"]) for turn in prompt]
    texts = [str(text).strip() for _, text in messages]
    if len(texts) > 1:
        return "\n".join(f"{role}: {text}" for (role, _), text in zip(messages, texts, strict=True))
    return texts[0] if texts else str(row.get(USER_MESSAGE) or row.get(QUESTION) or prompt)


def build_judge(run: RunConfig) -> Judge:
    """The judge of `eval.judge`; raises ConfigError like `build_rewards`."""
    assert run.eval.judge is not None
    entry = RewardSection(name="judge", params=run.eval.judge.params)
    takes = [name for name in inspect.signature(Judge).parameters if name not in (*BOUND_ONLY, "mode", "scale")]
    check_params("eval.judge", entry, takes)
    bound = {"folder": run.outputs, "run": run.run.name or ""}
    return cast(Judge, construct(run, "eval.judge", entry.name, Judge, bound | entry.params))
