"""One rule of where outputs land and files are looked up, in every runner; no model is loaded."""

import json
from pathlib import Path

import pytest
import yaml

from tests.notebooks.batch_notebooks import write_notebook
from tests.notebooks.runners import COMMANDS, PYTHON, call, text_of
from tests.notebooks.server import jupyter_lab

PARAMETERS = "# Parameters\nconfig = 'task/mine.yaml'\noutput_dir = None\n"
BODY = """import json
import rloo_kit as kit
from rloo_kit.data.sources import find_file
from rloo_kit.system.input_files import find_input
from rloo_kit.system.environment import find_root
parameters = kit.read_parameters(globals())
run = kit.load_config(parameters.config, *parameters.overrides)
found = {"folder": run.folder.absolute(), "data": find_file(run.data.source, run.source)}
found |= {"reward": find_input("own.py", "rewards.0.name", run.source.parent), "adapter": run.model.adapter}
found |= {"root": find_root(), "again": kit.load_config(str(parameters.config)).source}
print("FOUND", json.dumps({key: str(value) for key, value in found.items()}))
"""
OWN = {
    "model": {"name": "embedded/thinking", "adapter": "old"},
    "data": {"source": "rows.csv", "test_size": 1},
    "rewards": [{"name": "own.py:score"}],
    "rloo": {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 2},
}
FILES = {
    "mine.yaml": yaml.safe_dump(OWN),
    "rows.csv": "prompt,answer\n" + "".join(f"1{n}+23=,{n + 33}\n" for n in range(9)),
    "own.py": "def score(completions, **columns):\n    return [float(len(text)) for text in completions]\n",
    "old/adapter_config.json": "{}",
}


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """Where a user starts: a config with its files in task/, and a clone that looks like a project of its own."""
    folder = tmp_path / "started"
    for name in ("task/old", "clone/notebooks", "clone/configs"):
        (folder / name).mkdir(parents=True)
    for name, text in FILES.items():
        (folder / "task" / name).write_text(text)
    (folder / ".env").write_text("")
    write_notebook(folder / "clone" / "notebooks" / "x.ipynb", BODY, parameters=PARAMETERS)
    (folder / "clone" / "notebooks" / "x.py").write_text(f"# %%\n{PARAMETERS}# %%\n{BODY}")
    return folder


def check(text: str, folder: Path, output: str = "outputs/mine") -> None:
    (line,) = [line for line in text.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert found.pop("folder") == str(folder / output)
    assert found.pop("root") == str(folder)
    names = {"data": "rows.csv", "reward": "own.py", "adapter": "old", "again": "mine.yaml"}
    assert found == {key: str(folder / "task" / name) for key, name in names.items()}


@pytest.mark.parametrize("runner", ["script", pytest.param("jupyter nbconvert --execute", marks=pytest.mark.slow)])
def test_the_folder_in_which_it_was_started(runner: str, started: Path) -> None:
    """papermill in a bare folder wrote the run into the clone of the kit, and nbconvert next to the notebook."""
    command = [str(word).replace("IN.", "clone/notebooks/x.") for word in COMMANDS[runner]]
    check(call(command, started).text, started)


@pytest.mark.slow
def test_a_batch_is_started_there_too(started: Path) -> None:
    """Its notebooks ran in the folder of the batch file's project."""
    values = {"notebook": "x.ipynb", "output_dir": "found", "runs": [{}]}
    file = started / "clone" / "notebooks" / "b.yaml"
    file.write_text(yaml.safe_dump(values))
    call([PYTHON, "-m", "rloo_kit.cli", "batch", "clone/notebooks/b.yaml"], started)
    check(text_of(started / "found" / "b" / "x" / "notebook.ipynb"), started, "found/b/x/mine")


@pytest.mark.slow
def test_a_jupyter_server_is_started_there_too(started: Path) -> None:
    """JupyterLab runs a notebook in the notebook's folder; a cell that changes the directory decides for itself."""
    with jupyter_lab(started) as server:
        kernel = server.start_session("clone/notebooks/x")
        moved = "\nimport os\nos.chdir('..')\nprint('MOVED', run.folder)\nkit.shutdown_kernel()"
        text = server.run_all(kernel, [PARAMETERS, BODY + moved])
    check(text, started)
    assert "MOVED outputs/mine" in text
