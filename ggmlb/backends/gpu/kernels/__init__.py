"""The portable kernel texts for OpenCL and CUDA, read by `ggmlb.backends.gpu.source`."""
