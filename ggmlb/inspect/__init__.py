"""Inspection: drawings, traces, the sanitizer, and comparison of devices."""
