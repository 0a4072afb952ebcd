"""Tasks that come with the kit: reasoning-gym, the families of the embedded model, demonstrations to imitate."""
