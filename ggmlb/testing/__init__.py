"""The conformance kit for backends, its pytest plugin, golden programs, and a fake device for schedulers."""
