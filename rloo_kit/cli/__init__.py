"""The `rloo-kit` command line: each command parses its arguments, calls the kit's public functions and prints.

Heavy libraries are imported inside the commands. Exit codes: 0 done; 1 doctor found a fault, the planned run does not
fit, or the preflight says NO-GO; 2 refused; 130 interrupted. `batch` has its own.
"""

# In order of use; --help lists them in this order.
from rloo_kit.cli import before, training, after, ask, export  # noqa: F401, I001
from rloo_kit.cli.common import app


def main() -> None:
    """Entry point of `rloo-kit`."""
    app()
