"""Faults that were found behind the model, or behind the first evaluation: now before either, and all at once."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.checks.faults import FolderUse, check, find_faults, load_tokenizer
from rloo_kit.checks.rewards import find_reward_faults
from rloo_kit.config.run import load_config
from rloo_kit.data.load import render_row
from rloo_kit.errors import ConfigError
from rloo_kit.system.problems import PreflightError, Problem
from tests.checks.faulty import ADD, FAULTS, IN_WORLD, OWN, TOOL, WORLD, Faulty, prepare, reward, tools

SOUND = Faulty("a sound run", (), ())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def faults_of(folder: Path, fault: Faulty) -> list[Problem]:
    """Faults of a run, those of its configuration included."""
    file = prepare(folder, fault)
    try:
        run = load_config(file, *fault.overrides)
    except ConfigError as error:
        return [Problem("config", str(error))]
    return find_faults(run, folder=FolderUse())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_is_found_with_its_key_and_its_fix(place: Path, fault: Faulty) -> None:
    """A misspelt column cost 24 to 56 s and a download; a reward that raises, the whole first evaluation."""
    found = faults_of(place, fault)
    about = [one for one in found if one.level == fault.level and all(word in str(one) for word in fault.words)]
    assert about, [str(one) for one in found]
    assert about[0].level == "error" or not any(one.level == "error" for one in found)


@pytest.mark.parametrize(("keys", "text"), [((), ""), (TOOL, ADD), (IN_WORLD, WORLD)], ids=["plain", "tool", "world"])
def test_a_sound_run_has_none(place: Path, keys: tuple[str, ...], text: str) -> None:
    """A check with false alarms gets switched off; rewards get what they will get of an episode."""
    assert faults_of(place, Faulty("sound", keys, (), tools(text))) == []


def test_a_reward_model_is_looked_at_without_a_tokenizer(place: Path) -> None:
    """A policy from the hub has no tokenizer yet at the first start, and is downloaded before the rewards are built."""
    two = next(one for one in FAULTS if one.name == "a reward model with two outputs")
    (found,) = find_reward_faults(load_config(prepare(place, two), *two.overrides), None, True, None)
    assert found.key == "rewards.0.params.model" and "2 outputs" in str(found)


def test_faulty_tools_hide_no_other_fault(place: Path) -> None:
    """The data are rendered with the tools: a tool that cannot be imported was all that the first attempt reported."""
    found = faults_of(place, Faulty("two", (*TOOL, "data.answer_column=anser"), ()))
    assert [(one.name, one.key) for one in found] == [("tools", "rloo.tools"), ("data", "data.answer_column")]


def test_a_backend_that_is_missing_hides_no_other_fault(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Unsloth `train` reported that alone, and the rewards at the next attempt."""
    monkeypatch.setattr("rloo_kit.system.environment.is_importable", lambda name: False)
    found = faults_of(place, Faulty("two", ("model.backend=unsloth", "eval.every_steps=1", "eval.measure=no"), ()))
    assert [one.name for one in found if one.level == "error"] == ["machine", "rewards"], found


CODE = ("data.source=code.jsonl", "rewards=[{name: code_reward}, {name: 'my_rewards:longest'}]")


def code_faults(place: Path, tests: Any, *overrides: str, **columns: Any) -> list[Problem]:
    """Faults of data whose row n has the tests `tests(n)`, as JSON text."""
    columns |= {"prompt": lambda n: f"Write f{n}.", "tests": lambda n: tests(n) and json.dumps(tests(n))}
    rows = [json.dumps({key: one(n) for key, one in columns.items()}) for n in range(40)]
    (place / "code.jsonl").write_text("\n".join(rows))
    found = faults_of(place, Faulty("code", (*CODE, *overrides), ()))
    return [one for one in found if one.name in ("data", "config")]


def test_rows_that_no_code_can_pass_are_counted_by_reason(place: Path) -> None:
    """Rows whose tests the jail cannot judge were a failure of each completion, found in the log of the run."""
    other = ["import pandas\nassert f(1)", "from unittest.mock import patch\nassert f(1)", "f(1)", None]
    found = code_faults(place, lambda n: other[n // 2] if n < 8 else [f"assert f({n}) == 1"], "data.test_size=0.5")
    assert [one.level for one in found] == ["warning"] * len(found)
    texts = [one.text for one in found]
    for words in ("their tests import pandas; the jail has", "their tests use mock", "their tests assert nothing"):
        about = [text for text in texts if words in text]
        counts = [re.match(r"(\d) of 20 (rows|held-out rows) are not scored by code_reward: ", text) for text in about]
        assert sum(int(count[1]) for count in counts if count) == 2, texts
        assert all(re.search(r"\(first: .*code.jsonl, line [1-6]\): .*rewards.0.params", one) for one in about)


def test_code_that_cannot_be_judged(place: Path) -> None:
    """A run would train on the other rows alone, without a word; a whole data set of them, on nothing."""
    half = "data.test_size=0.5"
    code_faults(place, lambda n: "import pandas\nassert f(1)" if n % 8 else "assert f(1)", half)
    found = find_faults(load_config(place / "run.yaml", *CODE, half))
    assert [one.level for one in found if "code_reward" in str(one)].count("error") == 0, list(map(str, found))
    (fault,) = code_faults(place, lambda n: [["1", "2"]] if n == 3 else "assert f(1)", half)
    assert fault.level == "error" and "1 of 20 " in fault.text and "code.jsonl, line 4" in fault.text
    assert "a list that holds ['1', '2']" in fault.text and "{input, output, testtype}" in fault.text
    assert code_faults(place, lambda n: "f(1)", half)[0].level == "error", "no row is left"
    called = [{"input": "1", "output": "2", "testtype": "functional"}]
    assert code_faults(place, lambda n: called if n % 2 else None, metadata=lambda n: '{"func_name": "f"}') == []
    names = {"rewards": lambda n: "longest" if n % 2 else "code_reward"}
    assert code_faults(place, lambda n: "f(1)" if n % 2 else "assert f(1)", **names) == []
    code_faults(place, lambda n: f"assert f({n}) == 1")
    found = find_faults(load_config(place / "run.yaml", "data.source=code.jsonl", "rewards=[{name: code_reward}]"))
    assert not [one for one in found if "teaches nothing" in str(one)], "no made-up answer has to be right code"


def test_all_faults_are_reported_at_once(place: Path) -> None:
    """All faults are reported at once, not one for each attempt."""
    overrides = ("data.answer_column=anser", "rewards=[{name: answer_rewrd}, {name: 'my_reward:own'}]")
    with pytest.raises(PreflightError) as caught:
        check(load_config(prepare(place, SOUND), *overrides, "rloo.report_to=wandb"))
    text = str(caught.value)
    assert {fault.key for fault in caught.value.faults} >= {"rewards.0.name", "rewards.1.name", "rloo.report_to"}
    assert "4 problems" in text and "data.answer_column" in text


def test_prompts_are_prepared_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were rendered and tokenised for the check, and again for the run; those of a changed run are others."""
    from rloo_kit import load_data
    from rloo_kit.data import load

    rendered: list[int] = []
    monkeypatch.setattr(load, "render_row", lambda *row: rendered.append(1) or render_row(*row))
    run = load_config(prepare(place, SOUND))
    prepared, tokenizer, once = check(run), load_tokenizer(run), len(rendered)
    assert load_data(run, tokenizer, prepared=prepared).train["prompt"] == load_data(run, tokenizer).train["prompt"]
    assert len(rendered) == 2 * once
    run.data.system_prompt = "Be brief."
    assert "Be brief." in load_data(run, tokenizer, prepared=prepared).train[0]["prompt"]


def test_no_heavy_library_is_loaded(place: Path, run_fresh: Any) -> None:
    """`rloo-kit config` loads no heavy library: importing torch takes longer than all that it shows."""
    file = prepare(place, Faulty("", (), ()))
    done = run_fresh(
        "from rloo_kit.config.run import load_config\n"
        "from rloo_kit.checks.faults import find_faults\n"
        f"run = load_config({str(file)!r}, \"rewards.0.name='my_rewards:longest'\", 'data.source={place}/mine.csv')\n"
        "print([str(fault) for fault in find_faults(run, prompts=False)])\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'trl', 'numpy'} & set(sys.modules)))\n"
    )
    assert done.stdout.splitlines() == ["[]", "[]"], done.stdout + done.stderr


def test_workers_of_the_check_are_ended(place: Path) -> None:
    """The run starts its own: a worker left from the check would keep the user's module in memory twice."""
    import psutil

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    run = load_config(prepare(place, SOUND), "rewards.0.name='my_rewards:longest'")
    assert find_faults(run) == []
    after = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    with contextlib.suppress(psutil.Error):
        assert not [child for child in after if "system.isolation" in " ".join(child.cmdline())]


def test_a_run_is_resumed_over_its_own_folder(place: Path) -> None:
    """`--resume` was refused because the folder holds a run, which is what it is for."""
    run = load_config(prepare(place, SOUND))
    folder = place / "outputs" / "run"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("# rloo-kit run 0123456789ab: x\n")
    assert any("already contains a run" in str(fault) for fault in find_faults(run, folder=FolderUse()))
    assert find_faults(run, folder=FolderUse(resume=True)) == []
    assert find_faults(run, folder=FolderUse(overwrite=True)) == []
    assert find_faults(run) == [], "who only looks does not ask whether the folder is free"


def test_one_process_looks_without_waiting_for_the_others(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main process looks alone: reading the data waited for processes that were elsewhere."""
    from rloo_kit import collective

    def wait() -> None:
        raise AssertionError("waits for processes that do not look")

    monkeypatch.setattr(collective, "wait_for_all", wait)
    monkeypatch.setattr(collective, "_has_group", wait)
    run = load_config(prepare(place, SOUND), "rewards.0.name='my_rewards:longest'")
    assert find_faults(run, folder=FolderUse()) == []


def test_a_reward_of_ones_own_may_give_the_raw_column_nothing(place: Path) -> None:
    """The column held the working before a marker, which no completion repeats: "gives 0 to the gold answer"."""
    body = "    return [float(text.startswith('So it is')) for text in completions]\n"
    assert faults_of(place, Faulty("an answer in a sentence", OWN, (), reward(body))) == []


@pytest.mark.parametrize(("opening", "is_named"), [("<think>", True), ("(<think>)?", False)])
def test_a_pattern_that_wants_the_tag_of_the_prompt(place: Path, opening: str, is_named: bool) -> None:
    """It gave every completion 0, and the advice was to take other prompts; the template had opened the thinking."""
    pattern = opening + r"\s*.*?</think>\s*<answer>\s*.*?\s*</answer>\s*"
    body = f"    import re\n    return [float(bool(re.fullmatch(r'{pattern}', text, re.S))) for text in completions]\n"
    found = faults_of(place, Faulty("a published pattern", OWN, (), reward(body)))
    assert [(one.level, "the chat template opens it" in str(one)) for one in found] == [("warning", True)] * is_named
