"""`rloo-kit init`: what it asks, what it writes, that it fits, and that what it prints next works."""

import csv
import json
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from rloo_kit import cli
from rloo_kit.checks.starter import name_output
from rloo_kit.config.run import load_config
from rloo_kit.plan.planner import plan_vram

THINKING = "unsloth/Qwen3-4B-Thinking-2507-unsloth-bnb-4bit"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of the test's own, and no model that was fetched by chance."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return tmp_path


def write_csv(name: str, header: list[str], rows: list[list[Any]]) -> str:
    with open(name, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return name


def sums(name: str = "sums.csv", rows: int = 40, header: tuple[str, str] = ("prompt", "answer")) -> str:
    chance = random.Random(0)
    pairs = [(chance.randint(1, 99), chance.randint(1, 99)) for _ in range(rows)]
    return write_csv(name, list(header), [[f"{a}+{b}=", a + b] for a, b in pairs])


def school(answer: str = "She counts.\n#### {}") -> str:
    rows = [[f"How many clips did {n} friends buy, at two each?", answer.format(2 * n)] for n in range(50)]
    return write_csv("school.csv", ["question", "answer"], rows)


def call(*words: Any, typed: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["init", *map(str, words)], input=typed)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def list_next(printed: str) -> list[str]:
    """The commands after "next:", without the line that names an environment that is not activated."""
    lines = [line.strip() for line in printed.partition("next:\n")[2].splitlines()]
    return [line for line in lines if not line.startswith("(")]


def run_test(file: str) -> int:
    """The number of tests in a generated file; raises AssertionError if one fails."""
    path = Path(file).resolve()
    module = path.stem.removeprefix("test_")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        patch.delitem(sys.modules, module, raising=False)
        tests = [one for name, one in runpy.run_path(str(path)).items() if name.startswith("test_")]
        del sys.modules[module]
    for one in tests:
        one()
    return len(tests)


@pytest.mark.slow
def test_sums_of_ones_own_get_the_embedded_model_and_a_reward_whose_test_passes(folder: Path) -> None:
    """Without a GPU the shortest way to a run of one's own was to copy a config, a reward and a README by hand."""
    code, printed, said = call("--data", sums(), "--yes")
    assert code == 0 and not said, said
    commands = ["pytest test_sums_rewards.py", "rloo-kit preflight sums.yaml", "rloo-kit train sums.yaml"]
    assert list_next(printed) == commands
    run = load_config("sums.yaml")
    found = run.model.name, run.data.source, run.rewards[0].name
    assert found == ("embedded/thinking", "sums.csv", "sums_rewards:score")
    assert [reward.weight for reward in run.rewards] == [1.0, 0.0] and plan_vram(run).fits
    assert run.rewards[0].params == {}, "the id of </think> is bound from the tokenizer"
    assert run.rloo.prompts_per_generation * run.rloo.num_generations == run.rloo.generation_batch_size == 128
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sums_rewards.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout
    rewards = folder / "sums_rewards.py"
    rewards.write_text(rewards.read_text(encoding="utf-8").replace("float(answers_agree", "float(1 or answers_agree"))
    with pytest.raises(AssertionError):  # a test that cannot fail
        run_test("test_sums_rewards.py")


@pytest.mark.parametrize(("gpu_gib", "model"), [(4, "unsloth/Qwen3-1.7B-unsloth-bnb-4bit"), (80, THINKING)])
def test_a_general_file_gets_the_largest_model_that_fits(gpu_gib: float, model: str) -> None:
    """A config for 40 GB that is copied to an 8 GB GPU fails ten minutes later."""
    code, _, said = call("--data", school(), "--yes", "--gpu-gib", gpu_gib)
    assert code == 0, said
    run = load_config("school.yaml")
    assert (run.model.name, run.data.answer_after, run.rewards[1].params) == (model, "####", {"find": "boxed"})
    assert "a number, within \\boxed{}" in str(run.data.system_prompt)
    assert plan_vram(run, gpu_gib).fits and run.rloo.max_completion_length >= 4096
    assert run.rloo.thinking_budget == run.rloo.max_completion_length - 544 and run.rloo.prompts_per_generation == 4
    assert run_test("test_school_rewards.py") == 5


def test_without_a_gpu_a_real_model_that_learns_there_is_proposed(folder: Path) -> None:
    """`init` proposed Qwen3-0.6B at 8,192 tokens for two cores, and named no answer column."""
    rows = [[n, f"What is {n} plus 3?", "add", n + 3] for n in range(40)]
    write_csv("words.csv", ["id", "question", "kind", "answer"], rows)
    code, printed, said = call("--data", "words.csv", "--yes")
    assert code == 0, said
    assert "prompts in 'question', answers in 'answer'" in printed
    assert "other columns: id, kind; --prompt-column and --answer-column" in printed
    run = load_config("words.yaml")
    shipped = load_config(Path(__file__).parents[2] / "configs" / "smollm2_sums.yaml")  # at 1e-3 it collapsed
    assert (run.model.name, run.rloo.num_generations) == ("smollm2/instruct", 8)
    assert run.rloo.learning_rate == shipped.rloo.learning_rate
    assert run.rloo.max_completion_length <= 64 and run.rloo.thinking_budget is None and plan_vram(run).fits
    assert run.rewards[1].params == {"find": "last_number"}
    for file in folder.glob("*words*.[py]*"):
        assert not re.search("think", file.read_text(), re.I), f"{file.name} speaks of thinking"
    assert run_test("test_words_rewards.py") == 4
    code, printed, said = call("--data", school(), "--yes", "--gpu-gib", "7.45", "--overwrite")
    assert code == 0 and re.search(r"RTX 3060 Ti \(computed.*a step takes \d+ min, 200 steps [\d.]+ h", printed), said


@pytest.mark.parametrize("gpu", [[], ["--gpu-gib", "8"]], ids=["in a sentence", "in a box"])
def test_the_generated_reward_and_the_judge_agree(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """The reward paid nothing for `**42**`, which the evaluation counted as right; a run was trained away from it."""
    from rloo_kit.rewards import answer_reward

    name = "boxes" if gpu else "sentences"
    write_csv(f"{name}.csv", ["prompt", "answer"], [[f"What is {n} plus 3?", n + 3] for n in range(40)])
    assert call("--data", f"{name}.csv", "--yes", *gpu)[0] == 0
    run = load_config(f"{name}.yaml")
    monkeypatch.syspath_prepend(folder)
    score = __import__(f"{name}_rewards").score
    judge = answer_reward.with_(thinking=bool(gpu), **run.rewards[1].params)
    spelled = ["**42**", "$42", "４２", "42.", r"\boxed{42}", r"\$42", r"42\%", r"42 \text{ eggs}", "42元", "43", ""]
    golds = {"42": spelled, "1234": ["1,234", "1{,}234"], r"\$1,\!234": ["1234"], r"As $6\cdot7=\boxed{42}$.": spelled}
    for gold, answers in golds.items():
        for answer in answers:
            text = f"so</think>\\boxed{{{answer}}}" if gpu else answer
            columns = {"completions": [text], "completion_ids": [[7, 151668, 8]], "answer": [gold]}
            columns |= {"think_end_id": 151668} if gpu else {}
            paid, right = score(**columns)[0], judge(**columns)[0]
            assert (paid == 1.0) == (right == 1.0) == (answer not in ("43", "")), (answer, paid, right)


def test_what_is_missing_is_asked_with_a_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    """People who sit in front of a terminal should not have to know the flags."""
    monkeypatch.setattr("rloo_kit.cli._can_ask", lambda: True)
    sums("additions of mine.csv", header=("sum", "value"))
    code, printed, said = call(typed="none.csv\nadditions of mine.csv\nsun\nsum\nsum\nvalue\n\n")
    assert code == 0, said
    assert re.search(r"--prompt-column sum  \(for example '\d+\+\d+='\).*\n  --answer-column value  \(f", printed, re.S)
    for again in ("no file none.csv", "--prompt-column sun: there is no", "two different columns"):
        assert again in printed
    assert "[embedded/thinking]" in printed
    run = load_config("additions_of_mine.yaml")
    assert (run.data.source, run.data.prompt_column) == ("additions of mine.csv", "sum")
    words = ("--data", "additions of mine.csv", "--answer-column", "value", "--overwrite")
    code, printed, said = call(*words, typed="value\nsum\n\n")
    assert code == 0 and "are both value; name two different columns" in printed, said


@pytest.mark.parametrize(
    ("answer", "said"), [("Paris is it.", False), ("It is the town {}a.", True), ("6{} km", False)]
)
def test_answers_that_are_sentences_are_named(answer: str, said: bool) -> None:
    """A reward that pays for a whole sentence alone was written without a word."""
    rows = [[f"What is {n} plus 3?", answer.format(n)] for n in range(9)] + [["How many?", "some"]]
    code, printed, _ = call("--data", write_csv("own.csv", ["question", "answer"], rows), "--yes")
    assert code == 0 and ("answers are sentences, as 'It is the town 0a.'" in printed) is said
    assert ("put the bare answer into 'answer', or change the reward in own_rewards.py" in printed) is said


BAD: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "--data is missing"),
    "no terminal": (["--data", "sums.csv"], "--prompt-column is missing.*accept the proposed values with --yes"),
    "a hub id": (["--data", "openai/gsm8k", "--yes"], "--data openai/gsm8k: there is no such file"),
    "a column": (["--data", "sums.csv", "--prompt-column", "promt"], "--prompt-column promt.*did you mean prompt"),
    "one column twice": (
        ["--data", "sums.csv", "--prompt-column", "prompt", "--answer-column", "prompt", "--yes"],
        "are both prompt; name two different columns"),
    "no addition": (
        ["--data", "school.csv", "--yes", "--model", "embedded/thinking"],
        r"characters 0123456789\+= alone, and .*school.csv, line 2: 'How many.*--model smollm2/instruct"),
    "a header": (["--data", "header.csv", "--yes"], "header.csv has no rows"),
    "few rows": (["--data", "few.csv", "--yes"], "few.csv has 4 rows; .*at least 5"),
    "no answers": (
        ["--data", "blank.csv", "--yes", "--answer-column", "answer"],
        "--answer-column answer: .*blank.csv has no answer"),
    "a row without the marker": (["--data", "marked.csv", "--yes"], "marked.csv, line 4: the answer has no '####'"),
    "another ending": (["--data", "sums.csv", "--yes", "--output", "run.json"], "--output run.json.yaml"),
    "there already": (
        ["--data", "sums.csv", "--yes", "--output", "mine.yaml"], "mine_rewards.py: there already; --overwrite"),
    "too large": (
        ["--data", "sums.csv", "--yes", "--model", "Qwen/Qwen3-32B", "--gpu-gib", "12"], f"--model {THINKING} fits"),
    "too large, all of them": (
        ["--data", "school.csv", "--yes", "--model", "unsloth/Qwen3-0.6B-unsloth-bnb-4bit", "--gpu-gib", "1"],
        "GiB; no model of the shipped configs fits, or use --gpu-gib 24"),
    "no such shape": (["--data", "sums.csv", "--yes", "--model", "a/b"], "hf download a/b config.json"),
}  # fmt: skip


# Files as people have them: the first line, row n of 24, and the prompts' and answers' columns or what the refusal
# says. {a}, {b}: two numbers, {c}: their sum.
SUM, WORDS = "{a}+{b}=", "What is {a} plus {b}?"
FILES: dict[str, tuple[str, str, tuple[str, str] | str]] = {
    "numbered": ("Nr.;Aufgabe;Ergebnis", f"{{n}};{SUM};{{c}}", ("Aufgabe", "Ergebnis")),
    "ids": ("#,question_id,Prompt,ANSWER", f"{{n}},q{{n}},{SUM},{{c}}", ("Prompt", "ANSWER")),
    "excel": ("\ufeffFrage;Antwort;Thema", f"{SUM};{{c}};sums", ("Frage", "Antwort")),
    "excel with a hint": ("sep=;\nQuestion;Answer", f"{SUM};{{c}}", ("Question", "Answer")),
    "tabs": ("Answer\tQuestion", f"{{c}}\t{SUM}", ("Question", "Answer")),
    "three texts": ("question,context,answer", f"{SUM},Page {{a}} of {{b}} has it,{{c}}", ("question", "answer")),
    "a comma in a name": ("Question (short, clear);Answer", f"{SUM};{{c}}", ("Question (short, clear)", "Answer")),
    "spaces": ("  Question ,CorrectAnswer", f"{SUM},{{c}}", ("  Question ", "CorrectAnswer")),
    "remarks": ("question,answer,answer_length,wrong_answer", f"{SUM},{{c}},2,{{n}}", ("question", "answer")),
    "large sums": ("question,answer", f"1{{a}}0{SUM},{{c}}", ("question", "answer")),
    "one instruction": ("instruction,input,output", f"Add.,{SUM},{{c}}", "-column instruction .*'Add.'.*column input"),
    "a worked solution": (
        "problem,solution,answer", f"{WORDS},{{a}} and {{b}} give {{c}},{{c}}",
        r"--answer-column solution  \(for example '\d+ and .*\n  --answer-column answer  \(for example '\d+'\)"),
    "unknown words": ("Otázka,Odpověď", f"{WORDS},so {{c}}", "--prompt-column 'Otázka' .*--prompt-column 'Odpověď'"),
    "an index alone": ("id,answer", "{n},{c}", "--prompt-column id .*'0'"),
    "no header": (SUM.format(a=1, b=2) + ",3", f"{SUM},{{c}}", "--prompt-column 1.2= .*If the first line of the file"),
    "one column": ("question|answer", f"{SUM}|{{c}}", r"has one column \(question\|answer\)"),
    "choices": ("question,A,B,answer", f"{WORDS},{{c}},{{n}},{{letter}}", "the answer chooses from A, B, which the"),
    "numbered choices": ("question,choice1,choice2,label", f"{SUM},{{c}},{{n}},{{n}}", "from choice1, choice2"),
    "lettered choices": ("question,opt_a,opt_b,answer", f"{SUM},{{c}},{{n}},{{letter}}", "from opt_a, opt_b, which"),
    "endings": ("question,ending0,ending1,label", f"{SUM},{{c}},{{n}},{{n}}", "from ending0, ending1, which"),
    "solutions": ("goal,sol1,sol2,label", f"{SUM},{{c}},{{n}},{{n}}", "from sol1, sol2, which"),
    "letters": ("Q,A", f"{SUM},{{c}}", "--prompt-column Q .*--answer-column A "),
    "one letter": ("problem,answer,a", f"{SUM},{{c}},{{n}}", ("problem", "answer")),
    "a task and a text": ("task,text,answer", f"add,{SUM},{{c}}", ("text", "answer")),
    "a task": ("task_id,task,answer", f"{{n}},{SUM},{{c}}", ("task", "answer")),
    "a level": ("problem_level,text,incorrect_answer,answer", f"easy,{SUM},{{n}},{{c}}", ("text", "answer")),
    "counted": ("question_number,question,num_answers,answer", f"{{n}},{SUM},1,{{c}}", ("question", "answer")),
    "a decimal comma": ("question;answer", f"{SUM};{{a}},{{b}} km", "line 2: .* km has a decimal comma"),
    "latin-1": ("Frage,L\udcf6sung", f"{SUM},{{c}}", "line 1: not UTF-8 text"),
}  # fmt: skip


def write_file(name: str) -> str:
    """One of `FILES`, with random sums."""
    first, row, _ = FILES[name]
    chance, lines = random.Random(name), [first]
    for n in range(24):
        a, b = chance.randint(10, 99), chance.randint(10, 99)
        lines.append(row.format(a=a, b=b, c=a + b, n=n, letter="AB"[n % 2]))
    path = Path(f"{name}.csv")
    path.write_bytes("\r\n".join(lines).encode("utf-8", "surrogateescape"))
    return str(path)


@pytest.mark.parametrize("name", FILES)
def test_columns_are_right_or_the_choices_are_shown(name: str, folder: Path) -> None:
    """`init --yes` trained a model on row numbers; a file without a header lost a row; Excel's hint was a column."""
    expected, source = FILES[name][2], write_file(name)
    code, printed, said = call("--data", source, "--yes", "--output", "own.yaml")
    if isinstance(expected, str):
        assert code == 2 and not printed and re.search(expected, said, re.S), said
        assert list(folder.iterdir()) == [folder / source], "nothing is written"
    else:
        assert code == 0, said
        run = load_config("own.yaml")
        assert "are sentences" not in printed
        assert (run.data.prompt_column, run.data.answer_column) == expected
        assert run.model.name == ("smollm2/instruct" if name == "large sums" else "embedded/thinking")


@pytest.mark.slow
def test_an_accepted_file_is_trained_on(folder: Path) -> None:
    """Preflight and two steps, through the commands that `init` prints."""
    assert call("--data", write_file("excel with a hint"), "--yes", "--output", "own.yaml")[0] == 0
    small = ["rloo.max_steps=2", "rloo.per_device_train_batch_size=32", "eval.num_prompts=4"]
    for words in (["preflight", "own.yaml", *small], ["train", "own.yaml", *small]):
        done = CliRunner().invoke(cli.app, words)
        assert done.exit_code == 0, done.output
    assert (folder / "outputs" / "own" / "report.html").is_file()


def test_rows_of_json_are_read_or_refused_alike(folder: Path) -> None:
    """Chats are prompts; lists and objects are no answers, and a list of choices is not shown by the question."""
    talk = [{"role": "user", "content": "1+{}="}]
    rows: dict[str, tuple[dict[str, Any], str]] = {
        "messages": ({"id": "{}", "messages": talk, "answer": 7}, ""),
        "objects": ({"prompt": talk, "reward_model": {"ground_truth": "7"}, "ability": "math"}, "column reward_model"),
        "choices": ({"question": "1+{}=", "choices": ["6", "7"], "answer": 1}, "chooses from choices, "),
    }
    for name, (row, refusal) in rows.items():
        lines = [json.dumps(row).replace("{}", str(n)).replace('"answer": ', f'"answer": {n + 1}') for n in range(9)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        code, _, said = call("--data", f"{name}.jsonl", "--yes")
        assert code == (2 if refusal else 0) and refusal in said, (name, said)


@pytest.mark.parametrize("case", BAD, ids=str)
def test_what_cannot_be_used_is_refused_and_nothing_is_written(case: str, folder: Path) -> None:
    """A half-written start is worse than none: the next call finds files that it must not replace."""
    sums(), school(), sums("few.csv", 4)
    files = {"header.csv": "prompt,answer\n", "mine_rewards.py": "# mine\n"}
    files["blank.csv"] = "prompt,answer\n" + "".join(f"1+{n}=,\n" for n in range(6))
    files["marked.csv"] = "prompt,answer\na,so #### 1\nb,so #### 2\nc,so it is 3\n"
    for name, text in files.items():
        (folder / name).write_text(text)
    before = sorted(folder.iterdir())
    words, message = BAD[case]
    code, printed, said = call(*words)
    assert code == 2 and not printed and re.search(message, said, re.S), said
    assert said.startswith("rloo-kit: ") and sorted(folder.iterdir()) == before
    assert (folder / "mine_rewards.py").read_text() == "# mine\n"


def test_names_and_places(folder: Path) -> None:
    """A module that Python cannot import, or a file in a folder that is not there, fails at the first step."""
    assert name_output(None, "x/my data-2.csv") == Path("my_data_2.yaml")
    assert name_output(folder, "2024.csv") == folder / "data_2024.yaml"
    code, printed, _ = call("--data", sums(), "--yes", "--output", "new/class.yaml")
    commands = ["pytest new/test_class_rewards.py"]
    commands += [f"rloo-kit {step} new/class.yaml" for step in ("preflight", "train")]
    assert code == 0 and list_next(printed) == commands
    assert run_test("new/test_class_rewards.py") == 5


def test_images_get_a_model_that_reads_them(folder: Path) -> None:
    """`init` ended in a traceback at the first image, and proposed a model of text where there was none."""
    Image.new("RGB", (8, 8)).save("a.png")
    rows = [{"question": f"<image>What is {n}?", "images": ["a.png"], "answer": n} for n in range(40)]
    Path("seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, printed, said = call("--data", "seen.jsonl", "--yes", "--gpu-gib", "16")
    assert code == 0 and "images in a prompt: at most 1" in printed, said
    run = load_config("seen.yaml")
    assert run.model.name == "Qwen/Qwen3-VL-4B-Thinking" and run.model.vision is None
    assert "\\boxed{}" in str(run.data.system_prompt) and run.data.max_prompt_length >= 256 + 340
    assert call("--data", "seen.jsonl", "--yes", "--gpu-gib", "16", "--overwrite", "--model", "Qwen/Qwen3.5-4B")[0] == 0
    assert load_config("seen.yaml").model.vision
    for words, fix in ((), "--gpu-gib 16"), (("--model", "smollm2/instruct"), "use Qwen/Qwen3-VL"):
        code, _, said = call("--data", "seen.jsonl", "--yes", "--overwrite", *words)
        assert code == 2 and "seen.jsonl has images" in said and fix in said
