"""The engine path: a module that shows full shapes while a server loads it, and keeps this rank's rows only."""

from graphshard.runtime.engine.cut import Blocks
from graphshard.runtime.engine.prepared import Prepared, prepare_module
from graphshard.runtime.engine.stock import RowRules

__all__ = ["Blocks", "Prepared", "RowRules", "prepare_module"]
