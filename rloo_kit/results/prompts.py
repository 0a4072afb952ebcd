"""What training changed, prompt by prompt: fixed, broken, still wrong, still right."""

from rloo_kit.results.evaluation import Evaluation

OUTCOMES = ("broken", "fixed", "still wrong", "still right")  # the regressions first
HALF = 0.5  # of a prompt's completions: more than that right is right


def find_outcomes(before: Evaluation | None, after: Evaluation | None) -> list[str] | None:
    """One of OUTCOMES for each prompt with an answer, in order: by the greedy completions where both have them, else by
    most of the sampled ones; None where the two are not of the same prompts."""
    if before is None or after is None or before.prompts_digest != after.prompts_digest:
        return None
    sides = (before.greedy_per_prompt, after.greedy_per_prompt)
    if sides[0] is None or sides[1] is None:
        sides = (before.per_prompt, after.per_prompt)
    old, new = sides
    if old is None or new is None or len(old) != len(new):
        return None
    return [_outcome(first > HALF, second > HALF) for first, second in zip(old, new, strict=True)]


def count_outcomes(before: Evaluation | None, after: Evaluation | None) -> dict[str, int]:
    """How many prompts have each of OUTCOMES; empty where they cannot be compared."""
    found = find_outcomes(before, after)
    return {} if found is None else {name: found.count(name) for name in OUTCOMES}


def _outcome(was_right: bool, is_right: bool) -> str:
    if was_right:
        return "still right" if is_right else "broken"
    return "fixed" if is_right else "still wrong"
