"""Sampling by vLLM, in this process or on a server: one request for a completion's thinking and one for its answer.

A request that follows a forced close finds its prompt and its thinking in vLLM's prefix cache. vLLM decides how many
requests run at once; the others wait.
"""

import json
import math
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from rloo_kit.collective import share_from_main, wait_for_all
from rloo_kit.config.checks import VLLM_LEAST_TEMPERATURE
from rloo_kit.errors import BackendError, ConfigError, RolloutServerError
from rloo_kit.images.tokens import FIRST_ID
from rloo_kit.rollout.engine import Call, Engine, Sampling
from rloo_kit.rollout.types import CompletionState
from rloo_kit.system.processes import hold_signals, is_main_process
from rloo_kit.vllm.client import VllmClient
from rloo_kit.vllm.images import make_prompt
from rloo_kit.vllm.in_process import InProcessVllm

_requests = count()  # of this process: each name is used once


class VllmEngine(Engine):
    """See `choice.build_engine` for the arguments. torch's random numbers seed the requests.

    Args:
        vllm: started for `model`, see `in_process`; it queues what does not fit.
    """

    name = "vllm"

    def __init__(self, model: Any, vllm: InProcessVllm, sampling: Sampling) -> None:
        if 0 < sampling.temperature < VLLM_LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature is {sampling.temperature:g}, and vLLM would sample at {VLLM_LEAST_TEMPERATURE:g}: set it "
                f"to 0 (the likeliest token), or to {VLLM_LEAST_TEMPERATURE:g} or higher"
            )
        super().__init__(f"{vllm.reason}; {vllm.max_num_seqs} completions at once", replace(sampling, rows=None))
        self._model, self._vllm = model, vllm

    def _finish(self, call: Call) -> None:
        needed = max(len(state.prompt) for state in call.states) + call.limits.max_completion_length
        if needed > self._vllm.max_tokens:
            raise BackendError(
                f"a prompt and {call.limits.max_completion_length} tokens of a completion are {needed} tokens, but "
                f"vLLM was started for {self._vllm.max_tokens}: set model.max_seq_length={needed} and load the model "
                "again, or lower rloo.max_completion_length"
            )
        seeds = torch.randint(2**31 - 1, (len(call.states),)).tolist()
        with self._vllm.awake():
            adapter, engine = self._vllm.take_adapter(self._model), self._vllm.engine
            asked: dict[str, CompletionState] = {}  # by the name of the request
            scaled: dict[str, Any] = {}  # images by digest

            def ask(state: CompletionState) -> None:
                """Request the next stretch of a completion: up to a limit, `</think>` or an end."""
                while state.next_forced is not None:
                    state.take(state.next_forced, math.nan)
                if not state.finished:
                    name = f"rloo-{next(_requests)}"
                    prompt = make_prompt(state.prompt + state.ids, self._vllm.vision, scaled)
                    parameters = self._parameters(state, seeds[state.number])
                    asked[name] = state
                    with hold_signals():
                        engine.add_request(name, prompt, parameters, lora_request=adapter)

            try:
                for number in call.order:
                    ask(call.states[number])
                while asked or call.away:
                    for state in call.come_back(None if not asked else 0.0):
                        ask(state)
                    if not asked:
                        continue
                    with hold_signals():  # an interrupted step leaves the engine unusable
                        outputs = engine.step()
                    done = [(asked.pop(output.request_id), output.outputs[0]) for output in outputs if output.finished]
                    for state, completion in done:
                        _take(state, completion)
                        ask(state)
                        call.send_away(state)
                    if any(state.finished for state, _ in done):
                        call.report(len(call.states) - len(asked) - len(call.away))
            finally:  # an error or Ctrl-C leaves no request behind
                if asked:
                    with hold_signals():
                        engine.abort_request(list(asked))

    def _parameters(self, state: CompletionState, seed: int) -> Any:
        """The SamplingParams of a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room, stops = state.next_stretch
        return SamplingParams(
            max_tokens=room,
            stop_token_ids=stops,
            seed=(seed + state.requests) % 2**31,
            temperature=self.sampling.temperature,
            **self.sampling.filters.to_vllm(),
            ignore_eos=True,  # only a request's own stop ids end it, not those in the checkpoint's files
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _take(state: CompletionState, completion: Any) -> None:
    ids = list(completion.token_ids)
    if completion.finish_reason not in ("stop", "length") or not ids:
        raise BackendError(f"vLLM aborted a completion (finish_reason {completion.finish_reason}): see its log above")
    for token, scores in zip(ids, completion.logprobs, strict=True):
        logp = scores[token].logprob
        if not math.isfinite(logp):
            raise BackendError(
                "vLLM sampled from logits that contain a NaN: the weights are broken (a learning rate too high?); "
                "restart the process, and resume from an earlier checkpoint with a lower rloo.learning_rate"
            )
        state.take(token, logp)


IN_FLIGHT = 256  # requests of one process at once, if `rows` is None; the server queues the rest
CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class ServerSettings:
    """Where the server is and how it gets the adapter.

    Attributes:
        url: http://host:port.
        folder: for adapters; the server sees it under the same path. Other runs and other files may share it.
        hand_over: writes the adapter into the empty folder that it is given; called by all processes at once.
        vocabulary: number of ids that the model knows; an answer with another id is refused.
    """

    url: str
    folder: Path
    hand_over: Callable[[Path], None]
    vocabulary: int


class ServerEngine(Engine):
    """See `choice.build_engine` for the arguments. All processes of a run call `sample` at once; torch's random numbers
    seed the requests.

    `sample` raises `RolloutServerError` where the server is down, was restarted, refuses the adapter or cannot hold the
    completions.

    Attributes:
        rows: requests of this process in flight at once; None for up to 256.
    """

    name = "server"

    def __init__(self, settings: ServerSettings, reason: str, sampling: Sampling) -> None:
        super().__init__(f"{reason}; {settings.url}", sampling)
        self._settings = settings
        self._folder = settings.folder.resolve()
        self._client = VllmClient(settings.url, sampling.say)
        self._stem, self._count = f"rloo-{uuid4().hex}", 0
        self._adapter: str | None = None  # its name, on the server and as a folder
        self._made_folder = False  # by this process, for its adapters
        self._max_tokens: int | None = None
        self._stop = threading.Event()  # no further requests

    def _finish(self, call: Call) -> None:
        if any(max(state.prompt) >= FIRST_ID for state in call.states):
            raise BackendError("a server's completions API takes no images: set rollout.engine=generate or vllm")
        self._stop.clear()
        self._publish(call.states[0].prompt)
        longest, room = max(len(state.prompt) for state in call.states), call.limits.max_completion_length
        if self._max_tokens is not None and longest + room > self._max_tokens:
            raise RolloutServerError(
                f"a prompt of {longest} tokens and a completion of {room} exceed the {self._max_tokens} of "
                f"{self._client.url}: start it with --max-model-len {longest + room} or more, or lower "
                "rloo.max_completion_length"
            )
        self._sample_all(call)

    def close(self) -> None:
        """Unload the adapter and delete its folder; the next `sample` writes and loads it again."""
        if self._adapter is not None and is_main_process():
            self._forget(self._adapter)
        self._adapter = None

    def _publish(self, prompt: list[int]) -> None:
        """Make the server sample from the current policy; a failure is raised in all processes."""
        self._count += 1
        name = f"{self._stem}-{self._count:06d}"  # of the main process; the others get it below
        try:
            share_from_main(lambda: self._make_folder(name))
            self._settings.hand_over(self._folder / name)
            wait_for_all()  # from here on, no process samples from the last adapter
            self._adapter, self._max_tokens = share_from_main(lambda: self._replace(name, prompt))
        except BaseException:  # Ctrl-C too: it leaves no folder
            if self._adapter == name:
                self.close()
            elif is_main_process():
                shutil.rmtree(self._folder / name, ignore_errors=True)
            with suppress(OSError):  # it contains something else
                if self._made_folder:
                    self._folder.rmdir()
            raise

    def _make_folder(self, name: str) -> None:
        try:
            self._made_folder |= not self._folder.exists()
            (self._folder / name).mkdir(parents=True)  # fails if it exists
        except OSError as error:
            raise RolloutServerError(
                f"the adapter cannot be written into {self._folder}: {error.strerror or error}; set "
                "rollout.server_adapters to a folder that this user may write"
            ) from error

    def _replace(self, name: str, prompt: list[int]) -> tuple[str, int | None]:
        """The server's new adapter, and its limit for prompt and completion together."""
        if self._adapter is not None:
            self._forget(self._adapter)  # before the next one is loaded: by default a server has room for one
            self._adapter = None
            self._load(name)
            return name, self._max_tokens
        bases, max_tokens = self._client.read_served()
        trained = str(self._read_config(name).get("base_model_name_or_path") or "")
        if _last_part(trained) not in {_last_part(text) for pair in bases.items() for text in pair}:
            pairs = ", ".join(f"{name} ({root})" for name, root in bases.items())
            self.sampling.say(
                f"rollout: the server at {self._client.url} serves {pairs}, but this run trains "
                f"{trained or 'a model without a name'}: the weights have to be the same"
            )
        self._load(name)
        self._adapter = name
        temperature, filters = self.sampling.temperature, self.sampling.filters
        matters = temperature > 0 and (temperature != 1 or filters.active)
        if matters and self._client.find_logprobs_mode(name, prompt, temperature) == "raw":
            filtered = f" with the filters {filters}" if filters.active else ""
            raise RolloutServerError(
                f"rloo.temperature is {temperature}{filtered}, but {self._client.url} returns raw log-probabilities, "
                "from before temperature and filters: start it with --logprobs-mode processed_logprobs"
            )
        return name, max_tokens

    def _load(self, name: str) -> None:
        self._client.load_adapter(name, str(self._folder / name), self._read_config(name)["r"])

    def _forget(self, name: str) -> None:
        try:
            self._client.unload_adapter(name)
        except RolloutServerError as error:
            self.sampling.say(f"rollout: {error}")  # costs the server a little memory, and the run nothing
        shutil.rmtree(self._folder / name, ignore_errors=True)

    def _read_config(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self._folder / name / CONFIG).read_text(encoding="utf-8")))

    def _sample_all(self, call: Call) -> None:
        """Finish all states. An error ends it as soon as the requests in flight are done: vLLM's engine dies when it
        needs an adapter that was replaced and whose folder was deleted."""
        seeds = torch.randint(2**31 - 1, (len(call.states),)).tolist()
        with ThreadPoolExecutor(self.rows or IN_FLIGHT, thread_name_prefix="rollout") as pool:
            tasks = [pool.submit(self._sample_one, call.states[number], seeds[number], call) for number in call.order]
            try:
                for done, task in enumerate(as_completed(tasks), len(call.states) - len(tasks) + 1):
                    task.result()
                    call.report(done)
            finally:
                self._stop.set()
                pool.shutdown(cancel_futures=True)

    def _sample_one(self, state: CompletionState, seed: int, call: Call) -> None:
        """Finish one completion; the answer after closed thinking is a second request, and each turn has its own."""
        vocabulary = self._settings.vocabulary
        while not self._stop.is_set() and (not state.finished or call.ask_and_wait(state)):
            if state.next_forced is not None:
                state.take(state.next_forced, math.nan)
                continue
            room, stops = state.next_stretch
            prefix, number = state.prompt + state.ids, (seed + state.requests) % 2**31
            ids, logps = self._client.complete(str(self._adapter), prefix, room, stops, number, self.sampling)
            if max(ids) >= vocabulary:
                raise RolloutServerError(
                    f"{self._client.url} sampled the id {max(ids)}, but this run's model has {vocabulary} ids: serve "
                    "the model that is trained"
                )
            for token, logp in zip(ids, logps, strict=True):
                state.take(token, logp)


def _last_part(name: str) -> str:
    """The last part of a model's name or path, in lower case."""
    return name.rstrip("/").rsplit("/", 1)[-1].lower()
