"""Counts what bad input does to each surface of the kit: cases, refusals with a message, tracebacks.

`python tests/fuzz/run.py --cases 10000` is the long run; `--only YAML rows` selects surfaces, `--seed 1` gives other
cases.
"""

import argparse
import importlib
import logging
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
logging.getLogger("dotenv").setLevel(logging.ERROR)
for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ[name] = "1"


def main() -> int:
    from tests.fuzz.harness import count

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="of each surface (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of surfaces")
    options = parser.parse_args()
    files = sorted((ROOT / "tests" / "fuzz").glob("test_*.py"))
    modules = [importlib.import_module(f"tests.fuzz.{file.stem}") for file in files]
    surfaces = [module.SURFACE for module in modules if hasattr(module, "SURFACE")]
    print(f"{options.cases:,} cases a surface, seed {options.seed}")
    print(f"{'surface':<24}{'cases':>8}{'refused':>9}{'unclear':>9}{'tracebacks':>12}{'seconds':>9}", flush=True)
    failed = 0
    for surface in surfaces:
        if options.only and surface.name not in options.only:
            continue
        begun = time.monotonic()
        tally = count(surface, options.cases, options.seed)
        seconds = time.monotonic() - begun
        figures = f"{tally.cases:>8}{tally.refused:>9}{tally.unclear:>9}{tally.tracebacks:>12}{seconds:>9.0f}"
        print(f"{tally.surface:<24}{figures}", flush=True)
        for what, number in tally.failures.most_common():
            print(f"    {number} x {what}\n        {tally.examples[what]}", flush=True)
        failed += tally.failures.total()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
