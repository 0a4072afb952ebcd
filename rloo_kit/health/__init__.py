"""Rules that detect a failing run from its metrics: healthy ranges, signs of each fault, the watch. Never torch."""
