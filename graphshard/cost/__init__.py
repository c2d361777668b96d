"""What a step will cost: facts of models and hardware, times, memory, and what to shard. Plain data and arithmetic."""
