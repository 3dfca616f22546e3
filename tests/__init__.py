"""The tests, and in `tests.support` what they share."""
