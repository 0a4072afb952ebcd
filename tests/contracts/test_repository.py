"""The files of the repository: nothing of one machine in them, nothing binary, and documents that are true of it."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Bracketed so that this file does not match itself.
HOSTS = (
    r"[p]ypi\.org|[p]ythonhosted\.org|[d]ownload\.pytorch\.org|[n]pmjs\.org|[d]eb\.debian\.org|[a]naconda\.(org|com)"
)
MACHINE_PATHS = r"/[w]ork/\w|/[r]oot/|/[o]pt/\w|/[h]ome/[a-z]\w*/|/[U]sers/[a-z]\w*/"
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".npz", ".pkl", ".whl"}


def tracked() -> list[Path]:
    """Files that git tracks, or would track: not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def texts() -> list[tuple[Path, str]]:
    return [(path, path.read_text(encoding="utf-8")) for path in tracked() if path.suffix != ".png"]


@pytest.mark.parametrize(("what", "pattern"), [("package hosts", HOSTS), ("paths of one machine", MACHINE_PATHS)])
def test_no_file_names_a_host_or_a_machine(what: str, pattern: str) -> None:
    """An address of a registry or a private path that works here breaks everywhere else."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found, f"{what}: " + "\n".join(found)


def test_no_binary_files() -> None:
    """Weights in git cannot be reviewed and are downloaded by everyone, for ever; models are built, not shipped."""
    for path in tracked():
        assert path.suffix not in WEIGHTS, f"{path.relative_to(ROOT)} looks like weights"
        assert path.stat().st_size < 1_000_000, f"{path.relative_to(ROOT)} has {path.stat().st_size} bytes"
        assert path.suffix == ".png" or b"\0" not in path.read_bytes(), f"{path.relative_to(ROOT)} is binary"


def anchors(text: str) -> set[str]:
    """Anchors of a Markdown page's headings, as the usual renderers make them."""
    titles = re.findall(r"^#+ +(.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_of_the_documents_lead_somewhere() -> None:
    """A page that was renamed leaves links that no one clicks before a reader does."""
    broken = []
    for path, text in texts():
        if path.suffix != ".md":
            continue
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)
        for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            ok = target.exists() and (not anchor or anchor in anchors(target.read_text(encoding="utf-8")))
            if not ok:
                broken.append(f"{path.relative_to(ROOT)}: {link}")
    assert not broken, "\n".join(broken)


def test_paths_in_commands_exist() -> None:
    """A command that is copied from a document fails on a config that was renamed."""
    named = r"(?:configs|tests|benchmarks|rloo_kit|rewards|docs)/[\w/]+\.(?:yaml|py|md|json)"
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts()
        if path.suffix in (".md", ".yaml")
        for name in re.findall(rf"(?<![\w/]){named}", text)
        if not (ROOT / name).exists() and not re.search(r"/(x\.|my_)", name)  # the reader's own
    ]
    assert not missing, "\n".join(missing)


def test_make_targets_of_the_documents_exist() -> None:
    """`make unsloth` stood in the README for two months after its rename."""
    defined = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    for name in ("README.md", "CONTRIBUTING.md"):
        code = "".join(re.findall(r"```.*?```|`[^`]+`", (ROOT / name).read_text(encoding="utf-8"), re.S))
        assert set(re.findall(r"\bmake ([a-z][a-z-]*)", code)) <= defined, name


def test_every_page_of_the_docs_is_in_the_index() -> None:
    """A design page outside the index is found by no one."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = [
        path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md" and path.name not in index
    ]
    assert not missing, f"docs/README.md does not link {sorted(missing)}"


def test_no_package_shadows_a_library() -> None:
    """With tests/ on the import path `import config` finds tests/config, in place of the user's."""
    import importlib.util

    for name in (path.name for path in (ROOT / "tests").iterdir() if path.is_dir()):
        found = importlib.util.find_spec(name)
        places = list(found.submodule_search_locations or []) if found else []
        assert not any(str(ROOT / "tests") in place for place in places), f"`import {name}` finds {places}"


# Files in another format than text, of the kernel, or between two processes of the kit.
OTHER_WRITERS = {
    "cli.py: os.fdopen", "export/loaders.py: write_text", "export/parity.py: write_text", "export/parity.py: open",
    "training/memory_watch.py: write_text", "demo/embedded.py: write_bytes", "graders/jailed.py: open",
    "runs/files.py: open", "system/isolation.py: write_text", "system/processes.py: open",
}  # fmt: skip


def test_one_writer_of_text() -> None:
    """`before.json` failed on half an emoji, which `metrics.jsonl` survived: `runs/files.py` writes both."""
    found = set()
    for path in (ROOT / "rloo_kit").rglob("*.py"):
        for call in (
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
        ):
            name = ast.unparse(call.func)
            last = name.rpartition(".")[2]
            modes = [
                one.value
                for one in (*call.args, *(word.value for word in call.keywords))
                if isinstance(one, ast.Constant)
            ]
            opens = last in ("open", "fdopen") and any(re.fullmatch("[wax]b?[+]?", str(mode)) for mode in modes)
            is_paths = last in ("write_text", "write_bytes") and "." in name and len(call.args) == 1
            if opens or is_paths or name == "json.dump":
                found.add(f"{path.relative_to(ROOT / 'rloo_kit')}: {name if last == 'fdopen' else last}")
    assert found == OTHER_WRITERS


def test_words_that_read_as_translated_stay_out() -> None:
    """Over three hundred of these made the pages read as translated."""
    found = [
        f"{path.relative_to(ROOT)}: {word.group()}"
        for path, text in texts()
        for word in re.finditer(r"\b([b]eside|[a]new|[t]old|[m]end(ed|s|ing)?|[i]n silence)\b", text, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)
