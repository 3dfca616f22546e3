"""Programs: errors, types, tensors, ops, contexts and graphs. Independent of any device."""
