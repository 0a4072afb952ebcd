"""What a run keeps in its folder, and the rules that judge its health. Never torch."""
