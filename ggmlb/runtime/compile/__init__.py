"""Compilation of a graph for a scheduler's backends.

The files, in the order of use:

read.py        IndexedGraph: the graph as lists of integers
assign.py      passes 1-4: the backend of each node, and the cause
split.py       pass 5: runs of nodes on one backend, and the tensors that are copied to it
copies.py      the graph with these copies, in the order of execution
allocate.py    an address for each of its tensors, before memory is allocated
executable.py  the compiled graph with its plans, reused for equal graphs
"""
