"""The command line as people use it: its words, its exit codes, what goes to stderr, and one whole run."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rloo_kit import __version__
from rloo_kit.cli import app
from tests.fuzz.nasty import bomb

CONFIG = """
run: {{output_dir: {output}, progress_every_s: 0, sample_every_steps: 0}}
model: {{name: {model}, lora: {{r: 2, alpha: 2, target_modules: [q_proj]}}, max_seq_length: 128}}
data: {{source: {data}, test_size: 2, max_prompt_length: 64}}
rewards: [{{name: length_reward}}]
rloo: {{max_steps: 2, per_device_train_batch_size: 4, num_generations: 2, max_completion_length: 4, beta: 0.0}}
"""
SERVER = ("rollout.engine=server", "rollout.server_url=http://localhost:9")


@pytest.fixture
def config_file(tmp_path, tiny_folder):
    rows = [{"prompt": f"add {n}", "answer": str(n)} for n in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "tiny.yaml"
    file.write_text(CONFIG.format(output=tmp_path / "outputs", model=tiny_folder, data=tmp_path / "prompts.jsonl"))
    return file


def call(*words):
    """Exit code, stdout, stderr of `rloo-kit words`, in this process."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_light_commands_load_no_torch(config_file):
    """Four seconds of imports before a page of help teach people not to ask for it; and a batch lives for hours with
    its runs: it must not hold a GPU or a gigabyte."""
    lines = {"--help": 0, "train --help": 0, "init --yes": 2, "--version": 0, f"config {config_file}": 0}
    lines |= {f"plan {config_file}": 0, "batch nowhere.yaml": 125}
    code = f"""
import sys
from rloo_kit.cli import app
for line, expected in {lines!r}.items():
    try:
        app(line.split())
    except SystemExit as ended:
        found = sorted({{"torch", "transformers", "trl", "datasets"}} & set(sys.modules))
        assert (ended.code, found) == (expected, []), (line, ended.code, found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_help_names_the_commands():
    """The command line does what a notebook does; a command that it leaves out cannot be found."""
    code, printed, _ = call("--help")
    commands = {"doctor", "init", "config", "plan", "preflight", "sft", "train", "eval", "report", "show", "ask"}
    listed = {line.strip("│ ").partition(" ")[0] for line in printed.splitlines() if line.startswith("│ ")}
    assert code == 0 and commands | {"export", "batch"} <= listed, printed
    assert call("--version")[1] == f"rloo-kit {__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["config", "FILE", "rloo.bta=0.5"], "rloo.bta"),
        (["plan", "FILE", "model.name=google/gemma-3-4b-it"], "hf download google/gemma-3-4b-it config.json"),
        (["plan", "FILE", "--card-gib", "-1"], "gpu_gib is -1.0"),
        (["train", "FILE", *SERVER, "model.lora=null"], "model.lora is null"),
        (["train", "FILE", "--resume"], "no run to resume"),
        (["train", "FILE", "--resume", "--overwrite"], "--resume and --overwrite"),
        (["eval", "FILE", "--adapter", "nowhere"], "--adapter nowhere"),
        (["report", "FILE"], "is not a run's folder: it has no status.json"),
        (["report", "FOLDER"], "no config.yaml"),
        (["train", "nowhere.yaml"], "no configuration file at nowhere.yaml"),
        (["show", "outputs/nowhere"], "outputs/nowhere: no such run folder"),
        (["ask", "outputs/nowhere", "1+2="], "outputs/nowhere: no such run folder"),
        (["config", "FOLDER/empty.yaml"], "model: required"),
        (["train", "FILE", "data.source=FOLDER/pipe"], "supported are .jsonl, .csv, .parquet"),
        (["train", "FILE", "data.source=FOLDER/" + "x" * 300], "data.source: no file"),
        (["batch", "FOLDER/bomb.yaml"], "more than 100,000 values"),
    ],
)
def test_a_refusal_is_a_message_on_stderr_and_exit_code_2(words, message, config_file, tmp_path):
    """A traceback of forty lines hides the one that says which key to change. A pipe waited for ever, nine levels of
    aliases likewise; a long name and `²` ended in tracebacks."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bomb.yaml").write_text(bomb())
    (tmp_path / "empty.yaml").touch()
    words = [word.replace("FILE", str(config_file)).replace("FOLDER", str(tmp_path)) for word in words]
    code, printed, errors = call(*words)
    assert code == (125 if words[0] == "batch" else 2) and printed == ""
    assert errors.startswith("rloo-kit: ") and message in errors and "Traceback" not in errors
    assert len([line for line in errors.splitlines() if line.startswith("rloo-kit: ")]) == 1, errors


def test_an_engine_that_cannot_sample_here_is_refused_before_the_evaluation(config_file):
    code, printed, said = call("train", config_file, "rollout.engine=vllm")
    assert code == 2 and "rollout.engine is vllm" in said and "Evaluation before" not in printed, said


def test_a_whole_run(config_file, tmp_path, monkeypatch):
    """`make demo` in small: evaluate, train, evaluate, report; then each of the other commands on what it left. In a
    shell without the activated environment each printed command ended in "rloo-kit: command not found"."""
    code, printed, errors = call("train", config_file)
    assert code == 0, errors
    folder = tmp_path / "outputs" / "tiny"
    for words in ("Evaluation before", "step 1/2 | reward", "Evaluation after"):
        assert words in printed
    for name in ("adapter", "metrics.jsonl", "rollouts", "config.yaml", "report.html"):
        assert (folder / name).exists() and name in printed
    assert {"before.json", "after.json", "versions.json"} <= {entry.name for entry in folder.iterdir()}
    status = json.loads((folder / "status.json").read_text())
    assert status["command"] == f"rloo-kit train {config_file}"
    assert status["verdict"]["sentence"] in " ".join(printed.split())
    code, _, errors = call("train", config_file)
    assert code == 2 and "--resume" in errors and "--overwrite" in errors
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, printed, errors = call("train", config_file, "--resume")  # it evaluated again and said "2 steps in 0.1 s"
    assert code == 0 and "finished already (step 2); nothing was changed" in printed, errors
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    bare = tmp_path / "bin"
    bare.mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(bare))
        last = call("train", config_file, "--resume")[1].rstrip().splitlines()[-1]
        assert last.startswith("  (first, once per shell: source ")
        assert Path(last.split()[-1].rstrip(")")).absolute() == Path(sys.prefix, "bin", "activate")
        (bare / "rloo-kit").write_text("#!/bin/sh\n")
        (bare / "rloo-kit").chmod(0o755)
        assert "activate" not in call("train", config_file, "--resume")[1]
    (folder / "after.json").unlink()  # a kill between training and its evaluation
    code, printed, errors = call("train", config_file, "--resume")
    assert code == 0 and "Evaluation after" in printed and (folder / "after.json").exists(), errors

    code, printed, errors = call("eval", config_file, "--adapter", folder / "adapter", "--json")
    assert code == 0, errors
    after = json.loads((folder / "after.json").read_text())
    assert json.loads(printed.splitlines()[-1])["mean_tokens"] == after["mean_tokens"]

    folder = folder.rename(folder.with_name("run #2: mine"))  # what YAML would read as a comment, or as a mapping
    code, printed, errors = call("eval", config_file, "--adapter", folder, "--json")  # a run's folder has one in it
    assert code == 0 and json.loads(printed.splitlines()[-1])["mean_tokens"] == after["mean_tokens"], errors

    (folder / "report.html").unlink()
    moved = folder.rename(tmp_path / "moved")
    code, printed, errors = call("report", moved)
    assert code == 0 and (moved / "report.html").exists(), errors


@pytest.mark.slow
def test_an_interrupted_run_exits_130_and_goes_on_with_the_command_it_names(config_file, tmp_path):
    """The command has to hold the overrides too: without them the resume is refused, or trains something else."""
    reward = tmp_path / "interrupting.py"
    reward.write_text(
        "import os, signal\n"
        "def reward(completion_ids, **_):\n"
        "    marker = __file__ + '.done'\n"
        "    if len(completion_ids) not in (6, 9) and not os.path.exists(marker):\n"
        "        open(marker, 'w').close()\n"
        "        os.kill(os.getppid(), signal.SIGINT)\n"
        "    return [float(len(ids)) for ids in completion_ids]\n"
    )
    words = ["rewards.0.name=interrupting:reward", "rloo.max_steps=3", "run.evaluate=false"]
    done = subprocess.run(
        [sys.executable, "-m", "rloo_kit.cli", "train", str(config_file), *words],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 130, done.stdout + done.stderr
    status = json.loads((tmp_path / "outputs" / "tiny" / "status.json").read_text())
    assert status["state"] == "interrupted" and status["step"] == 1
    assert status["resume"] == f"rloo-kit train {config_file} {' '.join(words)} --resume"
    assert status["resume"] in done.stdout
    code, printed, errors = call(*status["resume"].split()[1:])
    assert code == 0 and "resuming" in printed and "step 3/3" in printed, errors


@pytest.mark.slow
def test_a_run_without_signal_exits_2_with_the_key_to_change(config_file, tmp_path):
    """With health.stop a job must end as a failure, or the batch that started it goes on."""
    (tmp_path / "flat.py").write_text("def reward(completions, **_):\n    return [1.0] * len(completions)\n")
    words = ["rewards.0.name=flat:reward", "health.stop=[no_signal]", "rloo.max_steps=6"]
    code, _, errors = call("train", config_file, *words, "run.evaluate=false")
    keys = ("health.stop=[no_signal]", "rloo.max_completion_length (currently 4)", "--resume")
    assert code == 2 and "step 5 of 6" in errors and all(key in errors for key in keys)


def test_the_last_lines_repeat_what_was_wrong(config_file, tmp_path):
    """A reward of 0.000 in all 14 steps ended with "Everything is in outputs/sub", exit code 0, finished."""
    (tmp_path / "flat.py").write_text("def reward(completions, **_):\n    return [0.0] * len(completions)\n")
    words = ["rewards.0.name=flat:reward", "health.off=[truncation]", "rloo.max_steps=5", "run.evaluate=false"]
    code, printed, _ = call("train", config_file, *words)
    last = printed[printed.rindex("no signal: ") :]
    assert code == 0 and "since step 1: " in last and "data.source" in last
    assert printed.index("Everything is in") < printed.rindex("no signal: ") and len(last.splitlines()) < 12
    status = json.loads((tmp_path / "outputs" / "tiny" / "status.json").read_text())
    assert status["state"] == "finished" and [one["rule"] for one in status["health"]] == ["no_signal"]
    assert status["verdict"]["kind"] == "no signal"
    report = (tmp_path / "outputs" / "tiny" / "report.html").read_text()
    assert "the completions of every group earned the same reward" in report


def test_an_old_name_is_one_line_of_stderr(config_file):
    """Python's own format showed a path of the package, a line of its source, and then the message."""
    code, printed, errors = call("config", config_file, "rloo.kl_coef=0.0", "rloo.lam=0.9")
    assert code == 0 and "kl_coef" not in printed
    first, second = errors.splitlines()
    assert first.startswith(f"rloo-kit: {config_file}: rloo.kl_coef ") and first.endswith("rloo.beta=0.0")
    assert "rloo.lam" in second and "no effect" in second


@pytest.mark.slow
def test_supervised_training_to_the_end_and_on_with_rloo(config_file, tmp_path):
    """Each figure that is decided by, in the order of the work, and a last line that can be pasted."""
    rows = [{"prompt": f"add {n}", "answer": str(n), "completion": f"{n}</think>\n\n{n}"} for n in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = ("sft", config_file, "sft.max_steps=1")
    code, out, err = call(*sft)
    assert code == 0, err
    order = [out.index(part) for part in ("data: ", "sft: ", "sft step 1/1", "signal: ", "next: ")]
    assert order == sorted(order) and "after supervised training: " in out
    folder = tmp_path / "outputs" / "tiny-sft"
    assert {path.name for path in folder.iterdir()} >= {"before.json", "after.json", "adapter", "status.json"}
    words = shlex.split(out.splitlines()[-1].removeprefix("next: "))
    assert words == ["rloo-kit", "train", str(config_file), f"model.adapter={folder}/adapter"]
    code, out, err = call(*words[1:], "rloo.max_steps=1")
    assert code == 0, err
    code, _, err = call(*sft)
    assert code == 2 and "already contains the supervised training of tiny" in err and "--overwrite" in err
