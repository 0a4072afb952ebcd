"""The machine and the process: environment, GPU, memory, console, processes, the doctor. Never torch."""
