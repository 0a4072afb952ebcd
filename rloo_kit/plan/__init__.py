"""The VRAM plan: GiB by part, rows of a rollout, headroom. Never imports torch."""
