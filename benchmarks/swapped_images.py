"""Whether the embedded model that sees looks at its pictures: accuracy before and after a run, and with the pictures of
other prompts, which have other answers.

    python benchmarks/swapped_images.py --seeds 0 1 2     # into benchmarks/results/swapped_images.json
"""

import argparse
import sys
import time
from typing import Any

from reporting import RESULTS, ROOT, header, settle, write


def measure(seed: int) -> dict[str, Any]:
    import rloo_kit as kit
    from rloo_kit.images.tokens import REFERENCE

    config, started = ROOT / "configs" / "shapes_thinking.yaml", time.monotonic()
    run = kit.load_config(config, f"run.seed={seed}", f"run.name=swapped_images_{seed}", "run.evaluate=false")
    policy = kit.load_policy(run)
    data = kit.load_data(run, policy.tokenizer)
    images = [REFERENCE.search(text)[0] for text in data.test["prompt"]]
    others = [
        REFERENCE.sub(image, text) for text, image in zip(data.test["prompt"], images[1:] + images[:1], strict=True)
    ]
    swapped = data.test.remove_columns("prompt").add_column("prompt", others)
    before = kit.evaluate(run, policy, data.test)
    result = kit.train(run, policy, data, kit.build_rewards(run, policy.tokenizer), overwrite=True)
    after = kit.evaluate(run, policy, data.test)
    row: dict[str, Any] = {"seed": seed, "verdict": kit.judge_run(run, result, before, after).kind}
    row |= {"minutes": round((time.monotonic() - started) / 60, 1), "prompts": len(images)}
    for name, found in (("before", before), ("after", after), ("swapped", kit.evaluate(run, policy, swapped))):
        row[name] = {key: found.measures[key].ends for key in ("accuracy", "greedy_accuracy") if key in found.measures}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    settle()
    import rloo_kit as kit

    kit.setup_environment()
    rows = [measure(seed) for seed in seeds]
    write(header("benchmarks/swapped_images.py") | {"chance": 0.1, "runs": rows}, RESULTS / "swapped_images.json")


if __name__ == "__main__":
    sys.exit(main())
