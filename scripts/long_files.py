"""Print the longest Python files, and fail if one is far beyond what a reader can hold in mind.

A file over 400 lines wants to be two. The table shows those that come near; the limit is where
wanting ends.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NEAR, LIMIT = 350, 600

tracked = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout
lengths = sorted(((len(Path(f).read_text().splitlines()), f) for f in tracked.splitlines()), reverse=True)
for lines, file in lengths:
    if lines > NEAR:
        print(f"{lines:6} {file}{'  (over 400: split it?)' if lines > 400 else ''}")
print(f"{sum(n for n, _ in lengths):6} lines in {len(lengths)} files")
sys.exit(any(lines > LIMIT for lines, _ in lengths))
