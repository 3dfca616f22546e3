"""Backends that are broken on purpose, each in one way; the conformance kit must find every one.

`values` compute or answer wrongly, `memory` keeps bytes wrongly, `weights` those of weights: the CPU backend
with a fault put in.
`order` does things in the wrong order: the fake backend, whose queue runs only when something waits for it.
"""
