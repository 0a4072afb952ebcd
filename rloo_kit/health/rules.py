"""The rules of a run's health: one table for the live run, `rloo-kit show` and the report.

docs/runs.md lists windows and limits; docs/benchmarks.md says how the runs of `benchmarks/health_runs.py` changed them.
"""

from rloo_kit.health import signs
from rloo_kit.health.rule import Rule

NOTHING_SCORED = ("all_none", "reward_failures")
BREAKS = ("broken_policy",)

RULES: tuple[Rule, ...] = (
    Rule(
        "broken_policy",
        ("reward", "reward_std", "entropy", "kl", "completions/repeated_ratio", "completions/clipped_ratio"),
        3,
        signs.broken_policy,
        "Updates were too large and destroyed the policy: rloo.learning_rate ({learning_rate}) is too high",
        "lower rloo.learning_rate ten times (currently {learning_rate}), keep rloo.max_grad_norm at 1.0, and start "
        "again, or from a checkpoint before that step",
        follows=(*NOTHING_SCORED, "reward_hacking"),
    ),
    Rule(
        "all_none",
        ("rewards/unscored_ratio", "rewards/failed_ratio"),
        None,
        signs.all_none,
        "Every reward returned None, which a reward does if its column is missing",
        "check rewards and data.answer_column",
        follows=("reward_failures",),
    ),
    Rule(
        "reward_failures",
        ("rewards/failed_ratio",),
        2,
        signs.reward_failures,
        "A reward raises an error, exceeds its time limit or returns something that is not a number",
        "fix the reward: the run's output names it and the first sample it failed on",
        level="watch",  # its threshold makes it alarming; too many failures stop the run anyway
        thresholds=(signs.FAILED,),
    ),
    Rule(
        "truncation",
        ("completions/clipped_ratio", "thinking/closed_ratio"),
        None,
        signs.truncation,
        "The limit is too short to reach an end, so chance decides which completions end",
        "raise rloo.max_completion_length (currently {max_completion_length}), and model.max_seq_length with it",
        follows=(*BREAKS, "length_explosion", "never_closed", "repetition"),
        thresholds=(signs.CLIPPED,),
    ),
    Rule(
        "cold_start",
        ("rewards/answer_reward/mean",),
        None,
        signs.cold_start,
        "The model does not solve these prompts at all, so there is nothing to reinforce, or the reward never matches",
        "score reference answers by hand; try easier prompts (data.source), rollout.difficulty_samples, rloo-kit sft "
        "first, or a graded reward",
        follows=(*NOTHING_SCORED, "truncation"),
    ),
    Rule(
        "no_signal",
        ("frac_score_zero_std", "frac_reward_zero_std", "reward_std"),
        None,
        signs.no_signal,
        "All completions of a prompt earn the same reward, so every advantage is zero",
        "use prompts that are solved sometimes (data.source), a graded reward (rewards), more completions per prompt "
        "(rloo.num_generations, currently {num_generations}) or a higher rloo.temperature (currently {temperature}); "
        "a reward whose pattern wants <think> gives all the same if the prompt opens it",
        follows=(*NOTHING_SCORED, *BREAKS, "truncation", "cold_start", "entropy_collapse", "never_closed"),
        thresholds=(signs.TIED,),
    ),
    Rule(
        "zero_gradient",
        ("grad_norm",),
        None,
        signs.zero_gradient,
        "Rewards differ, but no weight moves",
        "check that something is trainable (model.lora) and that not everything is masked",
        follows=(*NOTHING_SCORED, *BREAKS, "truncation", "cold_start", "no_signal", "entropy_collapse"),
    ),
    Rule(
        "gradient_spike",
        ("grad_norm",),
        1,
        signs.gradient_spike,
        "One batch had a much larger gradient than the others; clipped by rloo.max_grad_norm it may be harmless",
        "if it recurs or the reward falls, lower rloo.learning_rate (currently {learning_rate})",
        follows=BREAKS,
        level="watch",
        thresholds=(signs.GRADIENT,),
    ),
    Rule(
        "kl_explosion",
        ("kl",),
        3,
        signs.kl_explosion,
        "The policy drifts far from its reference",
        "raise rloo.beta (currently {beta}) or lower rloo.learning_rate (currently {learning_rate})",
        follows=BREAKS,
        thresholds=(signs.KL,),
    ),
    Rule(
        "kl_outweighs",
        ("kl/spread_ratio",),
        None,
        signs.kl_outweighs,
        "The policy learns to stay near its reference rather than to earn rewards",
        "lower rloo.beta (currently {beta})",
        follows=(*NOTHING_SCORED, *BREAKS, "kl_explosion", "no_signal", "cold_start", "entropy_collapse"),
        level="watch",
        thresholds=(signs.SPREAD,),
    ),
    Rule(
        "entropy_collapse",
        ("entropy", "completions/most_common_ratio"),
        5,
        signs.entropy_collapse,
        "The policy has settled on one answer and no longer explores",
        "check what the rewards pay for; lower rloo.learning_rate (currently {learning_rate}), raise rloo.beta "
        "(currently {beta}) or rloo.temperature (currently {temperature})",
        follows=(*BREAKS, "reward_hacking", "repetition", "length_collapse", "length_explosion", "never_closed"),
        thresholds=(signs.ENTROPY,),
    ),
    Rule(
        "entropy_explosion",
        ("entropy", "reward"),
        5,
        signs.entropy_explosion,
        "The policy degrades: it samples more and more at random",
        "lower rloo.learning_rate (currently {learning_rate}) or rloo.temperature (currently {temperature})",
        follows=(*BREAKS, "kl_explosion"),
    ),
    Rule(
        "length_explosion",
        ("completions/mean_length", "completions/clipped_ratio"),
        5,
        signs.length_explosion,
        "Completions grow without more of them being right: a reward pays for length, or nothing for ending",
        "check what the rewards pay for; add soft_overlong_penalty or thinking_budget_reward to rewards, or raise "
        "rloo.max_completion_length (currently {max_completion_length}) if the thinking is good",
        follows=(*BREAKS, "never_closed"),
    ),
    Rule(
        "length_collapse",
        ("completions/mean_length", "thinking/mean_length"),
        5,
        signs.length_collapse,
        "A reward or the KL sum pays for brevity",
        "check what the rewards pay for; with rloo.beta (currently {beta}) set rloo.kl_form=length_normalized "
        "(currently {kl_form}), and lower the weight of any length penalty",
        follows=(*BREAKS, "entropy_collapse"),
    ),
    Rule(
        "repetition",
        ("completions/repeated_ratio",),
        5,
        signs.repetition,
        "Completions repeat themselves: a reward pays for it, or updates are too large",
        "read rollouts/; check what the rewards pay for; lower rloo.learning_rate (currently {learning_rate})",
        follows=BREAKS,
        thresholds=(signs.REPEATED,),
    ),
    Rule(
        "never_closed",
        ("thinking/closed_ratio", "completions/clipped_ratio"),
        5,
        signs.never_closed,
        "No reward pays for closing the thinking, or one pays for leaving it open",
        "add think_format_reward to rewards, check what the others pay for, and set rloo.thinking_budget if thinking "
        "only runs out of room",
        follows=(*BREAKS, "truncation", "length_explosion", "repetition"),
        thresholds=(signs.CLOSED,),
    ),
    Rule(
        "reward_hacking",
        ("reward", "rewards/answer_reward/mean", "eval/accuracy"),
        5,
        signs.reward_hacking,
        "The policy earns reward in an unintended way",
        "read the best completions (rloo-kit show RUN --completions 4 --order best), then fix the reward or change the "
        "weights of rewards",
    ),
    Rule(
        "no_movement",
        ("policy/moved", "grad_norm"),
        10,
        signs.no_movement,
        "The steps are too small to move the weights",
        "raise rloo.learning_rate (currently {learning_rate}): 1e-5 and above for an adapter; see rloo.warmup_steps",
        follows=(*NOTHING_SCORED, "no_signal", "truncation", "cold_start", "zero_gradient"),
    ),
    Rule(
        "nothing_learnt",
        ("reward", "eval/accuracy"),
        15,
        signs.nothing_learnt,
        "Neither the reward nor, where it was measured meanwhile, held-out accuracy has changed beyond its noise",
        "check that the rewards pay for the task; raise rloo.learning_rate (currently {learning_rate}) two to five "
        "times, or rloo.num_generations (currently {num_generations}) to reduce noise",
        follows=(*NOTHING_SCORED, *BREAKS, "no_signal", "truncation", "cold_start", "zero_gradient", "no_movement",
                 "kl_outweighs", "sampler_gap"),
        level="watch",
    ),
    Rule(
        "sampler_gap",
        ("sampling/logp_difference_mean",),
        3,
        signs.sampler_gap,
        "Sampler and trainer are two policies (4-bit kernels, vLLM, another precision, padding)",
        "set rloo.sampler_correction=token (currently {sampler_correction}); if vLLM or a server samples, "
        "rollout.engine=generate avoids it",
        follows=BREAKS,
        thresholds=(signs.GAP,),
    ),
    Rule(
        "ratio",
        ("clip_ratio/region_mean",),
        3,
        signs.ratio,
        "On-policy this is a bug: the ratio has to be exactly 1",
        "see references/troubleshooting.md",
        thresholds=(signs.RATIO,),
    ),
)  # fmt: skip
