"""transformers + PEFT: the backend that runs everywhere, CPUs included, plain or in 4-bit.

Trained weights are in float32, whatever the base is in: bfloat16 loses an update of 1e-6 on a weight of 0.01.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from rloo_kit._stack import load_stack
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import BackendError
from rloo_kit.models.adapters import choose_targets, continue_adapter, find_outside
from rloo_kit.models.source import ModelSource, dtype_name, usable_length
from rloo_kit.seams import part

NON_REENTRANT = {"use_reentrant": False}


def load(run: RunConfig, source: ModelSource, config: Any, vllm: Any) -> tuple[Any, Any]:
    """The model with its adapter, and its tokenizer; with `vllm`, also starts vLLM with a copy of the base. Raises
    BackendError if the settings contradict each other; OSError or ValueError if the checkpoint cannot be read."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    _check_quantised(run, config)
    tokenizer = AutoTokenizer.from_pretrained(source.base)
    loader, vision = AutoModelForCausalLM, None
    if hasattr(config, "vision_config"):
        loader, vision = part("images").choose_class(run, source.base, config)
    dtype, quantization = getattr(torch, dtype_name(run)), None
    if run.model.load_in_4bit and getattr(config, "quantization_config", None) is None:
        nf4: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        nf4 |= {"llm_int8_skip_modules": ["lm_head", *vision.tower]} if vision is not None else {}
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **nf4)
    model = loader.from_pretrained(
        source.base, dtype=dtype, device_map={"": str(device)}, quantization_config=quantization
    )
    keep_4bit_weights(model)
    if vision is not None:
        tokenizer = part("images").attach(model, tokenizer, vision)
    if (lora := run.model.lora) is not None:
        for parameter in model.parameters():
            parameter.requires_grad = False
        if source.adapter is not None:
            model = continue_adapter(model, source.adapter, source.base)
        else:
            torch.manual_seed(run.run.seed)
            peft = load_stack().peft
            settings = peft.LoraConfig(
                r=lora.r,
                lora_alpha=lora.alpha,
                target_modules=choose_targets(model, lora.target_modules, lora.vision),
                exclude_modules=None if lora.vision else find_outside(model),
                task_type="CAUSAL_LM",
            )
            model = peft.get_peft_model(model, settings)
    if run.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=NON_REENTRANT)
        model.enable_input_require_grads()
    model.eval()  # PEFT's wrapper is in training mode even if its base is not
    if vllm is not None:
        start_engine(run, model, vllm)
    return model, tokenizer


def start_engine(run: RunConfig, model: Any, vllm: Any) -> None:
    """Start vLLM with a copy of the base and the planned memory; raises BackendError if it does not start."""
    settings, on_cuda = run.rollout.vllm, model.device.type == "cuda"
    part("vllm").start_vllm(
        model,
        part("vllm").VllmSettings(
            max_tokens=usable_length(run, model.config),
            gpu_memory_utilization=vllm.gpu_memory_utilization if on_cuda else None,
            max_num_seqs=vllm.max_num_seqs,
            float8_kv_cache=settings.float8_kv_cache,
            enforce_eager=settings.enforce_eager,
            four_bit=run.model.load_in_4bit,
        ),
    )


@contextmanager
def inference_mode(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def config_arguments(run: RunConfig) -> dict[str, Any]:
    """Gradient checkpointing as `RLOOConfig` takes it; "unsloth" is plain checkpointing here."""
    arguments: dict[str, Any] = {"gradient_checkpointing": bool(run.model.gradient_checkpointing)}
    if run.model.gradient_checkpointing:
        arguments["gradient_checkpointing_kwargs"] = dict(NON_REENTRANT)
    return arguments


def _check_quantised(run: RunConfig, config: Any) -> None:
    """Check that quantised weights, the checkpoint's too, have an adapter."""
    is_quantised = getattr(config, "quantization_config", None) is not None
    if (run.model.load_in_4bit or is_quantised) and run.model.lora is None:
        fix = "name a checkpoint that is not quantised" if is_quantised else "model.load_in_4bit=false"
        raise BackendError(
            f"{run.model.name} is loaded with quantised weights and model.lora is null, but quantised weights cannot "
            f"be trained: set model.lora={{}} or {fix}"
        )


def keep_4bit_weights(model: Any) -> None:
    """Keep generation from changing the policy: on CPUs with AVX512-BF16, bitsandbytes 0.50 repacks a layer in place at
    its first call in eval mode, rounds its scales to bf16 and fails on widths below its block size."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
