"""Checks that completions, groups and prompts of a rollout agree. Each error names numbers that work."""

import math

from rloo_kit.errors import ConfigError
from rloo_kit.system.processes import count_processes

GENERATIONS, PROMPTS = 8, 4  # defaults: completions per prompt, prompts per step
_SEARCHED = 10_000  # group sizes on either side of the wanted one


def usual_batch(num_generations: int | None) -> int:
    """Default number of completions per step: `PROMPTS` groups of `num_generations`; None means `GENERATIONS`.

    >>> usual_batch(None), usual_batch(6)
    (32, 24)
    """
    return PROMPTS * (num_generations or GENERATIONS)


def check_generation_batch(
    per_device: int, passes: int, num_generations: int, passes_key: str = "steps_per_generation"
) -> None:
    """Refuse a rollout that does not consist of whole groups, and name the nearest numbers that work.

    >>> check_generation_batch(8, 1, 4)

    Raises:
        ConfigError: per_device x processes x passes is not a multiple of num_generations.
    """
    processes = count_processes()
    total = per_device * processes * passes
    if total % num_generations == 0:
        return
    fitting = [f"num_generations={k}" for k in _nearest_divisors(total, num_generations)]
    fitting += [f"{passes_key}={p}" for p in _nearest_multiples(per_device * processes, num_generations, passes)]
    fitting += [
        f"per_device_train_batch_size={b}" for b in _nearest_multiples(processes * passes, num_generations, per_device)
    ]
    raise ConfigError(
        f"a rollout has {_spell_out(per_device, processes, passes, passes_key)}, which does not divide into whole "
        f"groups of {num_generations} (num_generations). The nearest that work: {' or '.join(fitting)}"
    )


def check_generation_batch_size(size: int, per_device: int, num_generations: int) -> None:
    """Refuse a `generation_batch_size` that is not a whole number of micro-batches and of groups.

    >>> check_generation_batch_size(16, 8, 4)

    Raises:
        ConfigError: size is not a multiple of per_device x processes and of num_generations.
    """
    unit = per_device * count_processes()
    if size % unit == size % num_generations == 0:
        return
    fitting = [f"generation_batch_size={s}" for s in _nearest_multiples(1, math.lcm(unit, num_generations), size)]
    if size % unit == 0:
        fitting += [f"num_generations={k}" for k in _nearest_divisors(size, num_generations)]
    raise ConfigError(
        f"generation_batch_size is {size}; it must be a multiple of {unit} (per_device_train_batch_size x processes) "
        f"and of {num_generations} (num_generations). The nearest that work: {' or '.join(fitting)}"
    )


def check_eval_batch(per_device: int, num_generations: int) -> None:
    """Refuse an evaluation batch that does not consist of whole groups.

    >>> check_eval_batch(8, 4)

    Raises:
        ConfigError: per_device x processes is not a multiple of num_generations.
    """
    processes = count_processes()
    total = per_device * processes
    if total % num_generations == 0:
        return
    fitting = [f"per_device_eval_batch_size={b}" for b in _nearest_multiples(processes, num_generations, per_device)]
    fitting += [f"num_generations_eval={k}" for k in _nearest_divisors(total, num_generations)]
    raise ConfigError(
        f"an evaluation has batches of {per_device} completions (per_device_eval_batch_size) x "
        f"{_count(processes, 'process')} = {total}, which does not divide into whole groups of {num_generations} "
        f"(num_generations_eval, or num_generations). The nearest that work: {' or '.join(fitting)}"
    )


def check_prompt_count(
    prompts: int, per_device: int, passes: int, num_generations: int, passes_key: str = "gradient_accumulation_steps"
) -> None:
    """Refuse a training set that does not fill one rollout: no step could run.

    >>> check_prompt_count(2, 8, 1, 4)

    Args:
        prompts: size of the training set. The others: see `check_generation_batch`.

    Raises:
        ConfigError: a rollout needs more prompts than there are.
    """
    processes = count_processes()
    total = per_device * processes * passes
    needed = total // num_generations
    if prompts >= needed:
        return
    most = prompts * num_generations  # completions

    def largest(unit: int) -> int:
        step = num_generations // math.gcd(unit, num_generations)
        return most // unit // step * step

    named = {"per_device_train_batch_size": largest(processes * passes), passes_key: largest(per_device * processes)}
    fitting = [f"{name}={value}" for name, value in named.items() if value]
    if prompts:
        least = max(-(-total // prompts), num_generations)
        sizes = range(least, min(total, least + _SEARCHED) + 1)
        fitting.append(f"num_generations={next((k for k in sizes if total % k == 0), total)}")
    raise ConfigError(
        f"the training set has {_count(prompts, 'prompt')}, but a rollout needs {needed}: it has "
        f"{_spell_out(per_device, processes, passes, passes_key)}, in groups of {num_generations} (num_generations), "
        f"one for each prompt. Train on more prompts{', or set ' if fitting else ''}{' or '.join(fitting)}"
    )


def _spell_out(per_device: int, processes: int, passes: int, passes_key: str) -> str:
    total = per_device * processes * passes
    return (
        f"{per_device} completions a pass (per_device_train_batch_size) x {_count(processes, 'process')} x "
        f"{_count(passes, 'pass')} ({passes_key}) = {total} completions"
    )


def _count(number: int, word: str) -> str:
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    return f"{number} {word if number == 1 else plural}"


def _nearest_divisors(total: int, wanted: int) -> list[int]:
    """The divisors of `total` next to `wanted` on either side, 2 or more, within `_SEARCHED`."""
    below = range(min(wanted - 1, total), max(1, min(wanted - 1, total) - _SEARCHED), -1)
    above = range(wanted + 1, min(total, wanted + _SEARCHED) + 1)
    found = [next((k for k in side if total % k == 0), None) for side in (below, above)]
    return [k for k in found if k is not None]


def _nearest_multiples(unit: int, group: int, wanted: int) -> list[int]:
    """Values next to `wanted` such that value x unit is a multiple of `group`."""
    step = group // math.gcd(unit, group)
    return [value for value in (wanted // step * step, (wanted // step + 1) * step) if value >= 1]
