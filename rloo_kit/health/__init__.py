"""Rules that detect a failing run from its metrics: signs of each fault, the watch. Never torch."""
