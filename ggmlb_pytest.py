"""The conformance kit's pytest plugin: its options. Installing ggmlb registers it.

    pytest --pyargs ggmlb.testing --ggmlb-device CUDA0
    pytest --pyargs ggmlb.testing --ggmlb-device CUDA0 --ggmlb-mode behaviour -k plan

It stands outside the package, and imports `ggmlb.testing.plugin` where an option is given or `ggmlb.testing`
is collected: the test suites of other projects start no later where ggmlb is installed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("ggmlb", "ggmlb: conformance of devices (--pyargs ggmlb.testing)")
    group.addoption("--ggmlb-device", metavar="NAME,NAME", help="devices to test; without it none is tested")
    group.addoption(
        "--ggmlb-mode", metavar="MODE,MODE", help="by default test,support,behaviour; also grad and perf"
    )
    group.addoption("--ggmlb-ops", metavar="OP,OP", default="", help="only these ops, or kinds of behaviour")
    group.addoption("--ggmlb-limit", metavar="N", type=int, default=0, help="most cases of an op; 0 for all")
    group.addoption("--ggmlb-xfail", metavar="FILE", help="known failures: 'REGEX # reason' in each line")
    group.addoption(
        "--ggmlb-require",
        action="store_true",
        help="fail, instead of skip, if a device is missing",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the rest of the plugin where it is needed."""
    is_given = any(value for name, value in vars(config.option).items() if name.startswith("ggmlb_"))
    if is_given or any("ggmlb.testing" in arg.replace(os.sep, ".") for arg in config.args):
        from ggmlb.testing import plugin

        config.pluginmanager.register(plugin, "ggmlb.testing.plugin")
