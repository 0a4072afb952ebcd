"""Check that an exported model is the one that was trained: load it with the program that it is for, in a separate
process, and compare it with the policy token by token."""

import base64
import io
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ExportError, shorten
from rloo_kit.export import loaders
from rloo_kit.images.tokens import FIRST_ID, REFERENCE, find_picture
from rloo_kit.models.policy import Policy
from rloo_kit.rollout.completions import generate_completions
from rloo_kit.rollout.types import Limits
from rloo_kit.system.versions import is_importable

ENGINE = "generate"  # both backends have it, and it does not start vLLM
LONGEST = 256  # tokens of a greedy completion; thousands of tokens of thinking would show nothing new
REFUSED = "the export is not what was trained"


@dataclass(frozen=True)
class ParityLimits:
    """Largest and mean difference of a token's log-probability in nats, and the least share of equal greedy texts."""

    largest: float
    mean: float
    equal: float


# By the file's type, and by the compute type of the policy or the program: the wider limit applies. docs/export.md has
# the measurements. The tensors prove the weights; a program that reads them wrongly (RoPE, norms, tokens) differs by
# far more than this. In 16 bits and below, greedy texts diverge at near-ties and stay apart.
OF_FILE = {
    "float32": ParityLimits(1e-3, 1e-4, 0.95),
    "float16": ParityLimits(5e-2, 5e-3, 0.8),
    "bfloat16": ParityLimits(0.3, 3e-2, 0.5),
    "q8_0": ParityLimits(1.0, 6e-2, 0.25),
}
OF_COMPUTING = {"float32": OF_FILE["float32"], "float16": OF_FILE["bfloat16"], "bfloat16": ParityLimits(1.0, 5e-2, 0.3)}
TYPES = {"LoRA": "float32", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # other kinds are types themselves
# llama.cpp sums the softmax of its reported log-probs in float32, likeliest first: a smaller share than this
# is lost to rounding, possibly in every row of the vocabulary.
LOST_A_ROW = 2.0**-24
MOST_UNSEEN = 0.02


@dataclass(frozen=True)
class Reference:
    """The trained policy's greedy completions."""

    rows: list[dict[str, Any]]  # text, ids and images of a prompt, completion and logps of its tokens
    limit: int  # of a completion, in tokens
    compute: str  # dtype of the policy's base
    device: str  # on which it ran
    num_rows: int  # of the vocabulary
    auto: str  # class of transformers that loads the model


@dataclass(frozen=True)
class Parity:
    """How much an export differs from the policy, in the program that it is for."""

    loader: str
    version: str
    holds: str  # type of the file's weights
    compute: str  # dtype that both sides compute in
    prompts: int
    tokens: int
    largest: float  # difference of a token's log-probability, in nats
    mean: float
    equal: int  # prompts whose greedy text is the same, end token included
    unseen: int  # tokens outside llama.cpp's likeliest 20, the only ones that it reports; they are in no other figure
    limits: ParityLimits  # the allowed differences

    @property
    def problems(self) -> list[str]:
        """The figures beyond their limit."""
        limits, found = self.limits, []
        if self.largest > limits.largest:
            found.append(f"the log-prob of a token differs by {self.largest:.2g} nats (limit {limits.largest:.2g})")
        if self.mean > limits.mean:
            found.append(f"log-probs differ by {self.mean:.2g} nats on average (limit {limits.mean:.2g})")
        if self.equal < (least := int(limits.equal * self.prompts)):
            found.append(f"{self.equal} of {self.prompts} greedy texts are equal (limit {least})")
        if self.unseen > MOST_UNSEEN * self.tokens:
            found.append(f"{self.unseen} of {self.tokens} tokens are not among the likeliest 20 (limit 2%)")
        return found

    def __str__(self) -> str:
        return (
            f"{self.loader} {self.version}, {self.prompts} prompts, {self.tokens} tokens: log-probs differ by at most "
            f"{self.largest:.2g} nats, {self.mean:.2g} on average (limits {self.limits.largest:.2g}, "
            f"{self.limits.mean:.2g}); {self.equal} of {self.prompts} greedy texts equal"
        )


def measure_reference(run: RunConfig, policy: Policy, prompts: list[str]) -> Reference:
    """The trained policy's greedy completions of rendered prompts, with log-probabilities."""
    limit = min(run.eval.max_completion_length or run.rloo.max_completion_length, LONGEST)
    plain = replace(policy, precision="no")  # other programs have no autocast
    made = generate_completions(plain, prompts, Limits(limit), temperature=0, engine=ENGINE)
    base = policy.model.get_base_model() if hasattr(policy.model, "peft_config") else policy.model
    table = base.get_input_embeddings().weight
    rows = []
    with policy.inference_mode():
        for text, completion in zip(prompts, made, strict=True):
            logps, _ = loaders.score_completion(policy.model, completion.prompt_ids, completion.ids)
            prompt = {"text": text, "ids": completion.prompt_ids, "images": []}
            if hasattr(policy.tokenizer, "vision"):
                prompt = _without_references(policy.tokenizer, prompt)
            rows.append(prompt | {"completion": completion.ids, "logps": logps})
    auto = f"AutoModelFor{'ImageTextToText' if hasattr(policy.tokenizer, 'vision') else 'CausalLM'}"
    dtype, device = str(table.dtype).removeprefix("torch."), str(policy.model.device)
    return Reference(rows, limit, dtype, device, table.shape[0], auto)


def _without_references(tokenizer: Any, prompt: dict[str, Any]) -> dict[str, Any]:
    """A prompt as other programs read it: with the model's placeholders, and its images as PNG in base64."""
    images = []
    for digest in REFERENCE.findall(prompt["text"]):
        buffer = io.BytesIO()
        find_picture(digest).open().save(buffer, "PNG", compress_level=1)
        images.append(base64.b64encode(buffer.getvalue()).decode())
    place = tokenizer.convert_tokens_to_ids(tokenizer.vision.writing.token)
    ids = [place if token >= FIRST_ID else token for token in prompt["ids"]]
    return {"text": tokenizer.spell(prompt["text"]), "ids": ids, "images": images}


def find_missing(loader: str) -> str | None:
    """Why a program cannot be run; None if it can."""
    is_there = loader != "llama.cpp" or is_importable("xllamacpp")
    return None if is_there else "xllamacpp is not installed (pip install xllamacpp)"


def check_parity(reference: Reference, loader: str, model: Path, kind: str, **request: Any) -> Parity:
    """Load `model` with `loader` (transformers, peft or llama.cpp) in a separate process and compare.

    Args:
        kind: of the file: a dtype, a type of GGUF, or LoRA. request: `adapter` and `four_bit`, for PEFT.

    Raises:
        ExportError: it does not load, or differs by more than the limits; the message has the figures.
    """
    request |= {"loader": loader, "model": str(model), "limit": reference.limit, "rows": reference.rows}
    reply = _ask(request | {"auto": reference.auto, "compute": reference.compute, "device": reference.device})
    differences: list[float] = []
    equal = unseen = 0
    for row, found in zip(reference.rows, reply["rows"], strict=True):
        tokens = found["prompt_tokens"]
        if tokens != (row["ids"] if isinstance(tokens, list) else len(row["ids"])):
            raise ExportError(
                f"{REFUSED}: {loader} tokenizes the prompt {row['text'][:80]!r} differently from the run. Nothing was "
                "published"
            )
        equal += found["greedy"] == row["completion"]
        unseen += found["logps"].count(None)
        pairs = zip(row["logps"], found["logps"], strict=True)
        differences += [abs(ours - theirs) for ours, theirs in pairs if theirs is not None]
    if not differences or any(value != value for value in differences):
        raise ExportError(f"{REFUSED}: its log-probs in {loader} are not finite")
    holds = TYPES.get(kind, kind)
    largest, mean, share = zip(astuple(OF_FILE[holds]), astuple(OF_COMPUTING[reference.compute]), strict=True)
    lost = LOST_A_ROW * reference.num_rows if loader == "llama.cpp" else 0.0
    parity = Parity(
        loader=loader,
        version=reply["version"],
        holds=holds,
        compute=reference.compute,
        prompts=len(reference.rows),
        tokens=len(differences) + unseen,
        largest=max(differences),
        mean=sum(differences) / len(differences),
        equal=equal,
        unseen=unseen,
        limits=ParityLimits(max(largest) + lost, max(mean) + lost, min(share)),
    )
    if parity.problems:
        raise ExportError(
            f"{REFUSED}: in {loader} {'; '.join(parity.problems)}. Nothing was published. If the run's model itself "
            "works, this is a bug in the export: keep the run's folder and report it"
        )
    return parity


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    """Run `loaders.py` on a request; raises ExportError with the end of its output if it fails."""
    with tempfile.TemporaryDirectory(prefix="rloo-kit-") as folder:
        asked, answer, log = (Path(folder) / name for name in ("request.json", "reply.json", "log"))
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-P", str(loaders.__file__), str(asked), str(answer)]
        with log.open("wb") as out:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ)).returncode
        if code or not answer.is_file():
            text = log.read_text(encoding="utf-8", errors="replace")
            raise ExportError(
                f"{request['loader']} does not load the export (exit code {code}), so it is not published. The end of "
                f"its output:\n{shorten(text, 3000, tail=2500)}"
            )
        return json.loads(answer.read_text(encoding="utf-8"))
