"""A `generate` that is not transformers' own: called, or reported as not called."""

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationMixin, Qwen3ForCausalLM

from rloo_kit.errors import BackendError
from rloo_kit.rollout.engine import choose_engine
from rloo_kit.rollout.types import Limits
from tests.rollout.models import PROMPTS, engine_for


def with_adapter(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


def counted(plain, calls):
    """A patch as scripts write it: it notes the call and goes on."""

    @functools.wraps(plain)
    def generate(*arguments, **named):
        calls.append(len(arguments))
        return plain(*arguments, **named)

    return generate


def patch_instance(model, calls, _patch):
    model.generate = counted(model.generate, calls)
    return model


def patch_below_an_adapter(model, calls, _patch):
    return with_adapter(patch_instance(model, calls, _patch))


def patch_adapted(model, calls, _patch):
    return patch_instance(with_adapter(model), calls, _patch)


def patch_everywhere(model, calls, patch):
    patch.setattr(GenerationMixin, "generate", counted(GenerationMixin.generate, calls))
    return model


def patch_class(model, calls, _patch):
    class Mine(Qwen3ForCausalLM):
        def generate(self, *arguments, **named):
            calls.append(len(arguments))
            return super().generate(*arguments, **named)

    model.__class__ = Mine
    return model


PATCHES = [patch_instance, patch_below_an_adapter, patch_adapted, patch_everywhere, patch_class]


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patched_generate_is_called(patch, make_tiny_model, monkeypatch):
    """A user who patches `generate` (a constraint, a cache of completions, a trace) has TRL call it; the kit's own loop
    never would, and no line reported it."""
    calls = []
    model = patch(make_tiny_model(), calls, monkeypatch)
    engine = engine_for(model, "auto")
    assert engine.name == "generate" and __name__ in engine.reason
    engine.sample(PROMPTS, Limits(3))
    assert calls
    name, reason = choose_engine("native", "transformers", model)
    assert name == "native" and f"own generate ({__name__}) is not called" in reason


@pytest.mark.parametrize("adapter", [False, True])
def test_what_the_libraries_put_there_is_no_patch(adapter, make_tiny_model):
    """PEFT has its own `generate`, and FSDP wraps the model's: both end in transformers'."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    model = with_adapter(make_tiny_model()) if adapter else make_tiny_model()
    register_fsdp_forward_method(model, "generate")
    model.generate = torch.no_grad()(model.generate)
    assert choose_engine("auto", "transformers", model)[0] == "native"
    assert "not called" not in choose_engine("native", "transformers", model)[1]


def test_a_generate_that_drops_the_logits_processor_is_named(make_tiny_model):
    """Without it there are no log-probabilities; the fault was an AssertionError in the middle of the kit."""
    model = make_tiny_model()
    model.generate = lambda input_ids, **_: torch.cat([input_ids, input_ids[:, :1]], dim=1)
    with pytest.raises(BackendError, match=r"logits_processor.*rollout\.engine=native"):
        engine_for(model, "auto").sample(PROMPTS, Limits(3))
