"""Trains one run: the trainer, its folder, what it prints, and how it stops and resumes.

However `train` ends, `status.json` has the state and the checkpoint to resume from exists.
"""

import json
from typing import Any

from transformers.trainer_callback import PrinterCallback

from rloo_kit.checks.faults import find_place_faults
from rloo_kit.collective import gather_objects, share, share_from_main, wait_for_all
from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import check_budget
from rloo_kit.data.load import Data
from rloo_kit.errors import ConfigError, HealthError, NoSignalError, RolloutServerError
from rloo_kit.evals.difficulty import select_prompts
from rloo_kit.evals.evaluate import evaluate
from rloo_kit.graders.scoring_model import RewardModel
from rloo_kit.loop.callbacks import Interrupts, MetricsWriter, Movement, RolloutLog, TimedSaves
from rloo_kit.loop.options import RLOOConfig, loaded_engine, training_arguments
from rloo_kit.loop.saving import load_weights, publish_adapter
from rloo_kit.loop.trainer import RLOOTrainer
from rloo_kit.models.adapters import NO_ADAPTER, drop_reference
from rloo_kit.models.parallel import Sharding
from rloo_kit.models.policy import Policy, start_engine
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.results.report import write_report
from rloo_kit.results.verdict import EARLY, TrainResult, judge_run, load_evaluation, record_verdict
from rloo_kit.rewarding.guard import reward_name
from rloo_kit.rewarding.worker import end_workers, read_sources, refuse_edited
from rloo_kit.rollout.choice import resolve_engine
from rloo_kit.runs.files import read_object
from rloo_kit.runs.find import TRAINED
from rloo_kit.runs.folder import INPUTS, RunDir
from rloo_kit.system.console import fill_text
from rloo_kit.system.problems import PreflightError, raise_errors
from rloo_kit.system.processes import is_distributed, is_main_process, say
from rloo_kit.system.user_code import digest_texts
from rloo_kit.tools.toolbox import open_toolbox
from rloo_kit.training.held_out import Evaluations, choose_measure
from rloo_kit.training.live import HealthGuard, PictureLog, ProgressLine, SampleTable, say_findings
from rloo_kit.training.memory_watch import planned_limits, watch_memory


def train(
    run: RunConfig,
    policy: Policy,
    data: Data,
    reward_funcs: list[Any],
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_changes: bool = False,
) -> TrainResult:
    """Train `policy` in place and write everything to the run's folder, after the whole preflight if `run.preflight` is
    set; a resumed run skips it.

    Args:
        run: a `RunConfig`. policy: from `load_policy`. data: from `load_data`. reward_funcs: from `build_rewards`.
        resume: continue from the last checkpoint in the folder.
        overwrite: delete the run that is in the folder.
        accept_changes: with `resume`, go on although rows, rewards or weights have changed.

    Returns:
        `TrainResult`. Ctrl-C does not raise: it saves, prints how to resume, and `stopped` is "interrupted". With
        `eval.every_steps` the policy then has the weights of the best evaluation.

    Raises:
        PreflightError: the preflight's verdict is NO-GO, the disk is too small for the checkpoints, or a tracker's
            library is missing; no folder was made and nothing trained.
        RunExistsError, RunNotFoundError, ConfigError: see `RunDir.create` and `check_sampling`; ConfigError also if
            this policy is trained already and no checkpoint replaces its weights, if there are fewer prompts than a
            rollout needs, or `eval.measure` cannot be measured; and `check_inputs`.
        RewardError: rewards failed too often (`run.max_reward_failure_share`); the state is saved.
    """
    if not (resume and RunDir(run.folder).last_checkpoint()):
        policy.refuse_trained("a new run would not begin at the start (resume=True continues its own)", "RLOO")
    if not resume:
        require_go(run, policy, data, reward_funcs)
    check_start(run, policy, data, reward_funcs)
    made: list[RunDir] = []  # an error of the main process is raised in each
    share_from_main(lambda: made.append(RunDir.create(run, resume=resume, overwrite=overwrite)))
    with made[0] if made else RunDir.create(run, resume=resume, overwrite=overwrite) as run_dir:
        run_dir.accepts_changes |= accept_changes
        check_inputs(run, run_dir, policy, data, reward_funcs)
        result = _Training(run, policy, data, reward_funcs, run_dir).run_to_end()
        say_findings(result.findings, result.steps)
        return result


def require_go(run: RunConfig, policy: Policy, data: Data, reward_funcs: list[Any]) -> None:
    """Run and print the whole preflight if `run.preflight` is set; raises PreflightError on a NO-GO."""
    if not run.run.preflight:
        return
    from rloo_kit import check_preflight  # the part above this one, by its public name

    result = check_preflight(run, policy, data, reward_funcs)
    say(result)
    if not result.go:
        raise PreflightError(result.faults, "by the preflight (run.preflight=true), and nothing was trained")


def check_start(run: RunConfig, policy: Policy, data: Data, reward_funcs: list[Any]) -> None:
    """Refuse what training would: the disk, the trackers, the sampling, the number of prompts, `eval.measure`."""
    if is_main_process():
        raise_errors(find_place_faults(run))
    check_sampling(run, policy)
    run.check_prompts(len(data.train))
    if run.eval.every_steps:
        choose_measure(run, data.test, reward_funcs)


def check_sampling(run: RunConfig, policy: Policy) -> None:
    """Refuse rollouts that this model, backend or machine cannot do: ConfigError, or BackendError for an engine."""
    check_budget(run, policy.family)
    name, _ = resolve_engine(run.rollout.engine, policy.backend, policy.model)
    if name == "server" and not hasattr(policy.model, "peft_config"):
        raise ConfigError(NO_ADAPTER)
    start_engine(run, policy)


def check_inputs(run: RunConfig, run_dir: RunDir, policy: Policy, data: Data, reward_funcs: list[Any]) -> None:
    """Record what a run's configuration only names (rows, sources of rewards and tools, weights, versions), once for
    each open folder. Raises ConfigError, with a list, if a resumed run began with others; if `run_dir` accepts them, or
    nothing is trained yet, what was measured before is deleted."""
    if not run_dir.inputs:
        run_dir.inputs = share_from_main(lambda: _compare_inputs(run_dir, _inputs_of(run, policy, data, reward_funcs)))


def _compare_inputs(run_dir: RunDir, found: dict[str, str]) -> str:
    began = read_object(run_dir / INPUTS) if run_dir.resumed else {}
    began = {name: text for name, text in began.items() if not name.startswith("version of")}  # no longer compared
    changed = [
        f"{name} ({began.get(name)} then, {found.get(name)} now)" if name.startswith("number ") else name
        for name in (began | found if began else ())
        if began.get(name) != found.get(name) and (name in began or not name.startswith("weights of"))
    ]
    if changed:
        text, trained = ", ".join(changed), run_dir.resumes_from
        if trained is not None and not run_dir.accepts_changes:
            raise ConfigError(
                f"the run in {run_dir.folder} began with other inputs. Changed: {text}. Restore them, continue with "
                "--accept-changes (accept_changes=True), or start over: --overwrite or run.name=..."
            )
        run_dir.drop_results("before.json", *(() if trained else ("evaluations.jsonl",)))
        if trained is not None:
            text = f"from step {trained.step} on other inputs: {text}"
            trained_on = "; held-out prompts may have been trained on before" if "column prompt" in text else ""
            say(f"WARNING: {run_dir.folder} continues {text}{trained_on}")
            run_dir.set_status("running", changed="; ".join(filter(None, [run_dir.status().get("changed"), text])))
    run_dir.write_json(INPUTS, found)
    return digest_texts(map(str, sorted(found.items())))


def _inputs_of(run: RunConfig, policy: Policy, data: Data, reward_funcs: list[Any]) -> dict[str, str]:
    """Digests, counts and versions by their names in words."""
    toolbox, found = open_toolbox(run), dict(policy.weights)
    found |= {f"tools in {file}": digest for file, digest in toolbox.sources.items()} if toolbox else {}
    for side, table in (("training", data.train), ("held-out", data.test)):
        found[f"number of {side} prompts"] = str(len(table))
        for name in table.column_names:
            values = (json.dumps(value, sort_keys=True, default=str) for value in table[name][:])
            found[f"column {name} of the {side} prompts"] = digest_texts(values)
    found["rewards"] = ", ".join(reward if isinstance(reward, str) else reward_name(reward) for reward in reward_funcs)
    return found | read_sources(RewardModel(reward) if isinstance(reward, str) else reward for reward in reward_funcs)


class _Training:
    """One call of `train`: the trainer with its callbacks, and the ways it can end."""

    def __init__(self, run: RunConfig, policy: Policy, data: Data, reward_funcs: list[Any], run_dir: RunDir):
        self.run, self.policy, self.run_dir = run, policy, run_dir
        self.was_training = policy.model.training
        blind = [index for index, sees in enumerate(gather_objects(run_dir.folder.is_dir())) if not sees]
        if blind:  # every process reads checkpoints
            raise ConfigError(
                f"the run's folder {run_dir.folder.absolute()} is not there for process "
                f"{', '.join(map(str, blind))}, on another machine: put it on a file system that all of them share, "
                "with run.output_dir=..."
            )
        self.checkpoint = share(run_dir.resumes_from)
        if self.checkpoint is not None and hasattr(policy.model, "peft_config"):
            trained = read_object(self.checkpoint.folder / "adapter_config.json").get("target_modules")
            now = policy.model.peft_config["default"].target_modules
            if trained is not None and set(trained) != set(now):
                raise ConfigError(
                    f"the run in {run_dir.folder} has an adapter on {', '.join(sorted(trained))}, and now it would be "
                    f"on {', '.join(sorted(now))} (model.lora.target_modules): start over, --overwrite or run.name=..."
                )
        if run_dir.resumed:
            run_dir.rewind(self.checkpoint.step if self.checkpoint else 0)
        self.rollouts = RolloutLog(run_dir)
        self.writer = MetricsWriter(run_dir)
        self.guard = HealthGuard(run, run_dir, self.writer.rows)
        self.interrupts = Interrupts()
        self.evaluations: Evaluations | None = None
        if run.eval.every_steps:
            self.evaluations = Evaluations(run, policy, data.test, reward_funcs, run_dir, self.interrupts)
        prompts = select_prompts(run, policy, data.train, run_dir)
        self.trainer = self._build_trainer(prompts, reward_funcs)
        if hasattr(policy.tokenizer, "vision"):
            self.trainer.rollout_listeners.append(PictureLog(self.rollouts, data.test["prompt"]))

    def _build_trainer(self, prompts: Any, reward_funcs: list[Any]) -> RLOOTrainer:
        run, policy = self.run, self.policy
        before = load_evaluation(run, "before") if run.run.evaluate else None  # the one after takes about as long
        progress = ProgressLine(self.writer, run.run.progress_every_s, 0.0 if before is None else before.seconds)
        progress.evaluations = self.evaluations
        shown = SampleTable(self.rollouts, run.run.sample_every_steps, run.run.num_samples)
        callbacks = [self.writer, progress, shown, self.guard, self.interrupts]
        if self.evaluations is not None:
            callbacks.append(self.evaluations)  # after the interrupts, which postpone an evaluation
        callbacks.append(TimedSaves(self.run_dir, run.run.save_every_minutes))
        values = training_arguments(run, policy, self.run_dir / "checkpoints") | planned_limits(run, policy)
        arguments = RLOOConfig(**values)
        arguments.is_from_file = True
        trainer = RLOOTrainer(
            model=policy.model,
            reward_funcs=reward_funcs,
            args=arguments,
            train_dataset=prompts,
            processing_class=policy.tokenizer,
            callbacks=callbacks,
            tools=open_toolbox(run),
        )
        trainer.checkpoint_record = self.run_dir.checkpoint_record
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Movement(trainer))
        trainer.rollout_listeners.append(self.rollouts)
        self.memory = watch_memory(run, policy.model.config.to_dict(), loaded_engine(run, policy), trainer.args)
        if self.memory is not None:
            trainer.rollout_listeners.append(self.memory)
        policy.sharding = Sharding(trainer) if trainer.rloo.parallel.kind == "shards" else None
        if self.evaluations is not None:
            self.evaluations.trainer = trainer
        return trainer

    def run_to_end(self) -> TrainResult:
        try:
            adapter_step = None
            if self._is_done_already():
                adapter_step = self._load_weights()
            else:
                self._train()
            stopped = self._why_stopped()
            steps = self.trainer.state.global_step
            if adapter_step is None:
                adapter_step = steps if self.evaluations is None else (self.evaluations.load_best() or steps)
                publish_adapter(self.policy, self.run_dir, run=self.run_dir.id, step=adapter_step, steps_done=steps)
            seconds = round(self.writer.seconds, 3)
        finally:
            if done := self.trainer.state.global_step + (not self.interrupts.between_steps):
                self.policy.trained["RLOO"] = done
            end_workers()
            drop_reference(self.policy.model)
            if not self.was_training:  # in training mode, checkpointing drops the KV cache and decodes nonsense
                self.policy.model.eval()
        self._record_end(stopped, adapter_step, seconds)
        if self.memory is not None:
            self.memory.report(self.run_dir)
        wait_for_all()  # a launcher kills the others as soon as one has exited
        folder, rows, findings = self.run_dir.folder, self.writer.rows, self.guard.findings
        result = TrainResult(folder, folder / "adapter", steps, rows, seconds, stopped, adapter_step, findings=findings)
        return share(result)

    def _is_done_already(self) -> bool:
        """Whether the resumed run has nothing left to do; the trainer would take one step too many."""
        if self.checkpoint is None:
            return False
        if self.evaluations is not None and self.evaluations.stopped is not None:
            return True
        state = read_object(self.checkpoint.folder / "trainer_state.json")
        epochs = self.run.rloo.num_train_epochs
        total = self.run.rloo.max_steps or (state["max_steps"] if state["num_train_epochs"] == epochs else None)
        return total is not None and self.checkpoint.step >= total

    def _load_weights(self) -> int | None:
        """Load the weights that the run ended with; returns their step if they are those in adapter/, which stays."""
        step = self.checkpoint.step
        self.trainer._load_from_checkpoint(str(self.checkpoint.folder))
        self.trainer.state.global_step = self.trainer.state.max_steps = step
        how = "finished"
        if self.evaluations is not None:
            self.evaluations.settle(step)
            total = self.run.rloo.max_steps or read_object(self.checkpoint.folder / "trainer_state.json")["max_steps"]
            if self.evaluations.stopped is not None and step < total:
                self.trainer.state.max_steps = total
                how = "stopped early (raise eval.patience to continue)"
        say(f"the run is {how} already (step {step}); its weights are loaded")
        kept = share(read_object(self.run_dir / "adapter" / TRAINED))
        if (kept.get("run"), kept.get("steps_done")) != (self.run_dir.id, step):
            return None
        return kept["step"] if load_weights(self.trainer, self.run_dir / "adapter") else None

    def _train(self) -> None:
        if self.run_dir.resumed:
            where = f"step {self.checkpoint.step}" if self.checkpoint else "the start: it has no checkpoint yet"
            say(f"resuming {self.run_dir.folder} from {where}")
            self.run_dir.drop_results()
        if self.memory is not None:
            self.memory.start()
        with self.interrupts:
            try:
                place = str(self.checkpoint.folder) if self.checkpoint else None
                self.trainer.train(resume_from_checkpoint=place)
            except (KeyboardInterrupt, RolloutServerError) as error:
                if is_distributed():  # processes stopped at different points: no collective operation
                    raise
                self.interrupts.requested |= isinstance(error, KeyboardInterrupt)
                step, last = self.trainer.state.global_step, self.run_dir.last_checkpoint()
                if step > 0 and self.interrupts.between_steps and (last is None or last.step < step):
                    self.trainer._save_checkpoint(self.trainer.model, trial=None)  # unless during a weight update
                if isinstance(error, RolloutServerError):
                    raise

    def _why_stopped(self) -> str | None:
        state = self.trainer.state
        if state.max_steps and state.global_step >= state.max_steps:
            return None
        if self.guard.stopped_by is not None:
            return self.guard.stopped_by.replace("_", " ")
        if self.evaluations is not None and self.evaluations.stopped is not None:
            return EARLY
        return "interrupted" if self.interrupts.requested else None

    def _record_end(self, stopped: str | None, adapter_step: int, seconds: float) -> None:
        """The final state, in `status.json` and on the screen."""
        folder, step, last = self.run_dir.folder, self.trainer.state.global_step, self.trainer.state.max_steps
        progress: dict[str, Any] = {"step": step, "max_steps": last, "adapter_step": adapter_step, "seconds": seconds}
        where = f"at step {step} of {last}"
        if stopped == EARLY and self.evaluations is not None:
            progress |= {"stopped_early": f"{where}: {self.evaluations.stopped}"}
            say(f"stopped early {progress['stopped_early']}")
        if self.evaluations is not None and adapter_step != step:
            say(f"{folder / 'adapter'} holds the weights of step {adapter_step}, the best evaluation's")
        if stopped in (None, EARLY):
            self.run_dir.set_status("finished", **progress)
            return
        resume = self.run_dir.resume_command
        if stopped == "interrupted":
            kept = self.run_dir.last_checkpoint()
            saved = f"the checkpoint of step {kept.step}" if kept else "no checkpoint yet (no step was finished)"
            self.run_dir.set_status("interrupted", resume=resume, **progress)
            say(f"interrupted {where}; {folder} has {saved}, and the adapter. To go on: {resume}")
            return
        error = self.guard.make_error(where)
        progress |= {"error": f"{type(error).__name__}: {error}", "stopped_by": stopped, "resume": resume}
        self.run_dir.set_status("failed", **progress)
        say(f"{error}\nThe state is saved in {folder}.")


def run_and_report(run: RunConfig, policy: Policy, data: Data, reward_funcs: list[Any], run_dir: RunDir) -> bool:
    """All of `rloo-kit train` in an open folder: preflight, evaluate, train, evaluate again, report.

    Returns whether it was interrupted. Raises HealthError if a rule of `health:` stopped the run, else as `train`."""
    if not run_dir.resumed:
        require_go(run, policy, data, reward_funcs)
    check_start(run, policy, data, reward_funcs)  # before a long evaluation
    check_inputs(run, run_dir, policy, data, reward_funcs)
    before = after = None
    if run.run.evaluate:
        before = share(load_evaluation(run, "before") if run_dir.resumed else None)
        if before is None:
            before = evaluate(run, policy, data.test, label="before", reward_funcs=reward_funcs)
            run_dir.write_json("before.json", before.to_dict())
        say(fill_text(before.describe()))
    result = _Training(run, policy, data, reward_funcs, run_dir).run_to_end()
    if result.stopped == "interrupted":
        say_findings(result.findings, result.steps)
        return True
    if result.stopped not in (None, EARLY):
        _conclude(run, result, before, None)
        error = NoSignalError if result.stopped == "no signal" else HealthError
        raise error(f"{run_dir.status().get('error')}\nTo go on regardless: {run_dir.resume_command}")
    if before is not None:
        refuse_edited()  # training has ended their processes
        after = evaluate(run, policy, data.test, label="after", reward_funcs=reward_funcs, base=before)
        end_workers()  # a later call restarts a reward's process
        run_dir.write_json("after.json", after.to_dict())
        say(fill_text(after.describe()))
    names = [result.adapter_folder.name, "metrics.jsonl", "rollouts", "config.yaml"]
    if run.run.report and is_main_process():
        names.append(write_report(run, result, before, after).name)
    where = f"Everything is in {run_dir.folder}: {', '.join(names)}"
    say(fill_text(f"{result.steps} steps, {result.seconds:.0f} s of training. {where}"))
    _conclude(run, result, before, after)
    return False


def _conclude(run: RunConfig, result: TrainResult, before: Evaluation | None, after: Evaluation | None) -> None:
    """The last lines: other health findings, and the verdict, which `status.json` stores."""
    verdict = judge_run(run, result, before, after)
    say_findings((finding for finding in result.findings if finding.name != verdict.rule), result.steps)
    if is_main_process():
        record_verdict(result.folder, verdict)
    say(verdict)
