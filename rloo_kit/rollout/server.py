"""Sampling on a vLLM server: it loads the adapter from a folder before each rollout; tokens travel over HTTP.

All processes write the adapter (`hand_over`). The main one makes the server load it under a name never used before,
because a server looks up cached prefixes by that name. Then each process requests its own completions.
"""

import filecmp
import json
import math
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from uuid import uuid4

import torch

from rloo_kit.collective import share, wait_for_all
from rloo_kit.errors import RolloutServerError
from rloo_kit.rollout.types import Call, CompletionState, Engine, Limits, Progress, Sampling
from rloo_kit.rollout.vllm_answers import Continuation
from rloo_kit.rollout.vllm_client import AdapterLostError, VllmClient
from rloo_kit.system.processes import is_main_process

IN_FLIGHT = 256  # requests of one process at once, if `rows` is None; the server queues the rest
PREFIX = "rloo-"  # of the names of adapters and their folders
LOOK_S = 30.0  # without an answer, after which the server's state is checked
RELOADS = 3  # of the adapter, at most, for one request: a server may be restarted twice in a row
MARKER = ".rloo-kit-run"  # a file in an adapter's folder that names the run that may delete it (`ServerSettings.run`)
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class ServerSettings:
    """Where the server is and how it gets the adapter.

    Attributes:
        url: http://host:port.
        folder: for adapters; the server sees it under the same path. Other runs and other files may share it.
        hand_over: writes the adapter into the empty folder that it is given; called by all processes at once.
        run: identifies this run. What an earlier process of the same run left in `folder` is deleted.
        vocabulary: number of ids that the model knows; an answer with another id is refused. None: not checked.
    """

    url: str
    folder: Path
    hand_over: Callable[[Path], None]
    run: str
    vocabulary: int | None = None


class ServerEngine(Engine):
    """See `engine.build_engine` for the arguments. All processes of a run call `sample` at once; torch's random numbers
    seed the requests. `on_tokens` gets whole completions once all are done: the server's answers are not streamed.

    Attributes:
        rows: requests of this process in flight at once; None for up to 256.

    Raises:
        RolloutServerError: from `sample`: the server is down, refuses the adapter or cannot hold the completions.
    """

    name = "server"

    def __init__(
        self, settings: ServerSettings, reason: str, sampling: Sampling, client: VllmClient | None = None
    ) -> None:
        super().__init__(f"{reason}; {settings.url}", sampling)
        self._settings, self._say = settings, sampling.say
        self._folder = settings.folder.resolve()
        self._temperature, self._end_ids, self._filters = sampling.temperature, sampling.end_ids, sampling.filters
        self._client = VllmClient(settings.url, say=sampling.say) if client is None else client
        self._stem = f"{PREFIX}{uuid4().hex}"
        self._count = 0
        self._adapter: str | None = None  # its name, on the server and as a folder
        self._made_folder = False  # by this process, for its adapters
        self._max_tokens: int | None = None
        self._reloading = threading.Lock()
        self._reloads = 0  # of the adapter, in this rollout
        self._losses = 0  # times in this rollout that the server lost the requests in flight
        self._is_lost = False  # at the last check the server was down or restarted, and the adapter is not reloaded yet

    def _finish(self, call: Call) -> None:
        self._publish(call.prompt_ids[0])
        self._check_lengths(call.prompt_ids, call.limits)
        self._reloads, self._losses, self._is_lost = 0, 0, False
        seeds = torch.randint(2**31 - 1, (len(call.prompt_ids),)).tolist()

        def sample_one(number: int, stop: threading.Event) -> CompletionState:
            return self._sample_one(call.prompt_ids[number], call.limits, seeds[number], stop)

        rows = self.rows or IN_FLIGHT
        found = _run_all(sample_one, call.order, rows, call.on_progress, self._count_losses, self._client.hang_up)
        for number, state in sorted(found.items()):
            call.states[number] = state
            if call.on_tokens is not None:
                call.on_tokens(number, state.ids)

    def close(self) -> None:
        """Unload the adapter and delete its folder; the next `sample` writes and loads it again."""
        if self._adapter is not None and is_main_process():
            self._forget(self._adapter)
        self._adapter = None

    # ------------------------------------------------------------------------------------------------ the adapter

    def _publish(self, prompt: list[int]) -> None:
        """Make the server sample from the current policy; a failure is raised in all processes."""
        self._count += 1
        name = f"{self._stem}-{self._count:06d}"  # only the main process's count matters: `share` replaces the others'
        if problem := share(self._make_folder(name)):
            raise RolloutServerError(problem)
        try:
            self._settings.hand_over(self._folder / name)
            wait_for_all()  # from here on, no process samples from the last adapter
            outcome: tuple[str | None, int | None, str] = (None, None, "")
            raised: Exception | None = None
            if is_main_process():
                try:
                    outcome = (self._replace(name, prompt), self._max_tokens, "")
                except Exception as error:
                    raised, outcome = error, (None, None, str(error))
            adapter, self._max_tokens, problem = share(outcome)
            if raised is not None:
                raise raised
            if adapter is None:
                raise RolloutServerError(f"the main process could not load the adapter into the server: {problem}")
            self._adapter = adapter
        except BaseException:  # Ctrl-C too: it leaves no folder
            if self._adapter == name:
                self.close()
            elif is_main_process():
                shutil.rmtree(self._folder / name, ignore_errors=True)
            with suppress(OSError):  # it contains something else
                if self._made_folder:
                    self._folder.rmdir()
            raise

    def _replace(self, name: str, prompt: list[int]) -> str:
        """The adapter that the server now has: the new one, or the last one if both are equal."""
        new, last = self._folder / name, self._adapter
        if last is not None and filecmp.cmp(new / WEIGHTS, self._folder / last / WEIGHTS, shallow=False):
            shutil.rmtree(new)
            return last
        config = json.loads((new / CONFIG).read_text(encoding="utf-8"))
        if last is None:
            self._greet(config)
            self._clear_leftovers(name)
        else:
            self._forget(last)  # before the next one is loaded: by default a server has room for one
        self._load(name, config["r"])
        self._adapter = name
        if last is None and self._temperature > 0 and (self._temperature != 1 or self._filters.active):
            self._check_mode(name, prompt)
        return name

    def _greet(self, config: dict[str, Any]) -> None:
        """On first use: wait for the server and compare its base with the run's."""
        self._client.wait_until_up()
        served = self._client.read_served()
        self._max_tokens = served.max_tokens
        trained = str(config.get("base_model_name_or_path") or "")
        names = {_last(text) for pair in served.bases.items() for text in pair}
        if _last(trained) not in names:
            pairs = ", ".join(f"{name} ({root})" for name, root in served.bases.items())
            self._say(
                f"rollout: the server at {self._client.url} serves {pairs}, but this run trains "
                f"{trained or 'a model without a name'}: the weights have to be the same"
            )

    def _check_mode(self, name: str, prompt: list[int]) -> None:
        """Refuse log-probabilities from before temperature and filters: they are not those of the sampled
        distribution."""
        if self._client.find_logprobs_mode(name, prompt, self._temperature) == "raw":
            filtered = f" with the filters {self._filters}" if self._filters.active else ""
            raise RolloutServerError(
                f"rloo.temperature is {self._temperature}{filtered}, but {self._client.url} returns raw "
                "log-probabilities, from before temperature and filters: start it with "
                "--logprobs-mode processed_logprobs"
            )

    def _load(self, name: str, rank: int) -> None:
        self._client.load_adapter(name, str(self._folder / name), rank)

    def _forget(self, name: str) -> None:
        try:
            self._client.unload_adapter(name)
        except RolloutServerError as error:
            self._say(f"rollout: {error}")  # costs the server a little memory, and the run nothing
        shutil.rmtree(self._folder / name, ignore_errors=True)

    def _make_folder(self, name: str) -> str:
        """Create an empty folder for an adapter, in the main process; returns the problem, or ""."""
        if not is_main_process():
            return ""
        try:
            self._made_folder |= not self._folder.exists()
            (self._folder / name).mkdir(parents=True)  # fails if it exists
            (self._folder / name / MARKER).write_text(self._settings.run, encoding="utf-8")
        except OSError as error:
            return (
                f"the adapter cannot be written into {self._folder}: {error.strerror or error}; set "
                "rollout.server_adapters to a folder that this user may write"
            )
        return ""

    def _clear_leftovers(self, new: str) -> None:
        """Unload and delete what a killed process of this run left behind, found by its marker."""
        for folder in self._folder.glob(f"{PREFIX}*"):
            if folder.name != new and self._is_ours(folder):
                self._forget(folder.name)

    def _is_ours(self, folder: Path) -> bool:
        """Whether a process of this run made the folder; links are not followed."""
        marker = folder / MARKER
        try:
            is_plain = folder.lstat().st_uid == os.getuid() and not folder.is_symlink() and not marker.is_symlink()
            return is_plain and marker.is_file() and marker.read_bytes() == self._settings.run.encode()
        except OSError:
            return False

    # ------------------------------------------------------------------------------------------------ completions

    def _check_lengths(self, prompt_ids: list[list[int]], limits: Limits) -> None:
        longest = max(map(len, prompt_ids))
        if self._max_tokens is not None and longest + limits.max_completion_length > self._max_tokens:
            raise RolloutServerError(
                f"a prompt of {longest} tokens and a completion of {limits.max_completion_length} exceed the "
                f"{self._max_tokens} of {self._client.url}: start it with --max-model-len "
                f"{longest + limits.max_completion_length} or more, or lower rloo.max_completion_length"
            )

    def _sample_one(self, prompt: list[int], limits: Limits, seed: int, stop: threading.Event) -> CompletionState:
        """A completion of one prompt; the answer after closed thinking is a second request."""
        state = CompletionState(limits, self._end_ids)
        while not state.finished:
            if state.next_forced is not None:
                state.take(state.next_forced, math.nan)
                continue
            room, stops = state.next_stretch
            found = self._complete(prompt + state.ids, room, stops, (seed + state.answers) % 2**31, stop)
            if max(found.ids) >= (self._settings.vocabulary or 2**31):
                raise RolloutServerError(
                    f"{self._client.url} sampled the id {max(found.ids)}, but this run's model has "
                    f"{self._settings.vocabulary} ids: serve the model that is trained"
                )
            for token, logp in zip(found.ids, found.logps, strict=True):
                state.take(token, logp)
        return state

    def _complete(
        self, prefix: list[int], room: int, stops: list[int], seed: int, stop: threading.Event
    ) -> Continuation:
        """One request; if the server was restarted, the first thread that notices loads the adapter again."""
        assert self._adapter is not None
        arguments = (self._adapter, prefix, room, stops, self._temperature, seed, stop, self._filters)
        for _ in range(RELOADS):
            reloads = self._reloads
            try:
                return self._client.complete(*arguments)
            except AdapterLostError as error:
                with self._reloading:
                    if self._reloads == reloads and not stop.is_set():
                        self._reload(self._adapter, error)
        return self._client.complete(*arguments)

    def _reload(self, adapter: str, error: AdapterLostError) -> None:
        """Load the adapter again; the caller holds the lock."""
        self._say(f"rollout: {error}; loading it again")
        config = json.loads((self._folder / adapter / CONFIG).read_text(encoding="utf-8"))
        self._load(adapter, config["r"])
        self._reloads += 1
        self._losses += not self._is_lost  # else `_count_losses` counted it already
        self._is_lost = False

    def _count_losses(self) -> int:
        """Check the server; returns how often in this rollout it was found to be down or restarted."""
        assert self._adapter is not None
        reloads = self._reloads
        is_lost = self._client.has_lost(self._adapter)
        with self._reloading:
            if self._reloads == reloads:  # else the check is older than the reload, which counted the loss
                self._losses += is_lost and not self._is_lost
                self._is_lost = is_lost
        return self._losses


class _Workers:
    """Threads that run `work(number, stop)` for all numbers, in order, `at_once` in parallel, and put the results into
    `done`. They are daemons and not joined: a request in flight must not keep the process alive."""

    def __init__(
        self,
        work: Callable[[int, threading.Event], CompletionState],
        numbers: list[int],
        at_once: int,
        done: "SimpleQueue[tuple[_Workers, int, CompletionState | BaseException]]",
    ) -> None:
        self._work, self._done = work, done
        self._waiting: SimpleQueue[int] = SimpleQueue()
        self.stop = threading.Event()
        for number in numbers:
            self._waiting.put(number)
        for _ in range(min(at_once, len(numbers))):
            threading.Thread(target=self._serve, name="rollout", daemon=True).start()

    def _serve(self) -> None:
        while not self.stop.is_set():
            try:
                number = self._waiting.get_nowait()
            except Empty:
                return
            try:
                self._done.put((self, number, self._work(number, self.stop)))
            except BaseException as error:
                self._done.put((self, number, error))


def _run_all(
    work: Callable[[int, threading.Event], CompletionState],
    numbers: list[int],
    at_once: int,
    on_progress: Progress | None,
    count_losses: Callable[[], int],
    hang_up: Callable[[], None],
) -> dict[int, CompletionState]:
    """Run `work(number, stop)` for all numbers; the first error ends it.

    A server that is shut down (SIGTERM) stops listening and never answers the requests in flight. After `LOOK_S`
    without an answer, open requests are therefore sent again if `count_losses` has grown. No request stays in flight at
    the end: vLLM's engine dies when it needs an adapter that was replaced and whose folder was deleted.
    """
    done: SimpleQueue[tuple[_Workers, int, CompletionState | BaseException]] = SimpleQueue()
    workers, seen = _Workers(work, numbers, at_once, done), 0
    found: dict[int, CompletionState] = {}
    try:
        while len(found) < len(numbers):
            try:
                source, number, result = done.get(timeout=LOOK_S)
            except Empty:
                if (losses := count_losses()) > seen:
                    seen = losses
                    workers.stop.set()
                    hang_up()
                    workers = _Workers(work, [number for number in numbers if number not in found], at_once, done)
                continue
            if isinstance(result, BaseException):
                if source is workers:
                    raise result
            elif number not in found:
                found[number] = result
                if on_progress is not None:
                    on_progress(len(found), len(numbers))
    finally:
        workers.stop.set()
        if len(found) < len(numbers):
            hang_up()
    return found


def _last(name: str) -> str:
    """The last part of a model's name or path, in lower case."""
    return name.rstrip("/").rsplit("/", 1)[-1].lower()
