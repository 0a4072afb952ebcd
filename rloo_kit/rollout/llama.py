"""Sampling from a GGUF file with llama.cpp in this process (`xllamacpp`): for questions, not for training.

The library also listens on a free port of this machine; the kit does not use it.
"""

import math
from dataclasses import replace
from pathlib import Path
from shlex import quote
from types import SimpleNamespace
from typing import Any

import torch

from rloo_kit.errors import BackendError, SetupError
from rloo_kit.rollout.types import Call, CompletionState, Engine, OnTokens, Sampling
from rloo_kit.system.versions import is_importable


class LlamaModel:
    """A GGUF file in place of a policy's model: it can only be sampled from.

    Args:
        file: the path. max_tokens: of a prompt and its completion together.

    Raises:
        SetupError: xllamacpp is not installed. BackendError: llama.cpp cannot read the file.
    """

    def __init__(self, file: Path, max_tokens: int) -> None:
        if not is_importable("xllamacpp"):
            model, modelfile = quote(str(file)), quote(str(file.parent / "Modelfile"))
            raise SetupError(
                f"{file} is for llama.cpp, which is not installed: pip install xllamacpp, or use another program: "
                f"llama-cli -m {model}, or ollama create NAME -f {modelfile} and ollama run NAME"
            )
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path, parameters.n_ctx = str(file), max_tokens
        parameters.n_parallel, parameters.warmup, parameters.verbosity = 1, False, 0
        try:
            self.server = xllamacpp.Server(parameters)
        except RuntimeError as error:
            raise BackendError(f"llama.cpp cannot load {file}: {error}") from error
        self.config = SimpleNamespace(max_position_embeddings=max_tokens, name_or_path=str(file))
        self.generation_config = SimpleNamespace(eos_token_id=None)
        self.device = torch.device("cpu")  # of the ids


class LlamaEngine(Engine):
    """Its log-probabilities are NaN, torch's random numbers seed the requests; BackendError if one is refused."""

    name = "llama.cpp"

    def __init__(self, model: LlamaModel, sampling: Sampling) -> None:
        super().__init__("the model is a GGUF file", replace(sampling, rows=1))
        self._model = model

    def _finish(self, call: Call) -> None:
        for done, number in enumerate(call.order, 1):
            state = call.states[number]
            while not state.finished:
                while state.next_forced is not None:
                    state.take(state.next_forced, math.nan)
                if not state.finished:
                    self._continue(call.prompt_ids[number], state, number, call.on_tokens)
            call.report(done)

    def _continue(self, prompt: list[int], state: CompletionState, number: int, on_tokens: OnTokens | None) -> None:
        """Sample to the completion's end, or to the point where its thinking is closed by force."""
        raised: list[BaseException] = []
        taken = len(state.ids)

        def on_chunk(chunk: dict[str, Any]) -> bool:
            """Whether llama.cpp has to stop; an exception would not propagate through it."""
            try:
                if "choices" not in chunk:
                    raise BackendError(f"llama.cpp refuses the prompt: {chunk.get('message', chunk)}")
                scores = chunk["choices"][0].get("logprobs") or {}
                for token in scores.get("content") or []:
                    if not state.finished and state.next_forced is None:
                        state.take(token["id"], math.nan)
                        if on_tokens is not None:
                            on_tokens(number, state.ids)
            except BaseException as error:
                raised.append(error)
            return bool(raised) or state.finished or state.next_forced is not None

        request = {
            "prompt": prompt + state.ids,
            "max_tokens": state.room,
            "temperature": self.sampling.temperature,
            "samplers": ["temperature"],  # the whole distribution
            "seed": int(torch.randint(2**31 - 1, ())),
            "logprobs": 1,  # makes it return the ids
            "stream": True,
        }
        self._model.server.handle_completions(request, on_chunk)
        if raised:
            raise raised[0]
        if len(state.ids) == taken:
            raise BackendError("llama.cpp gave no token: is the file made for this run's tokenizer?")
        if state.room > 0 and state.next_forced is None:
            state.finished = True  # it ended with an end token that only the file names
