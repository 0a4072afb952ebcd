"""Sampling by vLLM in this process: all prompts of a call at once, one request for thinking and one for the answer.

A request that follows a forced close finds its prompt and its thinking in vLLM's prefix cache. vLLM decides how many
requests run at once; the others wait.
"""

import math
from dataclasses import asdict, replace
from itertools import count
from typing import Any

import torch

from rloo_kit.config.checks import VLLM_LEAST_TEMPERATURE
from rloo_kit.errors import BackendError, ConfigError
from rloo_kit.models.vllm import InProcessVllm
from rloo_kit.rollout.types import Call, Engine, Sampling
from rloo_kit.system.processes import hold_signals

_requests = count()  # of this process: each name is used once


class VllmEngine(Engine):
    """See `engine.build_engine` for the arguments. torch's random numbers seed the requests.

    Args:
        vllm: started for `model`, see `models.vllm`; it queues what does not fit.
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
        needed = max(map(len, call.prompt_ids)) + call.limits.max_completion_length
        if needed > self._vllm.max_tokens:
            raise BackendError(
                f"a prompt and {call.limits.max_completion_length} tokens of a completion are {needed} tokens, but "
                f"vLLM was started for {self._vllm.max_tokens}: set model.max_seq_length={needed} and load the model "
                "again, or lower rloo.max_completion_length"
            )
        seeds = torch.randint(2**31 - 1, (len(call.prompt_ids),)).tolist()
        with self._vllm.awake():
            adapter = self._vllm.take_adapter(self._model)
            sampling = self._sampling(streams=call.on_tokens is not None)
            _Requests(self._vllm.engine, adapter, sampling, call, seeds).run()

    def _sampling(self, streams: bool) -> dict[str, Any]:
        """Keywords of SamplingParams that all requests of a call share; `streams`: they report every step, not only the
        last one."""
        from vllm.sampling_params import RequestOutputKind

        return {
            "temperature": self.sampling.temperature,
            **asdict(self.sampling.filters),
            "ignore_eos": True,  # only a request's own stop ids end it, not those in the checkpoint's files
            "logprobs": 0,  # of the sampled token only
            "detokenize": False,
            "output_kind": RequestOutputKind.CUMULATIVE if streams else RequestOutputKind.FINAL_ONLY,
        }


class _Requests:
    """The completions of one call, as requests to an engine of vLLM."""

    def __init__(self, engine: Any, adapter: Any, sampling: dict[str, Any], call: Call, seeds: list[int]) -> None:
        self._engine, self._adapter, self._sampling, self._call, self._seeds = engine, adapter, sampling, call, seeds
        self._open: dict[str, int] = {}  # row, by the name of its request

    def run(self) -> None:
        """Run until all states are finished; an error or Ctrl-C leaves no request behind."""
        call = self._call
        try:
            for number in call.order:
                self._ask(number)
            while self._open:
                with hold_signals():  # an interrupted step leaves the engine unusable
                    outputs = self._engine.step()
                if call.on_tokens is not None:  # the tokens so far, after those that the states already have
                    for output in outputs:
                        number = self._open[output.request_id]
                        call.on_tokens(number, call.states[number].ids + list(output.outputs[0].token_ids))
                done = [self._take(output) for output in outputs if output.finished]
                if any(done):
                    call.report(len(call.states) - len(self._open))
        finally:
            if self._open:
                with hold_signals():
                    self._engine.abort_request(list(self._open))

    def _ask(self, number: int) -> None:
        """Request the next stretch of a completion: up to a limit, `</think>` or an end."""
        from vllm import SamplingParams

        state = self._call.states[number]
        while state.next_forced is not None:
            state.take(state.next_forced, math.nan)
        if state.finished:
            return
        room, stops = state.next_stretch
        seed = (self._seeds[number] + state.answers) % 2**31
        parameters = SamplingParams(max_tokens=room, stop_token_ids=stops, seed=seed, **self._sampling)
        name = f"rloo-{next(_requests)}"
        prompt = {"prompt_token_ids": self._call.prompt_ids[number] + state.ids}
        self._open[name] = number
        with hold_signals():
            self._engine.add_request(name, prompt, parameters, lora_request=self._adapter)

    def _take(self, output: Any) -> bool:
        """Give a finished request's tokens to its state and request what follows; returns whether the completion is
        done."""
        number, found = self._open.pop(output.request_id), output.outputs[0]
        ids, state = list(found.token_ids), self._call.states[number]
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
