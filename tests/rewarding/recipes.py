"""Six rewards in the styles of published recipes, written for these tests: `tests/loop/test_reward_calls.py`."""

import asyncio
import math
import re

KNOWN = {"2+3?": "5", "1+4?": "5"}  # a table by question, as test cases of a coding task are
CLIENT = asyncio.Lock()  # in place of a client of its module, whose connections belong to the loop of the first call


def tagged(text):
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found.group(1).strip() if found else ""


# Notebooks: messages, the question from the prompt.
def numbers(prompts, completions, answer, **kwargs):
    question = prompts[0][-1]["content"]
    responses = [completion[0]["content"] for completion in completions]
    assert question in KNOWN, question
    found = [re.search(r"<answer>\s*(\d+)", text) for text in responses]
    return [
        1.5 if one and float(one.group(1)) == float(gold) else -0.5 for one, gold in zip(found, answer, strict=True)
    ]


# TRL's pages: message attributes by `get`, and as few arguments as possible.
def unique_letters(completions, **kwargs):
    return [float(len(set(completion[-1].get("content")))) for completion in completions]


# Open reproductions of R1: the column `solution`, closures, partly graded formats.
def accuracy(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [float(tagged(text) == gold) for text, gold in zip(contents, solution, strict=True)]


def cosine_scaled(low, high, longest):
    def cosine(completions, solution, **kwargs):
        rewards = []
        for completion, gold in zip(completions, solution, strict=True):
            text = completion[0]["content"]
            slope = math.cos(min(len(text) / longest, 1.0) * math.pi)
            rewards.append((low + 0.5 * (high - low) * (1.0 + slope)) * (1.0 if tagged(text) == gold else -1.0))
        return rewards

    return cosine


cosine = cosine_scaled(0.5, 1.0, 100)


# A trainer that scores one text by its data: called for each completion.
def compute_score(solution_str, ground_truth, format_score=0.1):
    found = re.findall(r"<answer>(.*?)</answer>", solution_str)
    return 0.0 if not found else 1.0 if found[-1] == ground_truth else format_score


def by_text(completions, problem, answer, **kwargs):
    return [
        compute_score(text, gold) + 10 * (KNOWN[asked] == gold)
        for text, asked, gold in zip(completions, problem, answer, strict=True)
    ]


# A model as a judge, behind a limit of calls at once.
async def judge(completions, **kwargs):
    async def ask(completion):
        async with CLIENT:
            await asyncio.sleep(0)
            return float("<answer>" in completion[0]["content"])

    return await asyncio.gather(*(ask(completion) for completion in completions))


RECIPES = [numbers, unique_letters, accuracy, cosine, by_text, judge]
