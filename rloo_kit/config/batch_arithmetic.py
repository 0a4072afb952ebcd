"""The arithmetic of a rollout: whole groups of `num_generations` completions, or the nearest numbers that give them."""

import math

from rloo_kit.errors import ConfigError
from rloo_kit.system.processes import count_processes

_LOOK = 10_000  # how far from the wanted group size a fitting one is looked for


def check_generation_batch(
    per_device: int, passes: int, num_generations: int, passes_key: str = "steps_per_generation"
) -> None:
    """Refuse a rollout that does not hold whole groups, and name the nearest numbers that work.

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
        f"a rollout has {per_device} completions a pass (per_device_train_batch_size) x {processes} "
        f"process{'es' if processes > 1 else ''} x {passes} pass{'es' if passes > 1 else ''} ({passes_key}) = {total} "
        f"completions, which does not divide into whole groups of {num_generations} (num_generations). The nearest "
        f"that work: {' or '.join(fitting)}"
    )


def _nearest_divisors(total: int, wanted: int) -> list[int]:
    """Divisors of `total`, 2 or more, next to `wanted` on either side; none that is further off than is looked."""
    below = range(min(wanted - 1, total), max(1, min(wanted - 1, total) - _LOOK), -1)
    above = range(wanted + 1, min(total, wanted + _LOOK) + 1)
    found = [next((k for k in side if total % k == 0), None) for side in (below, above)]
    return [k for k in found if k is not None]


def _nearest_multiples(unit: int, group: int, wanted: int) -> list[int]:
    """Values next to `wanted` for which value x unit is a multiple of `group`."""
    step = group // math.gcd(unit, group)
    return [value for value in (wanted // step * step, (wanted // step + 1) * step) if value >= 1]
