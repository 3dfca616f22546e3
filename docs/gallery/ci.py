"""Is a device right? In CI.

The kit of `ggmlb test`, from Python: the first cases of three ops on a device, compared with the CPU. A
runner needs no program for that; this line ends with a status of its own for each outcome, as [ggmlb
test](../cli/test.md) tells:

    ggmlb test -d OpenCL0 -o mul_mat,rope,soft_max --limit 3 --format junit --output report.xml

pytest has it too: `pytest --pyargs ggmlb.testing --ggmlb-device OpenCL0`. Whole files for GitHub and GitLab
are in [Conformance](../conformance.md#in-a-ci-runner).
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
