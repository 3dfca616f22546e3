"""Lowering of graphs onto NumPy, as `xp`: the definition of every op, once.

A rule turns one graph node into steps, callables with their arrays and
arguments bound; the list of steps is the plan. A backend over an array library brings a `Lowering`
that knows where its memory lies, and a `RuleTable` of the rules that it does better.
"""
