"""When rewards fail: saying so while the run goes on, and when it has to stop.

The guard around each reward (`reward_guard`) turns a failure into an unscored sample with a message. A run stands a few
of those; it must neither hide them nor bury its own lines under them, and it must not train on what is left when a
grader is down. No torch here.
"""

from collections.abc import Sequence


class FailureWatch:
    """Counts generation batches with failed rewards; speaks at the 1st, 2nd, 4th, 8th ... of them.

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
        self._speaks_at = 1
        self._over_limit_in_a_row = 0

    @property
    def exceeded(self) -> bool:
        """Whether more than `limit` of the samples failed in `patience` batches in a row."""
        return self._over_limit_in_a_row >= self.patience

    def observe(self, share: float, messages: Sequence[str]) -> None:
        """Take one generation batch.

        Args:
            share: of its samples that a reward failed for, 0 to 1, over all processes.
            messages: one for each reward of this process that failed.
        """
        self._over_limit_in_a_row = self._over_limit_in_a_row + 1 if share > self.limit else 0
        if share == 0.0:
            return
        self._batches += 1
        if self._batches < self._speaks_at:
            return
        self._speaks_at = 2 * self._batches
        for message in messages:
            print(f"WARNING: {message} ({share:.0%} of the samples of this rollout are not scored)", flush=True)
