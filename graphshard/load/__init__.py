"""Checkpoints on disk, read by byte ranges."""
