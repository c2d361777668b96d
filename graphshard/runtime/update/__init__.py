"""Online update: new weights into running ranks, all or nothing, at the addresses they have."""

from __future__ import annotations

from graphshard.runtime.update.report import UpdateReport

__all__ = ["UpdateReport"]
