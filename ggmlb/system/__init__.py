"""The process around the library: environment, forks and exit, disk cache, progress."""
