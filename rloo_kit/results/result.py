"""What became of a run: the result that `train` returns, and the same read from the run's folder."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo_kit.config.run import RunConfig, load_config
from rloo_kit.errors import ConfigError, RunNotFoundError
from rloo_kit.health.rule import Context, Finding
from rloo_kit.health.watch import examine
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.runs.find import ADAPTER_CONFIG, MODEL_CONFIG
from rloo_kit.runs.run_dir import RunDir

EARLY = "early"  # `TrainResult.stopped` of a run that eval.patience stopped


@dataclass
class TrainResult:
    """What became of a run.

    Attributes:
        folder: the run's. adapter_folder: the trained adapter (or the whole model, with `model.lora=null`).
        steps: optimizer steps done, those before a resume included.
        metrics: the rows of `metrics.jsonl`, one a logged step.
        seconds: of training, added up over all processes that the run has had.
        stopped: None when it ran to its end, else "early" (`eval.patience`; the run is finished), "interrupted" or the
            rule of `health:` that stopped it ("no signal"); of one read from its folder also "failed" and "running".
        adapter_step: whose weights the adapter holds: the last step's, or with `eval.save_best` the best evaluation's;
            None where it is not known.
        findings: what the rules of `health/rules.py` found, the causes in the order of their steps.
        method: "rloo", or "sft" of the supervised training before it.
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
        """Whose weights the adapter holds, and the evaluation after training measures."""
        return self.steps if self.adapter_step is None else self.adapter_step


def load_result(run: RunConfig) -> TrainResult:
    """The result of a run from what lies in its folder, finished or not. Raises RunNotFoundError where there is no
    run."""
    run_dir = RunDir(Path(run.folder))
    status = run_dir.status()
    if not status:
        raise RunNotFoundError(f"there is no run in {run_dir.folder}; rloo-kit train makes one")
    metrics = run_dir.read_metrics()
    seconds = (metrics[-1].get("seconds") if metrics else None) or 0.0
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
    """Whether nothing is left to do for a run: it finished with this configuration (`run.*` and `health.*` aside), and
    its weights, evaluations and report are there as far as it asks for them."""
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
    has_weights = any((run_dir / "adapter" / name).is_file() for name in (ADAPTER_CONFIG, MODEL_CONFIG))
    return is_same and has_weights and all((run_dir / name).is_file() for name in made)


def load_evaluation(run: RunConfig, when: str) -> Evaluation | None:
    """The evaluation "before" or "after" training from the run's folder; None where there is none."""
    return Evaluation.read(run.folder / f"{when}.json")
