"""The machine and the process: environment, GPU, memory, consoles, launchers, the doctor. Never torch."""
