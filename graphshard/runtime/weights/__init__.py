"""Weights on their way into a runtime: sources, fillers, and what they report."""
