"""A notebook's parameters: what papermill and people write is understood or refused by name, from any folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rloo_kit as kit
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.notebook.parameters import KIT_ROOT, KNOWN, Parameters, assigned_names, read_parameters

CONFIG = "configs/arithmetic_thinking.yaml"
OWN = f"# Parameters: plain values\nconfig = {CONFIG!r}\nmax_steps = 60\n"


def read(*cells: str, **variables: Any) -> Parameters:
    """`read_parameters` in a kernel in which these cells ran; they are run here, and variables laid over them."""
    namespace: dict[str, Any] = {}
    for cell in cells:
        exec(cell, namespace)
    return read_parameters(namespace | {"In": ["", *cells]} | variables)


def refusal(*cells: str, **variables: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*cells, **variables)
    return str(caught.value)


def with_value(name: str, value: Any) -> str:
    return f"# Parameters: x\nconfig = {CONFIG!r}\n{name} = {value!r}\n"


def test_known_parameters_are_keys_of_the_configuration() -> None:
    """A key renamed in the configuration would leave a parameter that no run accepts."""
    for name, key in KNOWN.items():
        if not key.startswith("("):
            section, last = key.split(".")
            assert last in RunConfig.model_fields[section].annotation.model_fields, name


def test_declared_values_become_overrides(tmp_path: Path) -> None:
    """What is in the cell is the run, in full, whatever the file says; an empty run_name leaves the file's name."""
    cell = (
        f"# Parameters: x\nconfig = {CONFIG!r}\nrun_name = ''\noutput_dir = {str(tmp_path)!r}\nmax_steps = 3\n"
        "num_generations = 4\nlearning_rate = 2e-3\nbeta = 0.0\nmax_completion_length = 40\n"
        "eval_prompts = 10\nseed = 7\n"
        "overrides = \"rloo.temperature=0.9 'eval.thinking_budgets=[4, 8]'\"\nresume = False\noverwrite = True\n"
    )
    parameters = read(cell)
    assert parameters.overrides == [
        f"run.output_dir={tmp_path}", "rloo.max_steps=3", "rloo.num_generations=4", "rloo.learning_rate=0.002",
        "rloo.beta=0.0", "rloo.max_completion_length=40", "eval.num_prompts=10", "run.seed=7", "rloo.temperature=0.9",
        "eval.thinking_budgets=[4, 8]",
    ]  # fmt: skip
    assert (parameters.config, parameters.resume, parameters.overwrite) == (KIT_ROOT / CONFIG, False, True)
    run = kit.load_config(parameters.config, *parameters.overrides)
    assert run.folder == tmp_path / "arithmetic_thinking" and run.rloo.max_steps == 3 and run.run.seed == 7
    assert run.eval.thinking_budgets == [4, 8] and run.rloo.temperature == 0.9


def test_undeclared_names_are_not_overridden() -> None:
    """A notebook with fewer parameters keeps the file's values for the others."""
    parameters = read(OWN)
    assert parameters.overrides == ["rloo.max_steps=60"] and not parameters.overwrite
    assert list(parameters.values) == ["config", "max_steps"]


def test_paths_that_papermill_injects_are_no_parameters_of_the_run() -> None:
    """`papermill --inject-paths` was refused for two names that nobody had misspelt."""
    parameters = read(OWN, "# Parameters\nmax_steps = 2\nPAPERMILL_INPUT_PATH = 'a'\nPAPERMILL_OUTPUT_PATH = 'b'\n")
    assert parameters.overrides == ["rloo.max_steps=2"] and list(parameters.values) == ["config", "max_steps"]


def test_variables_of_the_notebook_are_no_parameters() -> None:
    """Run again after training, the cell once took `seed` and `beta` of later cells for parameters."""
    parameters = read(OWN, "seed = 'abc'; beta = object(); steps = 3", "x = 1  # Parameters")
    assert parameters.overrides == ["rloo.max_steps=60"]


def test_added_cell_wins_and_may_hold_what_is_not_declared() -> None:
    """papermill's cell runs after the notebook's own, and gives some names only."""
    parameters = read(OWN, "# Parameters\nmax_steps = 5\nseed = 3\n")
    assert parameters.overrides == ["rloo.max_steps=5", "run.seed=3"]


@pytest.mark.parametrize(
    ("name", "given", "override"),
    [
        ("learning_rate", "0.1e-5", "rloo.learning_rate=1e-06"),
        ("learning_rate", "1e-6", "rloo.learning_rate=1e-06"),
        ("learning_rate", 1, "rloo.learning_rate=1.0"),
        ("max_steps", "20", "rloo.max_steps=20"),
        ("max_steps", "2e1", "rloo.max_steps=20"),
        ("max_steps", 20.0, "rloo.max_steps=20"),
        ("eval_prompts", None, "eval.num_prompts=null"),
        ("eval_prompts", "null", "eval.num_prompts=null"),
        ("run_name", "no", "run.name=no"),
        ("run_name", "true", 'run.name="true"'),
        ("run_name", "007", 'run.name="007"'),
        ("run_name", 7, 'run.name="7"'),
        ("run_name", " [a] # b: ", 'run.name=" [a] # b: "'),
    ],
)
def test_text_is_understood(name: str, given: Any, override: str) -> None:
    """`-p learning_rate 0.1e-5` once arrived as text and reached the trainer so; `run_name: 007` became run 7."""
    parameters = read(with_value(name, given))
    assert parameters.overrides == [override]
    run = kit.load_config(parameters.config, *parameters.overrides)
    if name == "run_name":
        assert run.name == str(given)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("true", True), ("True", True), ("yes", True), ("on", True), (1, True), ("1", True), (True, True)]
    + [("false", False), ("False", False), ("no", False), ("off", False), (0, False), (False, False)],
)
def test_switches_are_understood(given: Any, meant: bool) -> None:
    """`-p overwrite true` arrives as the text 'true', and `bool("false")` is True."""
    assert read(with_value("overwrite", given)).overwrite is meant
    assert read(with_value("resume", given)).resume is meant


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("max_steps", True, "is True; it takes a whole number or null"),
        ("max_steps", 2.5, "is 2.5; it takes a whole number or null"),
        ("max_steps", "many", "is 'many'; it takes a whole number or null"),
        ("max_steps", 0, "is 0; it must be at least 1"),
        ("seed", None, "is None; it takes a whole number"),
        ("learning_rate", False, "is False; it takes a number"),
        ("learning_rate", "fast", "is 'fast'; it takes a number"),
        ("learning_rate", ".nan", "is '.nan'; it must be a finite number"),
        pytest.param("learning_rate", 10**400, "...; it takes a number", id="huge"),
        ("beta", [0.1], "is [0.1]; it takes a number"),
        ("run_name", False, "is False; it takes text (in quotes"),
        ("run_name", 1.5, "is 1.5; it takes text"),
        ("output_dir", "", "is ''; it takes the folder that runs are written into"),
        ("config", "", "is ''; it takes a file"),
        ("overwrite", "perhaps", "is 'perhaps'; it takes True or False"),
        ("overwrite", 2, "is 2; it takes True or False"),
        ("overwrite", None, "is None; it takes True or False"),
        ("overrides", "rloo.temperature 0.9", "'rloo.temperature' in it is not section.key=value"),
        ("overrides", "eval.thinking_budgets=[4, 8]", "'8]' in it is not section.key=value; quote an item"),
        ("overrides", "run.name='x", 'it takes text such as "rloo.temperature=0.9'),
        ("overrides", 3, "is 3; it takes text such as"),
    ],
)
def test_ill_typed_values_are_refused_by_name(name: str, given: Any, wanted: str) -> None:
    """`num_generations: true` was once a run with one generation, and `run_name: no` a folder named False."""
    message = refusal(with_value(name, given))
    assert message.startswith(f"{name}: ") and wanted in message and "\n" not in message


def test_a_variable_that_a_later_cell_took_over_is_named_by_its_type() -> None:
    """`config = kit.load_config(...)` printed the whole run into the error."""
    assert refusal(OWN, config=RunConfig) == (
        "config: is a ModelMetaclass; it takes text (in quotes; papermill leaves the text of -r NAME VALUE as it is)"
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_step", "; did you mean max_steps?"),
        ("num_generation", "; did you mean num_generations?"),
        ("rloo_k", "; it is an old TRL name of num_generations: set num_generations"),
        ("cliprange", '; it is an old TRL name of epsilon: it is a key of the configuration, so it goes into '
         'overrides: overrides = "rloo.epsilon=..."'),
        ("top_p", '; it is a key of the configuration, so it goes into overrides: overrides = "rloo.top_p=..."'),
        ("temperature", 'overrides = "rloo.temperature=..." or overrides = "eval.temperature=..."'),
        ("temprature", "; did you mean temperature? it is a key"),
        ("zzz", "; known here: beta, config, eval_prompts"),
    ],
)  # fmt: skip
def test_unknown_names_are_refused(name: str, hint: str) -> None:
    """To papermill `-p max_step 20` is a warning in its log: the run then took its 60 steps and looked right."""
    message = refusal(OWN, f"# Parameters\n{name} = 20\n")
    assert message.startswith(f"{name}: unknown parameter (In[2])") and hint in message


def test_unknown_names_in_the_notebooks_own_cell_are_refused_too() -> None:
    """All at once, with their places, and with what else is wrong: one run to learn of three mistakes."""
    own = OWN + "max_stepz: int = 3\na, seeed = 1, 2\n"
    lines = refusal(own, "# Parameters\nbeta = True\nmax_step = 1").splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        "max_stepz: unknown parameter (In[1])",
        "a: unknown parameter (In[1])",
        "seeed: unknown parameter (In[1])",
        "max_step: unknown parameter (In[2])",
        "beta: is True",
    ]


def test_a_mended_cell_replaces_what_it_was() -> None:
    """`In` keeps the misspelt cell for good; every later try was refused until the kernel was started anew."""
    typo = OWN.replace("max_steps", "max_step")
    assert "max_step: unknown" in refusal(typo)
    assert read(typo, "x = 1", OWN).overrides == ["rloo.max_steps=60"]
    assert read(OWN, "# Parameters\nmax_step = 1", OWN).overrides == ["rloo.max_steps=60"]
    assert read(OWN, "# Parameters\nmax_step = 1", "# Parameters\nmax_steps = 1").overrides == ["rloo.max_steps=1"]
    assert "max_step: unknown" in refusal(OWN, typo)


def test_a_removed_line_no_longer_counts() -> None:
    """Its variable stays in the kernel, and would have gone on overriding the file."""
    assert read(OWN + "beta = 0.5\n", OWN).overrides == ["rloo.max_steps=60"]


def test_a_notebook_whose_own_first_line_is_bare() -> None:
    """`# Parameters` alone is what papermill writes too; a notebook of one's own may well begin so."""
    bare = OWN.replace(": plain values", "")
    assert read("import os", bare, "# Parameters\nmax_steps = 2\n").overrides == ["rloo.max_steps=2"]
    assert "max_step: unknown parameter (In[2])" in refusal(bare, "# Parameters\nmax_step = 2\n")
    assert "max_step: unknown" in refusal(bare + "max_step = 1", "# Parameters\nmax_steps = 2\n")


def test_cells_that_did_not_run_or_are_none_are_passed_over() -> None:
    """A cell with an error in it is in `In` as well, and other comments start alike."""
    cells = ["", "# Parameters: x\nmax_step = = 3", "# Parameters of the model\nnum = 3", OWN, "!ls"]
    assert assigned_names({"In": cells}) == {"config": "In[3]", "max_steps": "In[3]"}
    assert assigned_names({"In": ["", "\n\n" + OWN]}) == {"config": "In[1]", "max_steps": "In[1]"}


def test_parameters_of_a_script(tmp_path: Path) -> None:
    """`python notebooks/x.py` has no `In`: its cells come from its file."""
    script = tmp_path / "nb.py"
    script.write_text(f"# %% [markdown]\n# A\n\n# %% tags=['parameters']\n{OWN}\n# %%\nseed = 'later'\n")
    namespace = {"__file__": str(script), "config": CONFIG, "max_steps": "4", "seed": "later"}
    assert read_parameters(namespace).overrides == ["rloo.max_steps=4"]
    script.write_text(script.read_text().replace("max_steps", "max_step"))
    with pytest.raises(ConfigError, match=r"max_step: unknown parameter \(nb.py\); did you mean max_steps"):
        read_parameters(namespace)


@pytest.mark.parametrize("extra", [{}, {"__file__": "/nowhere/x.py"}, {"__file__": 3}, {"In": []}, {"In": ["", "x"]}])
def test_without_cells_known_names_count(extra: dict[str, Any]) -> None:
    """A kernel that keeps no history, a module that was imported: values still count, and are still checked."""
    assert read_parameters({"config": CONFIG, "max_steps": 3, "other": 1} | extra).overrides == ["rloo.max_steps=3"]
    with pytest.raises(ConfigError, match="max_steps: is 2.5"):
        read_parameters({"config": CONFIG, "max_steps": 2.5} | extra)


def test_without_config() -> None:
    """The next cell would have failed on an attribute."""
    assert refusal("# Parameters: x\nmax_steps = 3") == (
        "config: not set; it names the run's file. Run the cell that starts with '# Parameters' first"
    )


def test_one_key_is_not_given_twice() -> None:
    """`overrides` won over the parameter beside it, and the printed table said something else than the run did."""
    message = refusal(OWN + "overrides = '--rloo.max_steps=5'\n")
    assert message == (
        "overrides: has --rloo.max_steps=5, and the parameter max_steps sets rloo.max_steps=60; set max_steps instead"
    )
    assert read(OWN + "run_name = ''\noverrides = ['run.name=x']\n").overrides == ["rloo.max_steps=60", "run.name=x"]


def test_bounds_are_the_configurations_own() -> None:
    """Values that are of the right type and impossible: `load_config` says so, with the key."""
    parameters = read(OWN, "# Parameters\nnum_generations = 7\n")
    with pytest.raises(ConfigError, match="num_generations"):
        kit.load_config(parameters.config, *parameters.overrides)


def test_paths_from_a_folder_below_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JupyterLab runs a notebook in its own folder, and `configs/x.yaml` is beside that folder."""
    project = tmp_path / "project"
    (project / "notebooks").mkdir(parents=True)
    (project / "configs").mkdir()
    (project / "configs" / "mine.yaml").write_text((KIT_ROOT / CONFIG).read_text())
    (project / "notebooks" / "near.yaml").write_text((KIT_ROOT / CONFIG).read_text())
    monkeypatch.chdir(project / "notebooks")
    parameters = read(with_value("output_dir", "outputs"), "# Parameters\nconfig = 'configs/mine.yaml'")
    assert parameters.config == project / "configs" / "mine.yaml"
    assert parameters.overrides == [f"run.output_dir={project / 'outputs'}"]
    for given in ("near.yaml", "../configs/mine.yaml", str(project / "configs" / "mine.yaml")):
        assert read(OWN, f"# Parameters\nconfig = {given!r}").config.is_file()
    assert read(OWN).config == KIT_ROOT / CONFIG  # not in this project: the kit's own


def test_a_config_that_is_nowhere_names_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`No such file: configs/x.yaml` did not say that the working directory was another one."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    places = [tmp_path / "configs/x.yaml", tmp_path / "deep/configs/x.yaml", KIT_ROOT / "configs/x.yaml"]
    assert refusal(OWN, "# Parameters\nconfig = 'configs/x.yaml'") == (
        f"config: is 'configs/x.yaml'; there is no such file; looked at {', '.join(map(str, places))}"
    )


def test_parameters_print_as_a_table() -> None:
    """The first output of a run says what it runs with, in a terminal and in a saved notebook."""
    text = str(read(OWN + "run_name = ''\noverwrite = 'yes'\noverrides = 'rloo.top_p=0.9 eval.greedy=false'\n"))
    assert repr(read(OWN)) == str(read(OWN))
    assert [line.split("  ")[0] for line in text.splitlines()] == [
        "parameter", "config", "run_name", "max_steps", "overrides", "overwrite"
    ]  # fmt: skip
    for part in (
        str(KIT_ROOT / CONFIG),
        "(the file's name)",
        "60",
        "rloo.max_steps",
        "rloo.top_p=0.9 eval.greedy=false",
    ):
        assert part in text


NOTEBOOK_CELLS = [
    ('# Parameters: plain values\nconfig = "configs/arithmetic_thinking.yaml"\noutput_dir = "outputs"\nmax_steps = 60\n'
     "learning_rate = 2e-3\noverwrite = False", ["parameters"]),
    ("import rloo_kit as kit\nparameters = kit.read_parameters(globals())\nprint(parameters)", []),
    ("run = kit.load_config(parameters.config, *parameters.overrides)\n"
     "print('RUN', run.rloo.max_steps, run.rloo.learning_rate, parameters.overwrite is True, run.folder)", []),
]  # fmt: skip


@pytest.mark.slow
def test_papermill_from_another_folder(tmp_path: Path) -> None:
    """papermill itself: what arrives is what was meant, and what was not is refused by name with a failing exit."""
    import nbformat

    cells = [nbformat.v4.new_code_cell(source, metadata={"tags": tags}) for source, tags in NOTEBOOK_CELLS]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), tmp_path / "in.ipynb")
    work = tmp_path / "work"
    work.mkdir()

    def start(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "papermill", "--log-output", "--no-progress-bar", "../in.ipynb", "out.ipynb"]
        env = os.environ | {"PYTHONPATH": str(KIT_ROOT), "IPYTHONDIR": str(tmp_path / "ipython")}
        done = subprocess.run(
            [*command, *arguments], cwd=work, env=env, capture_output=True, text=True, timeout=240, check=False
        )
        return done.returncode, done.stdout + done.stderr

    code, text = start("-p", "learning_rate", "1e-6", "-p", "overwrite", "true", "-p", "max_steps", "3")
    assert code == 0, text
    assert f"RUN 3 1e-06 True {KIT_ROOT / 'outputs' / 'arithmetic_thinking'}" in text
    code, text = start("-y", json.dumps({"learning_rate": "0.1e-5", "seed": 3}))
    assert code == 0 and "RUN 60 1e-06 False" in text
    code, text = start("-p", "max_step", "20", "-p", "learning_rate", "fast")
    assert code != 0 and "RUN" not in text.replace("'RUN'", "")
    assert "max_step: unknown parameter (In[2]); did you mean max_steps?" in text
    assert "learning_rate: is 'fast'; it takes a number" in text
