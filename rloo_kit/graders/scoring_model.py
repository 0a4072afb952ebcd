"""Trained reward models: checkpoints that score a prompt with its completion."""

import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from rloo_kit._stack import load_stack
from rloo_kit.errors import WholeBatchError, describe_error, excerpt
from rloo_kit.graders.verifier import AnswerReader
from rloo_kit.rewards._binding import check_int
from rloo_kit.rewards.text import THINK_END_ID, Decode, as_text
from rloo_kit.runs.files import read_object
from rloo_kit.runs.find import digest_weights, find_in_cache

TRAINS = "rloo-kit reward-model trains one and prints its folder"
TEXT_ENDS = "reward_text_ends"  # key of a checkpoint's config: texts without a chat template have an end token
_OPENED = re.compile(r"<think>\s*(</think>\s*)?\Z")  # by the chat template, at the end of a prompt


class TextForm:
    """The text that a reward model reads, as TRL's RewardTrainer writes it: a conversation through the chat template.

    Of a run's prompts, those rendered by the model's own template become that conversation; of another one, the
    question is the user's message. Any other text is followed by the completion and, with `ends`, the end token.
    """

    def __init__(self, tokenizer: Any, ends: bool = False) -> None:
        self.tokenizer, self.ends, self.bos, self.header = tokenizer, ends, "", ""
        if not tokenizer.chat_template:
            return
        asked = [{"role": "user", "content": "Q?"}]
        prompt = _OPENED.sub("", tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
        whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": "A."}], tokenize=False)
        before, _, self.end = whole.rpartition("A.")
        if before.startswith(prompt):
            self.header, self.opening = prompt.rpartition("Q?")[2], before.removeprefix(prompt)
            self.bos = tokenizer.bos_token if tokenizer.bos_token and whole.startswith(tokenizer.bos_token) else ""

    def encode(self, prompt: Any, completion: Any, question: str | None = None) -> list[int]:
        """The ids of a prompt with its completion, each a text or messages."""
        stem = _OPENED.sub("", prompt) if isinstance(prompt, str) and self.header else ""
        if stem and stem.endswith(self.header):
            text = f"{self.bos}{stem.removeprefix(self.bos)}{self.opening}{as_text(completion).strip()}{self.end}"
        elif isinstance(prompt, str) and (question is None or not self.header):
            text, end = prompt + as_text(completion), self.ends and self.tokenizer.eos_token or ""
            text = text if text.endswith(end) else text + end
            return list(self.tokenizer(text, add_special_tokens=self.ends)["input_ids"])
        else:
            asked = [{"role": "user", "content": question}] if isinstance(prompt, str) else prompt
            reply = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
            text = self.tokenizer.apply_chat_template([*asked, *reply], tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def find_model_fault(model: str) -> str:
    """Why a folder, or a hub id in the cache, is no reward model, and what to do; "" if its files do not say so."""
    folder = Path(os.path.expanduser(model))
    is_folder, names = folder.is_dir(), " ".join(path.name for path in folder.glob("*"))
    if (file := folder / "config.json" if is_folder else find_in_cache(model)) is None:
        return f"{model}: there is no such folder; {TRAINS}" if re.match(r"[./~]|.*/.*/", model) else ""
    config, inner, head = read_object(file), folder / "reward_model", "ForSequenceClassification"
    labels, made = config.get("id2label"), str(config.get("architectures") or head)
    outputs = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)  # two are not stored
    faults = {
        "is an adapter: merge it, PEFT's merge_and_unload()": not config and "adapter_config.json" in names,
        f"has no config.json; the reward model in it is {inner}": not config and inner.is_dir(),
        "has no config.json that can be read": not config,
        f"has the head of {made}; a reward model has that of a ...{head}": head not in made,
        f"has {outputs} outputs; a reward model has one (num_labels=1)": outputs != 1,
        "has no tokenizer; add its own": is_folder and not re.search(r"token|vocab|tekken|\.(model|spm)\b", names),
        "has no model.safetensors": is_folder and not re.search(r"\b(model\.safetensors|pytorch_model\.bin)", names),
    }
    return next((f"{model} {fault}; {TRAINS}" for fault, is_wrong in faults.items() if is_wrong), "")


class RewardModel(AnswerReader):
    """A trained reward model: a sequence-classification checkpoint with one output, loaded on first use.

    It scores prompt and completion together, in the form of `TextForm`; of a model that thinks, the answer alone. A
    completion without one gets the lowest score of the others in the call, so that it escapes no penalty.

    Args:
        model: hub id or folder of the checkpoint; `rloo-kit reward-model` trains one.
        batch_size: texts scored at a time.
        max_length: tokens; a longer text is not scored (None), never cut.
        device: "cuda", "cpu", ...; by default a GPU if there is one. dtype: torch's name, "auto" for the checkpoint's
            own.
        think_end_id, thinking, decode: as for `rewards.AnswerReward`, bound by a run.
    """

    __name__: ClassVar[str] = "reward_model"
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(
        self,
        model: str,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        device: str | None = None,
        dtype: str = "auto",
        think_end_id: int = THINK_END_ID,
        thinking: bool = False,
        decode: Decode | None = None,
    ) -> None:
        check_int("batch_size", batch_size, 1)
        check_int("max_length", max_length, 1, none_allowed=True)
        if not isinstance(model, str) or not model:
            raise ValueError(f"model is {model!r}; it must be the id or folder of a sequence-classification checkpoint")
        self.model, self.batch_size, self.max_length = os.path.expanduser(model), batch_size, max_length
        self.device, self.dtype, self._failure = device, dtype, ""
        super().__init__(think_end_id, thinking, decode)

    def __repr__(self) -> str:
        return f"RewardModel({self.model!r})"

    @cached_property
    def loaded(self) -> tuple[Any, TextForm]:
        """The model, in evaluation mode, and the form of its texts; raises WholeBatchError, but tries it only once."""
        if not (fault := self._failure or find_model_fault(self.model)):
            stack, more = load_stack(), {"dtype": self.dtype, "output_loading_info": True}
            try:
                tokenizer = stack.transformers.AutoTokenizer.from_pretrained(self.model)
                model, info = stack.transformers.AutoModelForSequenceClassification.from_pretrained(self.model, **more)
                fault = info["missing_keys"] and f"{self.model} lacks {excerpt(info['missing_keys'])}; {TRAINS}"
                if not (fault := find_model_fault(self.model) or fault):  # of a hub id, which is in the cache now
                    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
                    model.config.pad_token_id = tokenizer.pad_token_id  # it scores the last token that is not padding
                    device = self.device or ("cuda" if stack.torch.cuda.is_available() else "cpu")
                    return model.to(device).eval(), TextForm(tokenizer, getattr(model.config, TEXT_ENDS, False))
            except Exception as error:  # of any library
                fault = f"the reward model {self.model} cannot be loaded: {describe_error(error)}"
            self._failure = fault
        raise WholeBatchError(fault)

    @cached_property
    def source_digests(self) -> dict[str, str]:
        """The digest of its weights, an input of the run; a hub id is loaded first if it is not in the cache."""
        digest, fault = digest_weights(self.model), self._failure or find_model_fault(self.model)
        digest = digest or (digest_weights(self.model) if not fault and self.loaded else "")
        return {f"weights of the reward model {self.model}": digest} if digest else {}

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any] | None = None,
        completion_mask: Sequence[Any] | None = None,
        question: Sequence[Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """The scores of a batch; also `get_rewards(prompts, completions)`, as published recipes have it. Raises
        ValueError if the model thinks and there are no completion_ids, WholeBatchError as `loaded`."""
        (model, form), answers = self.loaded, list(completions)
        if self.thinking:
            if completion_ids is None:
                raise ValueError("reward_model reads the answer after the thinking, for which it needs completion_ids")
            answers = self._answers(completions, completion_ids, completion_mask)
        asked = columns.get("user_message", question) if self.decode is not None else None
        ids = [form.encode(*row) for row in zip(prompts, answers, asked or [None] * len(answers), strict=True)]
        unanswered = [i for i, answer in enumerate(answers) if self.thinking and not answer]
        longest = self.max_length or max(map(len, ids), default=0)
        fits = [i for i, row in enumerate(ids) if len(row) <= longest and i not in unanswered]
        rewards: list[float | None] = [None] * len(ids)
        for start in range(0, len(fits), self.batch_size):
            rows = fits[start : start + self.batch_size]
            batch = {"input_ids": [ids[i] for i in rows]}
            padded = form.tokenizer.pad(batch, padding_side="right", return_tensors="pt")
            with load_stack().torch.inference_mode():
                scores = model(**padded.to(model.device)).logits[:, 0]  # (rows,)
            for i, value in zip(rows, scores.float().tolist(), strict=True):
                rewards[i] = value
        for i in unanswered:
            rewards[i] = min((value for value in rewards if value is not None), default=None)
        return rewards

    get_rewards = __call__
