"""Write the four notebooks' percent scripts from `rloo.py.jinja`: `python notebooks/source/generate.py [FOLDER]`.

`make notebooks` runs this, then jupytext, which writes each `.ipynb` from its `.py`.
"""

import sys
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

SOURCE = Path(__file__).parent

# What the template knows of a notebook: thinks and small (the embedded model) pick its text; the rest are values.
VARIANTS = {
    "arithmetic_thinking": {
        "thinks": True,
        "small": True,
        "title": "RLOO on a small model that thinks",
        "config": "arithmetic_thinking",
    },
    "arithmetic_instruct": {
        "thinks": False,
        "small": True,
        "title": "RLOO on a small model that answers at once",
        "config": "arithmetic_instruct",
    },
    "qwen3_thinking_rloo": {
        "thinks": True,
        "small": False,
        "title": "RLOO on Qwen3-4B-Thinking",
        "config": "evening_12gb",
    },
    "qwen3_instruct_rloo": {
        "thinks": False,
        "small": False,
        "title": "RLOO on Qwen3-4B-Instruct",
        "config": "qwen3_4b_instruct",
    },
}


def generate(folder: Path) -> list[Path]:
    """Write the scripts into `folder`; returns their paths."""
    environment = Environment(
        loader=FileSystemLoader(SOURCE),
        block_start_string="# {%",  # a comment in Python, so that an editor can show the source as a script
        block_end_string="%}",
        trim_blocks=True,
        variable_start_string="<<",
        variable_end_string=">>",
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    template = environment.get_template("rloo.py.jinja")
    paths = [folder / f"{name}.py" for name in VARIANTS]
    for path, values in zip(paths, VARIANTS.values(), strict=True):
        path.write_text(template.render(values), encoding="utf-8")
    return paths


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE.parent)
