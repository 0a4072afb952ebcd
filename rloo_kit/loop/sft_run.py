"""All of `rloo-kit sft` in an open folder: evaluate, train on demonstrations, evaluate again, measure RLOO's signal."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rloo_kit.config.resume import changed_keys
from rloo_kit.config.run import RunConfig, load_config
from rloo_kit.config.yaml_files import write_value
from rloo_kit.data.load import Data
from rloo_kit.evals.difficulty import measure_signal
from rloo_kit.evals.evaluate import evaluate
from rloo_kit.loop.sft import SftResult, fine_tune
from rloo_kit.models.policy import Policy
from rloo_kit.results.changes import compare
from rloo_kit.rewarding.worker import end_workers
from rloo_kit.runs.find import weights_of
from rloo_kit.runs.run_dir import RunDir
from rloo_kit.system.processes import say

WEIGHTS = ("model.adapter", "model.name")  # an adapter still needs the name of its base


def fine_tune_and_report(run: RunConfig, policy: Policy, data: Data, run_dir: RunDir) -> SftResult:
    """Held-out accuracy before and after supervised training, and the signal that RLOO would have.

    Printed, and written to before.json and after.json. Raises as `fine_tune`."""
    before = None
    if run.run.evaluate:
        before = evaluate(run, policy, data.test, label="before")
        run_dir.write_json("before.json", before.to_dict())
        say(before)
    result = fine_tune(run, policy, data, run_dir=run_dir)
    if result.stopped:
        return result
    if before is not None:
        after = evaluate(run, policy, data.test, label="after")
        run_dir.write_json("after.json", after.to_dict())
        say(after)
        say(f"after supervised training: {compare(before, after)}")
    if run.sft.signal_prompts:
        signal = measure_signal(run, policy, data, run.sft.signal_prompts)
        say(signal or "signal: no training prompt has an answer to judge by; rloo-kit preflight measures the rewards")
    end_workers()
    say(f"{result.steps} steps, {result.seconds:.0f} s of supervised training. Everything is in {run_dir.folder}")
    return result


def next_command(run: RunConfig, overrides: Sequence[str], result: SftResult) -> str:
    """The command that continues with RLOO from the weights of `result`.

    Args:
        run: read from a file, with `overrides` (KEY=VALUE), which are repeated. A key whose default follows the
            model's name keeps its value if the name is now that of a folder.
    """
    adapter, source = _from_here(result.adapter_folder), run.source
    key = f"model.{weights_of(adapter)[0]}"
    replaced = WEIGHTS[: WEIGHTS.index(key) + 1]
    own = (*(f"{one}=" for one in (*replaced, "run.name")), "sft.")
    kept = [word for word in overrides if not word.startswith(own)]
    if any(word.startswith("run.name=") for word in overrides):
        kept.append(f"run.name={run.name}")
    with_weights = [*kept, f"{key}={write_value(str(adapter))}"]
    assert source is not None
    if key == "model.name":
        then = load_config(source, *with_weights)
        changed = changed_keys(then.model_dump(mode="json"), run.model_dump(mode="json"))
        with_weights += [
            f"{name}={write_value(value)}"
            for name, (_, value) in changed.items()
            if not name.startswith(("model.name", "model.adapter", "model.build_seed", "model.vocabulary", "sft."))
        ]
    return shlex.join(["rloo-kit", "train", str(source), *with_weights])


def _from_here(folder: Path) -> Path:
    """The folder, relative to the working directory if it is inside it."""
    try:
        return folder.resolve().relative_to(Path.cwd())
    except ValueError:
        return folder
