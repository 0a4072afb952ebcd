"""thinking_reward and thinking_budget_reward: the bands, to the token."""

from typing import Any

import pytest

from rewards import answer_reward, think_format_reward, thinking_budget_reward, thinking_reward

END = 151668
EOS = 151645


def ids_with(tokens_before: int, *after: int) -> list[int]:
    return [7] * tokens_before + [END, *after]


def reward_of(text: str, ids: list[int]) -> float | None:
    return thinking_reward(prompts=["p"], completions=[text], completion_ids=[ids])[0]


@pytest.mark.parametrize(
    ("tokens", "plain", "asking"),
    [(0, 0.3, 0.3), (9, 0.3, 0.3), (10, 0.7, 0.8), (29, 0.7, 0.8), (30, 1.0, 1.1), (5000, 1.0, 1.1)],
)
def test_bands_begin_at_their_token(tokens: int, plain: float, asking: float) -> None:
    """Guards against a band that begins a token early or late, and against a bonus in the lowest band."""
    assert reward_of("so</think>4", ids_with(tokens, 19, EOS)) == plain
    assert reward_of("why?</think>4", ids_with(tokens, 19, EOS)) == asking


@pytest.mark.parametrize("ids", [[], [7] * 40, [7] * 40 + [EOS], [151667] * 30])
def test_thinking_that_never_closes_costs_one(ids: list[int]) -> None:
    """Guards against reading the tag off the text: a completion that only spells it has not closed its thinking."""
    assert reward_of("why?</think>4", ids) == -1.0


def test_a_question_in_the_answer_earns_nothing() -> None:
    """Guards against rewarding a model for asking the user back."""
    assert reward_of("so</think>what do you mean?", ids_with(30, 19, EOS)) == 1.0


def test_first_closing_tag_counts() -> None:
    """Guards against thinking grown by closing again and again: length and question mark end at the first tag."""
    twice = ids_with(12, *[7] * 40, END, 19, EOS)
    assert reward_of("so</think>why?</think>4", twice) == 0.7
    assert reward_of("so?</think>why</think>4", twice) == 0.8


def test_text_without_the_tag_is_searched_whole() -> None:
    """A text decoded without the tag cannot be cut; the ids still give the band."""
    assert reward_of("why? 4", ids_with(30, 19)) == 1.1


def test_decode_finds_the_question_behind_a_spelled_out_tag() -> None:
    """Guards against a model that writes about the tag: the spelling in ordinary tokens does not end its thinking."""
    decoded = {7: "a", 8: "</think>", 9: "?", END: "</think>", 19: "4"}
    exact = thinking_reward.with_(decode=lambda ids: "".join(decoded[token] for token in ids))
    ids = [7] * 10 + [8] + [7] * 20 + [9, END, 19]
    text = "".join(decoded[token] for token in ids)
    assert exact(completions=[text], completion_ids=[ids]) == [1.1]
    assert exact.with_(decode=None)(completions=[text], completion_ids=[ids]) == [1.0]


def test_thresholds_and_id_are_parameters() -> None:
    """Guards against a hard-wired id: the embedded model's compact vocabulary has the tag elsewhere."""
    compact = thinking_reward.with_(think_end_id=260, min_tokens=2, full_tokens=3)
    batch = [[1, 260], [1, 2, 260], [1, 2, 3, 260], [1, 2, 3, END]]
    assert compact(completions=["x</think>y"] * 4, completion_ids=batch) == [0.3, 0.7, 1.0, -1.0]
    assert thinking_reward.think_end_id == END


QWEN3_5 = 248069


@pytest.mark.parametrize("end_id", [QWEN3_5, 151649])
@pytest.mark.parametrize("reward", [thinking_reward, thinking_budget_reward, think_format_reward, answer_reward])
def test_a_default_id_that_cannot_be_right_is_refused(reward: Any, end_id: int) -> None:
    """In a bare TRL trainer with Qwen3.5 or an R1 distillation each completion scored "never closed", to the end."""
    texts = ["so</think>4", "so it is 4", "hm</think>5", None]
    batch: dict[str, Any] = {
        "completions": texts,
        "completion_ids": [[7] * 30 + [end_id, 19], [7], (8, end_id, 20), None],
    }
    batch["answer"] = ["4"] * 4
    with pytest.raises(ValueError) as caught:
        reward(**batch)
    for part in (reward.__name__, "151668", "2 completions", "with_(think_end_id=tokenizer.convert_tokens_to_ids("):
        assert part in str(caught.value)
    found = reward.with_(think_end_id=end_id)(**batch)
    assert reward is think_format_reward or (found[0] or 0) > (found[1] or 0), "the tokenizer's id is trusted"
    talk = [text and [{"role": "assistant", "content": text}] for text in texts]
    with pytest.raises(ValueError, match="think_end_id is 151668"):
        reward(**batch | {"completions": talk})


def test_a_tag_in_ordinary_tokens_is_no_contradiction() -> None:
    """Guards against ending a run because a model wrote about the tag."""
    spelled = ["the tag </think> ends it"] * 3
    reward_of(spelled[0], [7, 8, 9])  # one completion is no evidence
    ids = [[7, 8, 9], [7, 8, 9], ids_with(2, 19)]
    assert thinking_reward(completions=spelled, completion_ids=ids) == [-1.0, -1.0, 0.3]
    bound = thinking_reward.with_(think_end_id=END)  # set by somebody, as rloo-kit does
    assert bound(completions=spelled, completion_ids=[[7, 8, 9]] * 3) == [-1.0] * 3
    assert (
        answer_reward.with_(thinking=False)(completions=["4"] * 2, completion_ids=[[7]] * 2, answer=["4"] * 2)
        == [1.0] * 2
    )
    assert thinking_budget_reward(completion_ids=[[7]] * 2) == [0.0] * 2, "a loop that passes no texts"


@pytest.mark.parametrize(
    ("tokens", "hard", "soft"),
    [(3, 0.0, 0.75), (4, 1.0, 1.0), (8, 1.0, 1.0), (9, 0.0, 0.75), (12, 0.0, 0.0), (99, 0, 0)],
)
def test_budget_band_and_its_margin(tokens: int, hard: float, soft: float) -> None:
    """Guards against a margin that goes negative far outside, or edges that fall out of the band."""
    band = thinking_budget_reward.with_(min_tokens=4, max_tokens=8)
    assert band(completion_ids=[ids_with(tokens)]) == [hard]
    assert band.with_(margin_tokens=4)(completion_ids=[ids_with(tokens)]) == [soft]


def test_budget_of_unclosed_thinking_is_zero() -> None:
    """Guards against paying for length alone: cut-off thinking is not thinking within a budget."""
    assert thinking_budget_reward.with_(min_tokens=1)(completion_ids=[[7] * 50, []]) == [0.0, 0.0]
