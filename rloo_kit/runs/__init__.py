"""What a run keeps in its folder. Never torch."""
