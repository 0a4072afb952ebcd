"""What a run's configuration only names: its rows, the sources of its rewards, its base. A resume compares them."""

import json
from typing import Any

from rloo_kit.collective import share_from_main
from rloo_kit.data.load import Data
from rloo_kit.errors import ConfigError
from rloo_kit.models.policy import Policy
from rloo_kit.rewarding.guard import reward_name
from rloo_kit.rewarding.sources import read_sources
from rloo_kit.rewarding.worker import digest_texts
from rloo_kit.runs.files import read_object
from rloo_kit.runs.run_dir import INPUTS, RunDir
from rloo_kit.system.processes import say


def check_inputs(run_dir: RunDir, policy: Policy, data: Data, reward_funcs: list[Any]) -> None:
    """Record what a new run begins with, and compare it with what a resumed run has; once for each open folder.

    Changes that `run_dir` accepts, or that come before anything is trained, are recorded, and what was measured before
    them is deleted.

    Raises:
        ConfigError: rows, rewards or weights have changed; lists them.
    """
    if not run_dir.inputs:
        run_dir.inputs = share_from_main(lambda: _compare(run_dir, _read(policy, data, reward_funcs)))


def _compare(run_dir: RunDir, found: dict[str, str]) -> str:
    began = read_object(run_dir / INPUTS) if run_dir.resumed else {}
    changed = [
        f"{name} ({began[name]} then, {found[name]} now)" if name.startswith("number of") else name
        for name in (began | found if began else ())
        if began.get(name) != found.get(name) and not (name.startswith("weights of") and name not in began)
    ]
    if changed:
        text, trained = ", ".join(changed), run_dir.resumes_from
        if trained is not None and not run_dir.accepts_changes:
            raise ConfigError(
                f"the run in {run_dir.folder} began with other inputs. Changed: {text}. Restore them, continue with "
                "--accept-changes (accept_changes=True), or start over: --overwrite or run.name=..."
            )
        run_dir.drop_results("before.json", *(() if trained else ("evaluations.jsonl",)))
        if trained is not None:
            text = f"from step {trained.step} on other inputs: {text}"
            trained_on = "; held-out prompts may have been trained on before" if "column prompt" in text else ""
            say(f"WARNING: {run_dir.folder} continues {text}{trained_on}")
            run_dir.set_status("running", changed="; ".join(filter(None, [run_dir.status().get("changed"), text])))
    run_dir.write_json(INPUTS, found)
    return digest_texts(map(str, sorted(found.items())))


def _read(policy: Policy, data: Data, reward_funcs: list[Any]) -> dict[str, str]:
    """Digests and counts by their names in words."""
    found: dict[str, str] = {}
    for side, table in (("training", data.train), ("held-out", data.test)):
        found[f"number of {side} prompts"] = str(len(table))
        for name in table.column_names:
            values = (json.dumps(value, sort_keys=True, default=str) for value in table[name][:])
            found[f"column {name} of the {side} prompts"] = digest_texts(values)
    found["rewards"] = ", ".join(one if isinstance(one, str) else reward_name(one) for one in reward_funcs)
    return found | read_sources(reward_funcs) | policy.weights
