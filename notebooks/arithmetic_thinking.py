# ---
# jupyter:
#   # Generated from notebooks/source/rloo.py.jinja by `make notebooks`: edit that file.
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # RLOO on a small model that thinks
#
# This notebook runs a whole reinforcement-learning training: load a model, measure it, train it, measure it again,
# inspect what changed, save it and use it. It needs two CPU cores, no GPU and no download. A run takes about two
# minutes on an idle machine. The first one also builds the model: about one minute more.
#
# **The model** is a tiny Qwen3 with half a million weights. It was taught to add `47+385=` column by column in its
# thinking before it writes the answer. In the last third of its lessons, most answers were guessed without thinking,
# and that became its habit: about one of seven samples is right, and its most likely answer is nearly always wrong.
#
# **The training** is RLOO: REINFORCE with a leave-one-out baseline. Each answer earns 1 or 0 and nothing else. From
# that the model learns to think every time, and to be careful. It already knew the method; only a habit changes.
#
# `arithmetic_instruct` is the twin without thinking. `qwen3_thinking_rloo` does the same with a real model.

# %% [markdown]
# ## 1. Set up
#
# Run this cell first: the heavy libraries have to be imported in the right order. It reads the project's `.env`, finds
# the GPU if there is one, and chooses the number format for the computation.

# %%
import itertools
import statistics

import rloo_kit as kit

print(kit.setup_environment())

# %% [markdown]
# ## 2. Parameters
#
# The run is what the file in `config` says. `None` in the next cell leaves a key to that file; any other value
# overrides it, and the cell after it prints what does. `overrides` changes any other key of the file:
# `overrides = "rloo.temperature=0.9 eval.num_samples=4"`. A batch sets the values from outside:
# `papermill NOTEBOOK.ipynb OUTPUT.ipynb -p max_steps 20 -p beta 0.01`. Unknown names and invalid values are refused.
#
# If the run's folder already contains a run, `resume = True` continues it and `overwrite = True` deletes it and starts
# again. Relative paths begin in the folder in which Jupyter or papermill was started; `outputs/` lands there too.

# %% [markdown]
# ### Your own data
#
# In a terminal, `rloo-kit init --data my.csv` writes `my.yaml`, a reward in `my_rewards.py` and its test. Set
# `config = "my.yaml"` and `overwrite = False` in the next cell. Every cell below then runs on your prompts, with your
# reward. Only what the text says of this notebook's own model, task and numbers no longer applies.

# %% [markdown]
# ### What to try here
#
# - `overrides = "model.name=embedded/thinking@subtraction data.source=embedded/subtraction"`: another task.
#   A file of your own makes a third.
# - `num_generations = 2`, then `16`: a step has 128 completions in either case. What changes is
#   `frac_score_zero_std`, the share of groups that teach nothing, and the number of prompts per step.
# - `beta = 0.05`: the KL is measured and drawn. Thinking is short here, so the penalty is small and the gain the same.
# - `max_completion_length = 4`: every completion is cut off before its answer ends, and the run says what is wrong.
# - `learning_rate = 1e-4`: the choice for large models. A tiny one hardly moves.
#
# Give each experiment its own `run_name` to keep the folders side by side in `outputs/`.

# %% tags=["parameters"]
# Parameters: plain values; None leaves it to the file. papermill replaces them: papermill ... -p max_steps 20
config = "configs/arithmetic_thinking.yaml"  # one file is one run
run_name = None  # folder of the run in output_dir; None: the file's name
output_dir = None
max_steps = None
num_generations = None  # K
learning_rate = None
beta = None
max_completion_length = None
eval_prompts = None
seed = None
overrides = ""  # more keys of the file, as on the command line
resume = False
overwrite = True

# %%
parameters = kit.read_parameters(globals())
run = kit.load_config(parameters.config, *parameters.overrides)
print(parameters)
print(f"\nthe run's folder: {run.folder.absolute()}")

# %% [markdown]
# ### Does it fit?
#
# The plan adds up the run's peak memory, part by part, from the model's shape alone: for the rollout, where the KV
# cache grows, and for training. `Rows of a rollout` is the number of completions generated at once. If a run does not
# fit, the plan names the keys to change, cheapest first.

# %%
print(kit.plan_vram(run))

# %% [markdown]
# ## 3. The policy
#
# The policy is the model that is trained. It gives each possible next token a probability; sampling token by token
# makes a completion. The base weights stay frozen. Training changes an adapter (LoRA): small matrices next to the
# large ones, with no effect at first.

# %%
prepared = kit.check(run)  # what is wrong with file, data and rewards, before the model is loaded
policy = kit.load_policy(run)
print(policy.describe())

# %% [markdown]
# ## 4. The data
#
# Some prompts are held out: the model never trains on them, and it is measured on them alone. No prompt is in both
# parts. A prompt may come with the right answer, for rewards that compare with it.

# %%
data = kit.load_data(run, policy.tokenizer, prepared=prepared)
print(data)
print("\nThe first training prompt:", data.train[0]["prompt"], sep="\n")
print("its answer in the data:", data.train[0].get("answer"))

# %% [markdown]
# The prompt ends with `<think>`: the thinking is already open when the model begins to write. A completion is
# therefore the thinking, the single token `</think>`, then the answer. The kit always splits the two at the **id of
# that token**. Text is not reliable: a model can spell out the letters of `</think>` without closing anything.

# %% [markdown]
# ## 5. The reward
#
# A reward is a function that takes a completion and returns a number. The next cell prints the rewards of this run.
# They are *verifiable* if a program computes them, so that no person or second model has to judge: `answer_reward` is 1
# if the answer is right and 0 if it is not. It reads the answer alone, so a model is free to think whatever helps.
# Several rewards are added up, each with its weight; weight 0 only measures.
#
# The reward is the only signal that the model gets. It gets better at whatever raises that number, intended or not.

# %%
reward_funcs = kit.build_rewards(run, policy.tokenizer)

# %% [markdown]
# ## 6. Before training
#
# Can it learn at all? The preflight samples a few groups of completions, scores them, and takes one step at full
# length. It prints GO, or NO-GO with what to change: equal rewards, truncated completions, a task that is never solved,
# too little memory. It changes nothing: weights and random state are restored.

# %%
print(kit.check_preflight(run, policy, data, reward_funcs))

# %% [markdown]
# ### When nothing is solved yet
#
# RLOO reinforces what sometimes goes right. If nothing does, start with supervised training on demonstrations, until
# some samples earn more than others. `sft.max_steps=200` in `overrides` does that here, on the data's column
# `completion` (`sft.source` names other data). RLOO then starts from its adapter. By default this cell does nothing.

# %%
if run.sft.max_steps:
    kit.fine_tune(run, policy, data, overwrite=parameters.overwrite)
    print(kit.measure_signal(run, policy, data))

# %% [markdown]
# How good is it now? The policy answers held-out prompts, sampled at temperature 1, as in training. *Greedy* takes the
# most likely token every time. The interval contains the true mean with 95 % confidence; with few prompts it is wide.

# %%
before = kit.evaluate(run, policy, data.test, "before")
print(before)

# %%
kit.show_completions(before, num=4)

# %% [markdown]
# ## 7. How RLOO learns
#
# **REINFORCE**, the oldest of these methods, samples a completion, scores it with a reward R, and changes the weights
# to make the completion more likely, in proportion to R:
#
#     gradient = R x (gradient of log-probability of the completion)
#
# That is right on average, and very noisy. If nine of ten completions are right, nearly every step says "more of
# this", even to tokens that had nothing to do with it. What should count is not whether a completion is good, but
# whether it is **better than expected** for this prompt. The expected reward is called the *baseline*.

# %% [markdown]
# ### The leave-one-out baseline
#
# RLOO samples a group of K completions for each prompt (`num_generations`). The baseline of each one is the mean reward
# of its siblings, the other K - 1. The difference is its *advantage*, which replaces R:
#
#     advantage of completion i = R_i - (sum of the other R_j) / (K - 1)
#
# The policy is its own yardstick. Unlike PPO, no second network has to learn what to expect. (Kool et al. 2019;
# Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740.) An example with K = 4, two of them right:

# %%
rewards = [1.0, 0.0, 0.0, 1.0]
K = len(rewards)
print("Worked example: leave-one-out advantages of K = 4 made-up rewards")
for number, reward in enumerate(rewards, 1):
    siblings = (sum(rewards) - reward) / (K - 1)
    advantage = reward - siblings
    print(f"completion {number}: reward {reward:.0f}, siblings' mean {siblings:.2f}, advantage {advantage:+.2f}")

# %% [markdown]
# Right completions become more likely, wrong ones less likely, and the advantages of a group add up to zero. If all are
# right, or all are wrong, every advantage is 0: the prompt teaches nothing in this step. It is too easy or too hard for
# the current policy.

# %% [markdown]
# ### Why it is less noisy, and still right
#
# **Still right (unbiased).** The siblings are sampled independently of completion i, so their mean carries no
# information about it. It multiplies the gradient of a log-probability, which is zero on average, and so adds nothing
# on average. (The mean of the whole group, the completion's own reward included, would make the gradient too small by
# the factor (K - 1) / K.)
#
# **Less noisy (lower variance).** The noise of a gradient grows with the mean square of its factor, if right and wrong
# completions have gradients of about the same size. The factor is R in plain REINFORCE and the advantage in RLOO. With
# rewards of 0 and 1, right with probability p, the mean squares are p and p (1 - p) K / (K - 1):

# %%
print("Theory: mean square of the gradient's factor, by probability of a right answer")
print("right   REINFORCE   RLOO, K = 8")
for p in (0.2, 0.5, 0.9, 0.99):
    print(f"{p:5.0%} {p:11.3f} {p * (1 - p) * 8 / 7:13.3f}")

# %% [markdown]
# The better the policy, the larger the share of noise in plain REINFORCE. Add 10 to every reward and RLOO does not
# change, because the baseline removes what all siblings share. Plain REINFORCE would drown in it.

# %% [markdown]
# ### How many completions: K = 2, 4, 8, 16
#
# - **K = 2** costs least. One sibling is a rough baseline, and only a pair of one right and one wrong answer teaches.
#   With enough prompts it can work (arXiv 2510.00977).
# - **K = 4** is what full-length thinking of Qwen3-4B leaves room for on 8 GB (computed, not measured).
# - **K = 8** is the usual choice, and that of most files in `configs/`.
# - **K = 16 and more** pays when prompts are hard: the group teaches only if some completion is right.
#
# For the same prompts, time and rollout memory grow in proportion to K. At the same number of completions per step, a
# larger K means fewer different prompts. The table shows the share of groups that teach, for prompts solved in 10 % and
# in 50 % of the samples, and the factor that the baseline's own noise adds, K / (K - 1).

# %%
print("Theory: share of groups with a learning signal, and noise factor, by K")
print("  K   10 % right   50 % right   noise")
for k in (2, 4, 8, 16, 32):
    hard, even = (1 - p**k - (1 - p) ** k for p in (0.1, 0.5))
    print(f"{k:3d} {hard:11.0%} {even:12.0%} {k / (k - 1):9.2f}")

# %% [markdown]
# ### KL and beta
#
# `beta` keeps the policy near its start. It subtracts `beta` times an estimate of the KL divergence from the starting
# policy from each reward: per token the log-probability now minus the one at the start, summed over the completion
# (called k1). In the reward this estimate is unbiased on-policy; k3 as a term of the loss is not (arXiv 2510.01555,
# 2512.21852).
#
# **The sum is a trap for models that think.** At 0.005 nats a token, the penalty with `beta = 0.05` is:

# %%
print("Theory: KL penalty in units of reward, by length (beta 0.05, 0.005 nats a token)")
for tokens in (30, 500, 4096, 12288):
    print(f"{tokens:6d} tokens: {0.05 * 0.005 * tokens:.3f}")

# %% [markdown]
# From about 4,000 tokens on the penalty exceeds the reward of a right answer, so the model learns to think less, not
# better. The default, `rloo.kl_form: length_normalized`, takes the mean over the tokens instead, so long thinking costs
# no more than short. `overrides = "rloo.kl_form=sum"` takes the sum. `beta = 0`, as in this project's files, needs no
# starting policy and no time for it.

# %% [markdown]
# ### RLOO and GRPO
#
# | | RLOO | GRPO |
# |---|---|---|
# | baseline | mean of the K - 1 siblings | mean of all K, the completion itself included |
# | scale | none | divided by the standard deviation of the group |
# | ratio and clipping | one ratio for the completion; exactly 1 on-policy, nothing to clip | one ratio for each token |
#
# The division amplifies groups in which nearly all are right or nearly all wrong, because their deviation is small
# (Dr. GRPO, arXiv 2503.20783). The advantage of a right completion in a group of 8:

# %%
print("Theory: advantage of a right completion in a group of 8")
for right in (1, 4, 7):
    rewards = [1.0] * right + [0.0] * (8 - right)
    rloo = 1 - (right - 1) / 7
    grpo = (1 - statistics.mean(rewards)) / statistics.stdev(rewards)
    print(f"{right} of 8 right: RLOO {rloo:.2f}, GRPO {grpo:.2f}, {grpo / rloo:.2f} times as much")

# %% [markdown]
# At the same budget, published runs of the two end in a tie. The case for RLOO is not accuracy but exactness and cost:
# on average its step is the gradient of the mean reward, unscaled. It needs no second network. On-policy and with
# `beta = 0`, it scores each completion once and needs neither old nor reference log-probabilities.

# %% [markdown]
# ## 8. Training
#
# Each step samples K completions for some prompts, computes the rewards, subtracts the baselines and updates the
# adapter. A line of text every few seconds shows the progress. The stop button (Ctrl-C in a terminal) lets the step
# finish and saves; `resume = True` continues from there. To train again from the start, begin with section 3: this cell
# refuses a policy that it has trained, and deletes nothing then.

# %% [markdown]
# **What to look for** with this notebook's own file. `reward` and `accuracy` rise from the first steps on. `think`, the
# mean length of the thinking, rises with them within ten to twenty steps and stays: the model learns to think every
# time, because answers without thinking are mostly wrong. It also learns to be careful. `loss` is not printed because
# it says nothing: the advantages of a group add up to zero, so it stays near zero while the model learns.

# %%
result = kit.train(
    run,
    policy,
    data,
    reward_funcs,
    resume=parameters.resume,
    overwrite=parameters.overwrite and not parameters.resume,
)
print(f"{result.steps} steps, {result.seconds:.0f} s")

# %% [markdown]
# A run that was cut short raises an error here, so that nobody mistakes it for a whole one. The cells below still work,
# one by one, on what has been learnt so far.

# %%
if result.stopped not in (None, "early"):
    raise kit.RlooKitError(f"stopped ({result.stopped}) at step {result.steps}; resume = True goes on from there")

# %% [markdown]
# ### One group of this run
#
# `rollouts/` contains every sample, one file a step, one completion per line. The cells below show the first
# group with different rewards, the advantages that the trainer used, and the siblings' mean, computed again. With
# `beta` above 0 the trainer's advantage also contains the penalty.

# %%
K = run.rloo.num_generations
rows = list(itertools.islice(kit.read_rollouts(run.folder), 32 * K))
groups = [rows[start : start + K] for start in range(0, len(rows), K)]
group = next((group for group in groups if len({row["reward"] for row in group} - {None}) > 1), [])

# %%
scored = [row for row in group if row["reward"] is not None]
print("The first group of this run with different rewards, one line a completion")
print("reward   siblings   advantage   the completion ends with")
for row in scored:
    siblings = (sum(other["reward"] for other in scored) - row["reward"]) / (len(scored) - 1)
    print(f"{row['reward']:6.2f} {siblings:10.2f} {row['advantage']:+11.2f}   {row['completion'][-40:]!r}")

# %% [markdown]
# ## 9. After training
#
# The same held-out prompts as before, sampled the same way.

# %%
after = kit.evaluate(run, policy, data.test, "after")
print(after)

# %%
print(kit.compare(before, after))

# %% [markdown]
# The difference is taken prompt by prompt, and its interval shows the uncertainty. An interval that contains 0 shows no
# change. Check the greedy figure too. A training that only makes the model surer of what it already does, as a lower
# temperature would, raises the sampled figure and leaves the greedy one unchanged. If both rise, what the model does
# most of the time has changed. RLOO makes what it finds more likely; it cannot teach what never occurs in a rollout.

# %% [markdown]
# ## 10. Step by step
#
# Thin lines are single steps, the thick line a moving mean. The reward is on training prompts; the held-out figures are
# in the tables above. KL is drawn only with `beta` above 0, because it is computed only then.

# %%
kit.plot_training(result)

# %% [markdown]
# ## 11. Completions before and after
#
# The same prompts, answered before and after. Numbers show that something changed; only reading shows what.

# %%
kit.show_completions(before, after, num=4)

# %% [markdown]
# Whenever the reward rises, read more completions in `rollouts/` and in the report. A model can earn reward in
# ways nobody intended: an answer guessed from the wording, thinking that repeats itself, a format without content.

# %% [markdown]
# ## 12. When training looks wrong
#
# | what you see | what it means | what to change |
# |---|---|---|
# | "earned the same reward" | nothing is learnt | easier prompts, graded rewards, larger K |
# | `completions/clipped_ratio` over 0.3 | completions are cut off; over 0.8 alarming | raise `max_completion_length` |
# | `thinking/closed_ratio` low | thinking does not end | `max_completion_length`; add `think_format_reward` |
# | `grad_norm` exactly 0 | no signal, or nothing to train | as for equal rewards; check `model.lora` |
# | `grad_norm` over 10 | steps are too large | lower `learning_rate` |
# | `entropy` under 0.01 early on | always the same answer | lower `learning_rate`, raise `beta` or temperature |
# | `kl` over 2 nats a token | far from the start | raise `beta` or lower `learning_rate` |
# | thinking shrinks, `beta` above 0 | the KL sum punishes length | smaller `beta`, `kl_form=length_normalized` |
# | the reward rises, the held-out figure does not | the reward is being gamed | read completions; change `rewards` |

# %% [markdown]
# Three more. `rewards/failed_ratio` above 0: a reward raises errors, and the warning names it.
# `clip_ratio/region_mean` above 0 on-policy (`num_iterations` is 1): a bug, since the ratio is exactly 1 there; report
# it. With `beta` above 0, watch `frac_score_zero_std`, not `frac_reward_zero_std`: the penalty alone makes equal
# rewards look different. The limits are starting points, not laws. Below: this run's first and last step.

# %%
names = ("reward", "frac_score_zero_std", "completions/clipped_ratio", "thinking/closed_ratio", "grad_norm", "entropy")
print("Metrics of this run's first and last logged step")
print(f"{'':26}    first     last")
for name in names:
    values = [row[name] for row in result.metrics if row.get(name) is not None]
    if values:
        print(f"{name:26} {values[0]:8.3f} {values[-1]:8.3f}")

# %% [markdown]
# ## 13. The report
#
# One HTML file with the numbers, the curves and the completions, for a reader who was not here. The run's folder also
# contains the configuration, every metric, every completion, both evaluations, the checkpoints and the adapter.

# %%
report = kit.write_report(run, result, before, after)
print(f"report: {report}")
print("next to it:", ", ".join(sorted(path.name for path in run.folder.iterdir() if path.name[0] != ".")))

# %% [markdown]
# ## 14. Save the adapter
#
# Training has already saved it in the run's folder. A copy elsewhere survives an `overwrite`. To continue from it or
# to measure it, use `overrides = "model.adapter=FOLDER"` or `rloo-kit eval FILE --adapter FOLDER`.

# %%
print(f"saved by the run: {result.adapter_folder}")
copy = kit.save_adapter(policy, run.folder.parent / "adapters" / run.folder.name)
print(f"a copy: {copy}")

# %% [markdown]
# ## 15. Use it
#
# Ask a held-out prompt, or a question of your own: answered once, greedily, by the engine that trained. The thinking
# comes first, split off at the id of `</think>`; the answer below it is what a user would see.

# %%
question = data.test[0]  # or the text of your own question, in quotes

# %%
answer = kit.ask(run, policy, question, temperature=0)
print(answer)
print("\nThe question was:", answer.question)

# %% [markdown]
# `rloo-kit ask RUN` reads questions in a terminal, and `--base` shows the untrained model's answers
# alongside. `rloo-kit export RUN --to merged`, `gguf` or `vllm` exports the model for other programs and compares it
# with this one before writing it.

# %% [markdown]
# ## 16. The verdict
#
# One sentence: learnt, no evidence, no signal, broken or gamed, by how much, on how many prompts, and what to do next.

# %%
print(kit.judge_run(run, result, before, after))

# %% [markdown]
# ## 17. The end
#
# This frees the memory and shuts the kernel down once nothing is being saved. Outputs stay in the notebook: save it as
# usual. Restart the kernel to run again.

# %%
del policy, data, reward_funcs
kit.shutdown_kernel()
