"""Packs what a machine with CUDA torch but no network lacks: the kit's other packages, the kit itself, and the embedded
model.

    make gpu-bundle                        writes .gpu-bundle/, for Python 3.12 and CUDA 13.0
    make gpu-bundle HAVE=packages.txt      without what that machine has (its `pip list --format=freeze`), and only that
    source .gpu-bundle/use.sh              on that machine, first in every shell

Names come from pyproject.toml and the metadata of the wheels, versions from constraints.txt. Nothing is installed over
the machine's torch: use.sh unpacks into a separate folder and puts it on PYTHONPATH.
"""

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable
from email.parser import HeaderParser
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
MIB, LIMIT_MIB = 2**20, 55
NOT_BUNDLED = {
    **dict.fromkeys(["torch", "triton"], "the machine's own: they fit its driver and each other"),
    **dict.fromkeys(["torchao", "torchvision", "xformers"], "built for one torch; Unsloth does without them"),
    **dict.fromkeys(["diffusers", "einops", "protobuf", "sentencepiece"], "for models that the kit does not train"),
    **dict.fromkeys(["nest-asyncio", "structlog", "tyro", "wheel"], "for Unsloth's own programs"),
    **dict.fromkeys(["aiohttp", "hf-transfer", "hf-xet"], "for downloads, and there is no network"),
}
DROPPED = (
    *("*/__pycache__/*", "*/tests/*", "*.pyi", "*.c", "*.h", "*.hpp", "*.pyx", "*.pxd", "*.pxi", "*.a"),
    *("studio/*", "unsloth_cli/*"),  # Unsloth's desktop program: 82 MB
)
Versions = dict[str, str | None]
# 60 MB, mostly present wherever torch with CUDA is installed; use.sh says which are missing.
USUAL: Versions = dict.fromkeys(["numpy", "pandas", "pillow", "pyarrow"])
IMPORTED_AS = {"pillow": "PIL"}
NEWEST = "99999"  # for what came with torch: pip took the newest version, which an upper bound refuses
Fetch = Callable[[Versions], dict[str, Path]]  # versions by name -> wheels by name


def read_versions(text: str) -> Versions:
    """Versions by canonical name, from lines `name==version`; None if a line is a bare name."""
    found = re.findall(r"^([A-Za-z0-9][\w.-]*)[ \t]*(?:==[ \t]*(\S+))?", text, flags=re.M)
    return {canonicalize_name(name): version or None for name, version in found}


def target_environment(python: str) -> dict[str, str]:
    """What markers are evaluated with: CPython of that version ("3.12") on Linux, x86_64."""
    names = {"os_name": "posix", "sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    implementation = {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    return names | implementation | {"python_version": python, "python_full_version": f"{python}.0"}


def select(lines: Iterable[str], target: dict[str, str], extras: Iterable[str] = (), base: bool = True) -> list[str]:
    """The requirements that apply on the target, without markers; `base=False`: only those that an extra asks for."""
    selected = []
    for requirement in map(Requirement, lines):
        marker, requirement.marker = requirement.marker, None
        if marker is None or marker.evaluate(target | {"extra": ""}):
            selected += [str(requirement)] if base else []
        elif any(marker.evaluate(target | {"extra": extra}) for extra in extras):
            selected.append(str(requirement))
    return selected


def requirements_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []


def close(wanted: list[str], pins: Versions, have: Versions, target: dict[str, str], fetch: Fetch) -> dict[str, Path]:
    """The wheels to pack, by name: the wanted ones and their requirements, less what the machine has.

    Args:
        have: the machine's versions; None satisfies every requirement.
    Raises:
        SystemExit: constraints.txt lacks a name, or has a version that a requirement refuses.
    """
    wheels: dict[str, Path] = {}
    packed: set[str] = set()
    seen: set[str] = set()
    while wave := [Requirement(text) for text in dict.fromkeys(wanted) if text not in seen]:
        seen.update(wanted)
        named = [(canonicalize_name(found.name), found) for found in wave]
        named = [(name, found) for name, found in named if name not in NOT_BUNDLED]
        packed |= {name for name, found in named if not _satisfied(found, name in have, have.get(name))}
        read = [(name, found) for name, found in named if name in packed or found.extras]
        for name, found in read:
            if name not in pins:
                raise SystemExit(
                    f"constraints.txt has no {name}, which the bundle needs ({found}): add the line {name}==VERSION "
                    "with the version that `make setup` installs on a machine with a GPU"
                )
            if name in packed and not _satisfied(found, True, pins[name]):
                raise SystemExit(f"constraints.txt has {name}=={pins[name]}, which {found} refuses: move one of them")
        wheels |= fetch({name: pins[name] for name, _ in read if name not in wheels})
        wanted = [
            text
            for name, found in read
            for text in select(requirements_of(wheels[name]), target, found.extras, base=name in packed)
        ]
    return {name: wheels[name] for name in sorted(packed)}


def _satisfied(requirement: Requirement, there: bool, version: str | None) -> bool:
    return there and (version is None or requirement.specifier.contains(version, prereleases=True))


def torch_closure(target: dict[str, str]) -> Versions:
    """The requirements of torch, which any machine with torch has: read from the torch that is installed here."""
    found: Versions = {}
    wanted = ["torch"]
    while wanted:
        try:
            lines = metadata.requires(wanted.pop()) or []
        except metadata.PackageNotFoundError:
            continue  # a CUDA library of another build
        names = [canonicalize_name(Requirement(line).name) for line in select(lines, target)]
        wanted += [name for name in names if name not in found]
        found |= dict.fromkeys(names, NEWEST)
    return found


def download(folder: Path, python: str) -> Fetch:
    """A Fetch by pip, from the index that pip is configured with; wheels for glibc 2.28 or older."""
    platforms = [f"manylinux{tag}_x86_64" for tag in (*(f"_2_{minor}" for minor in range(28, 16, -1)), "2014", "1")]
    options = [f"--platform={name}" for name in platforms] + [f"--python-version={python}", "--implementation=cp"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", *options, "-d", str(folder)]

    def fetch(versions: Versions) -> dict[str, Path]:
        if versions:
            done = subprocess.run([*command, *(f"{name}=={version}" for name, version in versions.items())])
            if done.returncode:
                raise SystemExit(f"pip could not download all of {', '.join(versions)} for Python {python}: see above")
        by_name = {parse_wheel_filename(wheel.name)[0]: wheel for wheel in folder.glob("*.whl")}
        return {name: by_name[canonicalize_name(name)] for name in versions}

    return fetch


def pack_site(wheels: Iterable[Path], cuda: str, target: Path) -> dict[str, int]:
    """Write the wheels' files as one .tar.xz, less what nothing imports. Returns: unpacked bytes by wheel."""
    files: dict[str, tuple[zipfile.ZipFile, str]] = {}
    records: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for wheel in wheels:
        archive, kept = zipfile.ZipFile(wheel), {}
        for info in archive.infolist():
            name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", info.filename)
            if not info.is_dir() and not _is_dropped(name, cuda):
                kept[name] = (archive, info.filename)
                sizes[wheel.name] = sizes.get(wheel.name, 0) + info.file_size
        libraries = re.findall(r"libbitsandbytes_cuda(\d+)\.so", "\n".join(archive.namelist()))
        if libraries and cuda not in libraries:
            raise SystemExit(f"bitsandbytes has no library for CUDA {cuda}, only for {', '.join(libraries)}: --cuda")
        listed = "".join(f"{name},,\n" for name in kept).encode()  # without hashes, which do not compress: 1 MB
        records |= {name: listed for name in kept if name.endswith(".dist-info/RECORD")}
        files |= kept
    with tarfile.open(target, mode="w:xz") as tar:
        for name in sorted(files, key=lambda name: (Path(name).suffix, name)):  # similar files together compress better
            archive, inside = files[name]
            content = records.get(name) or archive.read(inside)
            entry = tarfile.TarInfo(name)  # without owner and time: the same wheels make the same archive
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return sizes


def _is_dropped(name: str, cuda: str) -> bool:
    needed = (f"_cuda{cuda}.so", "_cpu.so")
    is_other_cuda = fnmatch(name, "bitsandbytes/libbitsandbytes_*.so") and not name.endswith(needed)
    return is_other_cuda or ".data/" in name or any(fnmatch(name, pattern) for pattern in DROPPED)


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the bundle packs the kit of a commit, so make it in a git checkout: {done.stderr.strip()}")
    return done.stdout.strip()


def pack_model(target: Path) -> None:
    """Write the embedded model, from the kit's cache or built into it (a minute), as an archive of such a cache."""
    from rloo_kit.demo.embedded import build

    folder = build("thinking")
    with tarfile.open(target, "w:gz") as tar:
        tar.add(folder, folder.name)


USE = r"""# Source this file: it unpacks the packages and puts them on PYTHONPATH, after the checkout that you are in,
# and rloo-kit on PATH. Outside a checkout it unpacks the kit and goes there. BUNDLE_ROOT: where to unpack.
_use_bundle() {
  local here root=${BUNDLE_ROOT:-/tmp/rloo-kit-bundle} site kit=$PWD revision
  here=$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")" && pwd) || return 1
  site=$(_unpack_bundle "$here/site.tar.xz" "$root") || return 1
  read -r revision < "$here/REVISION"
  if [ "${PWD#"$root"/kit-}" != "$PWD" ] || [ ! -f pyproject.toml ] || [ ! -d rloo_kit ]; then
    kit=$(_unpack_bundle "$here/kit.tar.gz" "$root") && cd "$kit" || return 1
    revision=${revision%-dirty} # the packed kit is the commit
  fi
  if [ -f "$here/cache.tar.gz" ]; then
    RLOO_KIT_CACHE=$(_unpack_bundle "$here/cache.tar.gz" "$root") && export RLOO_KIT_CACHE || return 1
  fi
  export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false UNSLOTH_DISABLE_STATISTICS=1
  export PYTHONPATH=$kit:$site RLOO_KIT_REVISION=$revision PATH=$root/bin:${PATH#"$root/bin:"}
  mkdir -p "$root/bin" && printf '%s\n' '#!/usr/bin/env python3' 'import sys' 'from rloo_kit.cli import main' \
    'sys.exit(main())' > "$root/bin/rloo-kit" && chmod +x "$root/bin/rloo-kit" || return 1
  python3 -c 'if True:
    import sys; from importlib.util import find_spec
    lacks = ", ".join(name for name in "@LEFT_OUT@".split() if not find_spec(name))
    hint = "make gpu-bundle HAVE=FILE, with what this machine has (pip list --format=freeze)"
    sys.exit(f"python3 has no {lacks}, which this bundle leaves out: {hint}" if lacks else 0)' || return 1
  echo "rloo-kit $revision: the kit in $kit, its packages in $site, both on PYTHONPATH"
}
_unpack_bundle() { # ARCHIVE ROOT: prints the folder, which is named by the archive's content
  PYTHONPATH= python3 - "$@" <<'PYTHON'
import hashlib, os, pathlib, shutil, sys, tarfile, tempfile
archive, root = map(pathlib.Path, sys.argv[1:])
python = "%d.%d" % sys.version_info[:2]
if python != "@PYTHON@":
    sys.exit(f"this bundle is for Python @PYTHON@ and python3 is {python}: make gpu-bundle BUNDLE_PYTHON={python}")
key = hashlib.sha256(archive.read_bytes()).hexdigest()[:12]
folder = root.absolute() / f"{archive.name.partition('.')[0]}-{key}"
if not folder.exists():
    root.mkdir(parents=True, exist_ok=True)
    unfinished = tempfile.mkdtemp(dir=root)
    os.chmod(unfinished, 0o755)
    with tarfile.open(archive) as files:
        files.extractall(unfinished, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    try:
        os.rename(unfinished, folder)
    except OSError:  # another process was faster
        shutil.rmtree(unfinished)
print(folder)
PYTHON
}
_use_bundle
"""


def write_bundle(dest: Path, have: Versions | None, python: str, cuda: str, model: bool = True) -> None:
    """Write site.tar.xz, kit.tar.gz, cache.tar.gz (`model`), REVISION and use.sh; print the packages and the size."""
    revision, target = git("rev-parse", "HEAD"), target_environment(python)
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "rloo_kit", "rewards", "configs", "benchmarks")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["gpu"], "pytest"]
    pins = read_versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    dest.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        fetch = download(Path(folder), python)
        wheels = close(wanted, pins, torch_closure(target) | (USUAL if have is None else have), target, fetch)
        sizes = pack_site(wheels.values(), cuda, dest / "site.tar.xz")
    git("archive", "--format=tar.gz", f"--output={dest.resolve() / 'kit.tar.gz'}", "HEAD")
    (dest / "REVISION").write_text(revision + ("-dirty" if changed else "") + "\n", encoding="utf-8")
    (dest / "cache.tar.gz").unlink(missing_ok=True)
    if model:
        pack_model(dest / "cache.tar.gz")
    left_out = ["torch", *(IMPORTED_AS.get(name, name) for name in USUAL if name not in wheels)]
    use = USE.replace("@PYTHON@", python).replace("@LEFT_OUT@", " ".join(left_out))
    (dest / "use.sh").write_text(use, encoding="utf-8")
    mib = sum(path.stat().st_size for path in dest.glob("*.tar.*")) / MIB
    print(f"{len(wheels)} packages: {' '.join(wheels)}")
    print(f"{dest}: {mib:.1f} MiB, {sum(sizes.values()) / MIB:.0f} MiB unpacked. There: source {dest.name}/use.sh")
    if mib > LIMIT_MIB:
        print(f"over {LIMIT_MIB} MiB: HAVE=FILE leaves out what that machine has (its `pip list --format=freeze`)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dest", type=Path, default=ROOT / ".gpu-bundle", help="folder, default .gpu-bundle")
    parser.add_argument("--have", type=Path, help="packages of that machine; default: torch's own, usual large ones")
    parser.add_argument("--python", default="3.12", help="its Python version, default 3.12")
    parser.add_argument("--cuda", default="130", help="CUDA version of its torch, default 130 (13.0): for bitsandbytes")
    parser.add_argument("--no-model", action="store_true", help="without the embedded model, built there at first use")
    given = parser.parse_args()
    there = read_versions(given.have.read_text(encoding="utf-8")) if given.have else None
    write_bundle(given.dest, there, given.python, given.cuda, model=not given.no_model)
