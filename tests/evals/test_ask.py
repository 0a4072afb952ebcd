"""Questions to a trained model: what it reads, what is shown, the base model, budgets, the command."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rloo_kit.completion import Completion
from rloo_kit.config.run import load_config
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.evals.ask import ask
from rloo_kit.models.policy import load_base, load_policy, load_trained, save_adapter
from rloo_kit.rollout import completions
from rloo_kit.rollout.completions import generate_completions
from rloo_kit.rollout.thinking_budget import make_budget_limits
from rloo_kit.runs.find import RUN_FILE
from tests.episodes import Scripted, call, with_tools
from tests.rollout.models import shake

CONFIG = """
run: {{output_dir: {output}}}
model: {{name: {model}, lora: {{r: 2, alpha: 4}}, max_seq_length: 128}}
data: {{source: any/prompts, system_prompt: Be brief., max_prompt_length: 64}}
rewards: [{{name: length_reward}}]
rloo: {{max_steps: 2, per_device_train_batch_size: 4, num_generations: 2, max_completion_length: 12}}
eval: {{temperature: 0.7}}
"""


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory, make_tiny_model, tiny_tokenizer) -> Path:
    """Random weights, large enough that every prompt gets its own answer; end tokens and tags are unlikely."""
    folder = tmp_path_factory.mktemp("base")
    model = make_tiny_model(initializer_range=0.3)
    with torch.no_grad():
        model.get_input_embeddings().weight[256:261] = 0
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, base_folder) -> Path:
    """A run with a saved adapter that is not the identity, of a model that thinks in random bytes."""
    output = tmp_path_factory.mktemp("outputs")
    file = output / "tiny.yaml"
    file.write_text(CONFIG.format(output=output, model=base_folder))
    run = load_config(file)
    policy = load_policy(run)
    shake(policy.model, scale=0.5)
    save_adapter(policy, run.folder / "adapter")
    (run.folder / "config.yaml").write_text(run.to_yaml())
    return run.folder


@pytest.fixture(scope="module")
def trained(run_folder):
    return load_trained(run_folder)


def sampled(run, policy, prompt, **named):
    options = {"limits": 12, "temperature": run.eval.temperature, "engine": run.rollout}
    (completion,) = generate_completions(policy, [prompt], **options | named)
    return completion


PROMPT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_the_model_reads_what_it_was_trained_on(trained):
    """Without the run's system prompt or template, the model is asked something it has never seen."""
    run, policy = trained
    given = ask(run, policy, "1+2=", seed=5)
    wanted = sampled(run, policy, PROMPT, seed=5)
    assert given.tokens == len(wanted.ids) and given.ended == wanted.ended
    assert given.thinking == policy.tokenizer.decode(wanted.ids, skip_special_tokens=True).strip()
    assert given.thinking and given.answer == "" and not given.closed and given.question == "1+2="
    assert ask(run, policy, "1+2=", seed=5) == replace(given, seconds=pytest.approx(0, abs=60))
    other = ask(run, policy, "1+2=", seed=5, system="Be long.")
    assert other.thinking != given.thinking


def test_a_budget_closes_the_thinking(trained, monkeypatch):
    """A model that never stops thinking is made to answer; the forced token is not part of its text."""
    monkeypatch.setattr("rloo_kit.config.run.FORCED_ANSWER", 4)
    run, policy = trained
    given = ask(run, policy, "1+2=", budget=3)
    assert (given.thinking_tokens, given.forced, given.closed) == (3, True, True)
    limits = make_budget_limits(policy.tokenizer, policy.tags, 12, 3, answer_budget=8)
    wanted = sampled(run, policy, PROMPT, limits=limits)
    assert given.tokens == len(wanted.ids) == 12 and "</think>" not in given.thinking + given.answer
    assert "3 of thinking; closed by the budget; truncated" in given.summary
    assert ask(run, policy, "1+2=", budget=11).tokens == 11 + 1 + 4, "the least for an answer"
    assert ask(run, policy, "1+2=", budget=3, max_tokens=6).tokens == 6
    assert ask(run, policy, "1+2=", budget=3, max_tokens=5).tokens == 5
    with pytest.raises(ConfigError, match="max-tokens .*above 4 or lower --budget"):
        ask(run, policy, "1+2=", budget=3, max_tokens=4)


MESSAGES = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
TURNS = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    "<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n<think>\n"
)


@pytest.mark.parametrize(
    ("question", "system", "prompt", "asked"),
    [
        ("1+2=", "", PROMPT.partition("<|im_end|>\n")[2], "1+2="),  # an empty system prompt is none
        (MESSAGES, None, TURNS, "3"),  # earlier turns are in the prompt as the template renders them
        ({"prompt": PROMPT, "answer": "3"}, None, PROMPT, "system: Be brief.\nuser: 1+2="),  # a held-out row as it is
    ],
)
def test_what_the_model_reads(question, system, prompt, asked, trained):
    """The notebook asked the demo's sum of any model, and a row's prompt would have been rendered a second time."""
    run, policy = trained
    given = ask(run, policy, question, system=system)
    wanted = policy.tokenizer.decode(sampled(run, policy, prompt).ids, skip_special_tokens=True).strip()
    assert given.thinking == wanted and given.question == asked


def test_the_base_is_the_model_without_its_adapter(trained):
    """Compared with itself a trained run would look unchanged; the adapter is active again afterwards."""
    run, policy = trained
    given = ask(run, policy, "1+2=", base=True, temperature=0)
    plain = ask(run, policy, "1+2=", temperature=0)
    assert given.base is not None and given.thinking == plain.thinking != given.base.thinking
    with policy.model.disable_adapter():
        assert given.base.thinking == ask(run, policy, "1+2=", temperature=0).thinking
    shown = str(given)
    assert shown.index("base:\n") < shown.index("trained:\n") and shown.count(" tokens, ") == 2 and "thinking:" in shown


def test_what_cannot_be_asked_is_said(trained):
    """Each of these ended in a traceback or in an answer to something else."""
    run, policy = trained
    with pytest.raises(ConfigError, match="room for 128 in all.*model.max_seq_length"):
        ask(run, policy, "1" * 100)
    with pytest.raises(DataError, match="<think>"):
        ask(run, policy, "<think>")
    with pytest.raises(DataError, match="empty"):
        ask(run, policy, " ")


def test_control_characters_of_a_model_stay_symbols(trained, monkeypatch):
    """A random model writes bytes of escape sequences, which would recolour or clear the terminal."""
    run, policy = trained
    escape = policy.tokenizer("\x1b[2Jx")["input_ids"]
    ids = [*escape, 260, *escape]
    found = Completion(ids, "", False, len(escape), closed=True, prompt=PROMPT)
    monkeypatch.setattr("rloo_kit.evals.ask.generate_completions", lambda *_, **__: [found])
    given = ask(run, policy, "1+2=")
    assert str(given).count("␛[2Jx") == 2 and "\x1b" not in str(given) and given.answer == "\x1b[2Jx"


# ------------------------------------------------------------------------------------------------ what is asked


def test_folders_of_weights_are_asked_like_their_run(run_folder, trained, tmp_path):
    """`ask` works on what `export` writes: with the run's configuration inside, above, or without it."""
    run, policy = trained
    wanted = ask(run, policy, "1+2=", temperature=0)
    assert ask(*load_trained(run_folder / "adapter"), "1+2=", temperature=0).thinking == wanted.thinking
    merged = tmp_path / "merged"
    _, whole = load_trained(run_folder)
    whole.model.merge_and_unload().save_pretrained(merged)
    whole.tokenizer.save_pretrained(merged)
    with pytest.raises(ConfigError, match="rloo_kit.yaml"):
        load_base(merged)
    found = ask(*load_trained(merged), "1+2=", temperature=0, system="Be brief.", max_tokens=12)
    assert found.thinking == wanted.thinking
    (merged / RUN_FILE).write_text((run_folder / "config.yaml").read_text())
    found = ask(*load_trained(merged), "1+2=", temperature=0, base=load_base(merged))
    based = ask(run, policy, "1+2=", temperature=0, base=True)
    assert found.thinking == wanted.thinking and found.base.thinking == based.base.thinking


def test_a_run_that_trained_all_weights_has_its_base_loaded(tmp_path, base_folder):
    """Its policy has no adapter to disable, so the trained model would have answered as the base."""
    file = tmp_path / "whole.yaml"
    file.write_text(CONFIG.format(output=tmp_path, model=base_folder).replace("{r: 2, alpha: 4}", "null"))
    run = load_config(file)
    policy = load_policy(run)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.add_(torch.linspace(-1, 1, 264)[:, None])
    save_adapter(policy, run.folder / "adapter")
    with pytest.raises(ConfigError, match="base=base"):
        ask(run, policy, "1+2=", base=True)
    original = load_base(file)
    found = ask(*load_trained(file), "1+2=", base=original, temperature=0)
    wanted = ask(run, original, "1+2=", temperature=0)
    assert found.base.thinking == wanted.thinking != found.thinking


# ------------------------------------------------------------------------------------------------ tools


TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a + b


class World:
    def reset(self, answer, **row):
        self.answer = answer

    def look(self) -> str:
        """Look."""
        return self.answer
'''


@pytest.fixture(scope="module")
def tools(tmp_path_factory) -> Path:
    """The file of a tool: one, so that its process is started once."""
    file = tmp_path_factory.mktemp("tools") / "tools.py"
    file.write_text(TOOLS)
    return file


@pytest.mark.parametrize(
    ("turns", "shown"),
    [
        (
            [f"I add {call('add', a=1, b=2)}", "we</think>\n\n3 <b"],
            ["thinking I add", "call add(a=1, b=2)", "result 3", "thinking:", "we", "", "answer:", "3 <b"],
        ),
        (
            [f"two{call('add', a=1, b=2).replace('think>', 'think> So: ')}{call('add', a=3, b=4)[10:]}", "</think>ok"],
            ["thinking two", "So:", "call add(a=1, b=2)", "call add(a=3, b=4)", "result 3", "result 7", "ok"],
        ),
        (
            ["</think><tool_call>add 1", "so"],
            ["</think><tool_call>add 1", "result error: the call cannot be read", "thinking:", "so", "", "answer:"],
        ),
    ],
    ids=["one call", "two calls", "no call that can be read"],
)
def test_each_turn_is_shown_with_its_calls_and_results(trained, tools, tiny_tokenizer, monkeypatch, turns, shown):
    """As one text, the second turn's thinking was the first one's answer, and results were the model's words."""
    run, policy = trained
    run, policy = run.model_copy(deep=True), replace(policy, tokenizer=with_tools(tiny_tokenizer))
    run.rloo.tools, run.rloo.max_completion_length, run.model.max_seq_length = [f"{tools}:add"], 380, 512
    monkeypatch.setattr(completions, "build_engine", lambda *_, **__: Scripted(policy.tokenizer, [turns]))
    given = ask(run, policy, "1+2=")
    *lines, summary = str(given).split("\n")
    assert [line.partition(": Expec")[0].partition(": json")[0] for line in lines] == shown
    assert summary == f"({given.summary})"
    assert given.tokens == sum(len(tiny_tokenizer(turn)["input_ids"]) + 1 for turn in turns)


def test_an_environment_that_needs_a_row_is_refused_before_the_question_is_asked(
    trained, tools, tiny_tokenizer, monkeypatch, capsys
):
    """The model answered after `error: the environment cannot be started`, and the reason was printed twice."""
    run, policy = trained
    run, policy = run.model_copy(deep=True), replace(policy, tokenizer=with_tools(tiny_tokenizer))
    run.rloo.environment, run.rloo.max_completion_length, run.model.max_seq_length = f"{tools}:World", 380, 512
    scripted = Scripted(policy.tokenizer, [[call("look"), "</think>a"]])
    monkeypatch.setattr(completions, "build_engine", lambda *_, **__: scripted)
    with pytest.raises(ConfigError, match="^reset: TypeError: .*'answer'.* give the arguments of reset defaults$"):
        ask(run, policy, "1+2=", base=True)
    assert not any(capsys.readouterr())
    run.data.system_prompt = None
    row = {"prompt": policy.tokenizer.eos_token + "1+2=", "answer": "3"}
    assert [one["content"] for one in ask(run, policy, row).turns] == ["", "3", "a"]


# ------------------------------------------------------------------------------------------------ the command


def command(*words):
    return [sys.executable, "-m", "rloo_kit.cli", "ask", *map(str, words)]


@pytest.mark.slow
def test_a_question_comes_through_a_pipe_and_json_is_alone_on_stdout(run_folder):
    """A pipe has no terminal to ask at, an empty one no question; nothing is printed before the JSON."""
    words = command(run_folder, "--json", "--base", "--budget", "2", "--temperature", "0")
    done = subprocess.run(words, input="1+2=\n", capture_output=True, text=True, timeout=120)
    (found,) = map(json.loads, done.stdout.splitlines())
    keys = ["question", "thinking", "answer", "tokens", "thinking_tokens", "ended", "closed", "forced"]
    keys += ["seconds", "base", "turns"]
    assert list(found) == keys and list(found["base"]) == keys and found["question"] == "1+2=", done.stderr
    assert found["thinking_tokens"] == 2 and found["forced"] and found["base"]["base"] is None
    empty = subprocess.run(command(run_folder), input="\n", capture_output=True, text=True, timeout=120)
    assert empty.returncode == 2 and "there is no question" in empty.stderr


class Terminal:
    """A process with its own terminal."""

    def __init__(self, words):
        import fcntl
        import termios

        self.end, other = pty.openpty()
        environment = {**os.environ, "TERM": "xterm"} | {"PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            words, stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(other)
        self.text, self.read = "", 0

    def wait_for(self, text):
        """The output up to and including `text`."""
        deadline = time.monotonic() + 120
        while text not in self.text[self.read :]:
            assert time.monotonic() < deadline, self.text
            if select.select([self.end], [], [], 1)[0]:
                self.text += os.read(self.end, 4096).decode(errors="replace")
        start, self.read = self.read, self.text.index(text, self.read) + len(text)
        return self.text[start : self.read]

    def send(self, text):
        os.write(self.end, text.encode())


@pytest.mark.slow
def test_questions_at_a_terminal(run_folder):
    """Ctrl-C stops an answer and not the program, the next question is answered, Ctrl-D ends it with code 0."""
    words = ("--set", "model.max_seq_length=512", "--set", "rloo.max_completion_length=400")
    terminal = Terminal(command(run_folder, *words))
    try:
        terminal.wait_for("\n> ")
        terminal.send("1+2=\n")
        terminal.wait_for("1+2=\r\n")
        time.sleep(0.05)  # it samples
        terminal.send("\x03")
        assert "(stopped" in terminal.wait_for("\n> ")
        terminal.send("3+4=\n")
        assert "of thinking" in terminal.wait_for("tokens/s")
        terminal.wait_for("\n> ")
        terminal.send("<think>\n")
        assert "rloo-kit: the user message contains" in terminal.wait_for("\n> ")
        terminal.send("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        if terminal.process.poll() is None:
            os.killpg(terminal.process.pid, signal.SIGKILL)
        os.close(terminal.end)
