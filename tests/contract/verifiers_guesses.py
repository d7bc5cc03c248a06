"""A taskset of verifiers with its own environment, for test_verifiers.py: guess a number; code answers."""

import random
import time

import verifiers.v1 as vf

__all__ = ["GuessEnv", "Guesses"]


class Guess(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "stop"


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=9)
    highest: int = 9


class GuessEnv(vf.Env[GuessConfig]):
    async def start(self):
        self.started = True

    async def run(self, task, agents):
        assert self.started
        secret, won, letters = random.randint(0, self.config.highest), 0.0, 0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                letters += len(segment.last_reply)
                if segment.last_reply == str(secret):
                    won = 1.0
                    break
                await mischief(segment.last_reply, task, agents.player, interaction)
                digits = segment.last_reply.isdecimal() and len(segment.last_reply) < 5
                hint = "higher" if digits and int(segment.last_reply) < secret else "lower"
                segment = await interaction.turn(hint)
        interaction.trace.record_reward("won", won, 1.0)
        interaction.trace.record_reward("brief", 1 / (1 + letters), 0.5)
        interaction.trace.record_metric("turns", interaction.trace.num_turns)


async def mischief(word, task, player, interaction):
    """What an environment of a plain chat must not do, one for each word."""
    if word == "hang":
        time.sleep(600)
    if word == "program":
        await interaction._run.runtime.run(["true"], {})
    if word == "machine":
        async with player.provision(task) as machine:
            await machine.run(["true"], {})
    if word == "again":
        async with player.interaction(task) as second:
            await second.turn()


class Guesses(vf.Taskset[Guess, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield Guess(vf.TaskData(prompt="Guess a number from 0 to 9."), self.config.task)
