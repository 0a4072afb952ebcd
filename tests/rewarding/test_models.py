"""math-verify in its process, and trained reward models."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from rloo_kit.errors import BackendError
from rloo_kit.rewarding.guard import guard
from rloo_kit.rewarding.models import MathAnswerReward, RewardModel

END = 151668


@pytest.fixture(scope="module")
def math_reward() -> Any:
    """One reward, and so one process, for all tests here."""
    pytest.importorskip("math_verify", reason="the extra 'math' is not installed")
    reward = MathAnswerReward(answer_timeout_s=5.0)  # a worker that restarts after a hang has to import first
    yield reward
    reward.worker.close()


def judge(reward: MathAnswerReward, *pairs: tuple[str, Any]) -> list[float | None]:
    return reward(
        prompts=["p"] * len(pairs),
        completions=[f"so</think>{given}" for given, _ in pairs],
        completion_ids=[[7, END, 19, 151645]] * len(pairs),
        answer=[expected for _, expected in pairs],
    )


def test_mathematics_is_compared_as_mathematics(math_reward: MathAnswerReward) -> None:
    """Guards against comparing LaTeX as text, and against math-verify's own limits, which use a POSIX signal: in a
    thread every answer was wrong."""
    pairs = [
        (r"It is \boxed{\frac{1}{2}}.", "0.5"),
        ("$1+x^2$", "x^2+1"),
        (r"\boxed{\sqrt2}", r"\sqrt{2}"),
        ("so it must be 42.", "42"),
        (r"\boxed{43}", "42"),
        ("", "42"),
    ]
    found = [judge(math_reward, *pairs)]
    thread = threading.Thread(target=lambda: found.append(judge(math_reward, *pairs)))
    thread.start()
    thread.join()
    assert found == [[1.0, 1.0, 1.0, 1.0, 0.0, 0.0]] * 2


def test_an_answer_that_hangs_counts_as_wrong_and_the_rest_are_judged(math_reward: MathAnswerReward) -> None:
    """Guards against a tower of powers that stops the run: without the limit this test never ends."""
    pairs = [("$9^{9^{9^9}}$", "42"), (r"\boxed{\frac{1}{2}}", "0.5")]
    assert judge(math_reward, *pairs) == [0.0, 1.0]


def test_what_a_batch_has_no_time_for_is_failed_not_wrong(math_reward: MathAnswerReward) -> None:
    """Guards against calling answers wrong that were never checked."""
    hurried = MathAnswerReward(answer_timeout_s=5.0, timeout_s=0.3)
    hurried.__dict__["worker"] = math_reward.worker
    guarded = guard(hurried)
    pairs = [("$9^{9^{9^9}}$", "42"), (r"\boxed{\frac{1}{2}}", "0.5"), ("42", "42")]
    rewards = guarded(
        completions=[f"so</think>{given}" for given, _ in pairs],
        completion_ids=[[7, END, 19]] * 3,
        answer=[expected for _, expected in pairs],
    )
    assert rewards == [None, None, 1.0]
    assert guarded.failed == [True, True, False]
    assert "reward 'math_answer_reward' failed on sample 1" in guarded.failures[1]


def test_unclosed_and_unanswerable_samples(math_reward: MathAnswerReward) -> None:
    """Guards against judging thinking as an answer, and a prompt without a gold answer as wrong."""
    batch = {"completions": ["so 42", "a</think>42"], "completion_ids": [[7, 8], [7, END, 19]]}
    assert math_reward(**batch, answer=["42", None]) == [0.0, None]
    with pytest.raises(ValueError, match="math_answer_reward needs a column 'answer'.*columns found: solution"):
        math_reward(**batch, solution=["42", "42"])
    with pytest.raises(ValueError, match="answer_timeout_s is 0; it must be a finite number of seconds above 0"):
        MathAnswerReward(answer_timeout_s=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """A sequence-classification checkpoint with one output and random weights."""
    return save_classifier(tmp_path_factory.mktemp("reward_model"), tiny_tokenizer, num_labels=1)


def save_classifier(folder: Path, tokenizer: Any, num_labels: int) -> Path:
    config = Qwen3Config(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=256, num_labels=num_labels,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


PROMPTS = ["2+2=", "a longer prompt: ", "x"]
COMPLETIONS = ["4", "no</think>yes, and more of it", "y"]


def test_a_checkpoint_scores_prompt_and_completion(checkpoint: Path) -> None:
    """Guards against scores that depend on the batch: padding must not reach the last token that is read."""
    reward = RewardModel(str(checkpoint), batch_size=2, device="cpu")
    scores = reward(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=[[1]] * 3)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with torch.inference_mode():
        for prompt, completion, score in zip(PROMPTS, COMPLETIONS, scores, strict=True):
            alone = model(**tokenizer(prompt + completion, return_tensors="pt")).logits[0, 0].item()
            assert score == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 4) for score in scores}) == 3


def test_conversations_go_through_the_models_own_template(checkpoint: Path) -> None:
    """Guards against joining dictionaries as text."""
    reward = RewardModel(str(checkpoint), device="cpu")
    prompt = [{"role": "user", "content": "2+2="}]
    completion = [{"role": "assistant", "content": "4"}]
    written = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert reward(prompts=[prompt], completions=[completion]) == pytest.approx(
        reward(prompts=[written], completions=[""])
    )


def test_texts_beyond_the_limit_are_not_scored(checkpoint: Path) -> None:
    """Guards against silently scoring half of a completion."""
    reward = RewardModel(str(checkpoint), max_length=10, device="cpu")
    scores = reward(prompts=PROMPTS, completions=COMPLETIONS)
    assert [score is None for score in scores] == [False, True, False]


def test_a_checkpoint_with_another_head_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Guards against taking the first of two classes for a reward."""
    folder = save_classifier(tmp_path / "two", tiny_tokenizer, num_labels=2)
    with pytest.raises(BackendError, match="has 2 outputs; a reward model has one"):
        RewardModel(str(folder))(prompts=["a"], completions=["b"])
    with pytest.raises(BackendError, match="the reward model '.*nowhere' cannot be loaded"):
        RewardModel(str(tmp_path / "nowhere"))(prompts=["a"], completions=["b"])
    with pytest.raises(ValueError, match="batch_size is 0"):
        RewardModel(str(folder), batch_size=0)


def test_nan_of_a_model_is_a_failure(checkpoint: Path) -> None:
    """Guards against a broken reward model that TRL would read as "does not apply"."""
    reward = RewardModel(str(checkpoint), device="cpu")
    reward.loaded[0].score.weight.data.fill_(math.nan)
    guarded = guard(reward)
    assert guarded(prompts=["a"], completions=["b"], completion_ids=[[1]]) == [None]
    assert "reward 'reward_model' failed on sample 0" in guarded.failures[0]
