"""Weights on disk: checkpoints read by byte ranges, recipes over their tensors, shard files. No torch."""
