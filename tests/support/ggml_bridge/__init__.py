"""ggml's own `test-backend-ops` over ggmlb's devices, which `ggmlb.register_with_ggml` gives to it.

`worker` is a process that calls the test's `main`, and `suite` shares cases among workers.
`scripts/build_ggml_tests.py` builds the libraries; `make test-ggml` runs all.
"""

FAULT = "ggmlb raised "
"""What is printed where a callback failed; such a case has failed, whatever its values are."""

END = "END of test-backend-ops, status "
"""Begins the last line of a worker's answer."""
