"""Services of the process: environment variables, log, threads, forks and exit, disk cache, progress."""
