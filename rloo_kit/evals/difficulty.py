"""Which training prompts are worth their completions: those that the starting policy solves sometimes.

A prompt that is always solved, or never, gives a group of equal rewards and no gradient. With
`rollout.difficulty_samples` above 0 each training prompt is sampled that many times before training, with the run's own
limits and temperature, and judged as evaluation judges (`answer_judge`); prompts with a pass rate at or below
`rollout.min_pass_rate`, or at or above `rollout.max_pass_rate`, are skipped. Pass rates are kept (`pass_rate_cache`),
and what was chosen is written into the run's folder, so that a resumed run trains on the same prompts.

Several processes share the measuring: each takes a part of the prompts.

Left out: measuring again while the policy learns (`resample` works with the policy of the moment), and an order of
difficulty. The pass rate of few samples is rough: of a prompt that is solved half the time, 8 completions are all
alike in 1 of 128 cases.
"""

import hashlib
import json
import os
import time
from typing import Any

import rloo_kit
from rloo_kit.collective import gather_lists, gather_objects, share, share_of
from rloo_kit.errors import ConfigError, DataError, SetupError
from rloo_kit.evals.evaluate import AnswerJudge, engine_outside_training
from rloo_kit.rollout.engine import generate_completions
from rloo_kit.runs.run_dir import RunDir
from rloo_kit.system.environment import CACHE_VARIABLE, cache_folder
from rloo_kit.system.processes import is_distributed, say

FOLDER = "difficulty"


class PassRateCache:
    """The pass rates that were measured under the same conditions.

    Args:
        conditions: everything that a pass rate depends on, but for the prompt and its right answer, as JSON takes it.

    Attributes:
        path: the file; it is made with the first entry.

    Raises:
        SetupError: from `add`, when the file cannot be written.
    """

    def __init__(self, conditions: dict[str, Any]) -> None:
        self.conditions = conditions
        text = json.dumps(conditions, sort_keys=True)
        self.path = cache_folder() / FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
        self._right = self._read()

    @staticmethod
    def key(prompt: str, answer: Any) -> str:
        """What a prompt and its right answer are known by."""
        return hashlib.sha256(f"{prompt}\0{answer}".encode()).hexdigest()[:32]

    def get(self, prompt: str, answer: Any) -> int | None:
        """How many completions of the prompt were right; None where it was not measured."""
        return self._right.get(self.key(prompt, answer))

    def add(self, measured: list[tuple[str, Any, int]]) -> None:
        """Keep what was measured: prompt, right answer, number of right completions."""
        found = self.take(measured)
        lines = [{"prompt": key, "right": right} for key, right in found.items()]
        try:
            self._append(lines)
        except OSError as error:
            raise SetupError(
                f"pass rates cannot be kept in {self.path}: {error.strerror or error}. Set {CACHE_VARIABLE} to a "
                "folder that can be written, or rollout.difficulty_samples=0"
            ) from error

    def take(self, measured: list[tuple[str, Any, int]]) -> dict[str, int]:
        """As `add`, but only for this process: another one has written it. Returns them by their keys."""
        found = {self.key(prompt, answer): right for prompt, answer, right in measured}
        self._right |= found
        return found

    def _append(self, lines: list[dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size == 0:
                lines = [{"conditions": self.conditions}, *lines]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a crash cut the last line off
                text = "\n" + text
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _read(self) -> dict[str, int]:
        try:
            lines = self.path.read_text(encoding="utf-8").split("\n")
        except OSError:
            return {}
        right = {}
        for line in lines:
            try:
                entry = json.loads(line)
                right[str(entry["prompt"])] = int(entry["right"])
            except (ValueError, KeyError, TypeError):  # the conditions, or a line that a crash cut off
                continue
        return right


SELECTION = "prompts.json"
BATCHES_AT_ONCE = 4  # batches between two entries in the cache: an engine that refills its rows likes long lists
SAMPLED_VALUES = 256  # of each tensor, for the fingerprint


def select_prompts(run: Any, policy: Any, dataset: Any, run_dir: RunDir) -> Any:
    """The prompts of `dataset` that are to be trained on; all of them unless `rollout.difficulty_samples` is above 0.

    Args:
        run: a `RunConfig`; read are `rollout`, `rloo`, `rewards`, `model`, `eval.batch_size` and `run`.
        policy: the policy that training starts from. dataset: `load_data(...).train`, with `prompt` and `answer`.
        run_dir: the run's open folder; what it holds from before a resume is used, else it is written.

    Returns:
        A `datasets.Dataset` with the same columns, in the same order.

    Raises:
        ConfigError: there are no answers to judge by.
        DataError: fewer prompts are left than one rollout takes; or a resumed run has other prompts than it had.
    """
    if not run.rollout.difficulty_samples:
        return dataset
    digest = _digest(dataset)
    selection = share(run_dir.read_json(SELECTION) if run_dir.resumed else None)
    if selection is None:
        selection = {"digest": digest} | _choose(run, policy, dataset)
        run_dir.write_json(SELECTION, selection)
    elif selection["digest"] != digest:
        raise DataError(
            f"{run_dir / SELECTION} chose among other prompts than the {len(dataset)} that data.* gives now; resume "
            "with the data of the run, or start anew: --overwrite"
        )
    return dataset.select(selection["kept"])


def measure_pass_rates(run: Any, policy: Any, prompts: list[str], answers: list[Any]) -> tuple[list[float], int]:
    """The share of right completions of each prompt, from the cache or measured, and how many were in the cache.

    Args:
        run: as for `select_prompts`. policy: what samples. prompts: rendered. answers: the right ones.
    """
    samples = run.rollout.difficulty_samples
    judge = AnswerJudge(run, policy.tokenizer, answers)
    try:
        cache = PassRateCache(_conditions(run, policy, judge))
        pairs = list(dict.fromkeys(zip(prompts, answers, strict=True)))
        todo = share([pair for pair in pairs if cache.get(*pair) is None])  # another machine has another cache
        _measure(run, policy, judge, cache, [todo[place] for place in share_of(todo)])
        cache.take(gather_lists([(*todo[place], cache.get(*todo[place])) for place in share_of(todo)]))
        judge.unscored = sum(gather_objects(judge.unscored))
    finally:
        judge.close()
    if judge.unscored:
        say(f"difficulty: {judge.unscored} completions could not be judged; they count as wrong")
    rights = share([cache.get(*pair) or 0 for pair in zip(prompts, answers, strict=True)])
    return [right / samples for right in rights], len(pairs) - len(todo)


def fingerprint(model: Any) -> str:
    """A digest of the weights that sample: 256 values of each tensor, with its name, shape and type.

    An adapter that changes nothing yet is left out, because its random half differs from seed to seed.
    """
    from rloo_kit.models.adapters import is_identity

    skipped = "lora_" if is_identity(model) else None
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if skipped is not None and skipped in name:
            continue
        name = name.replace(".base_layer", "").removeprefix("base_model.model.")
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        if not parameter.is_meta:
            values = parameter.detach().reshape(-1)
            step = max(1, values.numel() // SAMPLED_VALUES)
            digest.update(values[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _choose(run: Any, policy: Any, dataset: Any) -> dict[str, Any]:
    """The rows to keep and how many were left out for what; says so."""
    if "answer" not in dataset.column_names:
        raise ConfigError(
            f"rollout.difficulty_samples is {run.rollout.difficulty_samples}, but the training prompts have no column "
            "'answer' to judge completions by: name it in data.answer_column, or set rollout.difficulty_samples=0"
        )
    low, high = run.rollout.min_pass_rate, run.rollout.max_pass_rate
    rates, cached = measure_pass_rates(run, policy, list(dataset["prompt"]), list(dataset["answer"]))
    kept = [row for row, rate in enumerate(rates) if low < rate < high]
    hard, easy = (sum(rate <= low for rate in rates), sum(rate >= high for rate in rates))
    found = (
        f"of {len(rates)} training prompts, {hard} have a pass rate of at most {low:g} (rollout.min_pass_rate) and "
        f"{easy} of at least {high:g} (rollout.max_pass_rate)"
    )
    measured = f"{run.rollout.difficulty_samples} completions each"
    needed = run.rloo.prompts_per_generation
    if len(kept) < needed:
        raise DataError(
            f"{found}, {measured}: {len(kept)} are left, and a rollout takes {needed}. Use prompts of another "
            "difficulty (data.source), raise rollout.difficulty_samples or rloo.max_completion_length, widen the two "
            "rates, or set rollout.difficulty_samples=0 to train on all"
        )
    say(f"difficulty: {found}, {measured} ({cached} from the cache): {len(kept)} are trained on")
    mean = sum(rates) / len(rates)
    return {"prompts": len(rates), "too_hard": hard, "too_easy": easy, "mean_pass_rate": mean, "kept": kept}


def _measure(run: Any, policy: Any, judge: AnswerJudge, cache: PassRateCache, todo: list[tuple[str, Any]]) -> None:
    """Sample and judge `todo`, and add it to the cache chunk by chunk."""
    samples = run.rollout.difficulty_samples
    rows = run.rollout.rows or run.eval.batch_size
    prompts_at_once = max(1, BATCHES_AT_ONCE * rows // samples)
    printed_at = time.monotonic()
    each = " by each process" if is_distributed() else ""
    for start in range(0, len(todo), prompts_at_once):
        chunk = todo[start : start + prompts_at_once]

        def report(done: int, total: int, start: int = start) -> None:
            nonlocal printed_at
            if time.monotonic() - printed_at >= max(run.run.progress_every_s, 0.1):
                say(f"difficulty: {start + done // samples}/{len(todo)} prompts measured{each}")
                printed_at = time.monotonic()

        prompts = [prompt for prompt, _ in chunk]
        completions = generate_completions(
            policy,
            prompts,
            num_samples=samples,
            batch_size=rows,
            seed=_seed(run.run.seed, prompts[0]),
            engine=engine_outside_training(run, policy),
            on_batch=report,
            **_sampling(run),
        )
        judge.gold = [answer for _, answer in chunk]
        verdicts = judge.judge(completions) or []
        rights = [sum(verdicts[at : at + samples]) for at in range(0, len(verdicts), samples)]
        cache.add([(*pair, right) for pair, right in zip(chunk, rights, strict=True)])


def _sampling(run: Any) -> dict[str, Any]:
    """What the run samples with, as arguments of `generate_completions`."""
    names = ("max_completion_length", "temperature", "thinking_budget", "answer_budget", "thinking_close")
    return {name: getattr(run.rloo, name) for name in names}


def _conditions(run: Any, policy: Any, judge: AnswerJudge) -> dict[str, Any]:
    return {
        "model": run.model.name,
        "adapter": None if run.model.adapter is None else str(run.model.adapter),
        "weights": fingerprint(policy.model),
        "samples": run.rollout.difficulty_samples,
        **_sampling(run),
        "judge": repr(judge.reward),
        "kit": rloo_kit.__version__,
    }


def _seed(seed: int, prompt: str) -> int:
    """Another one for each chunk, so that no two prompts are judged by the same luck; the same in each run."""
    return int.from_bytes(hashlib.sha256(f"{seed} {prompt}".encode()).digest()[:4], "big")


def _digest(dataset: Any) -> str:
    return hashlib.sha256("\0".join(dataset["prompt"]).encode()).hexdigest()[:16]
