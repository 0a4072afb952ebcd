"""`python -m rloo_kit.cli`."""

from rloo_kit.cli import main

main()
