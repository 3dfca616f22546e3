"""Device-independent core: errors, types, tensors, ops, contexts and graphs."""
