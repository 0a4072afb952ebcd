"""Images in prompts of vLLM in the trainer's process, in a process of its own.

vLLM's vision models import torchvision, whose wheels are for CUDA: RLOO_KIT_TORCHVISION names a folder with one
(`pip install --no-deps --target FOLDER torchvision`), of which the Python code alone is used.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT, VARIABLE = Path(__file__).resolve().parents[2], "RLOO_KIT_TORCHVISION"
OPERATORS = """import torch
operators = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""  # declared in each of vLLM's processes, as the compiled part does
MOST = 1e-4  # nats between vLLM's and the trainer's log-probability of a token, in float32


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
def test_tokens_behind_images_are_as_likely_as_the_trainer_says(kind, tmp_path):
    """vLLM's own resize is 4e-3 nats off, and ids of images that it expands once more are of other images."""
    if not (folder := os.environ.get(VARIABLE)):
        pytest.skip(f"torchvision is not in {VARIABLE}")
    (tmp_path / "sitecustomize.py").write_text(OPERATORS)
    call = [sys.executable, "-m", "tests.with_vllm.test_images", kind, str(tmp_path)]
    paths = {"PYTHONPATH": f"{ROOT}:{tmp_path}:{folder}"}
    done = subprocess.run(call, cwd=ROOT, env=os.environ | paths, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-4000:]


def main(kind: str, folder: Path) -> None:
    from rloo_kit.rollout.choice import build_engine
    from rloo_kit.vllm.in_process import VllmSettings
    from tests.images.models import ROPE, TEXT, TOWER, make, noise
    from tests.images.test_exactness import Pair
    from tests.rollout.models import BUDGET, check_logps
    from tests.with_vllm.test_in_process import disturb

    TEXT.update(hidden_size=64, head_dim=32)  # vLLM's attention on a CPU has no heads of 16
    TOWER["out_hidden_size"] = 64
    ROPE.update(mrope_section=[6, 5, 5], mrope_interleaved=kind == "qwen3_vl")  # transformers reads the class instead
    pair, wide = Pair(make(kind, folder)), noise(2, 150, 100)
    pair.vision.processor.size = {"shortest_edge": 256, "longest_edge": 2048}  # below the checkpoint's 4096
    prompts = [pair.read("1", wide, "2+3="), pair.read(noise(1), "1", wide, "2="), pair.read("a question: 7+8=")] * 2
    settings = VllmSettings(512)
    engine = build_engine(pair.model, "vllm", vllm=settings, temperature=1.0, end_ids=[258], pad_id=256)
    for seed in (1, 2):  # the second adapter is an update
        disturb(pair.model, seed)
        check_logps(pair.model, prompts, engine.sample(prompts, BUDGET), tolerance=MOST)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
