"""The command that exports a trained model for other programs: export."""

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from rloo_kit.cli.common import JsonLine, Overrides, Overwrite, command, find_run
from rloo_kit.system.processes import say


@command()
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or its config.")],
    overrides: Overrides = None,
    to: Annotated[str, typer.Option("--to", help="Format: adapter, merged, gguf or vllm.")] = "merged",
    quantization: Annotated[
        str | None, typer.Option("--quantization", help="GGUF: f32, f16, bf16, q8_0 or q4_k_m; default: f16.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Merged weights: bfloat16, float16 or float32.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="Folder to create; default: RUN/export/TARGET.")
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", help="Held-out prompts for the check.")] = 20,
    push: Annotated[
        str | None, typer.Option("--push", metavar="OWNER/NAME", help="Upload to this hub repository.")
    ] = None,
    overwrite: Overwrite = False,
    json: JsonLine = False,
) -> None:
    """Export a trained model for other programs, and compare it with the policy in those programs."""
    run = find_run(source, overrides)
    import rloo_kit as kit

    kit.setup_environment(run.model.backend)
    found = kit.export_model(
        source,
        to,
        *(overrides or []),
        quantization=quantization,
        dtype=dtype,
        output=output,
        num_prompts=prompts,
        push=push,
        overwrite=overwrite,
    )
    say(found)
    if json:
        say(dumps(found.to_dict()))
