"""The result of a run, as `train` returns it or as read from the run's folder."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo_kit.config.run import RunConfig, load_config
from rloo_kit.errors import ConfigError, RunNotFoundError
from rloo_kit.health.rules import Context, Finding
from rloo_kit.health.series import is_number
from rloo_kit.health.watch import examine
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.runs.folder import RunDir

EARLY = "early"  # `TrainResult.stopped` of a run that eval.patience stopped


@dataclass
class TrainResult:
    """The result of a run.

    Attributes:
        folder: the run's. adapter_folder: the trained adapter (or the whole model, with `model.lora=null`).
        steps: optimizer steps done, those before a resume included.
        metrics: the rows of `metrics.jsonl`, one per logged step.
        seconds: of training, earlier sessions of a resumed run included.
        stopped: None if it ran to its end, else "early" (`eval.patience`; the run is finished), "interrupted" or the
            rule of `health:` that stopped it ("no signal"); if read from a folder also "failed" and "running".
        adapter_step: the step of the adapter's weights: the last, or with `eval.save_best` the best evaluation's; None
            if unknown.
        findings: of the rules in `health/rules.py`, the causes in step order.
        method: "rloo", or "sft" for the supervised training before it.
    """

    folder: Path
    adapter_folder: Path
    steps: int
    metrics: list[dict[str, Any]] = field(repr=False)
    seconds: float
    stopped: str | None = None
    adapter_step: int | None = None
    findings: list[Finding] = field(default_factory=list, repr=False)
    method: str = "rloo"

    @property
    def lasting(self) -> list[Finding]:
        """The findings that were true of the last logged step."""
        last = max((row["step"] for row in self.metrics), default=self.steps)
        return [one for one in self.findings if one.last >= last]

    @property
    def kept_step(self) -> int:
        """The step of the weights in the adapter, which the evaluation after training measures."""
        return self.steps if self.adapter_step is None else self.adapter_step


def load_result(run: RunConfig) -> TrainResult:
    """The result of a run from its folder, finished or not. Raises RunNotFoundError if there is no run."""
    run_dir = RunDir(Path(run.folder))
    status = run_dir.status()
    if not status:
        raise RunNotFoundError(f"there is no run in {run_dir.folder}; rloo-kit train writes one")
    metrics = run_dir.read_metrics()
    known: list[Any] = [
        status.get("seconds"),
        metrics[-1].get("seconds") if metrics else None,
    ]  # a killed run has the second
    seconds = next(filter(is_number, known), 0.0)
    state, rule = status.get("state"), status.get("stopped_by")
    ended = EARLY if status.get("stopped_early") else None
    return TrainResult(
        run_dir.folder,
        run_dir / "adapter",
        status.get("step", 0),
        metrics,
        seconds,
        stopped=ended if state == "finished" else rule if isinstance(rule, str) else state,
        adapter_step=status.get("adapter_step"),
        findings=examine(metrics, Context.of(run, status.get("max_steps"))),
        method="sft" if status.get("method") == "sft" else "rloo",
    )


def is_over(run: RunConfig) -> bool:
    """Whether a run is complete: it finished with this configuration (except `run.*` and `health.*`), and its weights
    and the evaluations and report it asks for exist."""
    run_dir = RunDir(Path(run.folder))
    if run_dir.status().get("state") != "finished":
        return False
    try:
        saved = load_config(run_dir / "config.yaml")
    except ConfigError:
        return False
    made = (["before.json", "after.json"] if run.run.evaluate else []) + (["report.html"] if run.run.report else [])
    aside = {"run", "health"}
    is_same = saved.model_dump(exclude=aside) == run.model_dump(exclude=aside)
    has_weights = any((run_dir / "adapter").glob("*.safetensors"))
    return is_same and has_weights and all((run_dir / name).is_file() for name in made)


def load_evaluation(run: RunConfig, when: str) -> Evaluation | None:
    """The evaluation "before" or "after" training from the run's folder; None without one."""
    return Evaluation.read(run.folder / f"{when}.json")
