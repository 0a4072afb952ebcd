"""Watches for failed steps (NaN or infinity) and failed rewards. Too many in a row end the run."""

from collections.abc import Sequence

from rloo_kit.errors import NonFiniteError
from rloo_kit.system.processes import say


class FiniteWatch:
    """Counts optimizer steps that are skipped because of NaN or infinity; reports the 1st, 2nd, 4th, 8th ... one.

    Args:
        patience: skipped steps in a row after which the run has to stop (`max_skipped_steps`), 1 or more.

    Attributes:
        skipped: all skipped steps. in_a_row: skipped steps since the last one that was taken.
        reason: what was not finite most recently.

    >>> watch = FiniteWatch(patience=2)
    >>> watch.observe(7, "the gradient")
    WARNING: step 7 is skipped: NaN or infinity in the gradient (1 in a row; 2 stop the run)
    >>> watch.exceeded, watch.skipped
    (False, 1)
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.skipped = 0
        self.in_a_row = 0
        self.reason = ""
        self._reports_at = 1

    @property
    def exceeded(self) -> bool:
        """Whether `patience` steps in a row were skipped."""
        return self.in_a_row >= self.patience

    def observe(self, step: int, broken: str | None) -> None:
        """Count optimizer step `step`.

        Args:
            broken: what was NaN or infinite in any process ("the log-probabilities", "the KL", "the gradient"); None
                for a step that was taken.
        """
        if broken is None:
            self.in_a_row = 0
            return
        self.skipped += 1
        self.in_a_row += 1
        self.reason = broken
        if self.skipped < self._reports_at and not self.exceeded:
            return
        self._reports_at = 2 * self.skipped
        say(
            f"WARNING: step {step} is skipped: NaN or infinity in {broken} ({self.in_a_row} in a row; {self.patience} "
            "stop the run)"
        )

    def make_error(self, saved_in: str) -> NonFiniteError:
        """The error to raise once `exceeded` and the state is saved in the folder `saved_in`."""
        return NonFiniteError(
            f"NaN or infinity in {self.reason}, {self.in_a_row} steps in a row (max_skipped_steps = {self.patience}), "
            f"so training stopped; none of them moved a weight. The state is saved in {saved_in}. Lower learning_rate, "
            "raise beta, set delta if num_iterations is above 1, and prefer bf16 to fp16; then start from an earlier "
            "checkpoint"
        )


class FailureWatch:
    """Counts generation batches with failed rewards; reports the 1st, 2nd, 4th, 8th ... one.

    Args:
        limit: share of failed samples, 0 to 1, above which a batch counts as failed (`max_reward_failure_share`).
        patience: failed batches in a row after which the run has to stop (`reward_failure_steps`).

    >>> watch = FailureWatch(limit=0.5, patience=2)
    >>> watch.observe(0.25, ["reward 'mine' failed on sample 3: it returned nan"])
    WARNING: reward 'mine' failed on sample 3: it returned nan (25% of the samples of this rollout are not scored)
    >>> watch.exceeded
    False
    """

    def __init__(self, limit: float, patience: int) -> None:
        self.limit = limit
        self.patience = patience
        self._batches = 0
        self._reports_at = 1
        self._over_limit_in_a_row = 0

    @property
    def exceeded(self) -> bool:
        """Whether more than `limit` of the samples failed in `patience` batches in a row."""
        return self._over_limit_in_a_row >= self.patience

    def observe(self, share: float, messages: Sequence[str]) -> None:
        """Count one generation batch.

        Args:
            share: of its samples, over all processes, on which a reward failed, 0 to 1.
            messages: one for each reward that failed in this process.
        """
        self._over_limit_in_a_row = self._over_limit_in_a_row + 1 if share > self.limit else 0
        if share == 0.0:
            return
        self._batches += 1
        if self._batches < self._reports_at:
            return
        self._reports_at = 2 * self._batches
        for message in messages:
            print(f"WARNING: {message} ({share:.0%} of the samples of this rollout are not scored)", flush=True)
