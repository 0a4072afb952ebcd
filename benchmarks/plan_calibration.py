"""The memory plan against measured peaks on the CPU; figures go to `results/plan_calibration.json`.

    python benchmarks/plan_calibration.py                  # five settings, about a minute each on an idle core
    python benchmarks/plan_calibration.py --only 4-bit     # one of them; the others keep their figures

Each setting is a separate process that measures its resident memory: a checkpoint with random weights, the run's own
rollout with full caches, and two optimizer steps at full length (`measure_steps`). The models are large enough that
Python and its libraries take at most a third of a peak. Left out: GPUs, which `first_hour.py` measures.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from typing import Any

import reporting

RESULT = reporting.RESULTS / "plan_calibration.json"
CONFIG = "configs/arithmetic_thinking.yaml"
COMMON = [
    "model.family=thinking", "rloo.per_device_train_batch_size=32", "rloo.gradient_accumulation_steps=1",
    "data.max_prompt_length=128",
]  # fmt: skip
WIDE = {"hidden_size": 1024, "intermediate_size": 3072, "num_heads": 16, "num_kv_heads": 8}
NARROW = {"hidden_size": 768, "intermediate_size": 2048, "num_heads": 12, "num_kv_heads": 4}
SHORT = ["rloo.max_completion_length=384", "model.max_seq_length=512"]
# fmt: off
SETTINGS: dict[str, tuple[dict[str, int], list[str]]] = {
    "float32, LoRA": (
        WIDE | {"num_layers": 8},
        [*SHORT, "rollout.rows=16", "rloo.num_generations=4", "model.gradient_checkpointing=false"],
    ),
    "checkpointing": (
        WIDE | {"num_layers": 8},
        [*SHORT, "rollout.rows=16", "rloo.num_generations=4", "model.gradient_checkpointing=true"],
    ),
    "long rows": (
        NARROW | {"num_layers": 12},
        ["rloo.max_completion_length=1920", "model.max_seq_length=2048", "rollout.rows=16", "rloo.num_generations=4",
         "model.gradient_checkpointing=true"],
    ),
    "4-bit, K = 8": (
        WIDE | {"num_layers": 12},
        [*SHORT, "rollout.rows=32", "rloo.num_generations=8", "model.gradient_checkpointing=true",
         "model.load_in_4bit=true"],
    ),
    "all weights": (
        NARROW | {"num_layers": 10},
        [*SHORT, "rollout.rows=8", "rloo.num_generations=4", "model.gradient_checkpointing=false", "model.lora=null",
         "rloo.learning_rate=1e-6"],
    ),
}
# fmt: on


def measure(name: str) -> dict[str, Any]:
    """One setting in this process: computed and measured GiB of both peaks."""
    import rloo_kit as kit

    kit.setup_environment("transformers")
    from rloo_kit.measure.memory import load_of, measure_steps
    from rloo_kit.measure.stand_ins import save_random_model
    from rloo_kit.plan.corrections import PARTS
    from rloo_kit.plan.peaks import rollout_gib, training_gib
    from rloo_kit.plan.shapes import ModelShape

    sizes, words = SETTINGS[name]
    shape = ModelShape(**sizes, head_dim=64, vocab_size=32000, tied=True)
    with tempfile.TemporaryDirectory(prefix="rloo-kit-calibration-") as folder:
        save_random_model(shape, folder)
        run = kit.load_config(CONFIG, f"model.name={folder}", *COMMON, *words)
        policy = kit.load_policy(run, check=False)
        load = load_of(run, policy)
        rows = min(run.rollout.rows or load.completions, load.completions)
        peaks = measure_steps(policy, run, rows)
    found = {"weights_m": round(shape.num_weights / 1e6), "rows": rows, "tokens": load.row_tokens}
    found |= {"pass_tokens": load.pass_tokens, "words": words, "shape": asdict(shape)}
    for part, computed, peak in zip(PARTS, (rollout_gib(load, rows), training_gib(load)), peaks, strict=True):
        found[part] = {"computed_gib": round(computed, 3), "measured_gib": round(peak.gib, 3)}
        found[part] |= {"ratio": round(peak.gib / computed, 3), "seconds": round(peak.seconds, 1)}
    return found


def start(name: str) -> dict[str, Any]:
    """One setting in a separate process."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"RLOO_KIT_CACHE": cache, "PYTHONPATH": str(reporting.ROOT)}
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(
            command, cwd=reporting.ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def calibration_table(result: dict[str, Any]) -> list[str]:
    """plan_calibration.json, for docs/plan.md."""
    head = ["setting", "M weights", "rows x tokens", "of a pass"]
    head += ["rollout: computed", "measured", "ratio", "training: computed", "measured", "ratio"]
    rows = []
    for name, found in result["settings"].items():
        row = [name, str(found["weights_m"]), f"{found['rows']} x {found['tokens']}", str(found["pass_tokens"])]
        for part in ("rollout", "training"):
            row += [f"{found[part][figure]:.2f}" for figure in ("computed_gib", "measured_gib", "ratio")]
        rows.append(row)
    return reporting.table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SETTINGS)
    parser.add_argument("--one", choices=SETTINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    reporting.settle()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    known = json.loads(RESULT.read_text(encoding="utf-8"))["settings"] if RESULT.is_file() else {}
    for name in [options.only] if options.only else SETTINGS:
        known[name] = start(name)
        print(name, {part: known[name][part] for part in ("rollout", "training")}, flush=True)
    settings = {name: known[name] for name in SETTINGS if name in known}
    found = reporting.header("benchmarks/plan_calibration.py") | {"settings": settings}
    RESULT.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    import doc_tables  # the page has a separate table

    doc_tables.write_tables()


if __name__ == "__main__":
    main()
