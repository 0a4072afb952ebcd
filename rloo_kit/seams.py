"""Where the parts enter the core: their modules by name, loaded once a run asks for them. The core imports no part."""

from importlib import import_module
from typing import Any

PARTS = {
    "tools": "rloo_kit.tools.toolbox",  # rloo.tools, rloo.environment; data.source: verifiers/NAME
    "episodes": "rloo_kit.tools.episodes",  # completions of several turns: a `Dialogue`
    "gym": "rloo_kit.tasks.gym",  # data.source: reasoning_gym/TASK
    "families": "rloo_kit.tasks.families",  # data.source: embedded/FAMILY
    "demo": "rloo_kit.demo.embedded",  # model.name: embedded/..., smollm2/...
    "images": "rloo_kit.images.model",  # a checkpoint with a vision tower
    "image_rows": "rloo_kit.images.rows",  # columns image, images; parts of messages that are images
    "plan": "rloo_kit.plan.planner",  # how vLLM shares the GPU
    "vllm": "rloo_kit.vllm.in_process",  # rollout.engine: vllm
    "engines": "rloo_kit.vllm.engines",  # the two `Engine`s of vLLM
}
IMAGE_REFERENCE = r"<\|image:([0-9a-f]{14})\|>"  # an image in a prompt's text, by its digest (images.tokens)
FRAMED_IMAGE = rf"(?:<\|vision_start\|>)?({IMAGE_REFERENCE})(?:<\|vision_end\|>)?"  # with Qwen's tokens around it
REWARDS = {
    "math_answer_reward": "rloo_kit.graders.verifier:MathAnswerReward",
    "reasoning_gym_score": "rloo_kit.graders.verifier:ReasoningGymScore",
    "code_reward": "rloo_kit.graders.code:CodeReward",
    "reward_model": "rloo_kit.graders.scoring_model:RewardModel",
    "judge_reward": "rloo_kit.graders.judge:JudgeReward",
}


def part(name: str) -> Any:
    """The module of a part."""
    return import_module(PARTS[name])


def resolve(target: str) -> Any:
    """The object that "module:name" names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
