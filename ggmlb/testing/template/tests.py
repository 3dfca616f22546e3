"""The cases of ggmlb's conformance kit, one test each: values, support and behaviour of the device.

python -m pytest --ggmlb-ops add -x --pdb        one op; a debugger at the first failure
python -m pytest --ggmlb-mode behaviour -k plan
"""

from ggmlb.testing.test_conformance import test_case

__all__ = ["test_case"]
