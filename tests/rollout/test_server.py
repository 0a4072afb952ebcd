"""Rollouts from a server, against a stand-in with real sockets and a real model: what is sent, in which order, and what
comes back; then a trainer that learns through it."""

import copy
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rloo_kit.errors import ConfigError, RolloutServerError
from rloo_kit.rollout.engine import Sampling
from rloo_kit.rollout.types import WHOLE, Filters, Limits
from rloo_kit.vllm.engines import ServerEngine, ServerSettings
from tests.loop.test_parallel import TORCHRUN
from tests.rollout.models import (
    BUDGET,
    END_OF_TEXT,
    FILTERS,
    THINK_END,
    TURN_END,
    adapted,
    budget_kinds,
    check_kept,
    check_logps,
    engine_for,
    lean,
    shake,
)  # fmt: skip
from tests.rollout.vllm_stand_in import COMPLETION_KEYS, WHOLE_DISTRIBUTION, Refusal, StandIn

VOCABULARY = 264  # of the model behind the stand-in
PROMPTS = [[5, 6, 7], [5, 6, 7], [9] * 20, [1]]
LOAD, UNLOAD, COMPLETE = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"


@pytest.fixture
def make_base(make_tiny_model: Callable[..., Any]) -> Callable[[], Any]:
    """`make_base()`: always the same weights, with a head that leans towards ends and `</think>`."""

    def build() -> Any:
        model = make_tiny_model(tie_word_embeddings=False, initializer_range=0.3)
        model.name_or_path = model.config.name_or_path = "org/tiny"
        return lean(model, dict.fromkeys((END_OF_TEXT, TURN_END, THINK_END), 3.0))

    return build


@pytest.fixture
def make_policy(make_base: Callable[[], Any]) -> Callable[[], Any]:
    """`make_policy()`: the base with an adapter that is not the identity."""
    return lambda: adapted(make_base()).eval()


@pytest.fixture
def server(make_base: Callable[[], Any]) -> Iterator[StandIn]:
    stand_in = StandIn(make_base)
    yield stand_in
    stand_in.stop()


@pytest.fixture
def make_engine(server: StandIn, tmp_path: Path) -> Callable[..., Any]:
    """`make_engine(model, **options)`: the engine of that policy; `engine.said` has its lines."""

    def build(model: Any, temperature: float = 1.0, rows: int | None = None, filters: Filters = WHOLE) -> Any:
        said: list[str] = []
        settings = ServerSettings(server.url, tmp_path / "adapters", write_of(model), VOCABULARY)
        sampling = Sampling(temperature, (TURN_END, END_OF_TEXT), rows, filters, said.append)
        engine = ServerEngine(settings, "a test", sampling)
        engine.said = said
        return engine

    return build


def write_of(model: Any) -> Callable[[Path], None]:
    """What hands the adapter over, without a trainer."""
    return lambda folder: model.save_pretrained(folder, save_embedding_layers=False)


def check_against(model: Any, found: Any, prompts: list[list[int]] = PROMPTS, temperature: float = 1.0) -> None:
    check_logps(model, prompts, found, temperature, tolerance=1e-4)


def test_requests_and_their_order(server, make_policy, make_engine, tmp_path):
    """A request before the adapter is there, or under the last one's name, is sampled from another policy."""
    model = make_policy()
    engine = make_engine(model)
    for seed in (1, 2):
        shake(model, seed)
        check_against(model, engine.sample(PROMPTS, Limits(8)))
        assert len(list(engine._folder.iterdir())) == 1
    engine.close()

    paths = [path for path, _ in server.requests]
    assert paths == [LOAD, *[COMPLETE] * 4, UNLOAD, LOAD, *[COMPLETE] * 4, UNLOAD]
    first, second = server.posted(LOAD)
    assert first["lora_name"] != second["lora_name"], "a server finds cached prefixes by the adapter's name"
    assert [body["lora_name"] for body in server.posted(UNLOAD)] == [first["lora_name"], second["lora_name"]]
    for body in (first, second):
        assert Path(body["lora_path"]) == tmp_path / "adapters" / body["lora_name"]
        assert re.fullmatch(r"rloo-[0-9a-f]{32}-00000[12]", body["lora_name"])
        assert not Path(body["lora_path"]).exists(), "old adapters would fill the disk"
    completions = server.posted(COMPLETE)
    for body, name in zip(completions, [first["lora_name"]] * 4 + [second["lora_name"]] * 4, strict=True):
        assert set(body) == COMPLETION_KEYS
        assert body == body | WHOLE_DISTRIBUTION | {
            "model": name, "max_tokens": 8, "temperature": 1.0, "stop_token_ids": [TURN_END, END_OF_TEXT],
            "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
        }  # fmt: skip
    assert sorted(body["prompt"] for body in completions[:4]) == sorted(PROMPTS)
    assert len({body["seed"] for body in completions}) == 8, "siblings with one seed would be one completion"
    assert not server.loaded


def test_the_seed_of_torch_fixes_the_samples(make_policy, make_engine):
    """A run that is started again with its seed is to sample the same, and siblings must differ."""
    engine = make_engine(make_policy())
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(engine.sample([[5, 6, 7]] * 5, Limits(6)).completion_ids)
    assert found[0] == found[1] != found[2]
    assert len({tuple(ids) for ids in found[0]}) > 2


def test_greedy_and_rows_and_order(server, make_policy, make_engine):
    """`rollout.rows` bounds the requests in flight, the longest start first; answers keep the prompts' order."""
    model = make_policy()
    done: list[tuple[int, int]] = []
    complete = server._complete

    def take_a_moment(body: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.05)
        return complete(body)

    server._complete = take_a_moment
    engine = make_engine(model, temperature=0.0, rows=2)
    found = engine.sample(PROMPTS, Limits(12), [1.0, 2.0, 4.0, 3.0], lambda *call: done.append(call))
    assert found.completion_ids == engine_for(model, temperature=0.0).sample(PROMPTS, Limits(12)).completion_ids
    assert found.sampler_logps is None
    assert server.most_at_once == 2
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert {tuple(body["prompt"]) for body in server.posted(COMPLETE)[:2]} == {tuple(PROMPTS[2]), tuple(PROMPTS[3])}


@pytest.mark.slow
def test_budgets_by_the_same_rules(server, make_policy, make_engine):
    """The thought is one request that stops at `</think>`, the answer a second one behind what was forced."""
    model, limits = make_policy(), BUDGET
    prompts = [prompt for prompt in PROMPTS for _ in range(5)]
    torch.manual_seed(1)
    found = make_engine(model).sample(prompts, limits)
    check_against(model, found, prompts)
    bodies = server.posted(COMPLETE)
    assert budget_kinds(found, limits) == {"forced", "closed", "ended"}
    for prompt, ids, spans in zip(prompts, found.completion_ids, found.forced, strict=True):
        if THINK_END in ids:
            before = ids[: spans[0][1] if spans else ids.index(THINK_END) + 1]
            assert any(body["prompt"] == prompt + before and body["max_tokens"] == 4 for body in bodies)
    thoughts = [body for body in bodies if body["max_tokens"] == 6]
    assert len(thoughts) == len(prompts)
    assert all(body["stop_token_ids"] == [TURN_END, END_OF_TEXT, THINK_END] for body in thoughts)
    answers = [body for body in bodies if body["max_tokens"] == 4]
    assert len(answers) == len(bodies) - len(thoughts)
    assert all(body["stop_token_ids"] == [TURN_END, END_OF_TEXT] for body in answers)


@pytest.mark.slow
def test_the_temperature_is_in_the_log_probabilities(server, make_policy, make_engine):
    """vLLM's default is from before the temperature: the correction would weigh every step by that gap."""
    model = make_policy()
    with pytest.raises(RolloutServerError, match=r"temperature is 0\.7.*--logprobs-mode processed_logprobs"):
        make_engine(model, temperature=0.7).sample(PROMPTS, Limits(4))
    server.logprobs_mode = "processed"
    for temperature in (0.7, 2.0):
        found = make_engine(model, temperature=temperature).sample(PROMPTS, Limits(4))
        check_against(model, found, temperature=temperature)
    server.requests.clear()
    make_engine(model).sample(PROMPTS, Limits(4))
    assert len(server.posted(COMPLETE)) == 4, "nothing is asked where it makes no difference"


def test_accepted_filters_reach_the_server(server, make_policy, make_engine):
    """Log-probabilities of the whole distribution would hide the gap: such a server is refused at 1 as well."""
    model, filters = make_policy(), FILTERS["all"]
    with pytest.raises(
        RolloutServerError, match=r"temperature is 1\.0 with the filters .*--logprobs-mode processed_logp"
    ):
        make_engine(model, filters=filters).sample(PROMPTS, Limits(4))
    server.logprobs_mode = "processed"
    found = make_engine(model, 0.8, filters=filters).sample(PROMPTS * 2, Limits(8))
    check_kept(model, PROMPTS * 2, found, filters, 0.8)


# settings of the stand-in, and what the message names
REFUSALS = {
    "updates off": ({"allows_updates": False}, r"no /v1/load_lora_adapter.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
    "LoRA off": ({"lora_enabled": False}, r"LoRA is off.*--enable-lora"),
    "rank": ({"max_lora_rank": 2}, r"its rank is 4: .*--max-lora-rank 8"),
    "two machines": (
        {"failures": [(LOAD, 404, "Loading lora a failed: No adapter found for /b")]},
        r"does not see .*set rollout.server_adapters to a folder that both",
    ),
    "context": ({"max_model_len": 24}, r"of 20 tokens and a completion of 8 exceed the 24.*--max-model-len 28"),
    "refused": (
        {"failures": [(COMPLETE, 500, "CUDA error")]},
        r"\+ 8 tokens at temperature 1 \(status 500\): .*CUDA error",
    ),
    "dropped": ({"failures": [(COMPLETE, "drop", "")]}, "does not answer.*server's log, restart it.*--resume"),
    "engine died": (
        {"failures": [(COMPLETE, 500, "EngineCore encountered an issue.")]},
        "status 500.*EngineCore.*server's log, restart it.*--resume",
    ),
    "key": ({"key": "secret"}, "VLLM_API_KEY"),
}


@pytest.mark.slow
def test_what_the_server_refuses_is_named_with_the_switch(server, make_policy, make_engine, monkeypatch):
    """A switch of `vllm serve` that is missing shows as a 404 or a stack trace of vLLM's."""
    engine = make_engine(make_policy())
    for settings, message in REFUSALS.values():
        with monkeypatch.context() as patch:
            for key, value in settings.items():
                patch.setattr(server, key, copy.copy(value))  # an answered failure is removed from the list
            with pytest.raises(RolloutServerError, match=f"(?s){message}"):
                engine.sample(PROMPTS[1:], Limits(8))
            engine.close()


def test_a_server_that_is_not_there(server, make_policy, make_engine, tmp_path):
    """It is said at once, and nothing is left behind."""
    server.stop()
    engine = make_engine(make_policy())
    with pytest.raises(RolloutServerError, match=r"does not answer .*vllm serve.*rollout.server_url"):
        engine.sample(PROMPTS, Limits(4))
    assert not list(tmp_path.iterdir()), "a run that has a checkpoints/ folder with content counts as one that began"
    (tmp_path / "adapters").write_text("a file")
    with pytest.raises(RolloutServerError, match=r"adapters: .*rollout.server_adapters"):
        engine.sample(PROMPTS, Limits(2))


def test_two_runs_in_one_folder_leave_each_other_alone(server, make_policy, make_engine, tmp_path):
    """Two runs of a batch share `rollout.server_adapters`: the second deleted the first one's live adapter."""
    server.max_loras = 4
    first, second = make_engine(make_policy()), make_engine(make_policy())
    first.sample(PROMPTS, Limits(2))
    second.sample(PROMPTS, Limits(2))
    names = {first._adapter, second._adapter}
    assert set(server.loaded) == names and not server.posted(UNLOAD)
    assert {path.name for path in (tmp_path / "adapters").iterdir()} == names
    second.close()
    assert set(server.loaded) == {first._adapter}
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == [first._adapter]


def test_what_it_serves_is_compared(server, make_policy, make_engine):
    """A server of another model takes the adapter where the shapes agree, and samples nonsense."""
    model = make_policy()
    engine = make_engine(model)
    engine.sample(PROMPTS, Limits(2))
    assert not engine.said, "org/tiny is served as tiny"
    server.name = "somebody/other"
    engine = make_engine(model)
    engine.sample(PROMPTS, Limits(2))
    assert any("serves somebody/other" in line and "org/tiny" in line for line in engine.said)


def test_an_error_waits_for_the_requests_in_flight(server, make_policy, make_engine):
    """vLLM's engine dies when a request in flight needs an adapter that was replaced meanwhile."""
    answered = []
    complete = server.complete

    def fail_once(body: dict[str, Any]) -> dict[str, Any]:
        if body["prompt"] == [1]:
            raise Refusal(400, "no")
        time.sleep(0.5)
        answered.append(complete(body))
        return answered[-1]

    server.complete = fail_once
    with pytest.raises(RolloutServerError, match="status 400"):
        make_engine(make_policy(), rows=3).sample([[1], *PROMPTS[:2], *[[7]] * 40], Limits(2))
    assert len(answered) == len(server.posted(COMPLETE)) - 1 <= 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollout")]


def test_after_an_error_no_request_is_sent(server, make_policy, make_engine):
    """Completions in flight went on to their answers and to all further turns: minutes after a Ctrl-C."""
    complete = server.complete

    def fail_once(body: dict[str, Any]) -> dict[str, Any]:
        if body["prompt"] == [1]:
            raise Refusal(400, "no")
        time.sleep(0.5)
        return complete(body)

    server.complete = fail_once
    with pytest.raises(RolloutServerError, match="status 400"):
        make_engine(make_policy(), rows=7).sample([[1], *PROMPTS[:2] * 3], Limits(8, 2, 4, (1, 2), 2))
    assert len(server.posted(COMPLETE)) <= 7, "the answers after forced closing are requests of their own"


@pytest.fixture
def make_trainer(make_trainer: Any, make_base: Any, server: StandIn) -> Callable[..., Any]:
    """`make_trainer(**options)`: our trainer on the server, K 4, two groups a step, two steps."""
    settings = {
        "max_completion_length": 12, "per_device_train_batch_size": 8, "max_steps": 2, "learning_rate": 1e-1,
        "beta": 0.0, "rollout_engine": "server", "rollout_server_url": server.url, "sampler_correction": "token",
    }  # fmt: skip

    def build(**options: Any) -> Any:
        reward = lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids]  # noqa: E731
        trainer = make_trainer(reward, model=make_base(), **settings | options)
        trainer.rows = []
        trainer.rollout_listeners.append(trainer.rows.extend)
        return trainer

    return build


def check_on_policy(logs: list[dict[str, float]]) -> None:
    """Both steps were sampled from the weights of that step."""
    for log in logs[:2]:
        assert log["sampling/logp_difference_max"] < 1e-3
        assert log["sampling/importance_weight_mean"] == pytest.approx(1.0, abs=1e-3)


def test_a_trainer_learns_through_it(server, make_trainer, tmp_path):
    """TRL's server mode is this engine, on-policy: an adapter of the step before would show in the second."""
    trainer = make_trainer(
        rollout_engine="auto", rollout_server_url=None, use_vllm=True, vllm_mode="server",
        vllm_server_base_url=server.url,
    )  # fmt: skip
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.describe().startswith("rollout: server") and server.url in trainer.describe()
    assert trainer.rloo.sampler.engine.name == "server" and not trainer.use_vllm
    moved = {name: not value.equal(before[name]) for name, value in trainer.model.named_parameters()}
    assert any(moved.values()) and not any(moved[name] for name in moved if "lora_" not in name), "only the adapter"
    check_on_policy(trainer.state.log_history)
    loads = server.posted(LOAD)
    assert len(loads) == 2 and all(Path(b["lora_path"]).parent == tmp_path / "run/server_adapters" for b in loads)
    assert not server.loaded and not list((tmp_path / "run" / "server_adapters").iterdir()), "nothing is left"
    assert len(server.posted(COMPLETE)) == 16


def test_what_cannot_be_handed_over_is_refused(make_trainer):
    """Full fine-tuning has no adapter; it should say so before the first rollout."""
    with pytest.raises(ConfigError, match="rollout.engine is server or vllm, .* train an adapter"):
        make_trainer(lora=False)


def test_the_reference_stays_at_home(make_trainer, server, tmp_path):
    """TRL keeps a copy of the starting adapter as "ref"; written along, it would be a folder in the adapter's."""
    trainer = make_trainer(beta=0.1, max_steps=1)
    trainer.model.add_adapter("ref", trainer.model.peft_config["default"])
    target = tmp_path / "handed"
    trainer.rloo.sampler.engine._settings.hand_over(target)
    assert {path.name for path in target.iterdir()} <= {"adapter_model.safetensors", "adapter_config.json", "README.md"}
    assert json.loads((target / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/tiny"


@pytest.mark.slow
def test_two_processes_share_one_adapter(launch, tiny_folder, tmp_path):
    """One process loads the adapter, in whole matrices, and each sends its own half with its own seeds."""
    stand_in = StandIn(lambda: AutoModelForCausalLM.from_pretrained(tiny_folder), name=str(tiny_folder))
    options = {
        "rollout_engine": "server", "rollout_server_url": stand_in.url, "beta": 0.0, "sampler_correction": "token",
        "rollout_server_adapters": str(tmp_path / "adapters"),
    }  # fmt: skip
    try:
        found = launch(2, {"server": {"sample": True, "options": options}}, TORCHRUN, "fsdp2")["server"]
    finally:
        stand_in.stop()
    assert [one["sharded"] for one in found] == [True] * 2
    assert all(one["describe"].startswith("rollout: server") for one in found)
    check_on_policy(found[0]["logs"])
    paths = [path for path, _ in stand_in.requests]
    assert paths == [LOAD, *[COMPLETE] * 8, UNLOAD, LOAD, *[COMPLETE] * 8, UNLOAD]
    names = [body["lora_name"] for body in stand_in.posted(LOAD)]
    assert [body["model"] for body in stand_in.posted(COMPLETE)] == [names[0]] * 8 + [names[1]] * 8
    assert len({body["seed"] for body in stand_in.posted(COMPLETE)}) == 16
    assert not list((tmp_path / "adapters").iterdir())
