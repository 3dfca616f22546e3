"""The conformance kit for backends, its pytest plugin, golden programs, and the fake device for schedulers."""
