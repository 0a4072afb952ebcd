"""The healthy range of each metric that has one; docs/metrics.md describes them."""

from rloo_kit.health.rule import Threshold

CLIPPED = Threshold(
    ("completions/clipped_ratio",),
    high=0.3,
    alarm_high=0.8,
    if_high="raise rloo.max_completion_length, or add soft_overlong_penalty to rewards",
)
TIED = Threshold(
    ("frac_score_zero_std", "frac_reward_zero_std"),
    high=0.8,
    alarm_high=0.8,
    if_high="if solved (reward near its maximum): harder prompts in data.source; else easier prompts, a graded reward "
    "in rewards, more rloo.num_generations or a higher rloo.temperature",
    unless_solved=True,
)
ENTROPY = Threshold(
    ("entropy",),
    low=0.05,
    high=0.5,
    alarm_low=0.01,
    if_low="lower rloo.learning_rate, raise rloo.beta or rloo.temperature; normal at the end of a run that has learnt "
    "its task",
    if_high="normal at the start; if it keeps rising, lower rloo.learning_rate",
    unless_solved=True,
)
KL = Threshold(("kl",), high=0.5, alarm_high=2.0, if_high="raise rloo.beta or lower rloo.learning_rate")
SPREAD = Threshold(
    ("kl/spread_ratio",),
    high=1.0,
    if_high="the KL penalty outweighs the reward: lower rloo.beta or set rloo.kl_form=length_normalized",
    unless_solved=True,
)
GRADIENT = Threshold(
    ("grad_norm",),
    low=0.001,
    high=1.0,
    alarm_high=10.0,
    if_low="no signal: see frac_score_zero_std and completions/clipped_ratio; or raise rloo.learning_rate",
    if_high="lower rloo.learning_rate",
    unless_solved=True,
)
RATIO = Threshold(
    ("clip_ratio/region_mean",),
    high=0.0,
    alarm_high=0.0,
    if_high="on-policy this is a bug, because the ratio has to be exactly 1; see references/troubleshooting.md",
    on_policy=True,
)
FAILED = Threshold(
    ("rewards/failed_ratio",),
    high=0.0,
    alarm_high=0.5,
    if_high="fix the reward: the run's output names it and the first sample it failed on",
)
REPEATED = Threshold(
    ("completions/repeated_ratio",),
    high=0.3,
    alarm_high=0.5,
    if_high="read rollouts.jsonl: a reward pays for repetition, or rloo.learning_rate is too high",
)
CLOSED = Threshold(
    ("thinking/closed_ratio",),
    low=0.5,
    alarm_low=0.2,
    if_low="raise rloo.max_completion_length, or add think_format_reward to rewards",
)
GAP = Threshold(
    ("sampling/logp_difference_mean",),
    high=0.1,
    alarm_high=0.1,
    if_high="sampler and trainer are two policies: set rloo.sampler_correction=token",
)
