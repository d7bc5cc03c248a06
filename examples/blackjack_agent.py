"""A LlamaGym script as its README has it: an agent of three methods, and a loop of the user's own over gymnasium.

    python examples/blackjack_agent.py --model meta-llama/Llama-2-7b-chat-hf --device cuda
    python examples/blackjack_agent.py --model Qwen/Qwen2.5-0.5B-Instruct --episodes 200

For lmgym only the import of Agent and AutoModelForCausalLMWithValueHead is another one (they were llamagym's and
TRL's). The same class plays in a recipe, with

    env: {name: gymnasium, id: Blackjack-v1, agent: "blackjack_agent:BlackjackAgent"}
"""

import argparse

import gymnasium as gym
from tqdm import trange
from transformers import AutoTokenizer

from lmgym.compat.llamagym import Agent, AutoModelForCausalLMWithValueHead


class BlackjackAgent(Agent):
    def get_system_prompt(self) -> str:
        return "You are an expert blackjack player. Answer hit or stick."

    def format_observation(self, observation) -> str:
        return f"Your current total is {observation[0]}"

    def extract_action(self, response: str):
        return 0 if "stick" in response else 1


def main() -> None:
    parser = argparse.ArgumentParser(description="An agent learns to play blackjack, in a loop of its own.")
    parser.add_argument("--model", required=True, help="folder or Hub id of a causal model with its tokenizer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--episodes", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=16)
    given = parser.parse_args()

    model = AutoModelForCausalLMWithValueHead.from_pretrained(given.model).to(given.device)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    agent = BlackjackAgent(model, tokenizer, given.device, ppo_config_dict={"batch_size": given.batch_size})
    env = gym.make("Blackjack-v1")

    for episode in trange(given.episodes):
        observation, _info = env.reset()
        done = False

        while not done:
            action = agent.act(observation)  # act based on observation
            observation, reward, terminated, truncated, _info = env.step(action)
            agent.assign_reward(reward)  # provide reward to agent
            done = terminated or truncated

        train_stats = agent.terminate_episode()  # trains if batch is full
        if train_stats:
            print(f"episode {episode}  " + "  ".join(f"{name} {value:.3g}" for name, value in train_stats.items()))


if __name__ == "__main__":
    main()
