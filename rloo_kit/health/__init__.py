"""Rules of a run's health: healthy ranges, how faults show in its numbers, the watch over them. Never torch."""
