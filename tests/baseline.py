"""What users rely on, frozen in tests/baseline/*.json, and what the tree has lost or gained since.

    python tests/baseline.py freeze                 # write the files; parts with times run twice
    python tests/baseline.py compare                # one line a part; exit code 1 if something frozen is missing
    python tests/baseline.py compare --only names help config

A part is a set of facts, each a short text under a name: a parameter of a function, a digest, a sentence of the report.
A fact may move or be joined by others, but must not be lost, unless given_up.json names it: "part/name" or
"part/name: fact", with the reason (* is any text). Numbers that two runs of one tree do not share stand as #.

Not in here, because it takes minutes: the rest of the fault table (`python tests/faults/table.py`), batches
(`pytest -m slow tests/notebooks`), and the whole demo (`--whole`). Digests hold on the kind of CPU that froze them.
"""

import argparse
import contextlib
import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
FROZEN = ROOT / "tests" / "baseline"
OLD_COMMIT = "4058bcb"  # whose run folders still have to be read
CACHE = ROOT / ".baseline" / OLD_COMMIT
DEMO = ["configs/arithmetic_thinking.yaml", "run.output_dir=runs", "data.test_size=48", "rloo.max_steps=3"]
INPUTS = yaml.safe_load((FROZEN / "inputs.yaml").read_text(encoding="utf-8"))
SECTION = r"\b(?:run|model|data|rewards|rloo|rollout|eval|health|sft|parameters)"
KEY = rf"{SECTION}(?:\.\w+)+|(?<![\w-])(?:rewards|rloo|model|rollout)(?=: )|(?<![\w-])--[a-z][a-z-]+"
Facts = dict[str, list[str]]

# -- facts from texts --


class Visible(HTMLParser):
    """The texts of a page that a reader sees or hears, one for each block; not the labels inside of drawings."""

    INLINE = {"b", "i", "em", "strong", "code", "a", "span", "small", "sup", "sub", "kbd", "time", "abbr", "mark"}
    HIDDEN = {"script", "style", "text", "pre"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.facts: list[str] = []
        self.inside: list[str] = []
        self.text = ""
        self.feed(page)
        self.end_block()

    def end_block(self) -> None:
        self.facts += [text] if (text := " ".join(self.text.split())) else []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.INLINE:
            self.end_block()
        if tag in self.HIDDEN:
            self.inside.append(tag)
        self.facts += [f"(for screen readers) {value}" for name, value in attrs if name in ("aria-label", "alt")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.INLINE:
            self.end_block()
        if tag in self.inside:
            self.inside.remove(tag)

    def handle_data(self, data: str) -> None:
        self.text += "" if self.inside else data


def mask(text: str) -> str:
    return re.sub(r"\d[\d.,]*", "#", text)


def normalise(text: str, folder: Path) -> str:
    """`text` without paths, dates, times, memory and versions."""
    for path, name in ((folder.resolve(), "."), (folder, "."), (ROOT, "ROOT"), (Path.home(), "~")):
        text = text.replace(str(path), name)
    text = re.sub(r"\d{4}-\d\d-\d\d(T[\d:+.]+)?|\d+:\d\d\b|\b[0-9a-f]{12}\b|[▁-█]{2,}", "#", text)
    if re.search("(?i)CPU cores|tokens per second|minutes of|loading|seconds", text):
        return mask(text)
    return re.sub(r"\d[\d.,]* ?(s|ms|min|h|GiB|MiB)\b", r"# \1", text)


def flat(value: Any, name: str = "") -> Iterator[str]:
    """`a.b.0: value` for every leaf."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not inner:
        yield f"{name}: {value}"
    for key, one in inner:
        yield from flat(one, f"{name}.{key}" if name else str(key))


def keys(value: Any, name: str = "") -> Iterator[str]:
    """The keys of a JSON value, those of all items of a list as one."""
    for key, one in value.items() if isinstance(value, dict) else ():
        yield (path := f"{name}.{key}" if name else str(key))
        yield from keys(one, path)
    for one in value if isinstance(value, list) else ():
        yield from keys(one, f"{name}[]")


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def call(*words: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `rloo-kit words`, in this process."""
    from typer.testing import CliRunner

    from rloo_kit.cli import app

    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "80", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return -1, result.stdout, f"traceback: {type(result.exception).__name__}: {result.exception}"
    return result.exit_code, result.stdout, result.stderr


def named(text: str) -> list[str]:
    """The keys and options that a message names, in its order; usage and example commands are not the message."""
    text = re.sub(r"(?m)^(Usage|Try) .*", "", text)
    return [f"names {key.rstrip('.')}" for key in dict.fromkeys(re.findall(KEY, text))] or ["names no key"]


def outcome(*words: str | Path) -> list[str]:
    code, _, errors = call(*words)
    for word in words:
        errors = errors.replace(f"override {word}: ", "")
    return [f"exit code {code}", *named(errors)]


def lines(text: str) -> list[str]:
    """The lines of a text, without those that are printed every few seconds."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip() and "| eta " not in line]


# -- the parts; each gets an empty folder, which is also the working directory --


def names(folder: Path) -> Facts:
    """Public names with their parameters; classes with their public attributes, those that functions return too."""
    import rloo_kit
    import rloo_kit.rewards

    def parameters(value: Any) -> list[str]:
        found = inspect.signature(value.__init__ if isinstance(value, type) else value).parameters.values()
        return [
            f"parameter {one.kind.description}: {one.name}"
            + ("" if one.default is one.empty else f" = {re.sub(r' at 0x[0-9a-f]+', '', repr(one.default))}")
            for one in found
        ]

    def attributes(kind: type) -> list[str]:
        own = [one for one in kind.__mro__ if one.__module__.startswith(("rloo_kit", "rewards"))]
        known = {name for one in own for name in [*vars(one), *getattr(one, "__annotations__", {})]}
        return [f"attribute {name}" for name in sorted(known) if not name.startswith("_")]

    facts: Facts = {"version": [rloo_kit.__version__]}
    for package, public in (("rloo_kit", rloo_kit), ("rewards", rloo_kit.rewards)):
        for name in public.__all__:
            value = getattr(public, name)
            if not callable(value):
                facts[f"{package}.{name}"] = [repr(value)]
                continue
            known = facts[f"{package}.{name}"] = ["there", *parameters(value)]
            known += attributes(value) if isinstance(value, type) else []
            returned = getattr(value, "__annotations__", {}).get("return")
            if isinstance(returned, type) and returned.__module__.startswith("rloo_kit"):
                known += [f"returns {one}" for one in attributes(returned)]
    printed = call("train", write_config(folder), "rewards.0.name=none")[2]
    facts["rewards by name"] = re.findall(r"\w+", printed.partition("Known:")[2].partition(";")[0])
    return facts


def help(folder: Path) -> Facts:
    """Every command with its arguments and options; the printed page has 80 columns and names each of them."""
    import typer

    from rloo_kit.cli import app

    facts: Facts = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        code, page, _ = call(name, "--help")
        facts[name] = [f"exit code {code}", f"at most 80 columns: {max(map(len, page.splitlines())) <= 80}"]
        facts[name].append(command.help.strip())
        for one in command.params:
            words = [*one.opts, *one.secondary_opts] if one.param_type_name == "option" else [one.metavar or one.name]
            shown = all(word.strip("[].") in page for word in words)
            flag = " flag" if getattr(one, "is_flag", False) else " several" if one.multiple or one.nargs != 1 else ""
            required = " required" if one.required else ""
            facts[name].append(f"{' '.join(words)}{flag}{required} | {one.help} | on the page: {shown}")
    facts["rloo-kit"] = lines(call("--help")[1])
    return facts


def config(folder: Path) -> Facts:
    """What `rloo-kit config` prints for every config that ships, and for the shortest one."""
    facts: Facts = {}
    for path in [*sorted((ROOT / "configs").glob("*.yaml")), write_config(folder)]:
        code, printed, errors = call("config", path)
        warned = re.findall(r"warning: (\w+)", errors)
        facts[path.name] = [f"exit code {code}", *(f"warns of {one}" for one in warned)]
        facts[path.name] += sorted(flat(yaml.safe_load(printed))) if printed else named(errors)
    return facts


def write_config(folder: Path) -> Path:
    file = folder / "FILE.yaml"
    file.write_text(
        "model: {name: embedded/thinking, max_seq_length: 256}\nrewards: [{name: answer_reward}]\n"
        "data: {source: embedded/addition, max_prompt_length: 64}\nrloo: {max_steps: 3, max_completion_length: 64}\n"
    )
    return file


def errors(folder: Path) -> Facts:
    """Exit codes of wrong calls and the keys that their messages name; the first one is frozen."""
    from tests.checks.faulty import FAULTS, prepare

    file = write_config(folder)
    bomb = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'x'}]\n" for n in range(9))
    for name, text in (INPUTS["bad_files"] | {"bomb.yaml": bomb}).items():
        (folder / name).write_text(text)
    (folder / "binary.yaml").write_bytes(bytes(range(256))[::-1])
    (folder / "configs").symlink_to(ROOT / "configs")
    facts: Facts = {}
    for words in INPUTS["bad_overrides"]:
        facts[f"config FILE {words}"] = outcome("config", file, *re.split(r" (?=\w+(?:\.\w+)*=)", words))
    for words in INPUTS["bad_calls"]:
        facts[words] = outcome(*words.replace("FOLDER", str(folder)).replace("FILE", str(file)).split())
    for number, fault in enumerate(FAULTS):
        place = folder / str(number)
        place.mkdir()
        prepare(place, fault)
        with contextlib.chdir(place):
            command = "train" if fault.level == "error" else "config"
            facts[f"{fault.name}: {command}"] = outcome(command, "run.yaml", *fault.overrides)
    return facts


def old_names(folder: Path) -> Facts:
    """What becomes of an old name as a keyword of RLOOConfig, as a key of a file, and as an argument of RLOOTrainer."""
    from rloo_kit import RLOOConfig, RLOOTrainer, load_config, load_policy

    plain = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none"}
    file = write_config(folder)

    def try_out(make: Callable[[], Any], look: Callable[[Any], dict[str, Any]], without: dict[str, Any]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                after = look(make())
            except Exception as error:
                words = re.findall(r"\w+", str(error).partition("known here")[0])
                today = {*usual, "reward_funcs", "processing_class", "eos_token"} & {*words}
                return [f"refused with {type(error).__name__}", *(f"mentions {one}" for one in sorted(today))]
        said = [one for one in caught if issubclass(one.category, FutureWarning)]
        changed = [f"becomes {key}: {value}" for key, value in after.items() if without.get(key, "unset") != value]
        return [f"{len(said)} warnings", *sorted(one for one in changed if "logging_dir" not in one)]

    def of_config(made: Any) -> dict[str, Any]:
        return {name: repr(value) for name, value in vars(made).items()}

    def of_file(made: Any) -> dict[str, Any]:
        return dict(line.split(": ", 1) for line in flat(made.model_dump(mode="json")))

    usual, usual_file = of_config(RLOOConfig(**plain)), of_file(load_config(file))
    facts: Facts = {}
    for name, value in INPUTS["old_names"].items():
        text = f"rloo.{name}={json.dumps(value)}"
        given = plain | {name: value}
        facts[f"RLOOConfig({name}=)"] = try_out(lambda given=given: RLOOConfig(**given), of_config, usual)
        facts[f"file: {text}"] = try_out(lambda text=text: load_config(file, text), of_file, usual_file)

    from datasets import Dataset

    policy = load_policy(load_config(file))
    small = RLOOConfig(**plain, num_generations=2, per_device_train_batch_size=2, max_steps=1)
    rows = Dataset.from_dict({"prompt": ["1+1="] * 4})
    today = {"model": policy.model, "args": small, "processing_class": policy.tokenizer}
    today |= {"reward_funcs": lambda completions, **_: [0.0] * len(completions), "train_dataset": rows}
    old = {"config": "args", "policy": "model", "tokenizer": "processing_class", "reward_model": "reward_funcs"}
    for name, new in (old | {"ref_policy": "model", "data_collator": "train_dataset"}).items():
        given = today | {name: today[new]}
        if name in old:
            given.pop(new)
        facts[f"RLOOTrainer({name}=)"] = try_out(lambda given=given: RLOOTrainer(**given), lambda made: {"": ""}, {})
    facts["RLOOTrainer(args, ...)"] = try_out(lambda: RLOOTrainer(small, policy.model), lambda made: {"": ""}, {})
    return facts


def data(folder: Path) -> Facts:
    """Digests of `load_data` for every config that ships; sources of the hub are replaced by rows made here."""
    from rloo_kit import load_config, load_data, load_policy

    rows = [{"question": f"What is {n} plus {n % 13}?", "answer": f"It is\n#### {n + n % 13}"} for n in range(600)]
    policies: dict[str, Any] = {}
    facts: Facts = {}
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        if path.stem.startswith("batch"):
            continue
        run = load_config(path, "model.family=auto", "model.enable_thinking=null")  # the families are the tokenizers'
        kind = "untaught" if "untaught" in run.model.name else "instruct" if "nstruct" in run.model.name else "thinking"
        name = run.model.name if run.model.name.startswith("smollm2/") else f"embedded/{kind}"
        if name not in policies:
            policies[name] = load_policy(load_config(write_config(folder), f"model.name={name}"))
        policy = policies[name]
        made = load_data(run, policy.tokenizer, rows if run.data.source == "openai/gsm8k" else None)
        facts[path.name] = [
            f"{len(made.train)} + {len(made.test)} rows, {made.dropped} dropped",
            *map(mask, made.notes),
        ]
        for side in ("train", "test"):
            table = getattr(made, side)
            ids = json.dumps(policy.tokenizer(list(table["prompt"]))["input_ids"]).encode()
            texts = json.dumps([{name: row[name] for name in sorted(row)} for row in table], default=str).encode()
            facts[path.name].append(f"{side}: columns {sorted(table.column_names)}")
            facts[path.name].append(f"{side}: ids {digest(ids)}, rows {digest(texts)}")
    return facts


def trained(folder: Path) -> list[str]:
    """Digest of an adapter, and every metric of every step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    facts = [f"adapter {digest(weights)}"]
    for row in rows:
        facts += [f"step {row.get('step')}: {name}: {value}" for name, value in row.items() if name != "run"]
    return facts


def page(file: str, *words: str) -> list[str]:
    """What a reader finds in `file` after `rloo-kit report words`."""
    code = call("report", *words)[0]
    return [f"exit code {code}", *Visible(Path(file).read_text(encoding="utf-8")).facts]


def read_run(run: str) -> Facts:
    """What `show` and `report` say of a run."""
    facts = {f"show {run}": lines(call("show", run)[1])}
    facts[f"show {run} --completions"] = lines(call("show", run, "--completions", "2")[1])
    facts[f"show {run} --json"] = list(keys(json.loads(call("show", run, "--json")[1])))
    Path(run, "report.html").unlink(missing_ok=True)
    return facts | {f"report {run}": page(f"{run}/report.html", run)}


def demo(folder: Path) -> Facts:
    """The demo in three steps and a run with more options: metrics, adapters, report, show, what compares both."""
    facts: Facts = {}
    (folder / "configs").symlink_to(ROOT / "configs")
    for name, words in (("arithmetic_thinking", DEMO), ("other", [*DEMO, *INPUTS["other_run"]])):
        code, printed, _ = call("train", *words)
        facts[f"train {name}"] = [f"exit code {code}", *trained(Path("runs", name))]
        facts[f"printed by train {name}"] = lines(printed)
        files = [path for path in Path("runs", name).rglob("*") if path.is_file()]
        facts[f"files of {name}"] = sorted(str(path.relative_to("runs")) for path in files)
        facts |= read_run(f"runs/{name}")
    both = ["runs/arithmetic_thinking", "runs/other"]
    facts["show of both"] = lines(call("show", *both)[1])
    facts["show of both --json"] = list(keys(json.loads(call("show", *both, "--json")[1])))
    facts["report of both"] = page("both.html", *both, "--output", "both.html")
    evaluation = ["eval", *DEMO, "--adapter", both[0]]
    export = ["export", both[0], "--to", "merged", "--prompts", "2"]
    for words in (evaluation, export, ["plan", *DEMO], ["doctor"], ["preflight", *DEMO]):
        printed = call(*words, "--json")[1]
        found = json.loads(printed if printed.startswith("{\n") else printed.splitlines()[-1])
        facts[f"{words[0]} --json"] = list(keys(found))
    ask = [sys.executable, "-m", "rloo_kit.cli", "ask", both[0], "12+34=", "--base", "--json"]
    answer = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    facts["ask --json"] = list(keys(json.loads(answer)))
    return facts


def whole_demo(folder: Path) -> Facts:
    (folder / "configs").symlink_to(ROOT / "configs")
    code = call("train", DEMO[0], "run.output_dir=runs")[0]
    return {"train": [f"exit code {code}", *trained(folder / "runs" / "arithmetic_thinking")]}


def faults(folder: Path) -> Facts:
    """What ends or damages a run of two steps, as far as seconds suffice; the rows of the whole table in docs."""
    (folder / "own.py").write_text(INPUTS["own"])
    small = ["train", str(write_config(folder)), *INPUTS["small_run"]]
    call(*small, "run.name=intact")
    run, weights = Path("runs/damaged"), Path("adapter/adapter_model.safetensors")

    def cut(name: str) -> Callable[[], object]:
        return lambda: (run / name).write_bytes((run / name).read_bytes()[:-9])

    damages: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "status.json emptied": lambda: (run / "status.json").write_bytes(b""),
        "the newest checkpoint cut": cut("checkpoints/checkpoint-2/optimizer.pt"),
        "no checkpoint": lambda: shutil.rmtree(run / "checkpoints"),
        "no adapter": lambda: shutil.rmtree(run / "adapter"),
        "config.yaml removed": (run / "config.yaml").unlink,
        "metrics.jsonl cut": cut("metrics.jsonl"),
        "metrics.jsonl of zeros": lambda: (run / "metrics.jsonl").write_bytes(bytes(99)),
        "rollouts cut": cut("rollouts/00000001.jsonl.gz"),
        "versions.json a list": lambda: (run / "versions.json").write_text("[1]"),
    }
    again = [*small, "run.name=damaged"]
    commands = {"show": ["show", str(run)], "report": ["report", str(run)], "train": again}
    facts: Facts = {}
    for fault, damage in damages.items():
        for command, words in (commands | {"train --resume": [*again, "--resume"]}).items():
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree("runs/intact", run)
            text = (run / "config.yaml").read_text()
            (run / "config.yaml").write_text(text.replace("name: intact", "name: damaged"))
            damage()
            facts[f"{fault}: {command}"] = outcome(*words)
            same = (run / weights).is_file() and (run / weights).read_bytes() == ("runs/intact" / weights).read_bytes()
            facts[f"{fault}: {command}"].append(f"adapter as without a fault: {same}")
    for words in INPUTS["resumed_with"]:
        facts[f"resumed with {words}"] = outcome(*again, "--resume", words)
    for words in INPUTS["endings"]:
        facts[words] = outcome(*small, "run.name=ended", "--overwrite", *words.split())
        facts[words].append(f"show: exit code {call('show', 'runs/ended')[0]}")
    kill = [*small, "run.name=killed", "rewards.0.name=own:terminated"]
    code = subprocess.run([sys.executable, "-m", "rloo_kit.cli", *kill], capture_output=True, check=False).returncode
    status = json.loads(Path("runs/killed/status.json").read_text())
    facts["SIGTERM"] = [f"exit code {code}", f"{status['state']}, step {status['step']}"]
    facts["SIGTERM, then --resume"] = outcome(*kill, "--resume")
    table = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8").partition("<!-- table: faults -->")[2]
    rows = table.partition("<!-- end -->")[0].strip().splitlines()[2:]
    facts["table"] = [" | ".join(row.split(" | ")[:2]) for row in rows]
    return facts


def old_runs(folder: Path) -> Facts:
    """Run folders that an older commit made: a finished one and one that was interrupted after its first step."""
    if not (CACHE / "done").exists():
        make_old_runs()
    shutil.copytree(CACHE / "runs", folder, dirs_exist_ok=True)
    both = ["runs/finished", "runs/interrupted"]
    facts = read_run(both[0]) | {"show runs/interrupted": lines(call("show", both[1])[1])}
    facts["report of both"] = page("both.html", *both, "--output", "both.html")
    facts["resume"] = [*outcome(*old_words("interrupted"), "--resume"), *trained(Path(both[1]))]
    facts["resume of the finished one"] = outcome(*old_words("finished"), "--resume")
    return facts


def old_words(name: str) -> list[str]:
    few = ["run.output_dir=runs", f"run.name={name}", "data.test_size=32", "rloo.max_steps=3", "rloo.save_steps=1"]
    return ["train", "old.yaml", *few, *(["rewards.0.name=own:interrupted"] if name == "interrupted" else [])]


def make_old_runs() -> None:
    """Fill `CACHE` with the runs of `OLD_COMMIT`; half a minute, once."""
    shutil.rmtree(CACHE, ignore_errors=True)
    (CACHE / "tree").mkdir(parents=True)
    (CACHE / "runs").mkdir()
    archive = subprocess.run(["git", "archive", OLD_COMMIT], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=CACHE / "tree", input=archive, check=True)
    shutil.copy(ROOT / DEMO[0], CACHE / "runs" / "old.yaml")
    (CACHE / "runs" / "own.py").write_text(INPUTS["own"])
    for name, code in (("finished", 0), ("interrupted", 130)):
        words = [sys.executable, "-m", "rloo_kit.cli", *old_words(name)]
        environment = os.environ | {"PYTHONPATH": str(CACHE / "tree")}
        done = subprocess.run(words, cwd=CACHE / "runs", env=environment, capture_output=True, text=True, check=False)
        if done.returncode != code:
            raise SystemExit(f"{OLD_COMMIT} made no {name} run:\n{done.stdout}\n{done.stderr}")
    (CACHE / "done").touch()


# -- freeze and compare --

PARTS = {one.__name__: one for one in (demo, faults, old_runs, old_names, data, errors, names, config, help)}


def run_part(name: str) -> Facts:
    """One part in a process of its own, in a folder of its own; paths and times are masked."""
    with tempfile.TemporaryDirectory(prefix="baseline-") as place:
        folder, file = Path(place).resolve() / "work", Path(place) / "facts.json"
        folder.mkdir()
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "80", "NO_COLOR": "1", "PYTHONHASHSEED": "0",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        words = [sys.executable, __file__, "part", name, str(file)]
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"the part itself": [f"failed: {done.stderr[-2000:]}"]}
        found = json.loads(file.read_text())
        return {normalise(key, folder): [normalise(fact, folder) for fact in facts] for key, facts in found.items()}


def freeze(chosen: list[str]) -> int:
    FROZEN.mkdir(exist_ok=True)

    def write(name: str) -> str:
        first = run_part(name)
        second = run_part(name) if name in ("demo", "faults", "old_runs") else first  # those that measure times
        frozen: Facts = {}
        for key in first:
            both = {*second.get(key, []), *map(mask, second.get(key, []))}
            kept = [fact if fact in both else mask(fact) for fact in first[key]]
            kept = list(dict.fromkeys(fact for fact in kept if fact in both))
            further = [fact for fact in kept if fact.startswith("names ")][1:]  # the first key is the one that counts
            frozen[key] = [fact for fact in kept if fact not in [*further, "names no key"]]
        text = json.dumps(frozen, indent=1, ensure_ascii=False) + "\n"
        (FROZEN / f"{name}.json").write_text(text, encoding="utf-8")
        return f"{name}: {sum(map(len, frozen.values()))} facts"

    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(write, chosen):
            print(line, flush=True)
    return 0


def compare(chosen: list[str]) -> int:
    given_up = json.loads((FROZEN / "given_up.json").read_text(encoding="utf-8"))
    excuses = [re.compile(re.escape(one).replace(r"\*", ".*") + ": ") for one in given_up]  # * is any text
    lost = 0

    def look(name: str) -> tuple[str, list[str], list[str], float]:
        started = time.perf_counter()
        frozen, found = json.loads((FROZEN / f"{name}.json").read_text(encoding="utf-8")), run_part(name)
        missing, added = [], [f"{name}/{key}" for key in found if key not in frozen]
        for key, facts in frozen.items():
            now = found.get(key, [])
            known = {*now, *map(mask, now)}
            missing += [f"{name}/{key}: {fact}" for fact in facts if fact not in known]
            before = {*facts, *map(mask, facts)}
            new = [fact for fact in now if not {fact, mask(fact)} & before and not fact.startswith("names ")]
            added += [f"{name}/{key}: {fact}" for fact in new]
        return name, missing, added, time.perf_counter() - started

    with ThreadPoolExecutor(2) as pool:
        for name, missing, added, seconds in pool.map(look, chosen):
            excused = [fact for fact in missing if any(excuse.match(f"{fact}: ") for excuse in excuses)]
            missing = [fact for fact in missing if fact not in excused]
            lost += len(missing)
            state = f"{len(missing)} MISSING" if missing else "equal"
            print(f"{name}: {state}, {len(excused)} given up, {len(added)} added ({seconds:.0f} s)", flush=True)
            for sign, facts in (("-", missing), ("+", added)):
                print("".join(f"  {sign} {fact[:300]}\n" for fact in facts[:25]), end="")
                print(f"  {sign} and {len(facts) - 25} more\n" if len(facts) > 25 else "", end="", flush=True)
    return int(lost > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Freeze what users rely on, or compare the tree with it.")
    parser.add_argument("command", choices=["freeze", "compare", "part"])
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--whole", action="store_true", help="the whole demo too (minutes)")
    given = parser.parse_args()
    if given.whole:
        given.only.append("whole_demo")
    if given.command == "part":
        name, file = given.arguments
        Path(file).write_text(json.dumps((PARTS | {"whole_demo": whole_demo})[name](Path.cwd())), encoding="utf-8")
        return 0
    return freeze(given.only) if given.command == "freeze" else compare(given.only)


if __name__ == "__main__":
    sys.exit(main())
