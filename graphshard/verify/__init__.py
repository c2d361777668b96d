"""The verifier: proves an op list free of races before a byte is allocated. Imports core only.

`graphshard.verify` is this package and, called, its `verify`: importing a package binds its name in the one above it,
whoever does so, and would hide a function of the same name there.
"""

import sys
from types import ModuleType

from graphshard.verify.interpreter import Outcome, explore
from graphshard.verify.rank_interpreter import explore_ranks
from graphshard.verify.ranks import Collective, Difference, collectives_of, compare_ranks, first_difference
from graphshard.verify.report import RULE_NAMES, Report, Violation
from graphshard.verify.rules import RULES, Rule, verify
from graphshard.verify.sequence import SequenceReport, verify_sequences

__all__ = [
    "RULES",
    "RULE_NAMES",
    "Collective",
    "Difference",
    "Outcome",
    "Report",
    "Rule",
    "SequenceReport",
    "Violation",
    "collectives_of",
    "compare_ranks",
    "explore",
    "explore_ranks",
    "first_difference",
    "verify",
    "verify_sequences",
]


class _Callable(ModuleType):
    __call__ = staticmethod(verify)


sys.modules[__name__].__class__ = _Callable
