"""Code shared by backends: operand rules, fusion, scratch memory, packed weights."""
