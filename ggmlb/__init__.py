"""ggml's backend layer for Python, GPU first."""
