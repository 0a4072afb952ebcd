"""Log-probabilities under the policy and under the reference of its KL penalty.

The reference is a separate model, the adapter "ref", or the base without an adapter. While the policy still equals it
(a fresh adapter, the first step), the reference pass is skipped.

Shapes: N completion tokens of a pass, end to end.
"""

from typing import Any

import torch
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from rloo_kit.errors import ConfigError
from rloo_kit.gradient.packing import Group
from rloo_kit.gradient.scorer import Scorer, Scores
from rloo_kit.models.adapters import same_as_reference
from rloo_kit.models.parallel import Parallel


class PolicyScorer:
    """Scores groups under the policy and its reference, in the trainer's precision.

    Args:
        policy: the bare model. scorer: scores its completions. parallel: the run's processes.
        beta: of the KL penalty; 0: no reference.
        reference: "start" of training, or the "base" model without an adapter.
        reference_model: the reference if it is a separate model, else None; it is scored by a scorer like the
            policy's.
        checkpointing: keywords of gradient checkpointing, which is off in a reference pass.
    """

    def __init__(
        self,
        policy: torch.nn.Module,
        scorer: Scorer,
        parallel: Parallel,
        beta: float = 0.0,
        reference: str = "start",
        reference_model: Any = None,
        checkpointing: dict[str, Any] | None = None,
    ):
        self.policy, self.scorer, self.parallel = policy, scorer, parallel
        self.beta, self.kind, self.checkpointing = beta, reference, checkpointing
        self.reference_model = reference_model
        if reference_model is not None:
            self.reference_scorer = Scorer(reference_model, scorer.temperature, scorer.pad_id, scorer.layout)
        self.copy = getattr(policy, "peft_config", {}).get("ref")
        # with sharded weights, no process has the tensors to compare
        self._may_be_reference = reference_model is None and parallel.kind != "shards"

    @property
    def layout(self) -> str:
        """The layout in use, one of `scorer.LAYOUTS`."""
        return self.scorer.layout

    def choose_layout(self, groups: list[Group]) -> None:
        """Call it with the groups of a rollout before its passes: see `Scorer.choose_layout`."""
        self.scorer.choose_layout(groups)
        if self.reference_model is not None:
            self.reference_scorer.layout = self.scorer.layout

    def score(
        self,
        model: torch.nn.Module,
        groups: list[Group],
        need_entropy: bool = True,
        balanced: torch.Tensor | None = None,
    ) -> Scores:
        """Log-probabilities and entropies of the groups' completions, (N,); `model` is the policy, however wrapped.
        `balanced`: see `Scorer.score`."""
        with self.parallel.accelerator.autocast():
            return self.scorer.score(model, groups, need_entropy, balanced)

    def reference(self, model: torch.nn.Module, groups: list[Group]) -> torch.Tensor | None:
        """(N,) under the reference, without a graph; None while the policy equals it, or without a KL penalty."""
        return None if self.beta == 0.0 or self.is_reference() else self.score_reference(model, groups)

    def score_reference(self, model: torch.nn.Module, groups: list[Group]) -> torch.Tensor:
        """(N,) under the reference, without a graph, even while the policy equals it."""
        with torch.no_grad(), self.parallel.accelerator.autocast():
            if self.reference_model is not None:
                return self.reference_scorer.score(self.reference_model, groups, need_entropy=False).logps
            adapters = getattr(self.policy, "peft_config", {})
            with (
                disable_gradient_checkpointing(self.policy, self.checkpointing),
                use_adapter(self.policy, adapter_name="ref" if "ref" in adapters else None),
            ):
                return self.scorer.score(model, groups, need_entropy=False).logps

    def is_reference(self) -> bool:
        """Whether the policy's weights still equal the reference's; not checked any more once they have moved.

        Raises ConfigError if the model has another trainer's reference by now."""
        if getattr(self.policy, "peft_config", {}).get("ref") is not self.copy:
            raise ConfigError("a later trainer on this model replaced this one's KL reference: make a new RLOOTrainer")
        if self._may_be_reference:
            self._may_be_reference = same_as_reference(self.policy, self.kind)
        return self._may_be_reference

    def tokens(self, groups: list[Group]) -> int:
        """Tokens that a pass over these groups computes."""
        return self.scorer.tokens(groups)
