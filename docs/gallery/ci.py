"""Testing a device in CI.

The conformance kit from Python: the first cases of three ops on a device, compared with the CPU. The same on
the command line, with a different exit status for each outcome ([ggmlb test](../cli/test.md)):

    ggmlb test -d OpenCL0 -o mul_mat,rope,soft_max --limit 3 --format junit --output report.xml

With pytest: `pytest --pyargs ggmlb.testing --ggmlb-device OpenCL0`. Complete files for GitHub and GitLab:
[In a CI runner](../ci.md).
"""

import sys
from collections import Counter

import ggmlb
from ggmlb.testing.run import Runner, Selection, tasks

device = ggmlb.device_by_name("OpenCL0")
outcomes = Counter()
with Runner([device]) as runner:
    for task in tasks(device, Selection("test", ops=("mul_mat", "rope", "soft_max"), limit=3)):
        for result in runner.run(task):
            outcomes[task.family, result.outcome.value] += 1
            if result.outcome.value == "failed":
                print(result.id, result.reason)

for (family, outcome), count in sorted(outcomes.items()):
    print(f"{family:13} {outcome:8} {count}")
sys.exit(any(outcome == "failed" for _, outcome in outcomes))
