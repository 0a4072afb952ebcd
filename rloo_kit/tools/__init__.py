"""Tools of a run: where they are called, how a chat template writes them, environments of `verifiers`."""
