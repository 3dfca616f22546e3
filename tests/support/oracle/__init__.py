"""Random programs of the conformance kit's families, and ggml itself to compute them."""

from tests.support.oracle.ggml_process import GgmlProcess, Missing, Refused
from tests.support.oracle.random_programs import programs

__all__ = ["GgmlProcess", "Missing", "Refused", "programs"]
