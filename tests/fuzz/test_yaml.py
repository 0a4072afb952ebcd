"""YAML of a run's config: `load_config`."""

from pathlib import Path

from rloo_kit.config.run import load_config
from tests.fuzz.harness import Surface, check
from tests.fuzz.nasty import ROOT, mutated_yaml, without_comments

SMALL = """model: {name: embedded/thinking, max_seq_length: 128, lora: {r: 16, alpha: 16}}
data: {source: embedded/addition, max_prompt_length: 64}
rewards:
  - name: answer_reward
    weight: 1.0
    params: {scale: 2}
rloo:
  max_steps: 60
  learning_rate: 2e-3
  max_completion_length: 48
  reward_clip_range: [-1, 1]
  report_to: none
rollout: {engine: auto}
eval:
  pass_at_k: [1]
run:
  name: x
"""
OLD = """model: {name: embedded/thinking, max_seq_length: 128}
data: {source: embedded/addition, max_prompt_length: 64}
rewards: [{name: answer_reward}]
rloo:
  kl_coef: 0.0
  total_episodes: 100
  num_mini_batches: 1
  reward_clip_range: 10
  normalize_reward: true
  max_completion_length: 48
  non_eos_penalty: false
  stop_token: eos
  exp_name: x
  vf_coef: 0.1
"""
SHIPPED = [without_comments(path) for path in sorted((ROOT / "configs").glob("[aq]*.yaml"))]


def attack(case: bytes, folder: Path) -> None:
    file = folder / "run.yaml"
    file.write_bytes(case)
    load_config(file).to_yaml()


SURFACE = Surface("YAML", mutated_yaml([SMALL, SMALL, OLD, *SHIPPED[:3]]), attack)


def test_a_run_file_is_read_or_refused_in_words() -> None:
    """`!!timestamp x`, `!!bool x` and a long hexadecimal number ended in tracebacks; 316 bytes of aliases never
    ended."""
    check(SURFACE)
