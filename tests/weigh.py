"""What the repository weighs: lines, words, modules, functions, circles of imports.

python tests/weigh.py                      # the working tree
python tests/weigh.py 4058bcb 8676891 .    # commits and the tree, side by side
"""

import ast
import io
import re
import statistics
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ("rloo_kit/", "rewards/")
PAGES = ("docs/", "references/", "README.md", "SKILL.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md")


def read_files(commit: str) -> dict[str, str]:
    """Path and text of every Python file and page of a commit, or of the tracked files of the working tree (".")."""
    command = ["git", "archive", commit] if commit != "." else ["git", "ls-files", "-z"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    if commit == ".":
        names = [name for name in output.decode().split("\0") if name.endswith((".py", ".md"))]
        return {name: (ROOT / name).read_text(encoding="utf-8") for name in names if (ROOT / name).exists()}
    with tarfile.open(fileobj=io.BytesIO(output)) as archive:
        members = [one for one in archive if one.isfile() and one.name.endswith((".py", ".md"))]
        return {one.name: archive.extractfile(one).read().decode("utf-8") for one in members}  # type: ignore[union-attr]


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(path: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    """The known modules that a file imports anywhere in it, those under TYPE_CHECKING and in functions too; a script
    names its neighbours without their folder."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
        folder = path.partition("/")[0]
        for name in [*names, *(f"{folder}.{name}" for name in names)]:
            if name in known:
                yield name


def circles(files: dict[str, str], trees: dict[str, ast.Module]) -> list[frozenset[str]]:
    """Sets of more than one module that import each other, directly or through others."""
    paths = {module_name(path): path for path in files}
    reach = {name: set(imported(path, trees[path], set(paths))) - {name} for name, path in paths.items()}
    changed = True
    while changed:
        changed = False
        for name, found in reach.items():
            more = found.union(*(reach[one] for one in found))
            changed |= len(more) > len(found)
            reach[name] = more
    found = {frozenset(other for other in reach[name] if name in reach[other]) for name in reach if name in reach[name]}
    return sorted(found, key=len)


def weigh(commit: str) -> dict[str, str]:
    files = read_files(commit)
    code = {path: text for path, text in files.items() if path.endswith(".py")}
    package = {path: text for path, text in code.items() if path.startswith(PACKAGE)}
    benchmarks = {path: text for path, text in code.items() if path.startswith("benchmarks/")}
    trees = {path: ast.parse(text) for path, text in (package | benchmarks).items()}
    sources = [text for path, text in code.items() if path.startswith((*PACKAGE, "benchmarks/", "scripts/"))]
    uses = Counter(word for text in sources for word in re.findall(r"\w+", text))
    nodes = [node for path in package for node in ast.walk(trees[path])]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = sorted((one.end_lineno or one.lineno) - one.lineno + 1 for one in functions)
    once = [one for one in functions if re.match("_[^_]", one.name) and uses[one.name] <= 2]
    raised = sum(isinstance(node, ast.Raise) for node in nodes)

    def count(chosen: dict[str, str]) -> int:
        return sum(text.count("\n") for text in chosen.values())

    def describe(chosen: dict[str, str]) -> str:
        found = circles(chosen, trees)
        return f"{len(found)}" + (f" ({', '.join(str(len(one)) for one in found)} modules)" if found else "")

    modules = [path for path in package if not path.endswith("__init__.py")]
    lines = count(package)
    return {
        "package, lines": f"{lines:,}",
        "tests, lines": f"{count({p: t for p, t in code.items() if p.startswith('tests/')}):,}",
        "benchmarks, lines": f"{count(benchmarks):,}",
        "docs, words": f"{sum(len(text.split()) for path, text in files.items() if path.startswith(PAGES)):,}",
        "modules (no __init__)": str(len(modules)),
        "packages": str(len(package) - len(modules)),
        "functions": f"{len(functions):,}",
        "lines of a function: median (p90)": f"{statistics.median(lengths):g} ({lengths[len(lengths) * 9 // 10]})",
        "private functions used once": f"{len(once)} ({len(once) / len(functions):.0%})",
        "raise per 1,000 lines": f"{raised / lines * 1000:.1f}",
        "circles of imports, package": describe(package),
        "circles of imports, benchmarks": describe(benchmarks),
    }


def main() -> int:
    commits = sys.argv[1:] or ["."]
    tables = [weigh(commit) for commit in commits]
    print(f"| | {' | '.join('this tree' if commit == '.' else commit for commit in commits)} |")
    print("|---|" + "---|" * len(commits))
    for row in tables[0]:
        print(f"| {row} | {' | '.join(table[row] for table in tables)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
