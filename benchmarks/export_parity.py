"""Certificates of every export: how far each deviates from the policy, in the program that it is for.

    python benchmarks/export_parity.py                              # all but vllm, to results/export_parity.json
    .venv-vllm/bin/python benchmarks/export_parity.py --only vllm   # adds vLLM's rows; make test-vllm makes .venv-vllm

Trains the embedded model three times on this machine (the demo; 20 steps on a 4-bit base; 2 steps with Qwen3's 151,936
rows), exports each to every target and dtype, compares on 20 held-out prompts, and writes the table of docs/export.md.
Rows of targets that are not run stay.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import reporting

RESULT = reporting.RESULTS / "export_parity.json"
CONFIG = "configs/arithmetic_thinking.yaml"
RUNS = {
    "demo": [],
    "4-bit base": ["model.load_in_4bit=true", "rloo.max_steps=20", "run.evaluate=false"],
    "151,936 rows": ["model.vocabulary=qwen3", "rloo.max_steps=2", "run.evaluate=false"],
}
CASES = [
    *(["adapter", name, ""] for name in RUNS),
    *(["merged", name, dtype] for name in RUNS for dtype in ("float32", "bfloat16", "float16")),
    *(["gguf", name, kind] for name in RUNS for kind in ("f32", "f16", "bf16", "q8_0")),
    *(["vllm", name, dtype] for name in RUNS for dtype in ("float32", "bfloat16")),
]


def call(*words: str) -> str:
    """stdout of `rloo-kit words`."""
    command = [sys.executable, "-m", "rloo_kit.cli", *words]
    environment = os.environ | {"PYTHONPATH": str(reporting.ROOT), "RLOO_KIT_BACKEND": "transformers"}
    done = subprocess.run(command, cwd=reporting.ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"rloo-kit {' '.join(words)}\nended with exit code {done.returncode}:\n{done.stderr[-3000:]}"
        )
    return done.stdout


def measure(run: Path, target: str, kind: str) -> dict[str, Any]:
    """One row: the check of a certificate."""
    option = [] if not kind else ["--quantization" if target == "gguf" else "--dtype", kind]
    out = call("export", str(run), "--to", target, *option, "--overwrite", "--json")
    record = json.loads(out.splitlines()[-1])["certificate"]
    if record["verdict"] != "checked":
        raise RuntimeError(f"{target}: {record['why_not']}")
    return record["checks"][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    targets = sorted({case[0] for case in CASES})
    parser.add_argument("--only", choices=targets, action="append", help="only this target; repeat for several")
    chosen = parser.parse_args().only or [name for name in targets if name != "vllm"]
    reporting.settle()
    old = json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.is_file() else []
    result = reporting.header("benchmarks/export_parity.py")
    rows = [row for row in old if row["target"] not in chosen]
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in RUNS.items():
            number = str(len(list(Path(folder).iterdir())))
            call("train", CONFIG, f"run.output_dir={folder}", f"run.name={number}", "run.report=false", *overrides)
            for target, of, kind in CASES:
                if of == name and target in chosen:
                    row = {"run": name, "target": target, "kind": kind} | measure(Path(folder) / number, target, kind)
                    print(f"{name}, {target} {kind}: {row['largest']:.1e} at most, {row['mean']:.1e} in the mean")
                    rows.append(row)
    order = {tuple(case): place for place, case in enumerate(CASES)}
    rows.sort(key=lambda row: order[row["target"], row["run"], row["kind"]])
    reporting.write(result | {"rows": rows}, RESULT)
    import doc_tables

    doc_tables.write_tables((reporting.ROOT / "docs" / "export.md",))


if __name__ == "__main__":
    main()
