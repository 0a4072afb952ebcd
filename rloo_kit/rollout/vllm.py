"""Sampling by vLLM in this process: all prompts of a call at once, one request for thinking and one for the answer.

A request that follows a forced close finds its prompt and its thinking in vLLM's prefix cache. vLLM decides how many
requests run at once; the others wait.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from typing import Any

import torch

from rloo_kit.config.checks import VLLM_LEAST_TEMPERATURE
from rloo_kit.errors import BackendError, ConfigError
from rloo_kit.models.vllm import InProcessVllm
from rloo_kit.rollout.thinking_budget import CompletionState, begin_completions, collect_rollout
from rloo_kit.rollout.types import WHOLE, Filters, Limits, OnTokens, Progress, Rollout
from rloo_kit.system.signals import hold_signals

_requests = count()  # of this process: each name is used once


class VllmEngine:
    """See `engine.build_engine` for the arguments, `types.Engine` for the rest.

    Args:
        vllm: started for `model`, see `models.vllm`.
    """

    name = "vllm"
    rows: int | None = None  # vLLM queues what does not fit

    def __init__(
        self, model: Any, vllm: InProcessVllm, temperature: float, end_ids: Sequence[int], filters: Filters = WHOLE
    ) -> None:
        if 0 < temperature < VLLM_LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature is {temperature:g}, and vLLM would sample at {VLLM_LEAST_TEMPERATURE:g}: set it to 0 "
                f"(the likeliest token), or to {VLLM_LEAST_TEMPERATURE:g} or higher"
            )
        self.reason = f"{vllm.reason}; {vllm.max_num_seqs} completions at once"
        self._model, self._vllm, self._end_ids = model, vllm, list(end_ids)
        self._temperature, self._filters = temperature, filters

    def sample(
        self,
        prompt_ids: list[list[int]],
        limits: Limits,
        expected_lengths: Sequence[float] | None = None,
        on_progress: Progress | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Rollout:
        """See `types.Engine`; torch's random numbers seed the requests.

        Raises:
            BackendError: vLLM cannot hold a completion, or does not take the adapter.
        """
        self._check_lengths(prompt_ids, limits)
        seeds = torch.randint(2**31 - 1, (len(prompt_ids),)).tolist()
        states = begin_completions(limits, self._end_ids, len(prompt_ids))
        order = [number for number, state in enumerate(states) if not state.finished]
        if expected_lengths is not None:
            order.sort(key=lambda number: -expected_lengths[number])
        with self._vllm.awake():
            adapter = self._vllm.take_adapter(self._model)
            sampling = self._sampling(streams=on_tokens is not None)
            requests = _Requests(self._vllm.engine, adapter, sampling, prompt_ids, states, seeds, on_tokens)
            requests.run(order, on_progress)
        return collect_rollout(states, self._temperature)

    def _sampling(self, streams: bool) -> dict[str, Any]:
        """Keywords of SamplingParams that all requests of a call share; `streams`: they report every step, not only the
        last one."""
        from vllm.sampling_params import RequestOutputKind

        return {
            "temperature": self._temperature,
            **asdict(self._filters),
            "ignore_eos": True,  # only a request's own stop ids end it, not those in the checkpoint's files
            "logprobs": 0,  # of the sampled token only
            "detokenize": False,
            "output_kind": RequestOutputKind.CUMULATIVE if streams else RequestOutputKind.FINAL_ONLY,
        }

    def _check_lengths(self, prompt_ids: list[list[int]], limits: Limits) -> None:
        needed = max(map(len, prompt_ids)) + limits.max_completion_length
        if needed > self._vllm.max_tokens:
            raise BackendError(
                f"a prompt and {limits.max_completion_length} tokens of a completion are {needed} tokens, but vLLM was "
                f"started for {self._vllm.max_tokens}: set model.max_seq_length={needed} and load the model again, or "
                "lower rloo.max_completion_length"
            )


class _Requests:
    """The completions of one rollout, as requests to an engine of vLLM."""

    def __init__(
        self,
        engine: Any,
        adapter: Any,
        sampling: dict[str, Any],
        prompts: list[list[int]],
        states: list[CompletionState],
        seeds: list[int],
        on_tokens: OnTokens | None = None,
    ) -> None:
        self._engine, self._adapter, self._sampling = engine, adapter, sampling
        self._prompts, self._states, self._seeds, self._on_tokens = prompts, states, seeds, on_tokens
        self._open: dict[str, int] = {}  # row, by the name of its request

    def run(self, order: list[int], on_progress: Progress | None) -> None:
        """Run until all states are finished; an error or Ctrl-C leaves no request behind."""
        total = len(self._states)
        try:
            for number in order:
                self._ask(number)
            while self._open:
                with hold_signals():  # an interrupted step leaves the engine unusable
                    outputs = self._engine.step()
                if self._on_tokens is not None:
                    self._tell(outputs)
                done = [self._take(output) for output in outputs if output.finished]
                if on_progress is not None and any(done):
                    on_progress(total - len(self._open), total)
        finally:
            if self._open:
                with hold_signals():
                    self._engine.abort_request(list(self._open))

    def _tell(self, outputs: list[Any]) -> None:
        """Report the tokens of open requests so far, after those that their states already have."""
        assert self._on_tokens is not None
        for output in outputs:
            number = self._open[output.request_id]
            self._on_tokens(number, self._states[number].ids + list(output.outputs[0].token_ids))

    def _ask(self, number: int) -> None:
        """Request the next stretch of a completion: up to a limit, `</think>` or an end."""
        from vllm import SamplingParams

        state = self._states[number]
        while state.next_forced is not None:
            state.take(state.next_forced, math.nan)
        if state.finished:
            return
        room, stops = state.next_stretch
        seed = (self._seeds[number] + state.answers) % 2**31
        parameters = SamplingParams(max_tokens=room, stop_token_ids=stops, seed=seed, **self._sampling)
        name = f"rloo-{next(_requests)}"
        prompt = {"prompt_token_ids": self._prompts[number] + state.ids}
        self._open[name] = number
        with hold_signals():
            self._engine.add_request(name, prompt, parameters, lora_request=self._adapter)

    def _take(self, output: Any) -> bool:
        """Give a finished request's tokens to its state and request what follows; returns whether the completion is
        done."""
        number, found = self._open.pop(output.request_id), output.outputs[0]
        ids, state = list(found.token_ids), self._states[number]
        if found.finish_reason not in ("stop", "length") or not ids:
            raise BackendError(f"vLLM aborted a completion (finish_reason {found.finish_reason}): see its log above")
        for token, scores in zip(ids, found.logprobs, strict=True):
            logp = scores[token].logprob
            if not math.isfinite(logp):
                raise BackendError(
                    "vLLM sampled from logits that contain a NaN: the weights are broken (a learning rate too high?); "
                    "restart the process, and resume from an earlier checkpoint with a lower rloo.learning_rate"
                )
            state.take(token, logp)
        self._ask(number)
        return state.finished
