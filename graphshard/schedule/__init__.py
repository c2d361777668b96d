"""From a model to a plan to an op list: units, slots, emission and the automatic choices."""
