"""Loading, continuing and saving policies through transformers + PEFT, and what is refused before weights are read."""

import json
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rloo_kit.config.run import load_config
from rloo_kit.demo import embedded
from rloo_kit.errors import BackendError
from rloo_kit.models import policy as policies
from rloo_kit.models import unsloth
from rloo_kit.models.policy import load_policy as load
from rloo_kit.models.policy import save_adapter
from rloo_kit.models.source import find_source
from rloo_kit.plan.vram_plan import VllmPlan
from rloo_kit.system.environment import STANDBY_VARIABLE
from rloo_kit.vllm import in_process

BASE, CONTINUED = "weights of the base", "weights of the adapter to continue"
RUN = """\
model: {name: %s}
data: {source: embedded/addition, max_prompt_length: 64}
rewards: [{name: thinking_reward}]
rloo: {max_steps: 1, max_completion_length: 32}
"""


@pytest.fixture
def make_run(tmp_path: Path, tiny_folder: Path) -> Any:
    """`make_run(*overrides, name=...)`: a run on the tiny checkpoint."""

    def build(*overrides: str, name: object = tiny_folder) -> Any:
        file = tmp_path / "run.yaml"
        file.write_text(RUN % json.dumps(str(name)))
        return load_config(file, *overrides)

    return build


def logits(policy: Any) -> Any:
    ids = torch.tensor([[10, 20, 30, 40, 50, 60]])
    with policy.inference_mode():
        return policy.model(input_ids=ids).logits


def change(file: Path, **settings: Any) -> None:
    """Replace settings in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def train_a_little(policy: Any) -> None:
    """Two steps of plain gradient descent on a fixed text, so that the adapter is no longer the identity."""
    ids = torch.tensor([[10, 20, 30, 40, 50, 60]])
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.02)
    policy.model.train()
    for _ in range(2):
        policy.model(input_ids=ids, labels=ids).loss.backward()
        assert any(parameter.grad is not None and parameter.grad.any() for parameter in trained)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_without_lora_every_parameter_is_trained_and_saved(make_run: Any, tmp_path: Path) -> None:
    """`lora: null` once gave a frozen model whose loss had no gradient."""
    policy = load(make_run("model.lora=null"))
    assert not hasattr(policy.model, "peft_config")
    assert all(parameter.requires_grad for parameter in policy.model.parameters())
    train_a_little(policy)
    folder = save_adapter(policy, tmp_path / "whole")
    assert (logits(load(make_run("model.lora=null", name=folder))) == logits(policy)).all()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_4bit_on_the_cpu_trains_and_continues(make_run: Any, tmp_path: Path) -> None:
    """4-bit is the path of every GPU below 16 GB; the CPU runs the same code, so it is tested for real here."""
    from bitsandbytes.nn import Linear4bit

    run = make_run("model.load_in_4bit=true")
    policy = load(run)
    layers = [module for module in policy.model.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 14  # seven projections in each of two layers
    assert layers[0].weight.quant_state.quant_type == "nf4" and layers[0].weight.quant_state.nested
    assert "in 4-bit" in policy.describe()
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    assert trained and {parameter.dtype for parameter in trained} == {torch.float32}
    packed = [layer.weight.data.clone() for layer in layers]
    before = logits(policy)
    policy.model.train()
    assert torch.equal(policy.model(input_ids=torch.tensor([[10, 20, 30, 40, 50, 60]])).logits, before)
    train_a_little(policy)
    assert not torch.allclose(logits(policy), before)
    # bitsandbytes repacks its weights at the first call in eval mode, with coarser scales, on CPUs that can do bf16
    assert all(torch.equal(layer.weight.data, old) for layer, old in zip(layers, packed, strict=True))
    assert layers[0].weight.quant_state.nested
    adapter = save_adapter(policy, tmp_path / "adapter")
    again = load(make_run("model.load_in_4bit=true", f"model.adapter={adapter}"))
    assert torch.equal(logits(again), logits(policy))


def test_adapter_is_float32_over_a_bfloat16_base(make_run: Any) -> None:
    """0.01 - 1e-6 is 0.01 in bfloat16: an adapter in the base's dtype did not move at TRL's learning rate."""
    policy = load(make_run("model.dtype=bfloat16"))
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in policy.model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.slow
def test_an_adapter_is_continued_and_not_wrapped_twice(make_run: Any, tmp_path: Path) -> None:
    """A second wrapping starts a fresh adapter on top, trains that one and saves it: the first run's work is lost."""
    policy = load(make_run("model.lora.r=4"))
    train_a_little(policy)
    adapter = save_adapter(policy, tmp_path / "adapter")
    assert not (adapter / "config.json").exists()
    for run in (make_run(name=adapter), make_run(f"model.adapter={adapter}")):
        again = load(run)
        assert list(again.model.peft_config) == ["default"] and again.model.peft_config["default"].r == 4
        assert not any("base_model.model.base_model" in name for name, _ in again.model.named_parameters())
        assert torch.equal(logits(again), logits(policy))
    train_a_little(again)
    assert not torch.equal(logits(again), logits(policy))


@pytest.mark.slow
def test_saving_leaves_the_reference_copy_behind_and_inference_the_mode(make_run: Any, tmp_path: Path) -> None:
    """TRL adds a second adapter "ref"; PEFT's plain save wrote it next to the first, and a merge took the wrong one."""
    policy = load(make_run())
    policy.model.add_adapter("ref", policy.model.peft_config["default"])
    names = {path.name for path in save_adapter(policy, tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names and "ref" not in names
    # Evaluation in the middle of a run left the model in eval mode: dropout and checkpointing off from then on.
    policy.model.train()
    with policy.inference_mode():
        assert not policy.model.training and not torch.is_grad_enabled()
    assert policy.model.training and torch.is_grad_enabled()
    policy.model.eval()
    with pytest.raises(ZeroDivisionError), policy.inference_mode():
        raise ZeroDivisionError
    assert not policy.model.training and torch.is_grad_enabled()


@pytest.mark.slow
def test_pad_token_is_not_the_end_token(make_run: Any, tiny_folder: Path, tmp_path: Path) -> None:
    """With pad = end every padded completion looks ended, and the end of the others is masked out of the loss."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    change(folder / "tokenizer_config.json", pad_token="<|im_end|>")
    policy = load(make_run(name=folder))
    assert policy.tokenizer.pad_token == "<|endoftext|>" and policy.tokenizer.padding_side == "left"
    assert policy.model.config.pad_token_id == policy.model.generation_config.pad_token_id == 256


def refused(run: Any) -> str:
    with pytest.raises(BackendError) as caught:
        load(run)
    return str(caught.value)


# `HERE` stands for the test's own empty folder.
REFUSALS = {
    "a run's folder gave a traceback about model_type": (["model.name=HERE"], ["HERE", "config.json", "model.name"]),
    "a wrong hub id named a file and no key": (["model.name=nobody/nothing"], ["model.name = nobody/nothing"]),
    "4-bit weights cannot be trained": (
        ["model.load_in_4bit=true", "model.lora=null"],
        ["cannot be trained", "model.load_in_4bit=false", "model.lora={}"],
    ),
    "modules that are not there": (["model.lora.target_modules=[c_attn]"], ["model.lora.target_modules"]),
    "Unsloth stretches the rotary embedding": (["rloo.max_completion_length=449"], ["512 positions", "64 + 449 = 513"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("incident", REFUSALS)
def test_what_cannot_be_loaded_is_refused_with_its_key(make_run: Any, tmp_path: Path, incident: str) -> None:
    """Refused before weights are read: the libraries' own messages name files and classes, not what to change."""
    overrides, words = REFUSALS[incident]
    text = refused(make_run(*(override.replace("HERE", str(tmp_path)) for override in overrides)))
    for word in words:
        assert word.replace("HERE", str(tmp_path)) in text


def test_adapter_of_the_embedded_model_from_another_machine(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base was looked up under the home folder of the adapter's author, and the adapter was refused."""
    base = tmp_path / "thinking-compact-0-r2"
    base.mkdir()
    for file in (base / embedded.RECORD, base / "config.json"):
        file.write_text("{}")
    monkeypatch.setenv("RLOO_KIT_CACHE", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": f"/nowhere/{base.name}"}))
    source = find_source(make_run(name=tmp_path))
    assert (source.base, source.adapter) == (str(base), str(tmp_path))


@pytest.fixture
def adapter(make_run: Any, tmp_path: Path) -> Path:
    """A small adapter of the tiny checkpoint."""
    return save_adapter(load(make_run("model.lora.r=2")), tmp_path / "adapter")


@pytest.mark.slow
def test_what_contradicts_an_adapter_is_refused(make_run: Any, adapter: Path, tmp_path: Path) -> None:
    """Two adapters for one model; one where every parameter is trained; one whose base has moved; a damaged one."""
    other = shutil.copytree(adapter, tmp_path / "other")
    text = refused(make_run(f"model.adapter={other}", name=adapter))
    assert str(adapter) in text and "names another" in text
    text = refused(make_run(f"model.adapter={adapter}", "model.lora=null"))
    assert "model.lora is null" in text and "model.lora={}" in text
    change(adapter / "adapter_config.json", base_model_name_or_path="/gone/model")
    text = refused(make_run(name=adapter))
    assert "/gone/model" in text and "model.name" in text and f"model.adapter={adapter}" in text
    change(adapter / "adapter_config.json", base_model_name_or_path=None)
    assert "names no base model" in refused(make_run(name=adapter))
    (adapter / "adapter_config.json").write_text('{"r": ')
    assert "no readable adapter_config.json" in refused(make_run(name=adapter))


@pytest.mark.slow
def test_an_adapter_and_copies_of_its_base(
    make_run: Any, make_tiny_model: Any, tiny_folder: Path, adapter: Path, tmp_path: Path
) -> None:
    """Sizes alone do not tell Thinking from Instruct: the adapter loads and the answers are noise."""
    other, copy, renamed, wider = (
        Path(shutil.copytree(tiny_folder, tmp_path / name))
        for name in ("another_model", f"{tiny_folder.name}-unsloth-bnb-4bit", "renamed", tiny_folder.name)
    )
    for folder in (other, copy):
        make_tiny_model(seed=1).save_pretrained(folder)
    text = refused(make_run(f"model.adapter={adapter}", name=other))
    assert str(tiny_folder) in text and str(other) in text and "base_model_name_or_path" in text
    for folder in (copy, renamed):
        assert load(make_run(f"model.adapter={adapter}", name=folder)).model.peft_config["default"].r == 2
    make_tiny_model(hidden_size=48).save_pretrained(wider)  # the same name, other sizes
    (adapter / "trained.json").unlink()  # of an older version
    text = refused(make_run(f"model.adapter={adapter}", name=wider))
    assert "does not fit" in text and "size mismatch" in text


@pytest.mark.slow
def test_an_adapter_knows_the_weights_that_it_was_trained_on(
    make_run: Any, make_tiny_model: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    """An adapter was loaded on any base whose folder had the same last name: 0.175 fell to 0.075 with exit code 0."""
    base = Path(shutil.copytree(tiny_folder, tmp_path / "one" / "base"))
    adapter = save_adapter(load(make_run("model.lora.r=2", name=base)), tmp_path / "adapter")
    (base / "consolidated.safetensors").write_bytes(b"the same in a form of others, which is never loaded")
    assert set(load(make_run(f"model.adapter={adapter}", name=base)).weights) == {BASE, CONTINUED}
    elsewhere = Path(shutil.copytree(base, tmp_path / "two" / "base"))
    for now in (elsewhere, base):  # of the same name elsewhere, and replaced in place
        make_tiny_model(seed=1).save_pretrained(now)
        text = refused(make_run(f"model.adapter={adapter}", name=now))
        assert "other weights" in text and str(now) in text and f"delete {adapter / 'trained.json'}" in text
    (adapter / "trained.json").unlink()
    assert load(make_run(f"model.adapter={adapter}", name=base))


@pytest.mark.slow
def test_a_quantised_checkpoint_cannot_be_trained_whole(make_run: Any, tiny_folder: Path, tmp_path: Path) -> None:
    """A checkpoint that brings its own 4-bit weights needs no key to be quantised."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model-bnb-4bit"))
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    change(folder / "config.json", quantization_config=quantised)
    text = refused(make_run("model.lora=null", name=folder))
    assert "cannot be trained" in text and "not quantised" in text


@pytest.mark.slow
@pytest.mark.skipif("unsloth" in sys.modules, reason="Unsloth is in this process")
@pytest.mark.parametrize("installed", [False, True])
def test_unsloth_forced_where_it_cannot_run(make_run: Any, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """Unsloth's own error for a missing GPU is a traceback of NotImplementedError in the middle of its import."""
    spec = SimpleNamespace() if installed else None
    monkeypatch.setattr("rloo_kit.models.unsloth.find_spec", lambda name: spec)
    text = refused(make_run("model.backend=unsloth"))
    assert text.startswith("model.backend is unsloth, but ") and "model.backend=transformers" in text
    assert ("rloo-kit doctor" in text) is installed and ("pip install -e '.[gpu]'" in text) is not installed


def test_unsloth_does_not_train_every_parameter(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `lora: null` and Unsloth there, auto takes the backend that can, and forcing Unsloth says why not."""
    stack = SimpleNamespace(unsloth=object())
    name, reason = policies._choose(make_run("model.lora=null"), stack)
    assert name == "transformers" and "model.lora is null" in reason
    assert policies._choose(make_run(), stack)[0] == "unsloth"
    with pytest.raises(BackendError, match="model.lora is null"):
        policies._choose(make_run("model.lora=null", "model.backend=unsloth"), stack)
    monkeypatch.setattr(policies, "_loaded", {"unsloth"})
    with pytest.raises(BackendError, match="restart the kernel"):
        policies._choose(make_run("model.backend=transformers"), stack)


def test_unsloth_loads_vllm_as_planned(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsloth takes a share of its own once vLLM may sleep, and merges adapters unless its variable is 0; imported too
    early vLLM never sleeps, and a second one would share the first one's process groups."""
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", unsloth.SHARE_VARIABLE):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv(STANDBY_VARIABLE, "1")
    monkeypatch.setenv(unsloth.MERGED_VARIABLE, "")  # put back afterwards
    monkeypatch.delenv(unsloth.MERGED_VARIABLE)
    run = make_run("rollout.engine=vllm", "model.lora.r=12", "rollout.vllm.enforce_eager=true")
    plan = VllmPlan(0.8, 32, 4.0, None)
    with pytest.raises(BackendError, match="vLLM is not installed: .*constraints-vllm"):
        unsloth._vllm_arguments(run, plan)
    monkeypatch.setattr(in_process, "find_vllm_problem", lambda: None)
    assert unsloth._vllm_arguments(run, plan) == {
        "fast_inference": True, "max_lora_rank": 16, "gpu_memory_utilization": 0.8, "max_num_seqs": 32,
        "float8_kv_cache": False, "enforce_eager": True, "unsloth_vllm_standby": True,
    }  # fmt: skip
    assert (os.environ[unsloth.SHARE_VARIABLE], os.environ[unsloth.MERGED_VARIABLE]) == ("1", "0")
    monkeypatch.setenv(unsloth.MERGED_VARIABLE, "attention")  # a value that is set is the user's, and is refused below
    assert unsloth._vllm_arguments(run, plan) and os.environ[unsloth.MERGED_VARIABLE] == "attention"
    with monkeypatch.context() as second:
        second.setattr(in_process, "is_running", lambda: True)
        with pytest.raises(BackendError, match="another model of this process has a vLLM .* restart the kernel"):
            unsloth._vllm_arguments(run, plan)
    monkeypatch.delenv(STANDBY_VARIABLE)
    with pytest.raises(BackendError, match="restart the kernel and call load_config before"):
        unsloth._vllm_arguments(run, plan)


def test_unsloths_vllm_gets_copies_of_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM multiplies one matrix of each pair by alpha / r, in place: in one precision those are the parameters."""
    live = torch.ones(2, 2, requires_grad=True)
    folders = []

    def load_lora(folder: str, load_tensors: bool) -> SimpleNamespace:
        folders.append(folder)
        return SimpleNamespace(lora_int_id=1, lora_tensors={"q_proj.lora_B.weight": live})

    folder = tempfile.TemporaryDirectory(dir=tmp_path)
    request = unsloth._hand_over(folder, SimpleNamespace(load_lora=load_lora))
    request.lora_tensors["q_proj.lora_B.weight"] *= 2
    assert folders == [folder.name] and torch.equal(live, torch.ones(2, 2))
    merged = SimpleNamespace(load_lora=lambda *_, **__: object())  # Unsloth's own request to merge
    monkeypatch.setenv(unsloth.MERGED_VARIABLE, "auto")  # unset it, the advice was: unset, Unsloth merges
    with pytest.raises(ValueError, match="UNSLOTH_VLLM_MERGED_ROLLOUT='auto'.* set it to 0"):
        unsloth._hand_over(folder, merged)


def test_an_embedded_model_takes_one_thread(make_run, tiny_folder, monkeypatch):
    """Two threads that wait for each other made a demo of two minutes last twenty on a busy machine."""
    monkeypatch.setattr(embedded, "build", lambda *_, **__: tiny_folder)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for wanted, threads in (("2", 2), (None, 1)):
            monkeypatch.setenv("OMP_NUM_THREADS", "2") if wanted else monkeypatch.delenv("OMP_NUM_THREADS")
            load(make_run(name="embedded/thinking"))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
