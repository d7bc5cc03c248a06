"""A taskset of verifiers for test_verifiers.py: sums, in one turn."""

from typing import Literal

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: int


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        if trace.last_reply == "raise":
            raise ValueError("no such answer")
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    level: int = 1
    needs: Literal["", "image", "agent_user"] = ""


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        needs = {self.config.needs: "some"} if self.config.needs else {}
        for number in range(10):
            prompt = f"{number}+{number}="
            yield Sum(SumData(prompt=prompt, system_prompt="Add.", answer=2 * number, **needs), self.config.task)
