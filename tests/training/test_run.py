"""Whole runs of a few steps on a tiny random Qwen3, through the public `train`: its folder, its stops, its resumes."""

import json
import os
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch

from rloo_kit import build_rewards, evaluate, load_config, load_data, load_policy, train
from rloo_kit.errors import ConfigError, RewardError, RolloutServerError
from rloo_kit.export.export import export_model
from rloo_kit.loop.callbacks import RolloutLog
from rloo_kit.loop.collaborators import FailureCount
from rloo_kit.loop.options import precision_flags
from rloo_kit.loop.trainer import RLOOTrainer
from rloo_kit.models.policy import trained_run
from rloo_kit.models.source import find_source
from rloo_kit.results.verdict import judge_run
from rloo_kit.rewarding.guard import NamedReward, guard
from rloo_kit.rewarding.worker import WorkerReward, read_sources
from rloo_kit.rewards import ThinkingReward
from rloo_kit.rollout.completions import generate_completions
from rloo_kit.runs.find import weights_of
from rloo_kit.runs.folder import RunDir, open_runs
from rloo_kit.runs.rollouts import read_rollouts
from rloo_kit.system import environment
from tests.images.models import make, noise
from tests.loop.conftest import assert_same, by_ids, lines, status, weights


def test_the_model_decodes_by_itself_after_training(write_config):
    """Left in training mode, a model with checkpointing decodes without its cache: fluent nonsense."""
    config = load_config(write_config(), "model.gradient_checkpointing=true", "rloo.max_steps=1")
    policy = load_policy(config)
    with torch.no_grad():
        for name, value in policy.model.named_parameters():
            value.mul_(10 if value.dim() == 2 and "lora" not in name else 1)  # else it says its last token again
    data = load_data(config, policy.tokenizer)
    train(config, policy, data, build_rewards(config, policy.tokenizer))
    prompt = data.test["prompt"][0]
    ids = torch.tensor([policy.tokenizer(prompt)["input_ids"]])
    wanted = generate_completions(policy, [prompt], limits=12, temperature=0.0)[0].ids
    found = policy.model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)[0, ids.size(1) :]
    assert found.tolist() == wanted
    assert policy.model.get_base_model().model.layers[0].gradient_checkpointing, "which the next run needs"


RESUMED = {
    # 3 of 5 prompts are for training: a step is a pass, and TRL's sampler shuffles a second pass as it did the first
    "a second pass": ["data.num_prompts=5"],
    # the whole model is the state, and the reference is the model as it was published
    "every parameter": ["model.lora=null", "rloo.beta=0.5", "rloo.learning_rate=1e-3"],
    # transformers loads an adapter's copies in subfolders or the adapter itself, not both: it came back untrained
    "a continued adapter": ["rloo.beta=0.5"],
    # the policy in memory is trained by then; copied as the reference, it would make the KL start from zero again
    "in the process that was cut": ["rloo.beta=0.5"],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RESUMED)
def test_resume_equals_a_run_that_was_never_cut(case, start):
    """A resume that loses the optimizer, the sampler's place, the random state or the reference trains another run."""
    words = RESUMED[case]
    if case == "a continued adapter":
        words = [*words, f"model.adapter={start('rloo.max_steps=1', 'run.name=first').adapter_folder}"]
    whole = start("rloo.max_steps=3", "run.name=whole", *words)
    start("rloo.max_steps=1", *words)
    policy = start.policy if case == "in the process that was cut" else None
    result = start("rloo.max_steps=3", *words, resume=True, policy=policy)
    assert [row["step"] for row in result.metrics] == [1, 2, 3]
    assert [row["step"] for row in lines(result.folder, "metrics.jsonl")] == [1, 2, 3]
    assert [row["step"] for row in read_rollouts(result.folder)] == [*[1] * 8, *[2] * 8, *[3] * 8]
    assert_same(weights(result.adapter_folder), weights(whole.adapter_folder))
    if "rloo.beta=0.5" in words:
        assert result.metrics[-1]["kl"] == pytest.approx(whole.metrics[-1]["kl"], abs=1e-6) != 0.0


NOTEBOOK = """
import functools
def shown(score):
    @functools.wraps(score)
    def inner(*args, **columns):
        return score(*args, **columns)
    return inner
@shown
def by_ids(completion_ids, **_):
    return [{value} * ids for ids in completion_ids]
class Base:
    def judge(self, completion_ids, **_):
        return [{value} * ids for ids in completion_ids]
class Score(Base):
    def __call__(self, completion_ids, **_):
        return self.judge(completion_ids)
"""


@pytest.mark.parametrize("reward", ["Score()", "Score().judge", "functools.partial(by_ids, offset=0)"])
def test_a_reward_of_a_notebook_is_known_by_its_source(reward, tmp_path):
    """A cell was edited and run again: the function's name is the same, and so are its arguments."""

    def digest(value="1", made=reward):
        names, file = {"__name__": "__main__"}, tmp_path / f"cell_{len(list(tmp_path.iterdir()))}.py"
        file.write_text(NOTEBOOK.replace("{value}", value))
        exec(compile(file.read_text(), str(file), "exec"), names)
        return read_sources([NamedReward(guard(eval(made, names)), "score", 1.0)])

    then = digest()
    assert then and then == digest() and then != digest("2")
    assert (then != digest(made=reward.replace("offset=0", "offset=1"))) == ("offset" in reward)
    assert all(name.startswith("reward ") for name in then), "as a comparison of runs knows them"


def test_rewards_are_known_by_their_files(tmp_path):
    """Of two files of one name, an edit of the first went unnoticed."""
    assert read_sources([NamedReward(ThinkingReward(), "kit", 1.0)]) == {} != read_sources([by_ids])
    found = []
    for pay in ("1", "2"):
        rewards = []
        for name, text in (("a", pay), ("b", "1")):
            (tmp_path / name).mkdir(exist_ok=True)
            file = tmp_path / name / "score.py"
            file.write_text(f"def score(completions):\n    return [{text}] * len(completions)\n")
            rewards.append(WorkerReward(f"{file}:score"))
        found.append(read_sources(rewards))
    assert found[0].keys() == found[1].keys() == {"score.py"} and found[0] != found[1]


@pytest.mark.slow
def test_a_step_is_saved_once(start, tmp_path, monkeypatch):
    """A reward that fails for good saves the step again: a kill between the two renames left no checkpoint at all."""

    def failing(completion_ids, trainer_state, **_):
        if trainer_state.global_step == 2:
            raise RuntimeError("the judge is down")
        return by_ids(completion_ids)

    monkeypatch.setattr(FailureCount, "patience", 1)
    words = ("rloo.save_steps=1", "rloo.save_total_limit=1")
    said = r"100% of the samples.*max_reward_failure_share = .*failing.*the judge is down"
    with pytest.raises(RewardError, match=said):
        start(*words, rewards=[failing])
    checkpoints = tmp_path / "outputs" / "tiny" / "checkpoints"
    saved = checkpoints / "checkpoint-2"
    assert [path.name for path in checkpoints.glob("*-*")] == ["checkpoint-2"]
    before = saved.stat().st_ino
    with pytest.raises(RewardError):
        start(*words, rewards=[failing], resume=True)
    assert saved.stat().st_ino == before and status(saved.parents[1])["saved"] == 2


@pytest.mark.slow
def test_an_adapter_that_the_run_has_outgrown_is_not_taken_for_the_run(start, tmp_path, capsys):
    """A finished run was continued and killed: `ask` and `export` read the adapter of before."""
    folder = start("rloo.max_steps=2").folder
    assert trained_run(folder).model.adapter == str(folder / "adapter")

    def killed(self, rows):
        if (folder / "checkpoints" / "checkpoint-3").exists():
            raise OSError("killed")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="killed"):
        patch.setattr(RolloutLog, "__call__", killed)
        start("rloo.max_steps=4", "rloo.save_steps=1", resume=True)
    place = re.escape(str(folder / "checkpoints" / "checkpoint-3"))
    found = f"adapter has the weights of step 2, but the run went on to step 3: finish it .*resume.*or name {place}"
    for read in (trained_run, weights_of, lambda source: export_model(source, "merged")):
        with pytest.raises(ConfigError, match=found):
            read(folder)
    assert trained_run(folder / "checkpoints" / "checkpoint-3").model.adapter
    run = load_config(folder / "config.yaml", f"model.adapter={folder / 'adapter'}")
    find_source(run)  # named itself it is taken, and said
    assert "WARNING" in capsys.readouterr().out
    start("rloo.max_steps=4", "rloo.save_steps=1", resume=True)
    assert trained_run(folder).model.adapter == str(folder / "adapter")


@pytest.mark.slow
def test_a_training_cell_that_is_run_again_is_refused(start, write_config):
    """Each run of one cell deleted the run before it, and trained its weights further: 26 -> 48 -> 86 -> 93 %."""
    sent = []

    def interrupting(completion_ids, trainer_state, **_):
        if trainer_state.global_step == 1 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
        return by_ids(completion_ids)

    result = start(rewards=[interrupting])
    policy, run = start.policy, load_config(write_config())
    test = load_data(run, policy.tokenizer).test
    for folder in ("tiny", "another"):
        with pytest.raises(ConfigError, match=r"2 steps of RLOO .*resume=True.*kit.load_policy\(run\)"):
            start(f"run.name={folder}", policy=policy, overwrite=True)
    with pytest.raises(ConfigError, match="resume=True"):  # there is no checkpoint that would replace the weights
        start("run.name=another", policy=policy, resume=True)
    assert RunDir(result.folder).last_checkpoint().step == 2 and not (result.folder.parent / "another").exists()
    with pytest.raises(ConfigError, match=r"2 steps of RLOO.*not the policy before training.*load_policy"):
        evaluate(run, policy, test, "before")
    assert evaluate(run, policy, test).label == "after 2 steps"
    assert start(policy=policy, rewards=[interrupting], resume=True).steps == 4
    assert evaluate(run, load_policy(run), test, "before").label == "before"


def test_the_machine_and_the_dtype_choose_the_precision(monkeypatch):
    """ACCELERATE_MIXED_PRECISION, left over from another run, beats `bf16=False` and trains in another precision."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")

    for machine, dtype, expected in (
        ("bf16", "auto", "bf16"), ("bf16", "float32", "bf16"), ("bf16", "float16", "fp16"),
        ("fp16", "auto", "fp16"), ("fp16", "float32", "no"), ("fp32", "float16", "no"),
    ):  # fmt: skip
        monkeypatch.setattr(environment, "current", lambda machine=machine: SimpleNamespace(precision=machine))
        found = precision_flags(SimpleNamespace(model=SimpleNamespace(dtype=dtype)))
        assert found == {"bf16": expected == "bf16", "fp16": expected == "fp16"}
        assert os.environ["ACCELERATE_MIXED_PRECISION"] == expected


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_and_still_saves(start):
    """A second signal exits with the state of the last whole step; a refused resume keeps what adapter/ holds."""

    def insisting(completion_ids, trainer_state, **_):
        if trainer_state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        return by_ids(completion_ids)

    before, steps = signal.getsignal(signal.SIGINT), "rloo.max_steps=2"
    result = start(steps, rewards=[insisting])
    assert signal.getsignal(signal.SIGINT) is before, "the process gets its handler back"
    assert result.stopped == "interrupted" and result.steps == 1
    assert (result.folder / "checkpoints/checkpoint-1/trainer_state.json").exists()
    kept = status(result.folder)
    with pytest.raises(ConfigError, match="Changed: rewards"):
        start(steps, resume=True)
    assert status(result.folder) == kept and kept["state"] == "interrupted"
    assert start(steps, resume=True, accept_changes=True).steps == 2


@pytest.mark.slow
def test_a_run_whose_server_dies_is_saved(start, tmp_path, monkeypatch):
    """The steps since the last checkpoint are not lost with the server, and resumed it trains as if it had not died."""
    whole = start("rloo.max_steps=3", "run.name=whole")
    sample, calls = RLOOTrainer._generate_single_turn, []

    def lose(self, *arguments):
        calls.append(1)
        if len(calls) == 3:
            raise RolloutServerError("the server died: continue the run with --resume")
        return sample(self, *arguments)

    monkeypatch.setattr(RLOOTrainer, "_generate_single_turn", lose)
    with pytest.raises(RolloutServerError, match="--resume"):
        start("rloo.max_steps=3", "rloo.save_steps=100")
    folder = tmp_path / "outputs" / "tiny"
    assert status(folder)["state"] == "failed" and "server died" in status(folder)["error"]
    assert RunDir(folder).last_checkpoint().step == 2
    again = start("rloo.max_steps=3", "rloo.save_steps=100", resume=True)
    assert_same(weights(again.adapter_folder), weights(whole.adapter_folder))


def test_a_run_leaves_everything_in_its_folder(start, repository, capsys):
    """A run whose rollouts were not kept cannot be explained; saves are registered for what ends the kernel."""
    seen = []

    def watching(completion_ids, **_):
        seen.append(open_runs())
        return by_ids(completion_ids)

    result = start("rloo.max_steps=2", "rloo.beta=0.1", "rloo.save_steps=1", rewards=[watching])
    folder = result.folder
    assert result.steps == 2 and result.stopped is None and len(result.metrics) == 2
    assert status(folder)["state"] == "finished" and status(folder)["step"] == 2
    for name in ("config.yaml", "versions.json", "checkpoints/checkpoint-2", "adapter/adapter_config.json"):
        assert (folder / name).exists(), name
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["versions"]["torch"] and len(versions["git"]["revision"]) == 40
    rollouts = list(read_rollouts(folder))
    assert [row["step"] for row in rollouts] == [1] * 8 + [2] * 8
    for row in rollouts:
        assert row["rewards"] == {"watching": pytest.approx(sum(row["completion_ids"]) % 17 / 17)}
        assert {"thinking_tokens", "closed", "advantage", "reward"} <= set(row)
    assert [row["step"] for row in lines(folder, "metrics.jsonl")] == [1, 2]
    assert all(tensor.any() for name, tensor in weights(folder / "adapter").items() if "lora_B" in name), (
        "it has trained"
    )
    printed = capsys.readouterr().out
    assert "step 1/2 | reward" in printed and "tok/s | eta" in printed
    assert "{'loss'" not in printed and "%|" not in printed, "the libraries' own printing is off"
    assert "Completions of step 1" in printed and "thinking" in printed

    memory = json.loads((folder / "memory.json").read_text())
    assert memory["measured_gib"] > 0 and memory["planned_gib"] >= memory["computed_gib"] > 0
    assert "measured peak" in " ".join(printed.split())

    page = (repository / "docs" / "metrics.md").read_text()
    assert {"kl", "thinking/mean_length", "eps", "val/ratio", "policy/moved"} <= set(result.metrics[-1])
    assert [name for name in result.metrics[-1] if f"`{name.replace('watching', 'NAME')}`" not in page] == []
    assert 0 < result.metrics[0]["policy/moved"] < result.metrics[1]["policy/moved"]

    assert seen and all(found == [folder.absolute()] for found in seen) and open_runs() == []


@pytest.mark.slow
def test_a_run_that_trains_on_drops_its_last_results(start):
    """The report showed the accuracy of two steps after four; `seconds` began at 0 with every resume."""
    first = start("rloo.max_steps=1")
    folder = first.folder
    (folder / "after.json").write_text("{}")
    (folder / "report.html").write_text("old")
    assert start("rloo.max_steps=1", resume=True).steps == 1 and (folder / "after.json").exists()
    again = start("rloo.max_steps=2", resume=True)
    assert again.steps == 2 and not (folder / "after.json").exists() and not (folder / "report.html").exists()
    seconds = [row["seconds"] for row in again.metrics]
    assert seconds == sorted(seconds) and again.seconds >= seconds[-1] > first.metrics[-1]["seconds"]


@pytest.mark.slow
def test_a_resume_refuses_inputs_that_have_changed(write_config, tmp_path, tiny_folder, make_tiny_model, monkeypatch):
    """A reward, answers, rows or the base were edited and the run went on; contents are compared, not paths."""
    project = tmp_path / "project"
    shutil.copytree(tiny_folder, project / "base")
    text = write_config().read_text().replace(str(tiny_folder), "base").replace("length_reward", "'own.py:score'")
    (project / "run.yaml").write_text(text.replace(str(tmp_path / "prompts.jsonl"), "rows.jsonl"))
    rows = "\n".join(json.dumps({"prompt": f"add {n}", "answer": str(n)}) for n in range(16))
    own = "import helper\n\ndef score(completion_ids, **_):\n    return [helper.value(ids) for ids in completion_ids]\n"
    helper = "def value(ids):\n    return sum(ids) % 17 / 17\n"
    for name, content in {"own.py": own, "helper.py": helper, "rows.jsonl": rows}.items():
        (project / name).write_text(content)
    monkeypatch.chdir(tmp_path)

    def go(steps, place=project, file=None, **flags):
        words = (f"rloo.max_steps={steps}", "rloo.save_steps=1", f"run.output_dir={place}/outputs", "run.name=run")
        config = load_config(file or place / "run.yaml", *words)
        policy = load_policy(config)
        data, rewards = load_data(config, policy.tokenizer), build_rewards(config, policy.tokenizer)
        return train(config, policy, data, rewards, **flags)

    folder = go(1).folder
    own = "# a comment, and the mark of editors on Windows\n\n" + own
    (project / "own.py").write_bytes(b"\xef\xbb\xbf" + own.encode())
    changes = {
        "helper.py": helper.replace("17", "16"),
        "own.py": own.replace("value(ids)", "value(ids) + 5"),
        "rows.jsonl": rows.replace('"answer": "3"', '"answer": "33"'),
    }
    kept = {name: (project / name).read_bytes() for name in changes}
    for name, content in changes.items():
        (project / name).write_text(content)
    make_tiny_model(seed=1).save_pretrained(project / "base")
    with pytest.raises(ConfigError, match="Changed: .*[.] Restore.*--accept-changes") as refused:
        go(2, resume=True)
    said = str(refused.value)
    assert all(name in said for name in ("helper.py", "own.py", "column answer of the", "weights of the base"))
    assert status(folder)["state"] == "finished", "a refusal leaves the run as it was"
    for name, content in kept.items():
        (project / name).write_bytes(content)
    make_tiny_model().save_pretrained(project / "base")
    (project / "rows.jsonl").write_text(rows + "".join(f'\n{{"prompt": "sub {n}", "answer": "0"}}' for n in range(4)))
    (folder / "before.json").write_text("{}")
    again = go(2, file=folder / "config.yaml", resume=True, accept_changes=True)
    assert again.steps == 2 and not (folder / "before.json").exists(), "it is measured again"
    assert "from step 1 on other inputs: number of training prompts (14 then, 18 now)" in status(folder)["changed"]
    assert "continued from step 1 on other inputs" in judge_run(load_config(folder / "config.yaml"), again).sentence
    moved = project.rename(tmp_path / "moved")
    assert go(3, moved, resume=True).steps == 3, "they were accepted"


def test_a_resume_notices_another_image_under_the_same_path(start, tmp_path):
    """Inputs were compared by the rows' text, which is the same for another file of that name."""
    folder, seen = make("qwen3_vl", tmp_path / "model"), []

    def reward(prompts, completion_ids, **columns):
        seen.append((prompts, columns))
        return by_ids(completion_ids)

    def go(steps, **options):
        words = (f"model.name={folder}", f"data.source={tmp_path}/rows.jsonl", f"rloo.max_steps={steps}")
        return start(*words, "rloo.save_steps=1", rewards=[reward], **options)

    for seed in range(8):
        noise(seed).save(tmp_path / f"{seed}.png")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "?", "image": "{n}.png"}}\n' for n in range(8)))
    go(1)
    (prompts, columns), *_ = seen
    assert len(set(prompts)) == 2 and "<|image:" in prompts[0] and not {"image", "images"} & columns.keys()
    assert go(2, resume=True).steps == 2
    noise(9).save(tmp_path / "7.png")
    with pytest.raises(ConfigError, match="Changed: column prompt of the (training|held-out) prompts"):
        go(3, resume=True)
