"""The runtime: memory, bound programs, eager runs, captured graphs."""
