"""Supervised training before RLOO: an exact loss, a folder like a run's, and the reference that RLOO starts from."""

import json
import shlex
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForImageTextToText, TrainerCallback
from typer.testing import CliRunner

from rloo_kit import fine_tune, load_config, load_data, load_policy, load_trained
from rloo_kit.cli import app
from rloo_kit.errors import ConfigError, NonFiniteError, RlooKitError, RunExistsError
from rloo_kit.loop.options import RLOOConfig, training_arguments
from rloo_kit.loop.trainer import RLOOTrainer
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.runs.folder import RunDir, open_folder
from rloo_kit.tasks.worked import Demonstrations, Example, load_worked
from rloo_kit.training import sft
from rloo_kit.training.sft import build_trainer, next_command
from tests.gradient.test_scorer import by_logits
from tests.images.models import make, noise
from tests.images.test_exactness import Pair
from tests.loop.conftest import by_ids

SFT = ("sft.max_steps=2", "sft.learning_rate=0.05", "sft.gradient_accumulation_steps=2")


@pytest.fixture
def load(write_config, tmp_path, monkeypatch):
    """`load(*overrides)`: run, policy and data of the tiny model, its rows with demonstrations of several lengths."""

    monkeypatch.setattr(sft, "WARMUP_SHARE", 0)  # the first of two steps would do nothing

    def prepare(*overrides):
        file = write_config()
        rows = [
            {"prompt": f"add {n}", "answer": str(n), "completion": f"{'ab' * (n % 5)}</think>\n\n{n}"}
            for n in range(20)
        ]
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run = load_config(file, *SFT, *overrides)
        policy = load_policy(run)
        return run, policy, load_data(run, policy.tokenizer)

    return prepare


@pytest.fixture
def press(monkeypatch):
    """`press(act)`: `act()` is called at the beginning of the second step."""
    build = sft.build_trainer

    def at_second_step(act):
        class Press(TrainerCallback):
            def on_step_begin(self, args, state, control, **_):
                if state.global_step == 1:
                    act()

        def build_and_press(*arguments):
            trainer = build(*arguments)
            trainer.add_callback(Press())
            return trainer

        monkeypatch.setattr(sft, "build_trainer", build_and_press)

    return at_second_step


def trained(model):
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def assert_plain(trainer, model, read_examples):
    """A step has the loss and gradients of the mean cross-entropy of the examples' own tokens, one at a time."""
    gradients = {}

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **_):
            gradients.update({name: value.grad.clone() for name, value in trained(model).items()})

    trainer.add_callback(Watch())
    before = {name: value.detach().clone() for name, value in trained(model).items()}
    trainer.train()
    for name, value in trained(model).items():
        value.data.copy_(before[name])
        value.grad = None
    model.eval()
    losses, count = [], 0
    for example in read_examples():
        ids = torch.tensor([example.prompt_ids + example.completion_ids])
        logits = model(input_ids=ids).logits[0, len(example.prompt_ids) - 1 : -1]
        labels = torch.tensor(example.labels)
        losses.append(functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        count += int((labels != -100).sum())
    loss = torch.stack(losses).sum() / count
    loss.backward()
    logged = next(row for row in trainer.state.log_history if "loss" in row)
    assert logged["loss"] == pytest.approx(loss.item(), rel=1e-5) and "entropy" in logged
    assert trainer.tokens == count, "tok/s counted the prompts too"
    for name, value in trained(model).items():
        torch.testing.assert_close(gradients[name], value.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "keys",
    [["model.lora={r: 2, target_modules: [q_proj, v_proj]}"], ["model.lora=null"], ["model.load_in_4bit=true"]],
    ids=" ".join,
)
def test_one_step_is_the_plain_cross_entropy_of_the_completions(load, keys, tmp_path, monkeypatch):
    """The prompt in the loss, a mean of means, or attention across packed rows all train: only numbers show it."""
    run, policy, data = load(*keys, "rloo.max_grad_norm=0", "sft.max_steps=1")
    worked = load_worked(run, policy.tokenizer, data.test["prompt"])
    if run.model.lora:  # off the identity, so that both matrices of a pair have gradients
        for name, value in trained(policy.model).items():
            value.data.add_(0.1 if "lora_B" in name else 0.0)
    trainer, seen = build_trainer(run, policy, worked, tmp_path / "none"), []
    compute = trainer.compute_loss
    monkeypatch.setattr(
        trainer, "compute_loss", lambda model, inputs, **more: seen.append(inputs) or compute(model, inputs, **more)
    )

    def read_examples():
        assert len(seen) == 2 and trainer.model_accepts_loss_kwargs
        known = {tuple(example.prompt_ids + example.completion_ids): example for example in worked.examples}
        pairs = [pair for step in seen for pair in zip(step["input_ids"], step["attention_mask"], strict=True)]
        batch = [known[tuple(ids[: int(mask.sum())].tolist())] for ids, mask in pairs]
        assert len(batch) == 8 and len({len(example.completion_ids) for example in batch}) > 2
        return batch

    assert_plain(trainer, policy.model, read_examples)


def test_prompts_with_images_have_the_loss_of_transformers_alone(load, tmp_path):
    """Ids of images in a batch of TRL's are read as images: two steps train, from the same loss as from pixels."""
    folder = make("qwen3_vl", tmp_path / "model")
    run, policy, data = load(f"model.name={folder}", "rloo.max_grad_norm=0")
    for seed in range(3):
        noise(seed, 40, 24 + 16 * seed).save(tmp_path / f"{seed}.png")
    rows = [
        {"prompt": f"<image>{n}?", "images": f"{tmp_path}/{n % 3}.png", "completion": f"{'a' * n}</think>\n\n{n}"}
        for n in range(6)
    ]  # fmt: skip
    rows[5]["completion"] = [{"role": "assistant", "content": [{"type": "text", "text": "b</think>\n\nc"}]}]
    worked = load_worked(run, policy.tokenizer, [], [*rows, {"prompt": "none", "completion": "so</think>\n\nd"}])
    plain = AutoModelForImageTextToText.from_pretrained(folder)
    pair = SimpleNamespace(plain=plain, vision=policy.tokenizer.vision)
    targets = [torch.tensor(example.completion_ids) for example in worked.examples]
    pairs = zip(worked.examples, targets, strict=True)
    losses = [-Pair.alone(pair, example.prompt_ids, ids).gather(1, ids[:, None]) for example, ids in pairs]
    trainer = build_trainer(run, policy, worked, tmp_path / "none")
    batch = trainer.data_collator(list(trainer.train_dataset))
    loss = trainer.compute_loss(trainer.model, batch)
    assert len(losses) == 7 and loss.item() == pytest.approx(torch.cat(losses).mean().item(), abs=1e-5)
    before = {name: value.clone() for name, value in trained(policy.model).items()}
    assert fine_tune(run, policy, data, rows).steps == 2
    moved = [name for name, value in trained(policy.model).items() if not value.equal(before[name])]
    assert moved and all("language_model" in name for name in moved)


def test_results_of_tools_are_read_and_not_learnt(load, tmp_path):
    """A model that imitates its tools' results learns to make them up."""
    run, policy, _ = load("model.lora=null", "rloo.max_grad_norm=0", "sft.max_steps=1")
    draw = torch.Generator().manual_seed(0)

    def ids(length):
        return torch.randint(0, 250, (length,), generator=draw).tolist()

    spans = [[(3, 6)], [], [(1, 4), (6, 7)], [(5, 9)]]
    worked = Demonstrations([Example(ids(4 + n), ids(10 + n), spans[n]) for n in range(4)] * 2, 8)
    trainer = build_trainer(run, policy, worked, tmp_path / "none")
    assert_plain(trainer, policy.model, lambda: worked.examples)
    assert trainer.tokens == 2 * (10 + 11 + 12 + 13 - 3 - 4 - 4)


def test_tags_that_an_adapter_cannot_learn_are_named(load, capsys):
    """Tags made of unused tokens have equal rows, which an adapter does not reach: pass rate 3 %."""
    run, policy, data = load("sft.max_steps=1")
    assert not sft.has_equal_tags(policy)
    table = policy.model.get_input_embeddings().weight
    start, end = policy.tags.start_id, policy.tags.end_id
    with torch.no_grad():
        table[start] = table[end] * 1.1 + 0.01 * table[end].norm() * torch.randn(table.shape[1]) / table.shape[1] ** 0.5
    fine_tune(run, policy, data)
    assert "model.lora=null" in capsys.readouterr().out
    table.requires_grad_(True)
    assert not sft.has_equal_tags(policy), "every parameter is trained"


@pytest.mark.slow
def test_a_folder_like_a_runs(load, capsys):
    """What `eval`, `ask` and `export` read of a run: configuration, status, metrics, adapter."""
    run, policy, data = load("run.evaluate=true")
    with open_folder(run, False) as run_dir:
        run_dir.write_json("before.json", Evaluation("before", 2, 1, 1.0, 6, seconds=736.0).to_dict())
        result = sft._train(run, policy, sft.check_demonstrations(run, policy, data), run_dir)
    folder = result.folder
    assert folder == run.folder.parent / "tiny-sft" and result.stopped is None
    assert result.steps == 2 == len(result.metrics) and result.metrics[1]["loss"] < result.metrics[0]["loss"]
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["step"], status["max_steps"]) == ("finished", 2, 2)
    assert status["seconds"] == result.seconds >= result.metrics[-1]["seconds"]
    assert {path.name for path in folder.iterdir()} >= {"config.yaml", "versions.json", "metrics.jsonl", "adapter"}
    assert not (folder / "checkpoints").exists() and not policy.model.training
    printed = capsys.readouterr().out
    assert "sft step 1/2 | loss " in printed and "sft step 2/2 | loss " in printed and "<" not in printed
    assert printed.rstrip().endswith("| eta 12:16"), "the evaluation after training is still to come"
    _, again = load_trained(folder)
    found = load_file(result.adapter_folder / "adapter_model.safetensors")
    assert len(found) == len(trained(policy.model)) == len(trained(again.model))
    for name, value in trained(policy.model).items():
        assert torch.equal(value, trained(again.model)[name])
    with pytest.raises(RunExistsError, match=r"tiny-sft already contains the supervised training of tiny.*--overwrite"):
        fine_tune(run, load("run.evaluate=true")[1], data)
    with pytest.raises(ConfigError, match=r"2 steps of SFT.*kit.load_policy\(run\)"):  # it would be trained further
        fine_tune(run, policy, data, overwrite=True)
    assert fine_tune(run, load("run.evaluate=true")[1], data, overwrite=True).steps == 2


@pytest.mark.parametrize("mistake", ["weights", "a column of Parquet", "a policy that is trained", "processes", "cli"])
def test_what_is_refused_deletes_nothing(load, mistake, tmp_path, tiny_folder, write_config, monkeypatch):
    """`rloo-kit sft --overwrite` deleted the earlier adapter, and then could not start."""
    run, policy, data = load()
    with open_folder(run) as run_dir:
        (run_dir / "adapter").mkdir()
        (run_dir / "adapter" / "adapter_model.safetensors").write_text("a night")
        run_dir.set_status("finished", step=9)
    before = {path: path.read_bytes() for path in run_dir.folder.rglob("*") if path.is_file()}
    rows = [{"prompt": f"sub {n}", "answer": str(n)} for n in range(8)]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    words = [str(write_config()), *SFT, f"sft.source={tmp_path / 'rows.parquet'}"]
    if mistake == "weights":
        broken = shutil.copytree(tiny_folder, tmp_path / "broken")
        (broken / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
        words += ["sft.completion_column=answer", f"model.name={broken}"]
    if mistake in ("weights", "cli"):
        done = CliRunner().invoke(app, ["sft", *words, "--overwrite"])
        assert done.exit_code != 0 and (mistake == "weights" or "sft.completion_column" in done.stderr), done.output
    else:
        policy.trained["RLOO"] = int(mistake == "a policy that is trained")
        if mistake == "processes":
            monkeypatch.setattr(sft, "count_processes", lambda: 2)
        with pytest.raises(RlooKitError):
            fine_tune(load_config(*words), policy, data, overwrite=True)
    assert {path: path.read_bytes() for path in run_dir.folder.rglob("*") if path.is_file()} == before


def test_an_rloo_run_of_that_name_is_kept(load):
    """A run named `c-sft`, trained for a night, was deleted by the supervised training of the run `c`."""
    run, policy, data = load()
    own = run.model_copy(deep=True)
    own.run.name = "tiny-sft"
    with RunDir.create(own) as run_dir:
        run_dir.set_status("finished", step=9)
    for overwrite in (False, True):
        with pytest.raises(RunExistsError, match=r"tiny-sft contains a run that is no supervised training.*run.name"):
            fine_tune(run, policy, data, overwrite=overwrite)
    assert RunDir(own.folder).status()["step"] == 9


def test_ctrl_c_saves_what_is_trained(load, press):
    """An hour of training that ends in nothing because somebody looked."""
    run, policy, data = load("sft.max_steps=50")
    press(lambda: signal.raise_signal(signal.SIGINT))
    result = fine_tune(run, policy, data)
    assert (result.stopped, result.steps) == ("interrupted", 2)
    assert json.loads((result.folder / "status.json").read_text())["state"] == "interrupted"
    assert (result.adapter_folder / "adapter_config.json").is_file()


def test_a_broken_loss_ends_it(load, press):
    """A NaN that is saved is continued by RLOO."""
    run, policy, data = load("sft.max_steps=5")
    press(lambda: next(iter(trained(policy.model).values())).data.fill_(float("nan")))
    with pytest.raises(NonFiniteError, match=r"at step 2: lower sft.learning_rate"):
        fine_tune(run, policy, data)
    assert json.loads((run.folder.parent / "tiny-sft" / "status.json").read_text())["state"] == "failed"
    assert not (run.folder.parent / "tiny-sft" / "adapter").exists()


@pytest.mark.slow
@pytest.mark.parametrize("keys", [[], ["model.lora=null"], ["model.load_in_4bit=true"]], ids=" ".join)
def test_rloo_starts_from_it_and_keeps_it_as_the_reference(load, keys, tmp_path):
    """A KL against the base alone would pull the policy back: at step 1 it is 0, against what was fine-tuned."""
    run, policy, data = load(*keys)
    result = fine_tune(run, policy, data)
    start = f"model.{'adapter' if run.model.lora else 'name'}={result.adapter_folder}"
    run, tuned, data = load(*keys, start, "rloo.beta=0.1", "rloo.max_steps=2", "rloo.learning_rate=0.05")
    trainer = RLOOTrainer(
        model=tuned.model,
        reward_funcs=[by_ids],
        args=RLOOConfig(**training_arguments(run, tuned, tmp_path / "rloo")),
        train_dataset=data.train,
        processing_class=tuned.tokenizer,
    )
    groups, kept = [], trainer.rloo.scorer.score_reference

    def watch(model, given):
        groups.extend(given)
        return kept(model, given)

    trainer.rloo.scorer.score_reference = watch
    trainer.train()
    logs = [row for row in trainer.state.log_history if "kl" in row]
    assert logs[0]["kl"] == 0.0 and logs[1]["kl"] != 0.0
    assert groups, "the reference was not asked once the policy had moved"
    found = kept(trainer.model, groups)
    _, base, _ = load(*keys)
    with torch.no_grad():
        expected, untrained = (by_logits(model, groups) for model in (policy.model, base.model))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found - untrained).abs().max() > 0.01, "supervised training moved nothing, so the test shows nothing"


def test_the_next_command(load, tmp_path, monkeypatch):
    """A command that is nearly right trains from the base: the weights, and the overrides that still hold."""
    monkeypatch.chdir(tmp_path)
    run, policy, data = load("run.seed=3", "run.name=mine")
    result = fine_tune(run, policy, data)
    words = ["run.name=mine", "sft.max_steps=2", "run.seed=3", "model.adapter=old"]
    expected = f"rloo-kit train {run.source} run.seed=3 run.name=mine model.adapter=outputs/mine-sft/adapter"
    assert next_command(run, words, result) == expected
    expected = f"rloo-kit train {run.source} model.name=other model.adapter=outputs/mine-sft/adapter"
    assert next_command(run, ["model.name=other"], result) == expected, "the adapter is one of that base"
    result.adapter_folder = shutil.copytree(result.adapter_folder, tmp_path / "out #1: mine" / "adapter")
    then = load_config(*shlex.split(next_command(run, [], result))[2:])
    assert then.model.adapter == "out #1: mine/adapter", "YAML takes the rest for a comment"

    file = tmp_path / "full.yaml"  # defaults follow the model's name (6144 tokens), and a folder's is "adapter"
    file.write_text(
        "model: {name: Qwen/Qwen3-4B-Thinking-2507, lora: null}\ndata: {source: rows.jsonl}\n"
        "rewards: [{name: answer_reward}]\nrloo: {max_steps: 1}\n"
    )
    run, folder = load_config(file), tmp_path / "outputs" / "full-sft" / "adapter"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    command = next_command(run, [], sft.SftResult(folder.parent, folder, 1, [], 1.0, None)).split()
    then = load_config(*command[2:])
    assert then.model.max_seq_length == run.model.max_seq_length == 6144
    assert then.model.model_dump(exclude={"name"}) == run.model.model_dump(exclude={"name"})
    assert all(getattr(then, name) == getattr(run, name) for name in ("data", "rloo", "rollout", "eval"))
