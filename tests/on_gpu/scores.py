"""Log-probabilities of fixed ragged completions, and their gradients; as a program: in float32, without Unsloth.

python tests/on_gpu/scores.py MODEL_FOLDER ADAPTER_FOLDER|none OUT.pt [KEY=VALUE ..]      (overrides of the run)
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = ((301, (650, 31, 200)), (40, (5, 400)), (7, (90,)))  # tokens of a prompt, and of its completions
RUN = """\
model: {{name: "{model}", {adapter}family: thinking, dtype: float32, max_seq_length: 1024}}
data: {{source: embedded/addition, max_prompt_length: 128}}
rewards: [{{name: thinking_reward}}]
rloo: {{max_steps: 1, max_completion_length: 64}}
"""


def make_groups(device: Any) -> list[Any]:
    """Three prompts with their completions, single bytes; a fortieth as long when rehearsing."""
    import torch

    from rloo_kit.gradient.packing import Group

    generator = torch.Generator().manual_seed(7)
    shorter = 40 if os.environ.get("RLOO_KIT_CELL_REHEARSAL") == "1" else 1

    def draw(length: int) -> Any:
        return torch.randint(0, 256, (max(1, length // shorter),), generator=generator).to(device)

    return [Group(draw(prompt), [draw(length) for length in lengths]) for prompt, lengths in LENGTHS]


def one_by_one(groups: Iterable[Any]) -> list[Any]:
    """Each completion in a group of its own."""
    from rloo_kit.gradient.packing import Group

    return [Group(group.prompt, [one]) for group in groups for one in group.completions]


def autocast(device: Any) -> Any:
    """As the trainer scores: in the GPU's precision."""
    import torch

    from rloo_kit.system import environment

    name = environment.current().dtype_name
    plain = device.type == "cpu" or name == "float32"
    return nullcontext() if plain else torch.autocast(device.type, dtype=getattr(torch, name))


def log_probs(policy: Any, passes: list[list[Any]], layout: str) -> Any:
    """(N,) log-probabilities of the groups of all passes, in nats, float32; with a graph where grad is enabled."""
    import torch

    from rloo_kit.gradient.scorer import Scorer

    scorer = Scorer(policy.model, 1.0, policy.tokenizer.pad_token_id, layout)
    with autocast(policy.model.device):
        return torch.cat([scorer.score(policy.model, groups).logps for groups in passes])


def gradients(policy: Any, passes: list[list[Any]], layout: str) -> dict[str, Any]:
    """Of a weighted mean of the log-probabilities, by parameter, float32 and on the host; training mode."""
    import torch

    policy.model.train()
    policy.model.zero_grad(set_to_none=True)
    logps = log_probs(policy, passes, layout)
    weights = torch.linspace(-1.0, 2.0, len(logps), device=logps.device)
    (logps * weights).mean().backward()
    trained = [(name, value) for name, value in policy.model.named_parameters() if value.requires_grad]
    return {name: value.grad.detach().float().cpu() for name, value in trained}


def move_adapter(policy: Any, scale: float = 0.02) -> None:
    """Random values in the B matrices: a fresh adapter is the identity, and would hide a kernel that leaves it out."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in policy.model.named_parameters():
            if "lora_B" in name:
                value.copy_(scale * torch.randn(value.shape, generator=generator))


def without_unsloth(model: Path, adapter: Path | None, out: Path, *overrides: str) -> dict[str, Any]:
    """What this file computes as a program: {"logps": (N,), "gradients": by parameter}."""
    import torch

    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UNSLOTH", "TRITON"))}
    environment |= {"RLOO_KIT_BACKEND": "transformers"}
    environment.pop("RLOO_KIT_CELL_FILE", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, __file__, str(model), str(adapter or "none"), str(out), *overrides]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


def main(model: str, adapter: str, out: str, *overrides: str) -> None:
    import torch

    from rloo_kit import load_config, load_policy

    run = Path(out).with_suffix(".yaml")
    named = "" if adapter == "none" else f'adapter: "{adapter}", '
    run.write_text(RUN.format(model=model, adapter=named), encoding="utf-8")
    policy = load_policy(load_config(run, *overrides))
    assert policy.backend == "transformers" and "unsloth" not in sys.modules
    groups = make_groups(policy.model.device)
    passes = [[one] for one in one_by_one(groups)]
    policy.model.eval()
    with torch.no_grad():
        logps = log_probs(policy, passes, "padded")
    torch.save({"logps": logps.cpu(), "gradients": gradients(policy, passes, "padded")}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
