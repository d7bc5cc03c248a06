"""A taskset of verifiers with its own environment, for test_verifiers.py: guess a number; code answers."""

import random

import verifiers.v1 as vf

__all__ = ["GuessEnv", "Guesses"]


class Guess(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        secret, won = random.randint(0, 9), 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                if segment.last_reply == str(secret):
                    won = 1.0
                    break
                if segment.last_reply == "program":
                    await interaction._run.runtime.run(["true"], {})
                if segment.last_reply == "again":
                    async with agents.player.interaction(task) as second:
                        await second.turn()
                digits = segment.last_reply.isdecimal() and len(segment.last_reply) < 5
                hint = "higher" if digits and int(segment.last_reply) < secret else "lower"
                segment = await interaction.turn(hint)
        interaction.trace.record_reward("won", won, 1.0)


class Guesses(vf.Taskset[Guess, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield Guess(vf.TaskData(prompt="Guess a number from 0 to 9."), self.config.task)
