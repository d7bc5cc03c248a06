"""A taskset of verifiers that brings a program for its agent, for test_verifiers.py."""

import verifiers.v1 as vf
from verifiers_sums import Sums

__all__ = ["Program", "Sums"]


class Program(vf.Harness[vf.HarnessConfig]):
    async def launch(self, *given):
        raise AssertionError("it is refused before it runs")
