"""What a program is: errors, types, tensors, ops, contexts and graphs. Knows no device."""
