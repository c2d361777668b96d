"""The five errors that graphshard raises, one per kind of fault a user can fix.

Each message says what failed, what was found (with units), where, and what to do next.
"""

from __future__ import annotations


class GraphshardError(Exception):
    """Base of every error that graphshard raises on purpose.

    `exit_code` is the command line's answer: 2 for a request that cannot be met, 3 for a machine that cannot meet it.
    """

    exit_code = 2


class SpecError(GraphshardError):
    """A model, plan, layout or setting that cannot be built as asked."""


class ProgramError(GraphshardError):
    """An op list that is not free of races, or is used in a way that its certificate does not cover."""


class DeviceError(GraphshardError):
    """The driver, the machine or its memory refused."""

    exit_code = 3


class CommError(GraphshardError):
    """Ranks disagree, or one of them is missing, dead or late."""

    exit_code = 3


class LoadError(GraphshardError):
    """A checkpoint whose bytes do not match what the model asks for."""
