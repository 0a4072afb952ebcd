"""Pictures of a report for the front page, and the time to write and open a large one, by headless Chromium.

    python benchmarks/report_pictures.py --run outputs/arithmetic_thinking   # docs/pictures/report-*.png
    python benchmarks/report_pictures.py                                     # trains the demo run first (half a minute)
    python benchmarks/report_pictures.py --load                              # 100,000 rollouts; figures on stdout

The pictures are the top of the page: 1280 pixels wide in light and in dark, and 390 pixels in light.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from reporting import ROOT

sys.path.insert(0, str(ROOT))
from tests.browser import CHROMIUM, Browser

PICTURES = ROOT / "docs" / "pictures"
SHOTS = {"light": (1280, 6, False), "dark": (1280, 6, True), "narrow": (390, 1, False)}  # width, panels, dark
MOST_BYTES = 250_000  # of a picture in the repository
CONFIG = ROOT / "configs" / "arithmetic_thinking.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a finished run's folder (default: the demo run is trained)")
    parser.add_argument("--load", action="store_true", help="measure a report of 100,000 rollouts instead")
    options = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("no chromium on the PATH (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        if options.load:
            measure_load(Path(folder))
        else:
            take_pictures(options.run or train_demo(Path(folder)), Path(folder))


def train_demo(folder: Path) -> Path:
    """The demo run with evaluations during training, which make a fuller page."""
    (folder / "configs").mkdir()
    shutil.copy(CONFIG, folder / "configs")
    words = [sys.executable, "-m", "rloo_kit.cli", "train", f"configs/{CONFIG.name}"]
    words += ["eval.every_steps=5", "eval.save_best=false"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run(words, check=True, cwd=folder, env=environment)  # the page shows paths as given
    return folder / "outputs" / CONFIG.stem


def take_pictures(run: Path, folder: Path) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with Browser(folder / "profile") as browser:
        for name, (width, panels, dark) in SHOTS.items():
            browser.view(width, dark=dark)
            browser.open(run / "report.html")
            bottoms = browser.run(
                "[...document.querySelectorAll('.panel')].map((one) => one.getBoundingClientRect().bottom)"
            )
            height = int(max(bottoms[:panels])) + 28
            path = browser.picture(PICTURES / f"report-{name}.png", height=height)
            size = path.stat().st_size
            print(f"{path.relative_to(ROOT)}: {size:,} bytes")
            assert size < MOST_BYTES and not browser.messages, browser.messages


def measure_load(folder: Path) -> None:
    """Time writing and opening three reports: 500 steps of 200 short completions, completions of 8,000 tokens, and
    50,000 rows of metrics."""
    from rloo_kit.config.run import RunConfig
    from rloo_kit.results.report import write_report
    from rloo_kit.results.result import TrainResult
    from tests.results.test_report import make_metrics, make_rollout

    long = "a thought of some words and 12+34=46 " * 850  # about 8,000 tokens
    with Browser(folder / "profile") as browser:
        for name, steps, metrics, thought in (
            ("100,000 rollouts", 500, 500, "a short thought"), ("4,000 rollouts of 31,000 characters", 20, 20, long),
            ("50,000 rows of metrics", 0, 50_000, ""),
        ):  # fmt: skip
            run = RunConfig(run={"name": name, "output_dir": str(folder)}, model={"name": "embedded/thinking"},
                            data={"source": "embedded/addition"}, rewards=[{"name": "answer_reward"}],
                            rloo={"max_steps": 500})  # fmt: skip
            run.folder.mkdir(parents=True)
            closed = {"completion": f"{thought}</think>\n\n7", "answer_start": len(thought) + 8}
            text = "".join(json.dumps(make_rollout(0, number, **closed)) + "\n" for number in range(200))
            with open(run.folder / "rollouts.jsonl", "w") as file:
                for step in range(1, steps + 1):
                    file.write(text.replace('{"step": 0,', f'{{"step": {step},'))
            result = TrainResult(run.folder, run.folder / "adapter", steps, make_metrics(metrics), 60.0)
            started = time.perf_counter()
            path = write_report(run, result)
            wrote = time.perf_counter() - started
            browser.view(1280)
            browser.open(path)
            loaded = browser.run("performance.getEntriesByType('navigation')[0].loadEventEnd")
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{name}: written in {wrote:.1f} s, {path.stat().st_size / 1e6:.2f} MB, load event after "
                  f"{loaded / 1000:.2f} s, peak memory {peak:.0f} MiB")  # fmt: skip


if __name__ == "__main__":
    main()
