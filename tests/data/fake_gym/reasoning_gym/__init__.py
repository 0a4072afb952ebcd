"""A stand-in for the library reasoning-gym: put its folder in front of the module path."""
