"""Print the longest Python files, and how many lines there are in all.

A file is one idea, and as long as the idea; one of many hundred lines may be two.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

SHOWN = 10

tracked = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout
lengths = sorted(((len(Path(f).read_text().splitlines()), f) for f in tracked.splitlines()), reverse=True)
for lines, file in lengths[:SHOWN]:
    print(f"{lines:6} {file}")
print(f"{sum(n for n, _ in lengths):6} lines in {len(lengths)} files")
