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
from rloo_kit.rollout.types import Call, CompletionState, Engine, Sampling
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

            def ask(state: CompletionState) -> None:
                """Request the next stretch of a completion: up to a limit, `</think>` or an end."""
                while state.next_forced is not None:
                    state.take(state.next_forced, math.nan)
                if not state.finished:
                    name, prompt = f"rloo-{next(_requests)}", {"prompt_token_ids": state.prompt + state.ids}
                    parameters = self._parameters(state, seeds[state.number], streams=call.on_tokens is not None)
                    asked[name] = state
                    with hold_signals():
                        engine.add_request(name, prompt, parameters, lora_request=adapter)

            try:
                for number in call.order:
                    ask(call.states[number])
                while asked:
                    with hold_signals():  # an interrupted step leaves the engine unusable
                        outputs = engine.step()
                    if call.on_tokens is not None:  # the tokens so far, after those that the states already have
                        for output in outputs:
                            state = asked[output.request_id]
                            call.on_tokens(state.number, state.ids + list(output.outputs[0].token_ids))
                    done = [(asked.pop(output.request_id), output.outputs[0]) for output in outputs if output.finished]
                    for state, found in done:
                        _take(state, found)
                        ask(state)
                    if any(state.finished for state, _ in done):
                        call.report(len(call.states) - len(asked))
            finally:  # an error or Ctrl-C leaves no request behind
                if asked:
                    with hold_signals():
                        engine.abort_request(list(asked))

    def _parameters(self, state: CompletionState, seed: int, streams: bool) -> Any:
        """The SamplingParams of a request; `streams`: it reports every step, not only the last one."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room, stops = state.next_stretch
        return SamplingParams(
            max_tokens=room,
            stop_token_ids=stops,
            seed=(seed + state.answers) % 2**31,
            temperature=self.sampling.temperature,
            **asdict(self.sampling.filters),
            ignore_eos=True,  # only a request's own stop ids end it, not those in the checkpoint's files
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE if streams else RequestOutputKind.FINAL_ONLY,
        )


def _take(state: CompletionState, found: Any) -> None:
    """Give a finished request's tokens to its state."""
    ids = list(found.token_ids)
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
