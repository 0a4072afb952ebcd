"""Run the fault tests and write their records into docs/runs.md: the fault, what the user sees, what is kept.

python tests/faults/table.py
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
LONGEST = 120  # characters of a cell


def main() -> int:
    from tests.faults.conftest import TABLE_VARIABLE

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "tests/faults/test_runs.py"], cwd=ROOT,
            env=os.environ | {TABLE_VARIABLE: str(file)}, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            return done.returncode
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    lines = ["| fault | exit code | what the user sees | what is kept |", "|---|---|---|---|"]
    for row in rows:
        seen = row["seen"] if len(row["seen"]) <= LONGEST else row["seen"][:LONGEST] + " ..."
        cells = (row["fault"], "killed" if row["code"] < 0 else str(row["code"]), f"`{seen}`", row["kept"])
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    page = ROOT / "docs" / "runs.md"
    text = "<!-- table: faults -->\n" + "\n".join(lines) + "\n<!-- end -->"
    found = re.sub(
        r"<!-- table: faults -->.*?<!-- end -->", lambda _: text, page.read_text(encoding="utf-8"), flags=re.S
    )
    page.write_text(found, encoding="utf-8")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
