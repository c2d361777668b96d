"""The speculative step: a draft and a target as two runtimes, stepped as one by calls in a fixed order."""

from __future__ import annotations

from graphshard.runtime.speculative.agreement import Agreed
from graphshard.runtime.speculative.open import speculate
from graphshard.runtime.speculative.speculation import Speculation
from graphshard.runtime.speculative.step import SpeculativeStep

__all__ = ["Agreed", "Speculation", "SpeculativeStep", "speculate"]
