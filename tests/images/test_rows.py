"""Rows with images in the forms that people have them in, what is refused, and what tells prompts apart."""

import base64
import json
import re
from pathlib import Path

import datasets
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import prompt_identity
from rloo_kit.data.load import load_data
from rloo_kit.errors import BackendError, DataError
from rloo_kit.images.files import read_picture
from rloo_kit.images.model import attach
from rloo_kit.images.tokens import REFERENCE, Vision, refer, see
from rloo_kit.models.adapters import choose_targets
from rloo_kit.tools.turns import ToolFormat
from tests.data.conftest import jsonl
from tests.images.models import make, noise

IMAGES = ["img/0.png", "img/1.png", "img/2.png"]
PROMPTS, LISTS, SHOWN = ["<image> a", "b", "<image><image>c"], [IMAGES[:1], [], IMAGES[1:]], ["0 a", "b", "12c"]


@pytest.fixture
def read(tmp_path, monkeypatch):
    """`read(rows, **data)`: the data of a run on a tiny Qwen3-VL, in a folder with three images."""
    monkeypatch.chdir(tmp_path)
    Path("img").mkdir()
    model = str(make("qwen3_vl", tmp_path / "model"))
    for seed, name in enumerate(IMAGES):
        noise(seed).save(name)
    tokenizer = see(AutoTokenizer.from_pretrained(model), Vision(model, AutoConfig.from_pretrained(model), 4096))

    def build(rows=None, **data):
        data = {"source": None if "sources" in data else "rows.jsonl", "test_size": 0} | data
        keys = {"model": {"name": model}, "rewards": [{"name": "length_reward"}], "run": {"evaluate": False}}
        return load_data(RunConfig(data=data, rloo={"max_steps": 1}, **keys), tokenizer, rows=rows)

    return build


def shown(data):
    """The texts of prompts, the first image of them as 0, the next as 1, turns parted by |."""
    texts = ["|".join(re.findall(r"<.im_start.>\w+\n(.*?)<.im_end.>", prompt, re.DOTALL)) for prompt in data["prompt"]]
    found = list(dict.fromkeys(digest for text in texts for digest in REFERENCE.findall(text)))
    names = [REFERENCE.sub(lambda match: str(found.index(match[1])), text) for text in texts]
    return [re.sub(r"<.vision_(start|end).>", "", text) for text in names]


def test_lists(read):
    """A row without an image has None, "", [] or pandas' nan, and `images` may have one image alone."""
    pictures, files = list(map(Image.open, IMAGES)), [{"bytes": None, "path": path} for path in IMAGES[1:]]
    lists = [IMAGES[0], "", [*IMAGES[1:], ""]], [pictures[0], float("nan"), pictures[1:]]
    for images in (LISTS, *lists, [Path(IMAGES[0]).read_bytes(), None, files]):
        data = read([{"prompt": prompt, "images": value} for prompt, value in zip(PROMPTS, images, strict=True)])
        assert shown(data.train) == SHOWN and data.train["question"][:] == [" a", "b", "c"]
        assert data.train.column_names == ["prompt", "question"], "rewards get no pictures"


def test_files_and_tables(read):
    """Paths begin in the data file's folder, pictures of a dataset stay files, and a source of a mix may have none."""
    paths = datasets.Dataset.from_dict({"prompt": PROMPTS, "images": LISTS})
    table = paths.cast_column("images", datasets.List(datasets.Image()))
    table.to_parquet("rows.parquet")
    for data in (read(paths), read(table), read(source="rows.parquet")):
        assert shown(data.train) == SHOWN
    Path("rows.csv").write_text("prompt,image\nhow many,img/0.png\nnone,\n")
    assert shown(read(source="rows.csv").train) == ["0how many", "none"]
    Path("img/rows.jsonl").write_text(jsonl({"prompt": "x", "image": "0.png"}, {"prompt": "y", "image": "1.png"}))
    Path("text.jsonl").write_text(jsonl({"prompt": "the tag <image>"}, {"prompt": "z"}))
    mix = read(sources=[{"source": "img/rows.jsonl"}, {"source": "text.jsonl"}])
    assert shown(mix.train) == ["0x", "the tag <image>", "1y", "z"]
    assert "0" in shown(read(source="text.jsonl", test_source="img/rows.jsonl").test)[0]
    with pytest.raises(DataError, match="column 'picture' contains images, which would be in no prompt: rename it"):
        read(table.rename_column("images", "picture"))


def part(image=None, text=None):
    return {"type": "image" if text is None else "text", "image": image, "text": text}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def test_prompts(read):
    """Marks counted message by message stayed text; a row of texts among messages with images was refused."""
    talk = [{"role": "user", "content": "<image>q"}, {"role": "assistant", "content": [part(text="a")]}]
    encoded = base64.b64encode(Path(IMAGES[0]).read_bytes()).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    for expected, prompt, *images in (
        ("01what", "what", IMAGES[:2]),
        ("s|0q", [{"role": "system", "content": [part(text="s")]}, user("q")], IMAGES[:1]),
        ("0q|a|r 1", [*talk, user("r <image>")], IMAGES[:2]),
        ("0<image>1", [user(part(IMAGES[1]), part(text="<image>"), part(IMAGES[0]))]),
        ("a0b1", [user(part(text="a"), part(), part(text="b"), part())], IMAGES[:2]),
        ("ab", [user(part(text="a"), part(text="b"))]),
        ("0q0", [user(url, part(text="q"), {"type": "image", "base64": encoded})]),
        ("0q", json.dumps([user(part(), part(text="q"))]), IMAGES[:1]),
    ):
        assert shown(read([{"prompt": prompt} | ({"images": images[0]} if images else {})]).train) == [expected]


REFUSED = [
    ({"prompt": "x", "image": "img/9.png"}, "column 'image': there is no file 'img/9.png'; .*rename the column"),
    ({"prompt": "<image> <image>", "images": IMAGES[:1]}, "column has 1 images, its prompt has places for 2"),
    ({"prompt": "the tag <image>", "image": None}, "column has 0 images, its prompt has places for 1"),
    ({"prompt": [user(part(IMAGES[0]))], "image": IMAGES[0]}, "column has 1 images, its prompt has places for 0"),
    ({"prompt": [user(part("9.png"))]}, "there is no file '9.png'"),
    ({"prompt": "x", "image": IMAGES[0], "images": IMAGES[1:]}, "the columns image and images both have images"),
    ({"prompt": [user({"type": "video", "video": "x.mp4"})]}, "a part that is no text and no image: .*x.mp4"),
    ({"prompt": "<|image:0123456789abcd|>", "image": None}, "contains <.image:0123456789abcd.>, which stands for"),
]


@pytest.mark.parametrize(("row", "words"), REFUSED)
def test_what_is_refused_with_file_and_line(read, row, words):
    """Among thousands of rows, a file that is missing or a mark too many was named without its line."""
    Path("rows.jsonl").write_text(jsonl({"prompt": "ok", "image": IMAGES[0]}, row))
    with pytest.raises(DataError, match=f"rows.jsonl, line 2: .*{words}"):
        read()


def test_prompts_that_differ_in_an_image_are_different(read, capsys):
    """Questions alike about different images fell on one side of the split, as repeats of one prompt."""
    data = read([{"prompt": "What is it?", "image": IMAGES[row % 3]} for row in range(6)], test_size=1)
    assert "3 rows repeat an earlier prompt; the split keeps equal prompts together" in capsys.readouterr().out
    identities = list(map(prompt_identity, [*data.test["prompt"], *data.train["prompt"]]))
    assert len(identities) == 5 and identities.count(identities[0]) == 1 and len(set(identities)) == 3


def test_only_images_of_drawn_rows_are_read(read, monkeypatch):
    """`data.num_prompts: 500` decoded all 40,000 images of a source first, for twelve minutes."""
    opened = []
    monkeypatch.setattr(
        "rloo_kit.images.rows.read_picture", lambda *given: opened.append(given) or read_picture(*given)
    )
    Path("rows.jsonl").write_text(jsonl(*({"prompt": str(row), "image": IMAGES[row % 3]} for row in range(40))))
    assert len(read(num_prompts=4).train) == len(opened) == 4


def test_texts_are_texts_and_the_key_decides_the_size(tmp_path):
    """An observation with a reference became an image, one after an image in the text was refused, ids could not be
    decoded in batches, weights that the kit had saved kept the pixels of the run before, and target_modules left a
    tower that was to be trained without an adapter."""
    folder = str(make("qwen3_vl", tmp_path))
    config, picture = AutoConfig.from_pretrained(folder), read_picture(noise(1, 64, 64), None)
    small = see(AutoTokenizer.from_pretrained(folder), Vision(folder, config, 1024))
    small.save_pretrained(tmp_path / "saved")
    sizes = [Vision(str(tmp_path / "saved"), config, most).count(picture) for most in (1024, 4096)]
    assert sizes == [4, 16]
    parts = [{"type": "image", "image": refer(picture)}, {"type": "text", "text": "what?"}]
    talk = [{"role": "user", "content": parts}]
    prompt = small.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    ids = small([prompt, prompt])["input_ids"]
    assert small.batch_decode(ids) == [small.decode(row) for row in ids] and refer(picture) in small.decode(ids[0])
    form = ToolFormat.__new__(ToolFormat)  # of a template without tools
    form.tokenizer, form.options, talk[0]["content"] = small, {}, parts[::-1]
    prompt = small.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert REFERENCE.search(form.observe({"prompt": prompt, "question": "what?"}, f"see {refer(picture)}"))
    assert not REFERENCE.search(form.fit(f"see {refer(picture)}", 50))
    model = AutoModelForImageTextToText.from_pretrained(folder)
    with pytest.raises(BackendError, match="names no layer of the tower: leave it out, or add linear_fc1"):
        choose_targets(model, ["q_proj"], tower=True)
    for most, states in ((1024, 4), (4096, 16)):  # a second call kept the first one's size, and its states
        attach(model, small, Vision(folder, config, most))
        row = small(prompt)["input_ids"]
        assert sum(token > 2**60 for token in row) == states and model(torch.tensor([row])).logits.isfinite().all()
