"""Unsloth's FastLanguageModel: the backend for a CUDA GPU. Only this file and `_stack` name Unsloth.

Restores what Unsloth changes by itself: settings of the config, mixed precision, the mask of left-padded rows.
"""

import copy
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from rloo_kit._stack import load_stack
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import BackendError
from rloo_kit.models.adapters import choose_targets, continue_adapter
from rloo_kit.models.backends import has_unsloths_layers
from rloo_kit.models.source import ModelSource, dtype_name, usable_length
from rloo_kit.seams import part
from rloo_kit.system import environment

ENGINE = "vllm_engine"  # the model's attribute in which Unsloth keeps vLLM
MERGED_VARIABLE = "UNSLOTH_VLLM_MERGED_ROLLOUT"
MOST_OF_FREE = 0.98
SHARE_VARIABLE = "UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE"  # else Unsloth replaces the planned share with its own
PRECISION_VARIABLE = "UNSLOTH_MIXED_PRECISION"
COMPILE_VARIABLE = "UNSLOTH_BLOCK_COMPILE"  # read at every call of a block
OFFLOAD_VARIABLE = "UNSLOTH_OFFLOAD_FP32"  # without it, float32 checkpoints are stored in host memory as bfloat16
# What the generated trainer's constructor assigns in its config; checked by tests/with_unsloth/test_fingerprints.py.
CONSTRUCTOR_CHANGES = (
    "bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "eval_strategy", "eval_steps", "eval_accumulation_steps",
    "per_device_eval_batch_size",
)  # fmt: skip
ITS_OWN = ("gradient_checkpointing_kwargs",)  # Unsloth's checkpoints are reentrant unless you ask for another form


def unusable(run: RunConfig, stack: Any) -> str | None:
    """Why Unsloth cannot be used for this run ("what is wrong; what to do"); None if it can."""
    if stack.unsloth is None:
        fix = "pip install -e '.[gpu]'" if find_spec("unsloth") is None else "see `rloo-kit doctor`"
        return f"{environment.current().backend_reason}; {fix}"
    if run.model.lora is None:
        return "Unsloth trains adapters, but model.lora is null; set model.lora={}"
    return None


def load(run: RunConfig, source: ModelSource, config: Any, vllm: Any) -> tuple[Any, Any]:
    """The model with its adapter, and its tokenizer; with `vllm`, also vLLM on the model's weights. Raises BackendError
    if the adapter does not fit; OSError, RuntimeError or ValueError if the checkpoint cannot be read."""
    unsloth: Any = load_stack().unsloth
    lora, checkpointing, vision = run.model.lora, run.model.gradient_checkpointing, None
    assert lora is not None  # `unusable` refuses a run without it
    if has_tower := hasattr(config, "vision_config"):
        vision = part("images").choose_class(run, source.base, config)[1]
    fast = unsloth.FastLanguageModel if vision is None else unsloth.FastVisionModel
    os.environ.setdefault(OFFLOAD_VARIABLE, "exact")
    model, tokenizer = fast.from_pretrained(
        model_name=source.base,
        max_seq_length=usable_length(run, config),
        dtype=getattr(torch, dtype_name(run)),
        load_in_4bit=run.model.load_in_4bit,
        use_gradient_checkpointing=checkpointing,
        **({"text_only": True} if has_tower and vision is None else {}),
        **({} if vllm is None else _vllm_arguments(run, vllm)),
    )
    # Unsloth keeps a reference to its tokenizer, and pads right whenever the model enters training mode.
    tokenizer = copy.deepcopy(getattr(tokenizer, "tokenizer", tokenizer))  # of a vision model: its processor's
    if vision is not None:
        tokenizer = part("images").attach(model, tokenizer, vision)
        model._can_compile_fullgraph = False  # else `generate` allocates its cache, for which it masks ids itself
    if source.adapter is not None:
        model = continue_adapter(model, source.adapter, source.base)
        patch = fast.patch_peft_model if has_unsloths_layers(model) else unsloth.FastModel.post_patch_model
        model = patch(model, use_gradient_checkpointing=checkpointing)
    else:
        model = fast.get_peft_model(
            model,
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=0.0,
            target_modules=choose_targets(model, lora.target_modules, lora.vision),
            use_gradient_checkpointing=checkpointing,
            random_state=run.run.seed,
            **({} if vision is None else {"finetune_vision_layers": lora.vision}),
        )
    base = model.get_base_model()
    # without bfloat16 it loads float16, and weights that it cannot quantise as they are
    pairs = {
        "model.dtype": (dtype_name(run), str(base.get_input_embeddings().weight.dtype).removeprefix("torch.")),
        "model.load_in_4bit": (run.model.load_in_4bit, bool(getattr(base, "is_loaded_in_4bit", False))),
    }
    if changes := [_describe(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]:
        print(f"Unsloth loaded the model differently than requested: {', '.join(changes)}", flush=True)
    # keep the padding mask, which the backbone drops in training mode unless the last full call had no labels
    model.get_base_model().model._unsloth_keep_padding_mask = True
    return model, tokenizer


@contextmanager
def inference_mode(model: Any) -> Iterator[None]:
    """Unsloth's fast generation without gradients, with its CUDA graphs; restores training mode and its checkpointing
    afterwards, and frees the graphs and the buffers of decoding, which stay until a layer's next full forward."""
    graphs, was_training = import_module("unsloth.models._decode_graphs"), model.training
    model.for_inference()
    try:
        with torch.no_grad(), graphs.rl_generation():
            yield
    finally:
        graphs.release_for_training(model)
        for module in model.modules():
            for name in ("paged_attention", "paged_attention_K", "paged_attention_V"):
                vars(module).pop(name, None)
        if was_training:
            model.for_training(use_gradient_checkpointing=getattr(model, "_unsloth_gradient_checkpointing", False))


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """A block in which an environment variable has another value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ.update({} if before is None else {name: before})


def uncompiled() -> AbstractContextManager[None]:
    """Run padded rows in training mode through Unsloth's blocks as they are. On a GPU it compiles each kind of block at
    its first such call, unlike for packed rows."""
    return _variable(COMPILE_VARIABLE, "0")


def config_arguments(run: RunConfig) -> dict[str, Any]:
    """Switch off TRL's gradient checkpointing: the model already has Unsloth's."""
    return {"gradient_checkpointing": False}


def set_back(config: Any, stock: type, values: dict[str, Any]) -> list[str]:
    """After the constructor of a `config` that Unsloth generated from the keywords `values`: set its fields to what
    TRL's class, `stock`, makes of them. Returns what Unsloth had changed."""
    meant, changes = stock(**values), []
    for name in (field.name for field in fields(stock) if field.init):
        ours, found = getattr(meant, name), getattr(config, name)
        if found != ours and (name not in ITS_OWN or values.get(name) is not None):
            setattr(config, name, ours)
            changes.append(_describe(name, ours, found))
    return changes


@contextmanager
def keep_arguments(args: Any, model: Any) -> Iterator[list[str]]:
    """Wrap the generated trainer's constructor: restore and list what it changes in `args`, keep float32 (it turns on
    mixed precision unless its variable asks for the model's precision), and hide a vLLM on the model, which TRL's code
    would otherwise sample from with merged weights."""
    changes: list[str] = []
    before = {name: getattr(args, name) for name in CONSTRUCTOR_CHANGES if hasattr(args, name)}
    is_plain = args is not None and not (args.bf16 or args.fp16)
    if is_plain:
        changes.append(_describe("mixed precision", "no", "bf16, or fp16 on a GPU without it"))
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()  # Unsloth keeps vLLM on some of them
    hidden = [(module, vars(module).pop(ENGINE)) for module in modules if ENGINE in vars(module)]
    try:
        with _variable(PRECISION_VARIABLE, "bfloat16") if is_plain else nullcontext():
            yield changes
    finally:
        for module, engine in hidden:
            setattr(module, ENGINE, engine)
        for name, ours in before.items():
            if (found := getattr(args, name)) != ours:
                setattr(args, name, ours)
                changes.append(_describe(name, ours, found))


def adopt_engine(model: Any) -> Any:
    """Wrap the vLLM that Unsloth loaded with the model's weights, for the kit's engine `vllm`."""
    llm = model.vllm_engine
    folder = tempfile.TemporaryDirectory(prefix="rloo-kit-")  # Unsloth writes the adapter's configuration there, once
    shares = "Unsloth's, which shares the policy's weights; the adapter is passed in memory"
    vllm = part("vllm")
    return vllm.adopt_vllm(model, vllm.InProcessVllm(llm, partial(_hand_over, folder), shares))


def _hand_over(folder: "tempfile.TemporaryDirectory[str]", model: Any) -> Any:
    request = model.load_lora(folder.name, load_tensors=True)
    if not hasattr(request, "lora_int_id"):
        raise ValueError(
            f"{MERGED_VARIABLE}={os.environ.get(MERGED_VARIABLE, '')!r} merges the adapter into the base for each "
            "rollout: set it to 0, restart, and load the model again"
        )
    # vLLM scales one matrix of each pair in place; if the precisions match, these are the parameters themselves
    request.lora_tensors = {name: value.detach().clone() for name, value in request.lora_tensors.items()}
    return request


def _describe(name: str, ours: Any, unsloths: Any) -> str:
    """A setting that Unsloth changes by itself, with the run's value, which is kept."""
    return f"{name} {getattr(ours, 'value', ours)} (Unsloth: {getattr(unsloths, 'value', unsloths)})"


def find_sleep_problem() -> str | None:
    """Why vLLM could not free its memory while the model is trained; None if it can."""
    if part("vllm").is_running():
        return "another model of this process has a vLLM on its weights: restart the kernel and load only this model"
    if environment.STANDBY_VARIABLE in os.environ:
        return None
    return (
        "Unsloth was imported before the run's file was read, so vLLM would keep its memory while the model is "
        "trained: restart the kernel and call load_config before anything imports Unsloth"
    )


def _vllm_arguments(run: RunConfig, vllm: Any) -> dict[str, Any]:
    """Arguments that load vLLM on the model's weights; raises BackendError if that is impossible."""
    assert run.model.lora is not None
    in_process = part("vllm")
    if problem := in_process.find_vllm_problem() or find_sleep_problem():
        raise BackendError(f"rollout.engine is vllm, but {problem}")
    in_process.prepare_variables()
    share = vllm.gpu_memory_utilization
    if torch.cuda.is_available():  # Unsloth's is a share of what is free when vLLM is loaded
        free, total = torch.cuda.mem_get_info()
        share = min(share * total / free, MOST_OF_FREE)
    os.environ[SHARE_VARIABLE] = "1"
    os.environ.setdefault(MERGED_VARIABLE, "0")  # unset, Unsloth merges adapters of 16-bit models
    return {
        "fast_inference": True,
        "max_lora_rank": in_process.room_for_rank(run.model.lora.r),
        "gpu_memory_utilization": share,
        "max_num_seqs": vllm.max_num_seqs,
        "float8_kv_cache": run.rollout.vllm.float8_kv_cache,
        "enforce_eager": run.rollout.vllm.enforce_eager,
        "unsloth_vllm_standby": os.environ[environment.STANDBY_VARIABLE] != "0",
    }


def packed_keywords(laid: Any, layout: str) -> dict[str, Any]:
    """The keywords that Unsloth's forward needs in addition to the ids of a packed row: lengths, or for a shared prompt
    a table of segments. Its compiled attention needs a GPU for the backward pass; `Scorer` checks that first."""
    if layout == "shared":
        grouper = import_module("unsloth.utils.prefix_grouper_kernel")
        table, _ = grouper.build_seg_info_multigroup(laid.groups, laid.input_ids.device)
        return {"position_ids": laid.position_ids, "prefix_seg_info": table}
    lengths = [end - start for ((start, end),) in laid.sequences]
    return {
        "position_ids": laid.position_ids,
        "packed_seq_lengths": torch.tensor(lengths, dtype=torch.int32, device=laid.input_ids.device),
    }
