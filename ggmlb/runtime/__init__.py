"""How a graph gets to its devices: allocation, scheduling, evaluation."""
