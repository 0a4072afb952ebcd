"""The environment of a worker: an allow-list, so that a reward sees none of the secrets in `.env`."""

import os
import re
from collections.abc import Iterable

# fmt: off
PASSED_NAMES = {
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP", "NO_COLOR",
    "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "HF_HOME",
    "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY",
    "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "NLTK_DATA", "RANK", "LOCAL_RANK", "WORLD_SIZE",
}
# fmt: on
PASSED_BEGINNINGS = ("LC_", "PYTHON", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "RLOO_KIT_")
SECRET = re.compile("TOKEN(?!IZERS)|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|PRIVATE", re.IGNORECASE)


def worker_environment(further: Iterable[str] = ()) -> dict[str, str]:
    """The variables of this process that a worker gets: listed ones that do not look like a secret, and those named in
    `further`, whatever their value."""
    listed = {name for name in os.environ if name in PASSED_NAMES or name.startswith(PASSED_BEGINNINGS)}
    passed = {name for name in listed if not SECRET.search(name)} | set(further)
    return {name: value for name, value in os.environ.items() if name in passed}
