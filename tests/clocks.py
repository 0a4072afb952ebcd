"""The metrics that a clock makes: two runs that are the same have other values."""

CLOCKS = {"seconds", "step_time", "eps", "run", "time/rollout_s", "time/reward_s", "time/gradient_s"}
CLOCKS |= {"time/evaluation_s", "time/decode_ms_per_token_step", "time/tokens_per_s"}
CLOCKS |= {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
