"""The attributes of libraries that the kit replaces."""

# Every attribute of a library's class, module or model that the kit replaces, by the place that does it, with the
# reason; tests/contracts/test_patched_attributes.py keeps the list complete. Settings that a library documents
# (`padding_side`, `requires_grad`, `should_save`, ...) are not patches.
PATCHED_ATTRIBUTES = {
    "_stack.py: logger.addFilter": "transformers warns at the first decoding of an option that it ignores",
    "batch/papermill.py: papermill_engines.register": "papermill's registry: an engine that chooses the kernel's ports",
    "embedded/cold_start.py: full.generation_config._from_model_config": "else loading drops the second end token",
    "export/loaders.py: module.support_avx512bf16_for_cpu": "as in models/transformers.py, for a checking process",
    "gradient/logprobs.py: head.forward": "for one call: the head scores states instead of computing all logits",
    "gradient/logprobs.py: model.forward": "one model instance takes calls for scores; others pass through unchanged",
    "gradient/packing.py: AttentionInterface.register": "transformers' registry: attention that takes a packing plan",
    "gradient/packing.py: AttentionMaskInterface.register": "transformers' registry: the mask of that attention",
    "gradient/scorer.py: setattr(module, name)": "for the self-check: training mode, no dropout",
    "loop/build.py: setattr(module, name)": "dropout that attentions keep as a number, which TRL leaves on",
    "loop/collaborators.py: logger.addFilter": "for one call: TRL prints a whole completion for each unscored sample",
    "loop/trainer.py: trainer._step": "TRL counts micro-steps from 0 in every process, also in a resumed run",
    "models/adapters.py: config.init_lora_weights": "for TRL's constructor: its copy would subtract PiSSA again",
    "models/transformers.py: module.support_avx512bf16_for_cpu": "else bitsandbytes changes 4-bit weights in eval mode",
    "models/unsloth.py: request.lora_tensors": "copies: vLLM would scale the adapter's own tensors in place",
    "models/unsloth.py: setattr(module, ENGINE)": "vLLM is out of sight of the generated trainer's constructor",
    "models/unsloth.py: model.get_base_model().model._unsloth_keep_padding_mask": "else training ignores padding",
    "models/vllm.py: logger.addFilter": "transformers mistakes vLLM's process group for a run without a launcher",
    "models/vllm.py: torch.set_num_threads": "restored: on a CPU vLLM replaces it with a function that does nothing",
    "rewarding/worker.py: sys.modules[name]": "a reward's file as a module, which dataclasses look up there",
    "rewarding/worker.py: sys.modules[package]": "the file's folders as packages, for its relative imports",
    "rollout/decoders.py: AttentionInterface.register": "transformers' registry: attention of one token, grouped heads",
    "rollout/decoders.py: AttentionMaskInterface.register": "transformers' registry: the mask of that attention",
    "rollout/decoders.py: config._attn_implementation": "for one decoding step: it selects the attention",
    "system/console.py: sys.modules[_NOTEBOOK_BARS]": "text bars in notebooks (TQDM_NOTEBOOK=false)",
    "system/processes.py: logger.addFilter": "one message per run instead of one per process",
}
