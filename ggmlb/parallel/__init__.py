"""One node on many devices: the meta device and weights split by rows."""
