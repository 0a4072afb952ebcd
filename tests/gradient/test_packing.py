"""Layouts: which token lies where, what is scored, what a pass costs, and how sequences are put into buckets."""

import pytest
import torch

from rloo_kit.gradient.packing import Group, count_tokens, lay_out, plan_attention


def make_group(first: int, prompt: int, *completions: int) -> Group:
    """Token ids that count up from `first`, so that every token of a test is another one."""
    ids = iter(range(first, first + prompt + sum(completions)))
    draw = lambda length: torch.tensor([next(ids) for _ in range(length)], dtype=torch.long)  # noqa: E731
    return Group(draw(prompt), [draw(length) for length in completions])


GROUPS = [make_group(0, 3, 2, 0, 4), make_group(20, 1, 5)]  # 0-2 | 3 4 | | 5-8 ;  20 | 21-25


def test_a_prompt_is_laid_out_once_for_its_group() -> None:
    """Repeating it K times is what costs, and a position that goes on counting would be another prompt's."""
    laid = lay_out(GROUPS, "shared")
    assert laid.input_ids.tolist() == [[*range(9), *range(20, 26)]]
    assert laid.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]]
    assert laid.sequences == [[(0, 3), (3, 5)], [(0, 3), (5, 5)], [(0, 3), (5, 9)], [(9, 10), (10, 15)]]
    assert laid.groups == [(3, [2, 0, 4]), (1, [5])]


@pytest.mark.parametrize("layout", ["shared", "repeated", "padded"])
def test_each_token_is_predicted_by_the_one_before_it_in_its_sequence(layout: str) -> None:
    """The first of a later completion stands behind its sibling's last token, which knows nothing of it."""
    laid = lay_out(GROUPS, layout, pad_id=99)
    assert laid.score_targets.tolist() == [3, 4, 5, 6, 7, 8, 21, 22, 23, 24, 25]
    predictors = laid.input_ids.flatten()[laid.score_positions].tolist()
    assert predictors == [2, 3, 2, 5, 6, 7, 20, 21, 22, 23, 24]
    positions = laid.position_ids.flatten()[laid.score_positions].tolist()
    assert positions == [2, 3, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert (
        laid.input_ids.numel() == count_tokens(GROUPS, layout) == {"shared": 15, "repeated": 21, "padded": 28}[layout]
    )


def test_groups_without_completions_cost_nothing() -> None:
    """A pass may be handed a group whose rows are all left out."""
    groups = [Group(torch.tensor([7, 8]), []), *GROUPS]
    assert count_tokens(groups, "shared") == 15
    assert torch.equal(lay_out(groups, "shared").input_ids, lay_out(GROUPS, "shared").input_ids)


@pytest.mark.parametrize("layout", ["shared", "repeated"])
def test_a_plan_gathers_whole_sequences_and_finds_every_token_again(layout: str) -> None:
    """A token that is gathered from, or scattered to, a wrong place attends to foreigners."""
    groups = [*GROUPS, make_group(40, 50, 40, 1)]
    laid = lay_out(groups, layout)
    plan = plan_attention(laid)
    row = laid.input_ids[0]
    wanted = [[*group.prompt.tolist(), *one.tolist()] for group in groups for one in group.completions]
    assert len(plan.buckets) > 1
    found = []
    for bucket in plan.buckets:
        for ids in row[bucket.index].view(bucket.rows, bucket.length).tolist():
            end = ids.index(ids[-1]) + 1
            assert ids[end:] == [ids[-1]] * (bucket.length - end)
            found.append(ids[:end])
    assert sorted(found) == sorted(wanted)
    ends = plan.boundaries.tolist()
    flat = row[plan.flat_index].tolist()
    assert [flat[first:last] for first, last in zip(ends, ends[1:], strict=False)] == wanted
    assert plan.longest == 90
    laid_out = torch.cat([row[bucket.index] for bucket in plan.buckets])
    assert torch.equal(laid_out[plan.inverse], row) and torch.equal(row[plan.flat_index][plan.flat_inverse], row)
