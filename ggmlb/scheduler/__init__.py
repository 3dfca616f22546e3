"""The scheduler: one graph, split over several devices, allocated and computed.

assign.py     passes 1-4: which backend computes each node, and why
split.py      pass 5: runs of nodes on one backend, and the tensors that must be copied to it
execute.py    the copies and plans of each split, in an order that no copy can race
scheduler.py  the Scheduler: what a user calls
report.py     where each node landed and why, as data and as text
"""

from ggmlb.scheduler.assign import Cause
from ggmlb.scheduler.report import Placement
from ggmlb.scheduler.scheduler import Scheduler
from ggmlb.scheduler.split import Split, SplitInput

__all__ = ["Cause", "Placement", "Scheduler", "Split", "SplitInput"]
