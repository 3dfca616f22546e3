"""Execution of graphs: allocation, scheduling and evaluation."""
