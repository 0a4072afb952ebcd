"""The `rloo-kit` command line: each command parses its arguments, calls the kit's public functions and prints.

Heavy libraries are imported inside the commands. Exit codes: 0 done; 1 doctor found a fault, the planned run does not
fit, the preflight says NO-GO, or the run that `show` describes failed or is alarming; 2 refused; 130 interrupted.
`batch` has its own.
"""

import errno
import os
import shlex
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Exit, Option
from typer.core import TyperCommand

from rloo_kit import __version__
from rloo_kit.collective import end_processes
from rloo_kit.errors import ConfigError, RlooKitError, shorten
from rloo_kit.runs.files import is_disk_full
from rloo_kit.system.console import fill_text, print_table, print_text
from rloo_kit.system.processes import (
    INTERRUPTED,
    REFUSED,
    count_processes,
    is_distributed,
    is_main_process,
    process_index,
    say,
)

if TYPE_CHECKING:  # slow to import
    from rloo_kit.config.run import RunConfig
    from rloo_kit.data.load import Data
    from rloo_kit.models.policy import Policy

SECONDS_FOR_MAIN = 10.0
BATCH_REFUSED, MOST_COUNTED = 125, 100  # `batch` uses the small exit codes to count runs
OF_THE_DISK = (  # errors of a file or its disk, not of the program
    errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG,
    errno.EIO,
)  # fmt: skip

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="RLOO for Qwen3-Thinking models on one GPU, with a built-in small model that trains on a laptop.",
)
ConfigFile = Annotated[Path, Argument(metavar="FILE", help="A run's config, for example configs/x.yaml.")]
Overrides = Annotated[
    list[str] | None, Argument(metavar="[KEY=VALUE]...", help="Overrides, for example rloo.beta=0.0.")
]
Overwrite = Annotated[bool, Option("--overwrite", help="Delete existing output and start over.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
JsonLine = Annotated[bool, Option("--json", help="Print JSON at the end, on one line.")]


class Command(TyperCommand):
    """A command that ends with the kit's messages and exit codes; `refused` is that of a refusal."""

    refused = REFUSED

    def invoke(self, ctx: Any) -> Any:
        with exit_codes(self.refused):
            return super().invoke(ctx)


command = partial(app.command, cls=Command)


@contextmanager
def exit_codes(refused: int = REFUSED) -> Iterator[None]:
    """Messages instead of tracebacks for the kit's own errors and Ctrl-C; `batch` also has an exit code for bugs."""
    try:
        yield
    except Exit:
        raise
    except RlooKitError as error:
        name = "rloo-kit"
        if not is_main_process():  # if the main one exits with the same error, the launcher ends this one: printed once
            time.sleep(SECONDS_FOR_MAIN)
            name = f"rloo-kit (process {process_index()} of {count_processes()})"
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        raise Exit(refused) from None
    except KeyboardInterrupt:
        if is_main_process():
            print("rloo-kit: interrupted", file=sys.stderr, flush=True)
        raise Exit(INTERRUPTED) from None
    except Exception as error:
        if is_disk_full(error):
            what = f"the disk is full, or a quota is used up ({type(error).__name__}: {shorten(str(error))})"
            shown = f"rloo-kit: {what}: free some space, then repeat the command"
        elif isinstance(error, OSError) and error.filename is not None and error.errno in OF_THE_DISK:
            shown = f"rloo-kit: {error.filename if error.filename2 is None else error.filename2}: {error.strerror}"
        elif refused == REFUSED:
            raise
        else:
            shown = traceback.format_exc()
        print(shown, file=sys.stderr, flush=True)
        raise Exit(refused) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rloo-kit {__version__}")
        raise Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def print_found(found: Any, json: bool) -> None:
    if json:
        print(dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        print_table(found)


def read_config(file: Path, overrides: list[str] | None, read: "Callable[..., RunConfig] | None" = None) -> "RunConfig":
    """What `read` (`load_config`) makes of them; its warnings are lines on stderr, once in a command."""
    from rloo_kit.config.run import load_config

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FutureWarning)
        try:
            run = (read or load_config)(file, *(overrides or []))
        finally:
            for warning in caught if is_main_process() else []:
                print(f"rloo-kit: {warning.message}", file=sys.stderr)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"rloo_kit\.")
    return run


def say_activation() -> None:
    """Print how to activate the environment if the shell does not find `rloo-kit`."""
    script = Path(sys.prefix, "bin", "activate")
    if shutil.which("rloo-kit") is None and script.is_file():
        nearby = os.path.relpath(script)
        say(f"  (first, once per shell: source {shlex.quote(nearby if nearby[:2] != '..' else str(script))})")


def prepare(run: "RunConfig", prepared: "Data | None") -> "tuple[Policy, Data]":
    """Set up, load policy and data, and print a line for each; `prepared`: what `check` returned."""
    import rloo_kit as kit

    say(kit.setup_environment(run.model.backend).describe())
    started = time.monotonic()
    policy = kit.load_policy(run)
    say(fill_text(f"policy: {policy.describe()}, loaded in {time.monotonic() - started:.0f} s"))
    data = kit.load_data(run, policy.tokenizer, prepared=prepared)
    say(f"data: {data}")
    return policy, data


@command()
def doctor(json: Json = False) -> None:
    """Check this machine: GPU, libraries, cache, environment variables."""
    from rloo_kit.system.doctor import check_installation

    found = check_installation()
    print_found(found, json)
    raise Exit(found.exit_code)


@command()
def init(
    model: Annotated[str | None, Option(help="Hub id, local folder or embedded/thinking.")] = None,
    data: Annotated[str | None, Option(metavar="FILE", help="A .csv, .jsonl or .parquet file.")] = None,
    prompt_column: Annotated[str | None, Option(help="Column with the prompts.")] = None,
    answer_column: Annotated[str | None, Option(help="Column with the answers.")] = None,
    output: Annotated[Path | None, Option(metavar="FILE", help="Config or folder; default: ./DATA.yaml.")] = None,
    gpu_gib: Annotated[float | None, Option(help="Fit a GPU with this many GiB instead of this machine.")] = None,
    yes: Annotated[bool, Option("--yes", help="Accept the proposed value of every missing flag.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Write a config for your own data that fits this machine, and a reward with its test."""
    from rloo_kit.checks import starter

    source = _ask("--data", data, None, yes, starter.open_data)
    found = starter.find_columns(source, columns := starter.open_data(source), prompt_column, answer_column)
    choices = starter.list_choices(columns, found)
    if not yes and _can_ask():
        print(choices)
    elif any(len(names) != 1 for names in found.values()):
        raise ConfigError(f"{source}: which columns have the prompts and the answers? Pass one of each:\n{choices}")
    sure = [names[0] if len(names) == 1 else None for names in found.values()]
    check = partial(starter.find_columns, source, columns)
    prompts = _ask("--prompt-column", prompt_column, sure[0], yes, partial(check, answer=answer_column))
    answers = _ask("--answer-column", answer_column, sure[1], yes, partial(check, prompts))
    table = starter.read_table(source, prompts, answers)
    chosen = _ask("--model", model, starter.suggest_model(table, gpu_gib) if model is None else None, yes)
    print(starter.write_starter(chosen, table, output, gpu_gib, overwrite))
    say_activation()


def _ask(flag: str, given: str | None, proposed: str | None, take_it: bool, check: Callable[[str], Any] = str) -> str:
    """The value of a flag; of a missing one the proposed value with --yes, else what is typed and passes `check`."""
    if given is not None:
        return given
    if take_it and proposed is not None:
        return proposed
    if take_it or not _can_ask():
        there = f" (for example {flag} {proposed}), or accept the proposed values with --yes" if proposed else ""
        raise ConfigError(f"{flag} is missing, and there is no terminal to ask at: pass it{there}")
    while True:
        typed = str(typer.prompt(flag.removeprefix("--").replace("-", " "), default=proposed))
        try:
            check(typed)
            return typed
        except RlooKitError as error:
            print(error)


def _can_ask() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


@command()
def config(file: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved config with every key, and warnings for what would stop the run on this machine."""
    run = read_config(file, overrides)
    print(run.to_yaml(), end="", flush=True)
    from rloo_kit.checks.faults import find_faults

    for fault in find_faults(run, prompts=False):
        print(f"rloo-kit: warning: {fault}", file=sys.stderr)


@command()
def plan(
    file: ConfigFile,
    overrides: Overrides = None,
    gpu_gib: Annotated[float | None, Option("--gpu-gib", "--card-gib", help="GiB of another machine's GPU.")] = None,
    json: Json = False,
) -> None:
    """Compute a run's memory from its config alone. Exit code 1 if it does not fit, with what to change."""
    from rloo_kit.plan.planner import plan_vram

    planned = plan_vram(read_config(file, overrides), gpu_gib)
    print(dumps(planned.to_dict(), indent=2) if json else planned)
    raise Exit(0 if planned.fits else 1)


@command()
def preflight(
    file: ConfigFile,
    overrides: Overrides = None,
    json: Annotated[bool, Option("--json", help="Print JSON; everything else goes to stderr.")] = False,
) -> None:
    """Check whether a run can learn, in about a rollout's time: GO, or NO-GO with every problem and exit code 1."""
    run = read_config(file, overrides)
    with redirect_stdout(sys.stderr) if json else nullcontext():
        import rloo_kit as kit
        from rloo_kit.checks.preflight_result import Preflight
        from rloo_kit.system.problems import PreflightError

        try:
            prepared = kit.check(run)
        except PreflightError as error:
            found = Preflight(run.run.name or "", error.faults)
        else:
            policy, data = prepare(run, prepared)
            found = kit.check_preflight(run, policy, data, kit.build_rewards(run, policy.tokenizer))
    print(dumps(found.to_dict(), indent=2) if json else found)
    raise Exit(0 if found.go else 1)


@command()
def sft(file: ConfigFile, overrides: Overrides = None, overwrite: Overwrite = False) -> None:
    """Train on demonstrations before RLOO, for a model that solves nothing yet."""
    from rloo_kit.checks.faults import FolderUse, check
    from rloo_kit.runs.folder import check_folder, open_folder

    run, words = read_config(file, overrides), overrides or []
    check_folder(run, overwrite)
    policy, data = prepare(run, check(run, FolderUse(overwrite=True), worked=True))
    from rloo_kit.training.sft import check_demonstrations, next_command, train_and_report

    worked = check_demonstrations(run, policy, data)
    with open_folder(run, overwrite) as run_dir:
        run_dir.resume_command = shlex.join(["rloo-kit", "sft", str(file), *words, "--overwrite"])
        result = train_and_report(run, policy, data, worked, run_dir)
    say(f"next: {next_command(run, words, result)}")
    say_activation()
    if result.stopped:
        raise Exit(INTERRUPTED)


@command("reward-model")
def reward_model(file: ConfigFile, overrides: Overrides = None, overwrite: Overwrite = False) -> None:
    """Train a reward model on preferences, measure it on held-out pairs, and print the entry that uses it."""
    run = read_config(file, overrides)
    import rloo_kit as kit

    say(kit.setup_environment("transformers").describe())
    result = kit.train_reward_model(run, overwrite=overwrite)
    say(result)
    if result.stopped:
        raise Exit(INTERRUPTED)


@command()
def train(
    file: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[bool, Option("--resume", help="Continue from the newest intact checkpoint.")] = False,
    overwrite: Overwrite = False,
    accept_changes: Annotated[
        bool, Option("--accept-changes", help="With --resume: go on although rows, rewards or weights have changed.")
    ] = False,
) -> None:
    """Evaluate, train, evaluate again and write the report."""
    from rloo_kit.checks.faults import FolderUse, check
    from rloo_kit.results.verdict import is_over, judge_run, load_evaluation, load_result
    from rloo_kit.runs.folder import RunDir

    run = read_config(file, overrides)
    if resume and not accept_changes and is_over(run):
        result = load_result(run)
        say(f"the run in {run.folder} is finished already (step {result.steps}); nothing was changed")
        say(judge_run(run, result, load_evaluation(run, "before"), load_evaluation(run, "after")))
        say_activation()
        return
    prepared = check(run, FolderUse(resume, overwrite))
    with RunDir.create(run, resume=resume, overwrite=overwrite) as run_dir:
        words = ["rloo-kit", "train", str(file), *(overrides or [])]
        launcher = f" (by the same launcher, in {count_processes()} processes)" if is_distributed() else ""
        run_dir.resume_command = shlex.join([*words, "--resume"]) + launcher
        run_dir.accepts_changes = accept_changes
        run_dir.set_status("running", command=shlex.join(words))
        try:
            policy, data = prepare(run, prepared)
            from rloo_kit.rewarding.registry import build_rewards
            from rloo_kit.training.rloo import run_and_report

            stopped = run_and_report(run, policy, data, build_rewards(run, policy.tokenizer), run_dir)
            say_activation()
        except KeyboardInterrupt:  # outside training, which handles its own
            say(f"interrupted; to go on: {run_dir.resume_command}")
            raise
    end_processes()
    if stopped:
        raise Exit(INTERRUPTED)


class BatchCommand(Command):
    """`batch` with its own exit code for refusals and unknown options: 2 means two runs that are not done."""

    refused = BATCH_REFUSED

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's UsageError, or typer's own copy of it
            if getattr(error, "exit_code", None) == REFUSED:
                vars(error)["exit_code"] = BATCH_REFUSED
            raise


@app.command(cls=BatchCommand)
def batch(
    file: Annotated[Path, Argument(metavar="FILE", help="A batch's file, such as configs/batch_arithmetic.yaml.")],
    overrides: Annotated[
        list[str] | None, Argument(metavar="[KEY=VALUE]...", help="Overrides, for example parameters.max_steps=20.")
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Run only what is missing or failed.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Run a notebook with many parameters, each run in a kernel of its own, and compare the runs.

    Exit codes: 0 if every run is done, else the number of runs that are not
    (100: 100 or more); 125 refused, or an error of the batch itself;
    130 interrupted (Ctrl-C, SIGTERM, SIGHUP).
    """
    from rloo_kit.batch.batch_file import load_batch
    from rloo_kit.batch.runner import run_batch

    words = overrides or []
    again = shlex.join(["rloo-kit", "batch", str(file), *words, "--resume"])
    not_done, interrupted = run_batch(load_batch(file, *words), resume=resume, overwrite=overwrite, command=again)
    raise Exit(INTERRUPTED if interrupted else min(not_done, MOST_COUNTED))


@command("eval")
def evaluate(
    file: ConfigFile,
    overrides: Overrides = None,
    adapter: Annotated[Path | None, Option(help="Folder of a trained adapter or of its run.")] = None,
    json: JsonLine = False,
) -> None:
    """Evaluate a run's initial model, or a trained adapter, on its held-out prompts."""
    from rloo_kit.checks.faults import check
    from rloo_kit.config.yaml_files import write_value
    from rloo_kit.runs.find import weights_of

    overrides = list(overrides or [])
    if adapter is not None:
        key, folder = weights_of(adapter, "--adapter")
        overrides.append(f"model.{key}={write_value(str(folder))}")
    run = read_config(file, overrides)
    policy, data = prepare(run, check(run))
    from rloo_kit.evals.evaluate import evaluate as measure

    found = measure(run, policy, data.test, label=f"of {adapter or run.model.name}")
    say(found)
    if json:
        say(dumps(found.to_dict() | {"more_samples": []}))
    end_processes()


@command()
def report(
    sources: Annotated[list[str], Argument(metavar="RUN...", help="Runs' folders or configs; then KEY=VALUE.")],
    output: Annotated[Path | None, Option(metavar="FILE", help="Of several runs; default: comparison.html.")] = None,
) -> None:
    """Rebuild report.html from a run's folder, or write a page that compares several runs."""
    runs = [Path(word) for word in sources if "=" not in word or Path(word).exists()]
    overrides = [word for word in sources if Path(word) not in runs]
    if len(runs) > 1:
        if overrides:
            raise ConfigError(f"{overrides[0]}: a comparison of several runs takes no overrides")
        from rloo_kit.results.versus import compare_runs, write_comparison_page

        found = compare_runs(runs)
        page = output or found.runs[0].result.folder.parent / "comparison.html"
        print(fill_text(found.sentence))
        print(f"comparison: {write_comparison_page(found, page)}")
        return
    if not runs or output is not None:
        raise ConfigError("--output needs several runs" if runs else "name a run: its folder or its config")
    from rloo_kit.runs.find import find_run

    run = read_config(runs[0], overrides, find_run)
    from rloo_kit.results.report import write_report
    from rloo_kit.results.verdict import load_evaluation, load_result

    evaluations = (load_evaluation(run, when) for when in ("before", "after"))
    print(f"report: {write_report(run, load_result(run), *evaluations)}")


@command()
def show(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders of runs, or their configs.")],
    completions: Annotated[int | None, Option(min=0, help="Show N completions of one step.")] = None,
    step: Annotated[int | None, Option(help="Step of the completions; default: the last.")] = None,
    order: Annotated[str, Option(help="Which completions: first, best, worst or longest.")] = "first",
    max_chars: Annotated[int, Option(min=10, help="Maximum characters per text.")] = 1500,
    json: Json = False,
) -> None:
    """Show a run's outcome, its completions, or several runs. Exit code 1 if the run failed or is alarming."""
    found: Any
    code = 0
    if completions is not None or step is not None:
        if len(runs) > 1:
            raise ConfigError(f"--completions and --step take one run; got {len(runs)}")
        from rloo_kit.results.samples import pick_completions

        found = pick_completions(runs[0], step, 4 if completions is None else completions, order, max_chars)
    elif len(runs) > 1:
        from rloo_kit.results.versus import compare_runs

        found = compare_runs(runs)
    else:
        from rloo_kit.results.overview import describe_run

        found = describe_run(runs[0])
        code = int(found.status.get("state") == "failed" or found.level == "alarming")
    print_found(found, json)
    raise Exit(code)


@command()
def ask(
    source: Annotated[Path, Argument(metavar="RUN", help="A run's folder or config, or a folder of exported weights.")],
    questions: Annotated[
        list[str] | None, Argument(metavar="[QUESTION]...", help="Questions. Without any: a pipe, or a prompt.")
    ] = None,
    base: Annotated[bool, Option("--base", help="Ask the base model first, for comparison.")] = False,
    budget: Annotated[int | None, Option(min=0, help="Close thinking after N tokens.")] = None,
    temperature: Annotated[float | None, Option(min=0, help="0 is greedy; default: eval.temperature.")] = None,
    max_tokens: Annotated[int | None, Option(min=1, help="Maximum tokens per completion; default: the run's.")] = None,
    seed: Annotated[int, Option(min=0, help="Sampling seed.")] = 0,
    system: Annotated[str | None, Option(help="System prompt; default: data.system_prompt.")] = None,
    image: Annotated[
        list[str] | None, Option("--image", metavar="FILE", help="Image of each question; repeatable.")
    ] = None,
    overrides: Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override; repeatable.")] = None,
    json: Annotated[bool, Option("--json", help="Print only one JSON object per question.")] = False,
) -> None:
    """Ask a trained model. Without a question, read one after the other."""
    asked = list(questions or [])
    if not asked and not _can_ask():
        asked = ["" if sys.stdin is None else sys.stdin.read().strip()]
        if not asked[0]:
            raise ConfigError('there is no question: rloo-kit ask RUN "58+67=", or pipe one in')
    if json and not asked:
        raise ConfigError('--json needs a question: rloo-kit ask RUN "58+67=" --json')
    out = sys.stdout
    with redirect_stdout(sys.stderr) if json else nullcontext():
        import rloo_kit as kit
        from rloo_kit.runs.find import origin_of

        words = overrides or []
        kit.setup_environment(read_config(source, words, origin_of).model.backend)
        from rloo_kit.evals.ask import ask_in_turn
        from rloo_kit.models.policy import load_base

        run, policy = kit.load_trained(source, *words)
        options: dict[str, Any] = {"budget": budget, "temperature": temperature, "max_tokens": max_tokens}
        options |= {"base": base and (load_base(source, *words) or True), "seed": seed, "system": system}
        options["images"] = image or []
        if not asked:
            ask_in_turn(run, policy, options)
        for question in asked:
            answer = kit.ask(run, policy, question, **options)
            if json:
                print(dumps(asdict(answer)), file=out, flush=True)
            else:
                print_text(str(answer))


@command()
def export(
    source: Annotated[Path, Argument(metavar="RUN", help="A run's folder, or its config.")],
    overrides: Overrides = None,
    to: Annotated[str, Option(help="Format: adapter, merged, gguf or vllm.")] = "merged",
    quantization: Annotated[str | None, Option(help="GGUF: f32, f16, bf16 or q8_0; default: f16.")] = None,
    dtype: Annotated[str | None, Option(help="Merged weights: bfloat16, float16 or float32.")] = None,
    output: Annotated[Path | None, Option(metavar="DIR", help="Folder to create; default: RUN/export/TARGET.")] = None,
    prompts: Annotated[int, Option(help="Held-out prompts for the check.")] = 20,
    overwrite: Overwrite = False,
    json: JsonLine = False,
) -> None:
    """Export a trained model for other programs, and compare it with the policy in those programs."""
    import rloo_kit as kit
    from rloo_kit.runs.find import find_run

    kit.setup_environment(read_config(source, overrides, find_run).model.backend)
    asked: dict[str, Any] = {"quantization": quantization, "dtype": dtype, "output": output, "num_prompts": prompts}
    found = kit.export_model(source, to, *(overrides or []), overwrite=overwrite, **asked)
    say(found)
    if json:
        say(dumps(found.to_dict()))


def main() -> None:
    """Entry point of `rloo-kit`."""
    app()


if __name__ == "__main__":
    main()
