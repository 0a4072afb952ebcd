"""`rloo-kit sft` as people use it: to its end on a tiny model."""

import json
import shlex

import pytest

from tests.test_cli import call, config_file  # noqa: F401 - a fixture

WORDS = ("sft.max_steps=1", "sft.signal_prompts=2")


@pytest.fixture
def file(config_file, tmp_path):  # noqa: F811
    """A run's file whose rows have demonstrations."""
    rows = [{"prompt": f"add {n}", "answer": str(n), "completion": f"{n}</think>\n\n{n}"} for n in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config_file


def test_to_the_end_and_on_with_rloo(file, tmp_path):
    """Each figure that is decided by, in the order of the work, and a last line that can be pasted."""
    code, out, err = call("sft", file, *WORDS)
    assert code == 0, err
    order = [out.index(part) for part in ("data: ", "sft: ", "sft step 1/1", "signal: of 2 training prompts", "next: ")]
    assert order == sorted(order) and "after supervised training: " in out
    folder = tmp_path / "outputs" / "tiny-sft"
    assert {path.name for path in folder.iterdir()} >= {"before.json", "after.json", "adapter", "status.json"}
    words = shlex.split(out.splitlines()[-1].removeprefix("next: "))
    assert words == ["rloo-kit", "train", str(file), f"model.adapter={folder}/adapter"]
    code, out, err = call(*words[1:], "rloo.max_steps=1")
    assert code == 0, err
    code, _, err = call("sft", file, *WORDS)
    assert code == 2 and "already contains the supervised training of tiny" in err and "--overwrite" in err
