"""What the tests of the installer share: registries, asked once; one Node, one bare clone; a person with a project."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.skill import installer
from tests.skill.installer import ROOT, Node, Person, Tree


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for Node (130 MB), npm's cache and the bare clone; it does not stay as pytest's folders do."""
    folder = tmp_path_factory.mktemp("installer")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def package_index(workplace: Path) -> None:
    """Skips where pip cannot reach a package index."""
    reason = installer.no_package_index(workplace / "probe")
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def modern_node(workplace: Path, request: pytest.FixtureRequest) -> Node:
    """Node 22.20 or newer: the machine's, or a separate one from a Python package."""
    node = installer.machine_node()
    if node is None or node.version < installer.OWN_NODE:
        request.getfixturevalue("package_index")
        node = installer.own_node(workplace / "node")
    _need_npm_registry(node, workplace)
    return node


@pytest.fixture(scope="session")
def older_node(workplace: Path, request: pytest.FixtureRequest) -> Node:
    """The machine's Node from 18 on, which the older installers take; else the modern one."""
    node = installer.machine_node()
    if node is None or node.version < (18,):
        return request.getfixturevalue("modern_node")
    _need_npm_registry(node, workplace)
    return node


def _need_npm_registry(node: Node, workplace: Path) -> None:
    home = workplace / "probe-home"
    home.mkdir(exist_ok=True)
    reason = installer.no_npm_registry(node, home)
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def snapshot(workplace: Path) -> tuple[Path, Tree]:
    """The bare clone that the address stands for, and the repository's tracked files at that moment."""
    try:
        names = [name for name in installer.tracked() if not installer.is_left_out(name)]
    except LookupError as reason:
        pytest.skip(str(reason))
    return installer.bare_clone(workplace / "clone"), installer.tree(ROOT, names)


@pytest.fixture
def expected(snapshot: tuple[Path, Tree]) -> Tree:
    """What the repository tracks, less what installers leave out on purpose."""
    return snapshot[1]


@pytest.fixture
def make_person(
    tmp_path: Path,
    snapshot: tuple[Path, Tree],
    workplace: Path,
    request: pytest.FixtureRequest,
) -> Callable[..., Person]:
    """`make_person(version)`: with a Node that this version of the installer takes."""

    def make(version: str = "1.7.4") -> Person:
        node = request.getfixturevalue("modern_node" if version == "1.7.4" else "older_node")
        home, project = tmp_path / "home", tmp_path / "project"
        home.mkdir()
        project.mkdir()
        env = installer.home_environment(node, home) | {"npm_config_cache": str(workplace / "npm-cache")}
        person = Person(home, project, env)
        person.serve(snapshot[0])
        return person

    return make
