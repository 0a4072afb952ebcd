"""A language model as the judge: SmolLM2-135M served by llama.cpp over HTTP, asked by the reward and by the win rate.

`tests/graders/test_judge.py` has what a judge that knows the truth says, and faults; this shows that the requests and
replies are those of a real server. A model of this size judges by position, and the agreement says so.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from rloo_kit.evals.win_rate import measure_win_rate
from rloo_kit.graders.judge import Judge, JudgeReward
from rloo_kit.rewarding.guard import guard
from tests.evals.test_win_rate import make_evaluation, make_run

pytestmark = pytest.mark.slow
NAME = "smollm2"
SERVE = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.model_alias, params.n_ctx, params.n_parallel = sys.argv[1], {"smollm2"}, 2048, 1
params.warmup, params.fit_params, params.verbosity = False, False, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""
STORIES = [
    ("Early on Monday, Anna, who is a nurse, found a map at the station.", "Anna found a map.", "A nurse."),
    ("After work, Pedro, who is a baker, sold his boat at the harbour.", "Pedro sold his boat.", "Something happened."),
    ("In the spring, Tina, who is a student, lost a clock at the museum.", "Tina lost a clock.", "It was spring."),
]


def form(**properties: Any) -> dict[str, Any]:
    """Options that let the server write JSON of this form only."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}, "max_tokens": 32}


@pytest.fixture(scope="module")
def url(smollm2_at: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of llama.cpp with a GGUF that the kit's own writer has made."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from rloo_kit.export import gguf
    from rloo_kit.export.merge import list_weights

    folder = smollm2_at("smollm2/instruct")
    file = tmp_path_factory.mktemp("judge") / "judge-q8_0.gguf"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    gguf.write_gguf(list_weights(model), folder, tokenizer, config, file, "q8_0", NAME)
    del model
    command = [sys.executable, "-c", SERVE, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None
        yield f"{process.stdout.readline().decode().strip()}/v1"
        process.stdin.close()


def test_a_real_judge_scores_and_is_asked_once(url: str, tmp_path: Path) -> None:
    """Guards against a dialect that only the stand-in speaks: models, chat, a schema for the reply, usage."""
    params: dict[str, Any] = {"url": url, "model": NAME, "folder": tmp_path, "think_end_id": 7, "thinking": False}
    params |= {"rubric": "A good answer says who did what.", "concurrency": 1}
    reward = JudgeReward(**params, options=form(score={"enum": list(range(1, 11))}))
    assert reward.find_fault() == "" and "its reply cannot be used" in JudgeReward(**params).find_fault()
    # It serves under any name.
    for other in ({"model": "gpt"}, {"url": url.removesuffix("/v1")}, {"url": f"{url}/chat/completions"}):
        assert JudgeReward(**params | other, options=form(score={"enum": list(range(1, 11))})).find_fault() == ""
    metrics: dict[str, float] = {}
    answers = [good for _, good, _ in STORIES]
    batch = {"prompts": [story for story, _, _ in STORIES], "completions": answers, "completion_ids": [[1]] * 3}
    first = guard(reward).score(**batch, log_metric=metrics.__setitem__)
    assert not any(first.failed), first.failures
    assert all(value is not None and 0.0 <= value <= 1.0 for value in first.values)
    assert metrics["judge/calls"] == 3 + metrics["judge/retries"] and metrics["judge/tokens"] > 300
    again = guard(reward).score(**batch, log_metric=metrics.__setitem__)
    assert again.values == first.values and metrics["judge/calls"] == 0 and metrics["judge/cached_ratio"] == 1.0


def test_a_real_judge_ranks_and_compares(url: str, tmp_path: Path) -> None:
    """Guards against a verdict by position that nobody sees: rankings and win rates come with the agreement of both
    orders, which is low for a model of this size."""
    permutations = {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "maximum": 2},
        "minItems": 2,
        "maxItems": 2,
    }
    reward = JudgeReward(
        url=url, model=NAME, folder=tmp_path, thinking=False, mode="rank", options=form(ranking=permutations)
    )
    metrics: dict[str, float] = {}
    prompts = [story for story, _, _ in STORIES for _ in range(2)]
    answers = [answer for _, *both in STORIES for answer in both]
    found = guard(reward).score(
        prompts=prompts, completions=answers, completion_ids=[[1]] * 6, log_metric=metrics.__setitem__
    )
    for one, other, failed in zip(found.values[::2], found.values[1::2], found.failed[::2], strict=True):
        assert failed or (one is not None and other is not None and one + other == 1.0)
    assert all("not each of 1 to 2 once" in text for text in found.failures), "the schema allows [1, 1]"

    judge = Judge(url, NAME)
    run = make_run(tmp_path, judge.url, options=form(better={"type": "integer", "minimum": 0, "maximum": 2}))
    run.eval.judge.params["model"] = NAME  # type: ignore[union-attr]
    base, after = (
        make_evaluation(when, [story[side] for story in STORIES]) for when, side in (("before", 2), ("x", 1))
    )
    rows = {"prompt": [f"prompt {i}" for i in range(3)], "question": [story for story, _, _ in STORIES]}
    measure_win_rate(run, datasets.Dataset.from_dict(rows), after, base)
    values = after.measures["win_rate"].per_prompt
    assert values is not None and set(values) <= {0.0, 0.25, 0.5, 0.75, 1.0} and after.judge_agreement is not None
    print(f"win rate {values}, agreement {after.judge_agreement}, ranks {found.values}, {metrics}")
