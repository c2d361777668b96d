"""Measurements as functions: the command line, the demo and `bench/` call them, with raw samples kept."""
