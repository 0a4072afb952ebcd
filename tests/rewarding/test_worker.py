"""A reward in a separate process: what is sent, what comes back, and what is refused; faults in test_worker_faults."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.errors import ConfigError, RewardError, WholeBatchError
from rloo_kit.rewarding.guard import guard
from rloo_kit.rewarding.worker import WorkerReward, refuse_edited
from rloo_kit.system.isolation import Worker, worker_environment
from rloo_kit.system.user_code import MOST_FILES, read_files

HERE = Path(__file__).parent
BATCH: dict[str, Any] = {"prompts": ["p", "q"], "completions": ["abc", "ab"], "completion_ids": [(1, 2), (3,)]}


@pytest.fixture
def reward(request: pytest.FixtureRequest) -> Iterator[WorkerReward]:
    """`reward_examples:NAME` in a worker, with as long as a busy machine needs."""
    made = WorkerReward(f"reward_examples:{request.param}", folders=[HERE], timeout_s=60.0)
    yield made
    made.worker.close()


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("by_length", [3.0, 2.0]),
        ("types_of_ids", [1.0, 1.0]),
        ("sees", [2.0, 2.0]),
        ("same_loop", [1.0, 1.0]),
        ("heavy_modules", [0.0, 0.0]),
        ("odd_numbers", [0.1 + 0.2, float("-inf")]),
        ("scorer", [-2.0, -1.0]),  # an object with get_rewards
        ("arrays", [3.0, 2.0]),  # one number a row, as a classifier's logits are
    ],
    indirect=["reward"],
)
def test_a_good_reward_gives_what_it_gives_in_place(reward: WorkerReward, expected: list[float]) -> None:
    """A print broke the protocol, columns got lost, and a worker that loads torch costs ten seconds. A client of the
    reward's own failed with "Event loop is closed" in every call but the first."""
    columns = {"answer": ["1", "2"], "trainer_state": object()}
    assert reward(**BATCH, **columns) == expected and reward(**BATCH, **columns) == expected


@pytest.mark.parametrize("reward", ["logs"], indirect=True)
def test_logging_comes_back(reward: WorkerReward) -> None:
    """Guards against a reward that logs metrics in a notebook and loses them when a config names it."""
    seen: list[Any] = []
    reward(**BATCH, log_metric=lambda *args: seen.append(args), log_extra=lambda *args: seen.append(args))
    assert seen == [("lengths/mean", 2.0), ("first", ["a", "a"])]


@pytest.mark.parametrize("reward", ["slow_ids"], indirect=True)
def test_only_what_the_function_accepts_is_sent(reward: WorkerReward) -> None:
    """A function without `**columns` failed on every sample; what it cannot take need not even pickle."""
    batch = BATCH | {"odd": [lambda: 1, lambda: 2], "log_metric": lambda *args: None, "log_extra": print}
    assert (found := guard(reward, columns=["odd"]).score(**batch)).values == [2.0, 1.0] and found.failures == []


@pytest.mark.parametrize("reward", ["wants_state"], indirect=True)
def test_a_signature_that_cannot_work_is_refused(reward: WorkerReward) -> None:
    """The signature is the one in the worker's process: the module is never imported in this one."""
    with pytest.raises(RewardError, match="'trainer_state'.*worker"):
        guard(reward)


@pytest.mark.parametrize(
    ("reward", "values", "words"),
    [
        ("a_dict", [None, None], "it returned dict"),
        ("texts", [0.5, None], "sample 1 "),
        ("verdicts", [0.5, None], "sample 1 "),  # of a class that only the worker knows
    ],
    indirect=["reward"],
)
def test_what_is_no_reward_is_not_scored(reward: WorkerReward, values: list[float | None], words: str) -> None:
    """A list made of what the guard would refuse, float("1"), and an object that this process cannot read."""
    found = guard(reward).score(**BATCH)
    assert found.values == values and found.failed == [value is None for value in values] and reward.worker.running
    assert len(found.failures) == 1 and words in found.failures[0] and "it returned" in found.failures[0]


PASSED = ["PATH", "LC_ALL", "PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"]
PASSED += ["RLOO_KIT_BATCH"]  # a batch ends what carries its mark
HIDDEN = ["HF_TOKEN", "HF_ENDPOINT", "WANDB_API_KEY", "PGPASSWORD", "HTTPS_PROXY", "SSH_AUTH_SOCK", "ANYTHING"]
HIDDEN += ["PYTHON_TOKEN", "RLOO_KIT_SECRET", "CUDA_LICENSE_KEY", "LC_AUTH_COOKIE"]  # of names that are passed


def test_a_worker_sees_no_secret_that_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `.env` went to every reward: HF_TOKEN, WANDB_API_KEY and the hub's token."""
    for name in (*PASSED[1:], *HIDDEN, "JUDGE_API_KEY"):
        monkeypatch.setenv(name, "0" if name == "PYTHONHASHSEED" else "canary-4f1d7c")
    reward = WorkerReward("fault_examples:environment", folders=[HERE], env=["JUDGE_API_KEY"])
    seen: dict[str, list[str]] = {}
    reward(**BATCH, log_extra=seen.__setitem__)
    reward.worker.close()
    assert {*PASSED, *HIDDEN, "JUDGE_API_KEY"} & {*seen["names"]} == {*PASSED, "JUDGE_API_KEY"}
    assert {*HIDDEN} < worker_environment(HIDDEN).keys()
    worker = Worker("test")  # the kit's own: no second way to start one
    assert [worker.call(os.getenv, name, timeout_s=60) for name in ("HF_TOKEN", "PATH")] == [None, os.environ["PATH"]]
    worker.close()


def test_a_reward_never_shows_a_key_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error with the address that a reward had called, key included, was in the log and, by log_extra, in
    rollouts/."""
    monkeypatch.setenv("MY_API_KEY", key := "sk-Canary/4711+abc")
    reward = WorkerReward(f"{HERE.parent / 'tools' / 'leaking_tools.py'}:rate", timeout_s=60.0, env=["MY_API_KEY"])
    seen: list[Any] = []
    logs = {"log_metric": lambda *args: seen.append(args), "log_extra": lambda *args: seen.append(args)}
    found = guard(reward).score(**BATCH, **logs)
    assert seen == [("reply", ["from ***", {"key": "***", "n": 1}]), ("judge/n", 1.0)]
    assert found.values == [1.0, None] and "it returned '***'" in found.failures[0]
    for completion in ("fails", "a text"):
        found = guard(reward).score(**BATCH | {"completions": [completion] * 2}, **logs)
        assert found.failed == [True, True] and "***" in found.failures[0] and "Canary" not in str(found), key
    reward.worker.close()
    with pytest.raises(WholeBatchError, match="KeyError: 'MY_API_KEY'"):
        WorkerReward(f"{HERE.parent / 'tools' / 'leaking_tools.py'}:rate", timeout_s=60.0).load()


class Unreadable:
    """It can be pickled, and raises where it is read."""

    def __reduce__(self) -> Any:
        return int, ("x",)


@pytest.mark.parametrize("reward", ["process_id"], indirect=True)
def test_what_cannot_be_sent_leaves_the_process_as_it_was(reward: WorkerReward) -> None:
    """A new interpreter for every batch, and half a message in the pipe: the next call would read the wrong answer."""
    first = reward(**BATCH)
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError), match="pickle|local"):
        reward(**BATCH, odd=[lambda: 1, lambda: 2])
    with pytest.raises(RewardError, match="ValueError: invalid literal"):
        reward(**BATCH, odd=[Unreadable(), Unreadable()])
    assert reward(**BATCH) == first and reward.worker.running
    reward.worker.close()
    assert not reward.worker.running and reward(**BATCH) != first


def test_a_file_imports_relative_to_its_folder(tmp_path: Path) -> None:
    """`from .util import x` failed in `pkg/rewards.py`. The `__init__` of packages above it is not run."""
    for folder in (tmp_path / "pkg", tmp_path / "pkg" / "math"):
        folder.mkdir()
        (folder / "__init__.py").write_text("raise RuntimeError('not a library')")
    (tmp_path / "pkg" / "shared.py").write_text("ONE = 1.0")
    (tmp_path / "pkg" / "math" / "util.py").write_text("from ..shared import ONE")
    file = tmp_path / "pkg" / "math" / "rewards.v2.py"
    file.write_text("from .util import ONE\ndef score(completions): return [ONE for _ in completions]")
    reward = WorkerReward(f"{file}:score", timeout_s=60)
    assert reward(**BATCH) == [1.0, 1.0]
    reward.worker.close()


def test_a_process_never_starts_again_with_other_code(tmp_path: Path) -> None:
    """A reward was edited while its run trained; the evaluation after ran the new code: "learnt: from 0.14 to
    10.25"."""
    file = tmp_path / "own.py"
    file.write_text("def score(completions):\n    return [1.0] * len(completions)\n")
    made = WorkerReward("own:score", folders=[tmp_path])
    assert made(**BATCH) == [1.0, 1.0]
    kept = file.read_text()
    for text in (kept.replace("1.0", "10.0"), "def score(:\n", None):
        made.worker.close()
        refuse_edited()
        file.write_text(text) if text else file.unlink()
        with pytest.raises(WholeBatchError, match="own.py changed after the reward 'own:score' was loaded"):
            made(**BATCH)
        with pytest.raises(ConfigError, match="own.py changed.*--accept-changes"):
            refuse_edited()
        file.write_text(kept)
    assert made(**BATCH) == [1.0, 1.0]
    made.worker.close()


def test_a_file_that_is_too_deep_or_imports_hundreds_is_read_for_its_digest(tmp_path: Path) -> None:
    """A sum of 2,000 terms was a RecursionError, and a package installed in place took 25 s."""
    (tmp_path / "deep.py").write_text("import other_0\nTOTAL = " + " + ".join(["1"] * 2000))
    for number in range(300):
        (tmp_path / f"other_{number}.py").write_text(f"import other_{number + 1}")
    assert len(found := read_files(str(tmp_path / "deep.py"), [])) == MOST_FILES and "other_1.py" in found


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("reward_examples:Scorer", r"'reward_examples:Scorer' is a class; .* Scorer\(...\)"),
        ("broken:f", r"importing 'broken' failed: ZeroDivisionError: division by zero \(broken.py, line 1\)"),
        ("dies:f", "importing 'dies:f' ended its process with exit code 3"),
    ],
)
def test_a_target_that_cannot_be_used_is_said(target: str, words: str, tmp_path: Path) -> None:
    """Guards against a typing error in a config that shows only as an unscored batch, an hour later."""
    (tmp_path / "broken.py").write_text("1 / 0\n", encoding="utf-8")
    (tmp_path / "dies.py").write_text("import os\nos._exit(3)\n", encoding="utf-8")
    reward = WorkerReward(target, folders=[HERE, tmp_path])
    with pytest.raises(WholeBatchError, match=words):
        reward.load()
    assert not reward.worker.running
