"""Checkpoints of the trainer: transformers' files and the loop's own state, sealed and published atomically."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME

from rloo_kit.collective import gather_objects, share, wait_for_all
from rloo_kit.errors import shorten
from rloo_kit.models.adapters import load_shards
from rloo_kit.models.policy import Policy, save_adapter
from rloo_kit.runs.checkpoints import STEM, UNFINISHED, prune, publish, read_checkpoint, seal, set_aside
from rloo_kit.runs.files import read_object, saving, write_json
from rloo_kit.runs.find import ADAPTER_CONFIG
from rloo_kit.runs.folder import RunDir
from rloo_kit.system.processes import is_main_process, say

LOOP_STATE = "loop_state.json"


def find_micro_step(args: Any, state: Any, pass_length: int) -> int:
    """The micro-steps before the optimizer step of `state`, of `pass_length` in a pass over the prompts."""
    steps_a_pass = max(math.ceil(pass_length / args.gradient_accumulation_steps), 1)  # the last one may be shorter
    passes, rest = divmod(state.global_step, steps_a_pass)
    return passes * pass_length + rest * args.gradient_accumulation_steps


def save_checkpoint(trainer: Any, folder: Path, write: Callable[[], None]) -> None:
    """Save an `RLOOTrainer` as `folder/checkpoint-N`, N its step, and delete checkpoints beyond `save_total_limit`; all
    processes call this at once. `write` saves transformers' part, in `checkpoint-N` of the trainer's `_staging`."""
    step, record = trainer.state.global_step, trainer.checkpoint_record
    target, staged = folder / f"{STEM}{step}", folder / UNFINISHED / f"{STEM}{step}"
    writes, run = trainer.args.should_save, record.get("run", "")
    there = read_checkpoint(target) if writes else None
    if share(there is not None and there.run == run != ""):  # this step is saved already: a run saves before it stops
        return
    with saving(target):
        try:
            if writes:
                shutil.rmtree(staged.parent, ignore_errors=True)  # left by a save that was killed
            wait_for_all()
            trainer._staging = staged.parent
            write()
            state = trainer.state
            best = folder / f"{STEM}{state.best_global_step}"
            if state.best_global_step and (state.best_global_step == step or best.is_dir()):
                state.best_model_checkpoint = str(best)  # its published name: transformers looked in the staging folder
            if writes:
                state.save_to_json(str(staged / TRAINER_STATE_NAME))
                rloo = trainer.rloo
                reservoir = None if rloo.reservoir is None else rloo.reservoir.state_dict()
                write_json(staged / LOOP_STATE, {"reservoir": reservoir, "episodes": rloo.recorder.episodes})
            wait_for_all()  # every process has written its part
            if writes:
                seal(staged, step, **record)
                if target.exists() and (there is None or there.run != run):
                    say(f"WARNING: {target} is not of this run; it is kept as {set_aside(target).name}")
                publish(staged, target)
                prune(folder, trainer.args.save_total_limit, run, (step, state.best_global_step))
        except Exception:
            if writes:  # frees the space again if the disk is full
                shutil.rmtree(staged.parent, ignore_errors=True)
            raise
        finally:
            trainer._staging = None
        wait_for_all()


def publish_adapter(policy: Policy, run_dir: RunDir, **record: Any) -> Path:
    """Replace `adapter/` of the run by what was trained, with a `record` for `trained.json`; all processes call it."""
    target, staged = run_dir / "adapter", run_dir / UNFINISHED / "adapter"
    with saving(target):
        save_adapter(policy, staged, **record)
        if is_main_process():
            publish(staged, target)
    return target


def load_weights(trainer: Any, folder: Path) -> bool:
    """Load the weights that `save_adapter` wrote to `folder` into the policy of `trainer`; all processes call this at
    once. False, with a warning and the policy as it was, if a process cannot read them."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    damage = next(filter(None, gather_objects(_find_damage(folder, is_peft_model(policy)))), "")
    if damage:
        say(f"WARNING: the weights in {folder} are not used, because they are damaged ({damage})")
        return False
    if trainer.rloo.parallel.kind == "shards":
        load_shards(trainer.accelerator, policy, folder)
    elif is_peft_model(policy):  # the trainer's own would drop the reference, which is not in the folder
        policy.load_adapter(str(folder.absolute()), "default", is_trainable=True)  # never a name on the hub
        policy.set_adapter("default")
    else:
        trainer._load_from_checkpoint(str(folder))
    return True


def _find_damage(folder: Path, is_adapter: bool) -> str:
    if is_adapter and not read_object(folder / ADAPTER_CONFIG):
        return f"{ADAPTER_CONFIG} cannot be read"
    files = list(folder.glob("*.safetensors"))
    try:
        for file in files:
            with safe_open(file, framework="pt"):  # it compares the header with the file's size
                pass
    except (SafetensorError, OSError) as error:
        return shorten(str(error))
    return "" if files else "there are none"
