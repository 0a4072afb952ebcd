"""The core trains a run by itself, with every part made impossible to import."""

import subprocess
import sys
from pathlib import Path

from rloo_kit import build_rewards, load_config, load_data, load_policy, train
from tests.contracts.test_floors import PARTS
from tests.loop.conftest import lines

PROGRAM = """
import sys

PARTS = {parts!r}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:1] == ["rloo_kit"] and name.split(".")[1:2] and name.split(".")[1] in PARTS:
            raise ImportError(f"the core imports {{name}}")

sys.meta_path.insert(0, Refuse())
import rloo_kit as kit

kit.setup_environment()
run = kit.load_config({config!r}, "run.name=alone", *{overrides!r})
policy = kit.load_policy(run)
data = kit.load_data(run, policy.tokenizer)
rewards = kit.build_rewards(run, policy.tokenizer)

from rloo_kit.loop.callbacks import MetricsWriter, Movement, RolloutLog, TimedSaves
from rloo_kit.loop.options import training_arguments
from rloo_kit.loop.saving import publish_adapter
from rloo_kit.runs.folder import RunDir

with RunDir.create(run) as run_dir:
    trainer = kit.RLOOTrainer(
        model=policy.model,
        reward_funcs=rewards,
        args=kit.RLOOConfig(**training_arguments(run, policy, run_dir / "checkpoints")),
        train_dataset=data.train,
        processing_class=policy.tokenizer,
        callbacks=[MetricsWriter(run_dir), TimedSaves(run_dir, None)],
    )
    trainer.add_callback(Movement(trainer))
    trainer.rollout_listeners.append(RolloutLog(run_dir))
    trainer.train()
    publish_adapter(policy, run_dir, run=run_dir.id, step=4, steps_done=4)
completions = kit.generate_completions(policy, ["1+2="], 4)
assert len(completions[0].ids) <= 4
loaded = sorted(name for name in sys.modules if name.split(".")[:1] == ["rloo_kit"] and name.split(".")[1:2])
assert not [name for name in loaded if name.split(".")[1] in PARTS]
print(run_dir.folder)
"""


def test_a_run_trains_without_any_part(write_config, tmp_path):
    """The core imports no part; the steps are those of `train`, which puts the parts around it."""
    config, own = write_config(), tmp_path / "own.py"
    own.write_text("def by_ids(completion_ids, **_):\n    return [sum(ids) % 17 / 17 for ids in completion_ids]\n")
    overrides = [f"rewards=[{{name: '{own}:by_ids'}}]", "run.report=false"]
    program = PROGRAM.format(parts=PARTS, config=str(config), overrides=overrides)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    alone = lines(Path(done.stdout.split()[-1]), "metrics.jsonl")
    run = load_config(config, *overrides)
    policy = load_policy(run)
    whole = train(run, policy, load_data(run, policy.tokenizer), build_rewards(run, policy.tokenizer)).metrics
    assert len(alone) == 4 and all(row["policy/moved"] > 0 for row in alone)
    for name in ("loss", "reward", "grad_norm", "policy/moved"):
        assert [row[name] for row in alone] == [row[name] for row in whole], name
