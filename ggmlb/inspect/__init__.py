"""What happened and why: pictures, traces, the sanitizer, comparison of devices."""
