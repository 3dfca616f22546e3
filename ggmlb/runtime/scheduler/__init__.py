"""The scheduler: one graph, split over several devices, allocated and computed.

scheduler.py  the Scheduler: what a user calls
cache.py      compiled graphs, for the next graph that is equal
execute.py    the copies and plans of each split, ordered without races
report.py     where each node was placed, and why

How a graph is compiled is `ggmlb.runtime.compile`.
"""

from ggmlb.runtime.compile.assign import Cause
from ggmlb.runtime.compile.split import Split, SplitInput
from ggmlb.runtime.scheduler.report import NodePlacement
from ggmlb.runtime.scheduler.scheduler import Scheduler

__all__ = ["Cause", "NodePlacement", "Scheduler", "Split", "SplitInput"]
