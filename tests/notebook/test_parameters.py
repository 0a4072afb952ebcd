"""A notebook's parameters: what papermill and people write is understood or refused by name, from any folder."""

from pathlib import Path
from typing import Any

import pytest

import rloo_kit as kit
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.notebook.parameters import KIT_ROOT, KNOWN, Parameters, read_parameters

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


def test_declared_values_become_overrides(tmp_path: Path) -> None:
    """What the cell sets wins over the file, and nothing else; an empty run_name leaves the file's name."""
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


def test_none_leaves_a_key_to_the_file(tmp_path: Path) -> None:
    """The notebook took 48 tokens for the 32 of the user's file, and a rate of 2e-3 for 1e-4, without a word."""
    names = [name for name in KNOWN if name not in ("config", "overrides", "resume", "overwrite")]
    cell = "".join(f"{name} = None\n" for name in names)
    parameters = read(OWN.replace("max_steps = 60\n", cell), "# Parameters\nbeta = 0.5")
    assert parameters.overrides == ["rloo.beta=0.5"]
    rows = [line.split() for line in str(parameters).splitlines()[1:]]
    assert [row[0] for row in rows] == ["config", "beta"] and rows[1] == ["beta", "0.5", "rloo.beta"]


BARE = OWN.replace(": plain values", "")
TYPO = OWN.replace("max_steps", "max_step")
SIXTY, TWO = ["rloo.max_steps=60"], ["rloo.max_steps=2"]


@pytest.mark.parametrize(
    ("cells", "overrides"),
    [
        # undeclared names are not overridden; declared ones are, in papermill's cell too
        ([OWN], SIXTY),
        ([OWN, "# Parameters\nmax_steps = 5\nseed = 3"], ["rloo.max_steps=5", "run.seed=3"]),
        # papermill --inject-paths was refused for two names that were not misspelt
        ([OWN, "# Parameters\nmax_steps = 2\nPAPERMILL_INPUT_PATH = 'a'\nPAPERMILL_OUTPUT_PATH = 'b'"], TWO),
        # run again after training, the cell took seed and beta of later cells for parameters
        ([OWN, "seed = 'abc'; beta = object(); n = 3", "x = 1  # Parameters", "# Parameters of a model\nn = 3"], SIXTY),
        # a removed line no longer counts, nor a misspelt cell that was corrected, nor papermill's before it
        ([OWN + "beta = 0.5\n", OWN], SIXTY),
        ([TYPO, "x = 1", OWN], SIXTY),
        ([OWN, "# Parameters\nmax_step = 1", OWN], SIXTY),
        ([OWN, "# Parameters\nmax_step = 1", "# Parameters\nmax_steps = 2"], TWO),
        (["import os", BARE, "# Parameters\nmax_steps = 2"], TWO),
    ],
)
def test_which_cells_count(cells: list[str], overrides: list[str]) -> None:
    """`In` keeps every cell that ran, the misspelt ones for good; papermill's may look like the notebook's."""
    assert read(*cells).overrides == overrides


@pytest.mark.parametrize(
    ("name", "given", "override"),
    [
        ("learning_rate", "0.1e-5", "rloo.learning_rate=1e-06"),
        ("learning_rate", 1, "rloo.learning_rate=1.0"),
        ("max_steps", "2e1", "rloo.max_steps=20"),
        ("max_steps", 20.0, "rloo.max_steps=20"),
        ("eval_prompts", "null", "eval.num_prompts=null"),
        ("run_name", "no", "run.name=no"),
        ("run_name", "true", 'run.name="true"'),
        ("run_name", "007", "run.name=007"),
        ("run_name", 7, 'run.name="7"'),
        ("run_name", " [a] # b: ", "run.name= [a] # b: "),
    ],
)
def test_text_is_understood(name: str, given: Any, override: str) -> None:
    """`-p learning_rate 0.1e-5` once arrived as text and reached the trainer so; `run_name: 007` became run 7."""
    parameters = read(with_value(name, given))
    assert parameters.overrides == [override]
    run = kit.load_config(parameters.config, *parameters.overrides)
    if name == "run_name":
        assert run.name == str(given)


def test_switches_are_understood() -> None:
    """`-p overwrite true` arrives as the text 'true', and `bool("false")` is True."""
    for given, meant in {"true": True, "yes": True, 1: True, "False": False, "off": False, 0: False}.items():
        assert read(with_value("overwrite", given)).overwrite is read(with_value("resume", given)).resume is meant


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("max_steps", True, "is True; input should be a number"),
        ("max_steps", "many", "is 'many'; input should be a valid integer"),
        ("max_steps", 0, "is 0; input should be greater than or equal to 1"),
        ("learning_rate", "fast", "is 'fast'; input should be a valid number"),
        ("learning_rate", ".nan", "is '.nan'; input should be a finite number"),
        pytest.param("learning_rate", 10**400, "...; input should be a", id="huge"),
        ("run_name", False, "is False; it takes text (in quotes"),
        ("config", RunConfig, "RunConfig'>; it takes text"),
        ("output_dir", "", "is ''; it takes a path"),
        ("overwrite", "perhaps", "is 'perhaps'; it takes True or False"),
        ("max_steps", "20 # few", "is '20 # few'; input should be a valid integer"),
        ("overrides", "rloo.temperature 0.9", "'rloo.temperature' in it is not section.key=value"),
        ("overrides", "eval.thinking_budgets=[4, 8]", "'8]' in it is not section.key=value; quote an item"),
        ("overrides", "run.name='x", 'it takes text such as "rloo.temperature=0.9'),
    ],
)
def test_ill_typed_values_are_refused_by_name(name: str, given: Any, wanted: str) -> None:
    """`num_generations: true` was once a run with one generation, and `run_name: no` a folder named False."""
    message = refusal(OWN + f"{name} = None", **{name: given})
    assert message.startswith(f"{name}: ") and wanted in message and "\n" not in message


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_step", "; did you mean max_steps?"),
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
    unknown = {"max_stepz": 1, "a": 1, "seeed": 1, "max_step": 2}
    wanted = [f"{name}: unknown parameter (In[{cell}])" for name, cell in unknown.items()]
    assert [line.partition(";")[0] for line in lines] == [*wanted, "beta: is True"]


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
    with pytest.raises(ConfigError, match="config: not set.* '# Parameters'"):
        read_parameters({"max_steps": 3} | extra)


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("'say \"hi\" now'", 'say "hi" now'),
        (r"'a \b'", r"a \b"),
        (r"\boxed", r"\boxed"),
        ('"####"', "####"),
        ("007", "007"),
    ],
)
def test_quotes_hold_an_item_together(text: str, prompt: str) -> None:
    """The run had say \\hi\\ now: a backslash stayed, and the quotes were gone. `answer_after="####"` was null."""
    assert read(with_value("overrides", f"data.system_prompt={text}")).overrides == [f"data.system_prompt={prompt}"]


def test_one_key_is_not_given_twice() -> None:
    """`overrides` won over a parameter in the same cell, and the printed table differed from the run."""
    assert refusal(OWN + "overrides = '--rloo.max_steps=5'\n").endswith("rloo.max_steps=60; set max_steps instead")
    assert read(OWN + "run_name = ''\noverrides = ['run.name=x']\n").overrides == ["rloo.max_steps=60", "run.name=x"]


def test_a_config_that_is_nowhere_names_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`No such file: configs/x.yaml` did not say that the working directory was another one."""
    monkeypatch.chdir(tmp_path)
    assert read(OWN).config == KIT_ROOT / CONFIG, "not here: the kit's own"
    places = f"looked for as {tmp_path}/configs/x.yaml and as {KIT_ROOT}/configs/x.yaml; set config to its path"
    assert refusal(OWN, "# Parameters\nconfig = 'configs/x.yaml'").endswith(places)
