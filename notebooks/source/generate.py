"""Write the four notebooks' percent scripts from `rloo.py.jinja`: `python notebooks/source/generate.py [FOLDER]`.

`make notebooks` runs this, then jupytext, which writes each `.ipynb` from its `.py`.
"""

import sys
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

SOURCE = Path(__file__).parent
BAKERY = "A bakery bakes 14 trays of 12 rolls. In the evening 29 rolls are left. How many were sold?"

# What the template knows of a notebook: thinks and small (the embedded model) pick its text; the rest are values.
VARIANTS = {
    "arithmetic_thinking": {
        "thinks": True,
        "small": True,
        "title": "RLOO on a small model that thinks",
        "config": "arithmetic_thinking",
        "max_steps": 50,
        "num_generations": 8,
        "max_completion_length": 48,
        "question": "47+385=",
    },
    "arithmetic_instruct": {
        "thinks": False,
        "small": True,
        "title": "RLOO on a small model that answers at once",
        "config": "arithmetic_instruct",
        "max_steps": 80,
        "num_generations": 8,
        "max_completion_length": 16,
        "question": "147+285=",
    },
    "qwen3_thinking_rloo": {
        "thinks": True,
        "small": False,
        "title": "RLOO on Qwen3-4B-Thinking",
        "config": "qwen3_4b_thinking",
        "max_steps": 200,
        "num_generations": 16,
        "max_completion_length": 12288,
        "question": BAKERY,
    },
    "qwen3_instruct_rloo": {
        "thinks": False,
        "small": False,
        "title": "RLOO on Qwen3-4B-Instruct",
        "config": "qwen3_4b_instruct",
        "max_steps": 200,
        "num_generations": 8,
        "max_completion_length": 2048,
        "question": BAKERY,
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
