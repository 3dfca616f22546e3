"""From a graph to what is computed.

The files, in the order of the work:

read.py        IndexedGraph: the graph as lists of numbers
assign.py      passes 1-4: which backend computes each node, and why
split.py       pass 5: runs of nodes on one backend, and the tensors that are copied to it
copies.py      the graph with these copies, in the order of execution
allocate.py    a place for each of its tensors, without memory
executable.py  all of it, with places and plans, for every graph that is equal
"""
