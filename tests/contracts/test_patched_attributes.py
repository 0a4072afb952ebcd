"""`PATCHED_ATTRIBUTES` names every attribute of a library that the kit replaces; read from the sources."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

KIT = Path(__file__).resolve().parents[2] / "rloo_kit"

# Every attribute of a library's class, module or model that the kit replaces, by the place that does it, with the
# reason. Settings that a library documents (`padding_side`, `requires_grad`, `should_save`, ...) are not patches.
PATCHED_ATTRIBUTES = {
    "_stack.py: logger.addFilter": "transformers warns at the first decoding of an option that it ignores",
    "demo/cold_start.py: full.generation_config._from_model_config": "else loading drops the second end token",
    "export/loaders.py: module.support_avx512bf16_for_cpu": "as in models/transformers.py, for a checking process",
    "gradient/logprobs.py: head.forward": "for one call: the head scores states instead of computing all logits",
    "gradient/logprobs.py: model.forward": "one model instance takes calls for scores; others pass through unchanged",
    "gradient/packing.py: AttentionInterface.register": "transformers' registry: attention that takes a packing plan",
    "gradient/packing.py: AttentionMaskInterface.register": "transformers' registry: the mask of that attention",
    "gradient/scorer.py: setattr(module, name)": "for the self-check: training mode, no dropout",
    "images/model.py: base.forward": "ids of images become states of the tower, for whoever calls the model",
    "images/model.py: base.get_image_features": "an image is encoded alone, and once with a frozen tower",
    "images/model.py: config.image_token_id": "for one call: an id that its text has not, as a placeholder",
    "images/tokens.py: tokenizer.__class__": "one tokenizer instance reads references to images",
    "loop/build.py: setattr(module, name)": "dropout that attentions keep as a number, which TRL leaves on",
    "loop/trainer.py: trainer._step": "TRL counts micro-steps from 0 in every process, also in a resumed run",
    "graders/mirrors.py: setattr(module, name)": "dataclasses' functions, in a jail: objects are elsewhere",
    "models/adapters.py: config.init_lora_weights": "for TRL's constructor: its copy would subtract PiSSA again",
    "models/transformers.py: module.support_avx512bf16_for_cpu": "else bitsandbytes changes 4-bit weights in eval mode",
    "models/unsloth.py: model._can_compile_fullgraph": "else `generate` has a static cache, and masks ids of images",
    "models/unsloth.py: request.lora_tensors": "copies: vLLM would scale the adapter's own tensors in place",
    "models/unsloth.py: setattr(module, ENGINE)": "vLLM is out of sight of the generated trainer's constructor",
    "models/unsloth.py: model.get_base_model().model._unsloth_keep_padding_mask": "else training ignores padding",
    "vllm/in_process.py: logger.addFilter": "transformers mistakes vLLM's process group for a run without a launcher",
    "vllm/in_process.py: torch.set_num_threads": "restored: on a CPU vLLM replaces it by one that does nothing",
    "system/user_code.py: sys.modules[name]": "a user's file as a module, which dataclasses look up there",
    "system/user_code.py: sys.modules[package]": "the file's folders as packages, for its relative imports",
    "system/console.py: sys.modules[_NOTEBOOK_BARS]": "text bars in notebooks (TQDM_NOTEBOOK=false)",
}
# Attributes that the libraries document as settings, by what they are set on.
SETTINGS = {
    "grad", "requires_grad",  # torch: parameters
    "padding_side", "pad_token", "pad_token_id", "chat_template",  # transformers: tokenizers and configs
    "response_template",  # transformers: how a tokenizer's turns are read
    "normalizer", "pre_tokenizer", "decoder",  # tokenizers: the parts of one
    "should_save", "should_training_stop", "should_log", "global_step",
    "best_model_checkpoint", "num_input_tokens_seen",  # transformers: the trainer's control and state
    "use_vllm", "rollout_engine", "rollout_server_url", "reward_weights",  # the config that the user handed over
    "chat_template_kwargs",  # TRL's trainer: for the prompts that it renders
    "default_flow_style", "width", "sort_base_mapping_type_on_output", "Constructor", "Representer",
    "Scanner",  # ruamel.yaml
    "n_parallel", "verbosity", "warmup", "n_ctx", "n_threads", "fit_params", "flash_attn_type", "cache_type_k",
    "cache_type_v", "path",  # xllamacpp: the parameters of a server
    "merges", "dtype", "quantization_config",  # gguf: a vocabulary that was read; the config of what is written
    "min_width", "daemon", "check_hostname", "verify_mode", "version",  # rich, threading, ssl, email
    "whitespace_split", "escape", "commenters",  # shlex: how words are split
}  # fmt: skip
# Objects of the kit: what `ctx` keeps for the backward pass, the function that stands in, engines that are measured,
# the module that is made for tqdm, the config's notes; a config that Unsloth changed, restored to the user's values.
OWN = {
    "config/run.py: setattr(config.model, key)", "config/run.py: setattr(owner, key)",
    "demo/embedded.py: tokenizer.eos_token",
    "demo/embedded.py: tokenizer.model_max_length", "demo/embedded.py: config.eos_token_id",
    "demo/embedded.py: tokenizer.clean_up_tokenization_spaces",
    "images/model.py: base.check_prompt", "images/files.py: image.info",
    "gradient/logprobs.py: ctx.is_prepared", "gradient/logprobs.py: forward.without_scoring",
    "loop/options.py: error.args", "training/rloo.py: arguments.is_from_file", "loop/options.py: args._carried",
    "loop/options.py: setattr(cls, name)", "loop/options.py: RLOOConfig.__signature__",
    "models/backends.py: config._changes", "models/unsloth.py: setattr(config, name)",
    "models/unsloth.py: setattr(args, name)", "system/user_code.py: parent.__path__",
    "system/console.py: module.__spec__", "tools/verifiers_env.py: tool.__doc__",
    "tools/verifiers_env.py: tool.__annotations__", "graders/jailed.py: sys.modules[name]",
    "graders/crossing.py: function.__doc__", "graders/crossing.py: function.__qualname__",
    "graders/code_tests.py: test.decorator_list", "graders/code_tests.py: node.decorator_list",
    "graders/code_tests.py: tree.body",
}  # fmt: skip


def root_of(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def imports_of(tree: ast.AST) -> dict[str, str]:
    """Names of a module and the package that each was imported from."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(one.asname or one.name).split(".")[0]: one.name.split(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {one.asname or one.name: node.module.split(".")[0] for one in node.names}
    return found


def own_names(trees: list[ast.AST]) -> set[str]:
    """Attributes that classes of the kit declare or assign on themselves."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            names |= {ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root_of(node) == "self":
            names |= {node.attr} if isinstance(node.value, ast.Name) else set()
    return names


def patches_of(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Assignments to attributes of other objects, `setattr`, registrations, log filters, and modules put in place."""
    imports = imports_of(tree)
    foreign = {name for name, package in imports.items() if package not in {*sys.stdlib_module_names, "rloo_kit"}}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            is_stdlib = imports.get(root_of(node)) in sys.stdlib_module_names
            known = node.attr in SETTINGS | own or is_own or is_stdlib
            if root_of(node) in foreign or not known:
                yield ast.unparse(node)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if ast.unparse(node.value) == "sys.modules" or root_of(node) in foreign:
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            if ast.unparse(node.args[0]) != "self":
                yield f"setattr({', '.join(map(ast.unparse, node.args[:2]))})"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_registry = node.func.attr == "register" and root_of(node.func) in foreign
            if is_registry or node.func.attr == "addFilter":
                yield ast.unparse(node.func)


def test_the_list_is_whole() -> None:
    """Whoever debugs a library's behaviour in a run finds in one place what of it is not the library's own."""
    trees = {path.relative_to(KIT).as_posix(): ast.parse(path.read_text("utf-8")) for path in KIT.rglob("*.py")}
    own = own_names(list(trees.values()))
    found = {f"{name}: {patch}" for name, tree in trees.items() for patch in patches_of(tree, own)} - OWN
    assert found - set(PATCHED_ATTRIBUTES) == set(), "name it in PATCHED_ATTRIBUTES with why"
    assert set(PATCHED_ATTRIBUTES) - found == set(), "no longer patched: take it out of PATCHED_ATTRIBUTES"
    assert all(reason.strip() for reason in PATCHED_ATTRIBUTES.values())
