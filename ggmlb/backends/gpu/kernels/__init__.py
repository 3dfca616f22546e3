"""The portable kernel texts: one for OpenCL and CUDA, found and read by `ggmlb.backends.gpu.source`."""
