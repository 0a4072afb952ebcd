"""LoRA adapters around TRL's trainer: wrapping for the backend, precision, the KL's reference, saving and loading."""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, is_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from rloo_kit._stack import load_stack
from rloo_kit.errors import BackendError, ConfigError

# What PEFT's `save_pretrained` writes: neither TRL's copy "ref" nor the embedding, which is never resized ("auto" would
# ask the hub whether it was).
ADAPTER_ALONE: dict[str, Any] = {"selected_adapters": ["default"], "save_embedding_layers": False}
NO_ADAPTER = (
    "rollout.engine is server or vllm, which samples from an adapter, but this run trains every parameter: train an "
    "adapter (model.lora), or set rollout.engine=generate"
)
NO_COPY = "the KL needs a frozen copy of the adapter, and PEFT takes no second one with biases: {}, or set bias='none'"
MORE_THAN_MATRICES = ("lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters")
PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")  # initialisations that leave the base unchanged


def check_model(arguments: dict[str, Any]) -> None:
    """Raise ConfigError if the model, its adapter or the one that `peft_config` adds cannot be trained correctly, or if
    the KL has no reference: without an adapter TRL reads it from the checkpoint that the model's config names."""
    model, new, beta = arguments["model"], arguments.get("peft_config"), arguments["args"].beta
    is_name = isinstance(model, str)
    is_wrapped = not is_name and is_peft_model(model)
    config: Any = model.peft_config.get("default") if is_wrapped else new
    kind = "aLoRA" if getattr(config, "alora_invocation_tokens", None) else getattr(config, "peft_type", "LORA")
    active = list(model.active_adapters) if is_wrapped else ["default"]
    problems = [
        (is_wrapped and new is not None,
         "peft_config was given, but the model already has an adapter: drop one of them"),
        (kind != "LORA",
         f"the adapter is of the kind {getattr(kind, 'value', kind)}, but the kit trains LoRA: use a LoraConfig"),
        (active != ["default"],
         f"the active adapters are {', '.join(active)}: merge all but one (merge_and_unload), and name it 'default'"),
        (is_wrapped and getattr(config, "bias", "none") != "none",
         NO_COPY.format("give the bare model and peft_config")),
        (is_wrapped and isinstance(model.get_output_embeddings(), BaseTunerLayer),
         "the adapter changes lm_head, whose own matrix is scored: leave it out of target_modules"),
        (config is None and _has_layers(model),  # `model.add_adapter`
         "the model has an adapter, but is no PeftModel: add it by get_peft_model, or give peft_config"),
        (not config and _is_quantised(model),
         "the model's weights are quantised, which cannot be trained: give peft_config=LoraConfig(...)"),
        (is_name and (Path(model) / "adapter_config.json").is_file(),
         f"model is {model}, the folder of an adapter: give the model that "
         "AutoPeftModelForCausalLM.from_pretrained(..., is_trainable=True) returns"),
        (beta and not is_name and not config and not model.config.name_or_path,
         f"beta is {beta} and every parameter is trained, so the reference is a second model, loaded from the "
         "checkpoint that model.config names, but model.config names none: save the model and load it from there, "
         "train an adapter (peft_config), or set beta=0.0"),
    ]  # fmt: skip
    if problem := next((problem for applies, problem in problems if applies), None):
        raise ConfigError(problem)


def _has_layers(model: Any) -> bool:
    """Whether PEFT has put layers of an adapter into the model."""
    return isinstance(model, torch.nn.Module) and any(isinstance(layer, BaseTunerLayer) for layer in model.modules())


def _is_quantised(model: Any) -> bool:
    return getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)


def wrap_for_unsloth(arguments: dict[str, Any]) -> dict[str, Any]:
    """Create the adapter here, because the trainer that Unsloth generates accepts `peft_config` and ignores it."""
    if load_stack().unsloth is None or arguments.get("peft_config") is None:
        return arguments
    rest = {name: value for name, value in arguments.items() if name != "peft_config"}
    return rest | {"model": load_stack().peft.get_peft_model(rest["model"], arguments["peft_config"])}


def choose_targets(model: Any, wanted: Sequence[str] | None, tower: bool = False) -> list[str]:
    """Names of the layers of a bare model that get an adapter: `wanted`, or with None all linear layers of its blocks,
    and with `tower` those of its vision tower.

    Stacked experts count by the names that PEFT translates. Raises BackendError if a name matches no layer.
    """
    found = {name for path in _find_linear(model, tower) for name in re.findall(r"[^.]+(?:\.\d+)*$", path)}  # mlp.0
    if "experts" in found:
        found = found - {"experts"} | {"gate_proj", "up_proj", "down_proj"}
    paths = [f".{path}" for path, _ in model.named_modules()] + [f".{name}" for name in found]
    outside = {path.rpartition(".")[2] for path in find_outside(model) or ()}
    if tower and wanted and not outside & set(wanted):
        raise BackendError(
            "model.lora.vision is true, but model.lora.target_modules names no layer of the tower: leave it out, or "
            f"add {', '.join(sorted(outside))}"
        )
    missing = [name for name in wanted or () if not any(path.endswith(f".{name}") for path in paths)]
    if missing or not (wanted or found):
        has = f"has {', '.join(missing)}" if missing else "is null"
        raise BackendError(
            f"model.lora.target_modules {has}, but {type(model).__name__} has no such layers; its linear layers are "
            f"{', '.join(sorted(found)) or 'of an unknown kind'}: set names of its layers, or null for all linear ones"
        )
    return list(wanted or sorted(found))


def find_outside(model: Any) -> list[str] | None:
    """Paths of linear layers outside a bare model's text decoder, as a vision tower has, of the same names; or None."""
    inside = set(model.get_decoder().modules())
    linear = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    return [path for path, layer in linear if layer not in inside] or None


def find_bare_layers(model: Any) -> list[str]:
    """Names of linear layers in the blocks of a PeftModel that have no adapter, at least in some block."""
    return sorted({path.rpartition(".")[2] for path in _find_linear(model.get_base_model())})


def _find_linear(model: Any, tower: bool = False) -> Iterator[str]:
    """Paths of the linear layers in a model's blocks, and of its stacked experts, that have no adapter. A class of
    transformers with a forward of its own (a router, which returns several tensors) is not linear."""
    head, wrapped = model.get_output_embeddings(), tuple[str, ...]()
    for path, layer in (model.base_model if tower else model.get_decoder()).named_modules():
        kind = type(layer)
        is_own = kind.__module__.startswith("transformers.models.") and kind.forward is not torch.nn.Linear.forward
        is_linear = isinstance(layer, (torch.nn.Linear, Conv1D)) and not is_own and layer is not head
        is_stack = path.endswith(".experts") and not isinstance(layer, torch.nn.ModuleList)
        if isinstance(layer, BaseTunerLayer):
            wrapped += (f"{path}.",)
        elif (is_linear or is_stack) and not path.startswith(wrapped):
            yield path


def trainable_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The trained tensors by name, before TRL changes them; empty if `model` is the name of a checkpoint."""
    if not isinstance(model, torch.nn.Module):
        return {}
    return {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}


def restore_precision(model: torch.nn.Module, masters: dict[str, torch.Tensor]) -> None:
    """Undo TRL's cast of a quantised model's adapter to bfloat16: restore `masters` (from `trainable_tensors`), and
    cast an adapter that TRL created to float32."""
    is_quantised = _is_quantised(model)
    for name, parameter in model.named_parameters():
        master = masters.get(name)
        if master is not None and parameter.dtype != master.dtype:
            parameter.data = master
        elif master is None and is_quantised and parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()


def is_identity(model: torch.nn.Module) -> bool:
    """Whether the "default" LoRA adapter changes nothing yet: one matrix of each pair (an embedding's A) is zero."""
    named = dict(model.named_parameters())
    endings = ("lora_B.default", "lora_embedding_B.default")
    of_b = [name for name in named if any(ending in name for ending in endings)]  # matrices, and biases without an A

    def is_idle(name: str) -> bool:
        partner = named.get(name.replace("_B.default", "_A.default"))
        return not named[name].any() or (partner is not None and not partner.any())

    return bool(of_b) and all(map(is_idle, of_b))


@contextmanager
def keep_base(model: Any) -> Iterator[None]:
    """Protect the base while TRL's constructor adds a second adapter, "ref", with the configuration of the first; an
    earlier trainer's is deleted. PiSSA, OLoRA and similar initialisations subtract their start from the base's weights,
    and would do so twice. A second `peft_config` must reset all layers that the first left in the model (a cell that is
    run again), else ConfigError."""
    drop_reference(model)
    had_layers = _has_layers(model) and not is_peft_model(model)
    config: Any = getattr(model, "peft_config", {}).get("default")
    init = getattr(config, "init_lora_weights", None)
    with ExitStack() as after:
        if isinstance(init, str):
            after.callback(setattr, config, "init_lora_weights", init)
            config.init_lora_weights = False  # the copy gets its values afterwards
        yield
    if had_layers and not is_identity(model):
        raise ConfigError("the model still has layers of an earlier adapter below that of peft_config: load it again")


def settle_reference(model: Any, beta: float, reference: str) -> None:
    """Copy the adapter into the frozen adapter "ref" if the KL's reference is the start, and that is not the base.

    TRL creates "ref" if the model came with an adapter, but does not copy the matrices of embeddings; if TRL created
    the adapter, "ref" is missing. An unused copy, or one of the identity, is deleted: it costs memory and time. Raises
    ConfigError for trained biases, which PEFT neither copies nor switches off.
    """
    if not is_peft_model(model):
        return
    config: Any = copy.deepcopy(model.peft_config["default"])
    if beta and config.bias != "none":
        raise ConfigError(NO_COPY.format("set beta=0.0"))
    if not beta or reference == "base" or is_identity(model):
        drop_reference(model)
        return
    if "ref" in model.peft_config:
        model.peft_config["ref"] = config  # TRL's is the policy's own object
    else:
        config.init_lora_weights = False  # see `keep_base`
        model.add_adapter("ref", config)
    named = dict(model.named_parameters())
    for name, value in named.items():
        frozen = named.get(name.replace(".default", ".ref")) if ".default" in name else None
        if frozen is not None:
            frozen.data = value.data.clone()
            frozen.requires_grad_(False)


def drop_reference(model: Any) -> None:
    """Delete the copy "ref", if there is one."""
    if "ref" in getattr(model, "peft_config", {}):
        model.delete_adapter("ref")


def same_as_reference(model: torch.nn.Module, reference: str) -> bool:
    """Whether the policy's adapter still equals the KL's `reference`: "start" (the copy "ref") or "base"."""
    if not is_peft_model(model):
        return False
    if reference == "base" or "ref" not in model.peft_config:
        return is_identity(model)
    named = dict(model.named_parameters())
    pairs = [(value, named[name.replace(".default", ".ref")]) for name, value in named.items() if ".default" in name]
    return all(torch.equal(value, copy) for value, copy in pairs)


def is_switched_off(model: Any) -> bool:
    """Whether PEFT's `disable_adapter` is active, so that the model computes as its base."""
    return any(getattr(module, "_disable_adapters", False) for module in model.modules())


def find_beyond_lora(config: Any) -> str:
    """What an adapter's configuration has beyond a LoRA of linear layers; empty if nothing."""
    if config.peft_type != "LORA":
        return f"has the type {config.peft_type.value}"
    if getattr(config, "use_dora", False):
        return "uses DoRA"
    if config.bias != "none" or any(getattr(config, name, None) for name in MORE_THAN_MATRICES):
        return "trains biases, whole modules (modules_to_save), rows of the embedding or bare parameters too"
    return ""


def find_handover_problem(model: Any) -> str | None:
    """Why a vLLM with the base cannot load the adapter of `model`; None if it can."""
    if not is_peft_model(model):
        return NO_ADAPTER
    config: Any = model.peft_config["default"]
    fix = "set rollout.engine=generate"
    if found := find_beyond_lora(config):
        fix = "train a plain LoRA adapter (use_dora=False, bias='none'), or set rollout.engine=generate"
    elif config.rank_pattern or config.alpha_pattern:
        found = "scales layers differently (rank_pattern, alpha_pattern), which vLLM before 0.32 ignores"
        fix = "remove the patterns, or set rollout.engine=generate"
    elif isinstance(name := config.init_lora_weights, str) and name.lower() not in PLAIN_STARTS:
        found = f"is initialised by {name}, which changes the base"
        fix = "set init_lora_weights=True or rollout.engine=generate"
    return f"vLLM loads plain LoRA adapters, but this adapter {found}: {fix}" if found else None


def continue_adapter(model: Any, folder: str, base: str) -> Any:
    """A bare model with the saved adapter of a folder, to train it further; BackendError if it does not fit."""
    path = Path(folder).expanduser()
    try:
        return load_stack().peft.PeftModel.from_pretrained(model, str(path), is_trainable=True)
    except (RuntimeError, ValueError, OSError) as error:
        raise BackendError(f"the adapter {path} does not fit {base}: {error}") from error


def write_adapter(accelerator: Any, model: torch.nn.Module, folder: Path) -> None:
    """Write the adapter of `model`, wrapped or not, into the new or empty `folder` as PEFT does; ConfigError without
    one. Every process calls it; the main one creates and fills the folder."""
    policy = accelerator.unwrap_model(model)
    if not is_peft_model(policy):
        raise ConfigError(NO_ADAPTER)
    gathered = gather_adapter(accelerator, policy)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        state = {} if gathered is None else {"state_dict": gathered}
        policy.save_pretrained(str(folder), **ADAPTER_ALONE, **state)
        follow_umask(folder)


def follow_umask(folder: Path) -> None:
    """Give the weights in a folder the folder's permissions. safetensors creates files that only their owner can read,
    whatever the umask; a group that shares runs, or a server under another user, needs to read them."""
    for file in folder.glob("*.safetensors"):
        with suppress(OSError):  # a file system without permissions
            file.chmod(folder.stat().st_mode & 0o666)


def gather_adapter(accelerator: Any, policy: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """The adapter's tensors by name if they are sharded over processes; None if this process has them all."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return None
    trained = {name: value.detach() for name, value in policy.named_parameters() if value.requires_grad}
    # FSDP 2 shards them; those of the outermost module stay whole between two passes
    return {
        name: (part.full_tensor() if hasattr(part, "full_tensor") else part).cpu() for name, part in trained.items()
    }


def load_shards(accelerator: Any, policy: torch.nn.Module, folder: Path) -> None:
    """Load into a sharded model what `save_adapter` wrote, in every process; reverses `gather_adapter`."""
    saved: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        saved |= load_file(file)
    trained = {name: value for name, value in policy.named_parameters() if value.requires_grad}
    files = {name: name for name in trained}
    if is_peft_model(policy):  # PEFT's files leave out the adapter's name
        numbered: Any = {name: torch.tensor(number) for number, name in enumerate(trained)}
        state_dict, names = load_stack().peft.get_peft_model_state_dict, list(trained)
        found = state_dict(policy, state_dict=numbered, adapter_name="default", save_embedding_layers=False)
        files = {names[int(number)]: name for name, number in found.items()}
    for name, value in trained.items():
        new = saved[files[name]].to(value.device, value.dtype)
        if hasattr(value, "full_tensor"):
            new = torch.distributed.tensor.distribute_tensor(new, value.device_mesh, value.placements)
        value.data.copy_(new)
