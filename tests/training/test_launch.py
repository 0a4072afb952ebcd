"""Runs in two real processes on the CPU (gloo), started as a user starts them: accelerate launch, torchrun.

What the loop computes in several processes is tested in test_parallel.py; here it is files, words, ends and signals.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rloo_kit.runs.rollouts import read_rollouts
from tests.loop.conftest import assert_same, weights

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CPU_TWO = ROOT / "configs" / "accelerate" / "cpu_two.yaml"
SCRIPT = ROOT / "tests" / "loop" / "launched_script.py"
STEPS, ROWS, PROCESSES = 30, 4, 2
CONFIG = """
run: {{output_dir: {output}, progress_every_s: 0, sample_every_steps: 0, evaluate: false, report: false}}
model: {{name: {model}, lora: {{r: 2, alpha: 2, target_modules: [q_proj, v_proj]}}, max_seq_length: 128}}
data: {{source: {data}, test_size: 5, max_prompt_length: 64}}
rewards: [{{name: length_reward}}]
eval: {{batch_size: 3, temperature: 0, max_completion_length: 5}}
rloo:
  max_steps: 30
  learning_rate: 1e-2
  lr_scheduler_type: constant
  per_device_train_batch_size: 4
  num_generations: 4
  max_completion_length: 6
  beta: 0.0
  save_steps: 1000
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_folder):
    """The file of a run on the tiny random model, with its outputs next to it."""
    folder = tmp_path_factory.mktemp("launched")
    rows = [{"prompt": f"add {n}", "answer": str(n)} for n in range(21)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "tiny.yaml"
    file.write_text(
        CONFIG.format(output=folder / "outputs", model=tiny_folder, data=folder / "prompts.jsonl"), encoding="utf-8"
    )
    return file


def bare_environment(folder):
    hidden = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    path = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    return env | {"OMP_NUM_THREADS": "1", "RLOO_KIT_CACHE": str(folder / "cache"), "PYTHONPATH": path}


def command_of(how, config, *words):
    """The words with which a user starts `train` in two processes."""
    python = [sys.executable, "-m"]
    train = ["train", str(config), *words]
    return {
        "accelerate": [
            *python, "accelerate.commands.launch", "--config_file", str(CPU_TWO), "--main_process_port", "0",
            "-m", "rloo_kit.cli", *train,
        ],
        "torchrun": [*python, "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "rloo_kit.cli",
                     *train],
    }[how]  # fmt: skip


class Started:
    """A command under way; `until(text)` reads on to a line that holds it, `end()` to the last one."""

    def __init__(self, command, folder):
        self.lines = []
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, env=bare_environment(folder), cwd=folder, **pipes)

    def until(self, text):
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return self
        raise AssertionError(f"{text!r} never came:\n{self.text}")

    def ranks(self):
        """The run's processes by their rank."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if child.environ().get("RANK") and child.ppid() == self.process.pid:
                found[int(child.environ()["RANK"])] = child
        assert sorted(found) == [0, 1]
        return found

    def end(self, within_s=240):
        try:
            rest, _ = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            raise AssertionError(f"still running after {within_s} s:\n{self.text}") from None
        self.lines.append(rest)
        return self.process.returncode

    @property
    def text(self):
        return "".join(self.lines)


def read_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def assert_same_adapter(one, other, atol=0.0):
    first, second = weights(one / "adapter"), weights(other / "adapter")
    assert first.keys() == second.keys() and first
    for name, tensor in first.items():
        assert (tensor - second[name]).abs().max().item() <= atol, name


def run_script(config, out, jobs, *, fails=False, sharding=None):
    """What each process found, a list with an entry a job, in the order of their ranks; and what was printed."""
    given = {"config": str(config), "out": str(out), "jobs": jobs, "sharding": sharding}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, str(SCRIPT), json.dumps(given)]
    place = {"env": bare_environment(config.parent), "cwd": config.parent}
    done = subprocess.run(command, **place, capture_output=True, text=True, timeout=500)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    found = [] if fails else [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]
    return found, done.stdout + done.stderr


@pytest.fixture(scope="module")
def launched(config):
    """A run through `accelerate launch` to its end: the folder and what was printed."""
    words = ("run.name=whole", "run.evaluate=true", "run.report=true")
    started = Started(command_of("accelerate", config, *words), config.parent)
    assert started.end() == 0, started.text
    return config.parent / "outputs" / "whole", started.text


def test_a_launched_run_has_the_files_of_one_writer(launched):
    """Both processes wrote: each step stood twice in metrics.jsonl, and half of the completions nowhere."""
    folder, text = launched
    metrics, rollouts = read_lines(folder / "metrics.jsonl"), list(read_rollouts(folder))
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rollouts] == [n for n in range(1, STEPS + 1) for _ in range(ROWS * PROCESSES)]
    first = rollouts[: ROWS * PROCESSES]
    groups = [{row["prompt"] for row in first[:ROWS]}, {row["prompt"] for row in first[ROWS:]}]
    assert [len(group) for group in groups] == [1, 1] and groups[0] != groups[1], "a group a process"
    assert all(abs(sum(row["advantage"] for row in first[at : at + ROWS])) < 1e-5 for at in (0, ROWS))
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    for line in ("policy:", "Evaluation before", "step 1/30"):
        assert text.count(line) == 1, f"{line!r} is printed by one process:\n{text}"
    names = ("config.yaml", "versions.json", "before.json", "after.json", "report.html", "adapter", "checkpoints")
    assert all((folder / name).exists() for name in names)


def test_an_evaluation_by_two_processes_is_that_of_one(launched, config):
    """Five prompts for two processes: verdicts in another order than the prompts would pair wrong ones later."""
    from rloo_kit import evaluate, load_config, load_data, load_policy

    run = load_config(config)
    for name, overrides in (("before", ()), ("after", (f"model.adapter={launched[0] / 'adapter'}",))):
        loaded = load_config(config, *overrides)
        policy = load_policy(loaded)
        alone = evaluate(run, policy, load_data(loaded, policy.tokenizer).test).to_dict()
        two = json.loads((launched[0] / f"{name}.json").read_text())
        for key in ("samples", "measures", "mean_tokens", "num_prompts", "prompts_digest"):
            assert two[key] == alone[key], f"{name}: {key}"


def test_ctrl_c_saves_and_another_launcher_goes_on(launched, config):
    """Ctrl-C to `accelerate launch`, `--resume` under torchrun: the adapter of the run that was never stopped."""
    folder = config.parent / "outputs" / "stopped"
    started = Started(command_of("accelerate", config, "run.name=stopped"), config.parent).until("step 3/30")
    ranks = started.ranks()
    started.process.send_signal(signal.SIGINT)
    assert started.end() != 0, started.text
    assert "To go on: rloo-kit train" in started.text and "by the same launcher, in 2 processes" in started.text
    assert not [child for child in ranks.values() if child.is_running()], "processes are left behind"
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "interrupted" and 3 <= status["step"] < STEPS
    assert (folder / "checkpoints" / f"checkpoint-{status['step']}" / "trainer_state.json").is_file()

    resumed = Started(command_of("torchrun", config, "run.name=stopped", "--resume"), config.parent)
    assert resumed.end() == 0, resumed.text
    assert f"from step {status['step']}" in resumed.text
    assert [row["step"] for row in read_lines(folder / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert_same_adapter(launched[0], folder)


def test_a_refusal_ends_all_processes_with_one_message(launched, config):
    """The main process refused and left; the others waited for it in their first collective, without an end."""
    started = Started(command_of("accelerate", config, "run.name=whole"), config.parent)
    assert started.end(120) != 0, started.text
    assert started.text.count("already contains a run (finished at step 30)") == 1


@pytest.mark.long
@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_one_process_alone_is_ended(kill, config):
    """One process was killed, and the other one waited for it with the GPU's memory until somebody saw."""
    started = Started(command_of("accelerate", config, f"run.name=ended_{kill}"), config.parent).until("step 2/30")
    ranks = started.ranks()
    ranks[1].kill() if kill else ranks[1].terminate()
    assert started.end(150) != 0, started.text
    assert not ranks[0].is_running()
    status = json.loads((config.parent / "outputs" / f"ended_{kill}" / "status.json").read_text())
    assert status["state"] == ("failed" if kill else "interrupted") and status["step"] < STEPS


@pytest.mark.long
def test_two_machines_meet_and_stop_together(config):
    """A launcher each, with one process each, as on two machines; Ctrl-C reaches one launcher only."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    machines = []
    for rank in ("0", "1"):
        words = command_of("accelerate", config, "run.name=machines")
        words[words.index("--main_process_port") + 1] = port
        place = words.index("-m", 2)
        words[place:place] = ["--num_machines", "2", "--num_processes", "2", "--machine_rank", rank]
        words[place:place] = ["--main_process_ip", "127.0.0.1"]
        machines.append(Started(words, config.parent))
    first, second = machines
    first.until("step 2/30")
    second.process.send_signal(signal.SIGINT)
    first.end(), second.end()
    status = json.loads((config.parent / "outputs" / "machines" / "status.json").read_text())
    assert status["state"] == "interrupted" and 2 <= status["step"] < STEPS, first.text
    assert f"interrupted at step {status['step']} of {STEPS}" in first.text
    assert "step 2/30" not in second.text, "the second machine prints nothing itself"


def test_an_error_of_the_second_process_is_the_runs_error(config):
    """The first process said "connection closed by peer", and no message said that the second GPU was full."""
    jobs = [{"do": "fail", "overrides": ["run.name=full"]}]
    _, printed = run_script(config, config.parent / "full", jobs, fails=True)
    status = json.loads((config.parent / "outputs" / "full" / "status.json").read_text())
    assert status["state"] == "failed" and status["step"] < STEPS
    assert status["error"] == "process 1 of 2: MemoryError: the second GPU is full"
    assert "MemoryError: the second GPU is full" in printed


BEST = ["rloo.max_steps=6", "eval.every_steps=1", "eval.measure=reward", "eval.patience=2"]


@pytest.fixture(scope="module")
def copies(config, tmp_path_factory, make_tiny_model, tiny_tokenizer):
    """Scripts on DDP: six steps, a run that gets worse, a model in 4 bits, pass rates."""
    wide = tmp_path_factory.mktemp("wide")
    make_tiny_model(hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(wide)
    tiny_tokenizer.save_pretrained(wide)
    packed = [f"model.name={wide}", "model.load_in_4bit=true", "run.name=packed", "rloo.max_steps=2"]
    jobs = [
        {"overrides": ["rloo.max_steps=6", "run.name=copies"]},
        {"overrides": [*BEST, "run.name=best_copies"], "falls": True},
        {"overrides": packed},
        {"do": "measure", "overrides": ["rollout.difficulty_samples=2"]},
    ]
    return run_script(config, config.parent / "copies", jobs)


@pytest.fixture(scope="module")
def shards(config):
    """Scripts on shared-out weights: three steps, the same run resumed to six, a run that gets worse."""
    kind = "fsdp2"
    jobs = [
        {"overrides": ["rloo.max_steps=3", f"run.name={kind}"]},
        {"overrides": ["rloo.max_steps=6", f"run.name={kind}"], "resume": True},
        {"overrides": [*BEST, f"run.name=best_{kind}"], "falls": True},
    ]
    return kind, *run_script(config, config.parent / kind, jobs, sharding=kind)


def test_shards_train_evaluate_and_go_on_as_copies_do(config, copies, shards):
    """From the model to the adapter: evaluation, saved adapter and resume of shared-out weights are those of DDP."""
    (whole, *_), _ = copies[0]
    kind, (first, second), _ = shards
    for found, steps in zip(first[:2], (3, 6), strict=True):
        assert found["sharded"] and found["steps"] == steps
    assert first == second
    folder = config.parent / "outputs"
    assert_same_adapter(folder / "copies", folder / kind, atol=1e-4)
    assert first[0]["before"]["samples"] == whole["before"]["samples"]
    assert first[1]["after"]["samples"] == whole["after"]["samples"]


def test_processes_keep_the_best_weights_together(config, copies, shards):
    """Each process decided by its own prompts, and one stopped alone; or adapter/ had the last weights."""
    from rloo_kit import evaluate, load_config, load_data, load_policy

    for kind, place, (found, printed) in (("copies", 1, copies), (shards[0], 2, shards[1:])):
        first, second = (jobs[place] for jobs in found)
        folder = config.parent / "outputs" / f"best_{kind}"
        assert first == second and (first["stopped"], first["steps"], first["adapter_step"]) == ("early", 3, 1)
        rows = read_lines(folder / "evaluations.jsonl")
        assert [(row["step"], row["value"]) for row in rows] == [(0, 1.0), (1, 2.0), (2, -3.0), (3, -4.0)]
        assert printed.count("held-out at step 1:") == 1
        assert json.loads((folder / "status.json").read_text())["adapter_step"] == 1
        adapter, last = weights(folder / "adapter"), weights(folder / "checkpoints" / "checkpoint-3")
        assert_same(adapter, weights(folder / "best"))
        assert not all(last[key].equal(value) for key, value in adapter.items())
        loaded = load_config(config, f"model.adapter={folder / 'adapter'}")
        policy = load_policy(loaded)
        again = evaluate(loaded, policy, load_data(loaded, policy.tokenizer).test)
        assert again.to_dict()["samples"] == first["after"]["samples"], "what is in memory is what adapter/ holds"


def test_copies_of_a_4bit_model_train_and_measure_together(config, copies):
    """accelerate refuses 4-bit weights that lie on another device; of pass rates each process measured every prompt."""
    ((_, _, packed, first), (_, _, packed_2, second)), _ = copies
    assert packed == packed_2 and packed["steps"] == 2 and packed["in_4bit"]
    assert first["asked"] + second["asked"] == [f"add {n}" for n in range(7)]
    assert first["rates"] == second["rates"] == [0, 1, 0, 1, 0, 1, 0]
