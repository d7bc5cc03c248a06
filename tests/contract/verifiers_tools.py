"""A taskset of verifiers whose tasks have a tool, for test_verifiers.py."""

import verifiers.v1 as vf

__all__ = ["Tools"]


class Clock(vf.Toolset):
    @vf.tool
    async def now(self) -> str:
        """The time."""
        return "noon"


class WithTool(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Clock(vf.ToolsetConfig())]


class Tools(vf.Taskset[WithTool, vf.TasksetConfig]):
    def load(self):
        yield WithTool(vf.TaskData(prompt="What is the time?"), self.config.task)
