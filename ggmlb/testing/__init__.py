"""What tests of backends and of the scheduler need: golden programs and the fake device."""
