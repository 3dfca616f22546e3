"""ggml's own `test-backend-ops` over ggmlb's devices, in one process, by ctypes.

`c_api` has ggml's structs and functions, `nodes` reads its tensors as ggmlb's, `devices` registers a device
of ggmlb with ggml, `worker` is a process that calls the test's `main`, and `suite` shares cases among
workers.
`scripts/build_ggml_tests.py` builds the libraries; `make test-ggml` runs all.
"""
