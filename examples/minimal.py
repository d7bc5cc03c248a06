"""GRPO in one file: sampling, reward, advantage, loss and loop, without lmgym's own loop.

    python examples/minimal.py             # about 70 seconds on one core
    python examples/minimal.py --steps 5   # about 15

torch and transformers do the work. From lmgym come two conveniences, so that nothing has to be downloaded: a byte-level
tokenizer, and a Llama of 0.8 million random parameters.

The task is to spell a word of four random letters backwards: "abcd>" -> "dcba". GRPO improves what a model sometimes
does, and a random model never spells a word. So a short supervised warm start comes first, which ends when three in ten
of the held-out words are right. From there on the model sees no answer, only a reward of 1 or 0 for its own.

Greedy accuracy on 256 words after the warm start and after 100 steps of GRPO (torch 2.13, two cores of an AMD EPYC;
the words are random, and training happens to meet 3 to 10 of them):

    seed 0   0.38 -> 0.84
    seed 1   0.41 -> 0.90
    seed 2   0.55 -> 1.00

This shows that the loop learns, no more: more steps of the warm start alone would learn the task as well.

Missing here and present in lmgym: prompts of different lengths, any Hugging Face model, other tasks, intervals, logs,
checkpoints, exact resume. `lmgym/algorithms/grpo/` is the same algorithm behind lmgym's contract;
docs/reading_order.md goes on from there.
"""

import argparse
import string

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from lmgym.models.builtin import builtin_model, byte_tokenizer

LETTERS = 4  # of a word: 26^4 = 456,976 problems
HELD_OUT = 256  # words to measure on
PROMPTS = 32  # distinct prompts in a step
GROUP = 8  # answers to each of them
UPDATES = 2  # optimizer steps on each batch of answers; from the second one on the ratio leaves 1, and the clip acts
TEMPERATURE = 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
LEARNING_RATE, WARM_START_RATE = 5e-4, 2e-3
WARM_ENOUGH = 0.3  # accuracy at which the warm start ends
ANSWER = LETTERS + 2  # most tokens of an answer: the letters, the end of sequence, and one to go wrong with

tokenizer = byte_tokenizer()  # ids: 0 padding, 1 beginning, 2 end of sequence, then one for each byte
END = tokenizer.eos_token_id


def random_words(count: int, generator: torch.Generator) -> list[str]:
    """Words of LETTERS random letters."""
    places = torch.randint(26, (count, LETTERS), generator=generator).tolist()
    return ["".join(string.ascii_lowercase[place] for place in word) for word in places]


def encode_prompts(words: list[str]) -> Tensor:
    """Token ids [N P]. All prompts have the same length here, so nothing is padded in front."""
    return torch.tensor([tokenizer(word + ">")["input_ids"] for word in words])


def encode_answers(words: list[str]) -> tuple[Tensor, Tensor]:
    """The right answers, end of sequence included, padded on the right: ids [N T] and mask [N T]."""
    rows = [tokenizer(word[::-1], add_special_tokens=False)["input_ids"] + [END] for word in words]
    ids = torch.tensor([row + [0] * (ANSWER - len(row)) for row in rows])
    mask = torch.tensor([[column < len(row) for column in range(ANSWER)] for row in rows])
    return ids, mask


@torch.no_grad()
def sample(model: LlamaForCausalLM, prompts: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Answers as ids [N T], and the mask [N T] of the tokens that belong to them, end of sequence included.

    The key-value cache keeps what was read, so that each pass reads one new token only. Temperature 0 takes the most
    likely token.
    """
    read, cache = prompts, None
    open_rows = torch.ones(len(prompts), dtype=torch.bool)
    ids, mask = [], []
    for _ in range(ANSWER):
        output = model(input_ids=read, past_key_values=cache, use_cache=True)
        logits, cache = output.logits[:, -1], output.past_key_values
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            token = torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]
        ids.append(token)
        mask.append(open_rows)
        open_rows = open_rows & (token != END)  # the end itself was sampled, so it is trained; what follows is not
        read = token[:, None]
    return torch.stack(ids, 1), torch.stack(mask, 1)


def log_probabilities(model: LlamaForCausalLM, prompts: Tensor, answers: Tensor) -> Tensor:
    """log pi(token | everything before it) of each answer token [N T], at the temperature of the sampling.

    The logits at a place describe the token behind it: hence the shift by one.
    """
    logits = model(input_ids=torch.cat([prompts, answers], 1)).logits[:, prompts.shape[1] - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1).gather(2, answers[:, :, None])[:, :, 0]


def rewards(words: list[str], answers: Tensor, mask: Tensor) -> Tensor:
    """1 for an answer that is the word backwards and then ends, else 0: [N]."""
    values = []
    for word, ids, own in zip(words, answers, mask, strict=True):
        tokens = ids[own].tolist()
        ended = tokens[-1] == END
        values.append(float(ended and tokenizer.decode(tokens[:-1]) == word[::-1]))
    return torch.tensor(values)


def group_advantages(reward: Tensor) -> Tensor:
    """A = R - mean(R of the group): [N]. Answers to one prompt stand side by side, GROUP of them.

    DeepSeekMath's GRPO (arXiv 2402.03300) divides by the group's standard deviation as well; Dr. GRPO (arXiv
    2503.20783) shows why not to. A group whose answers all earned the same has advantages of zero and teaches nothing.
    """
    groups = reward.view(-1, GROUP)
    return (groups - groups.mean(1, keepdim=True)).view(-1)


def policy_loss(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The clipped surrogate, averaged over all answer tokens of the batch; and the share of tokens that were clipped.

    PPO, arXiv 1707.06347, equation 7; unequal bounds and the token mean: DAPO, arXiv 2503.14476, equations 8 and 10.
    """
    ratio = (new - old).exp()
    credit = advantages[:, None]  # one number for all tokens of an answer
    surrogate = torch.minimum(ratio * credit, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * credit)
    outside = ((ratio > 1 + CLIP_HIGH) & (credit > 0)) | ((ratio < 1 - CLIP_LOW) & (credit < 0))
    return -(surrogate * mask).sum() / mask.sum(), (outside & mask).sum() / mask.sum()


def optimizer_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """One step down the gradient, which is scaled to a norm of 1 at most; returns the norm before that."""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(norm)


def accuracy(model: LlamaForCausalLM, words: list[str]) -> float:
    """Share of words whose greedy answer is right."""
    answers, mask = sample(model, encode_prompts(words), temperature=0)
    return float(rewards(words, answers, mask).mean())


def warm_start(model: LlamaForCausalLM, held_out: list[str], generator: torch.Generator, most_steps: int) -> int:
    """Imitate right answers (cross-entropy) until WARM_ENOUGH of the held-out words are right; returns the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_START_RATE, weight_decay=0.01)
    for step in range(most_steps):
        if step % 5 == 0 and accuracy(model, held_out) >= WARM_ENOUGH:
            return step
        words = random_words(64, generator)
        answers, mask = encode_answers(words)
        loss = -(log_probabilities(model, encode_prompts(words), answers) * mask).sum() / mask.sum()
        optimizer_step(model, optimizer, loss)
    return most_steps


def grpo(model: LlamaForCausalLM, held_out: list[str], generator: torch.Generator, steps: int) -> None:
    """The loop: sample, judge, compare within each group, update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    for step in range(steps):
        words = [word for word in random_words(PROMPTS, generator) for _ in range(GROUP)]
        prompts = encode_prompts(words)
        answers, mask = sample(model, prompts, TEMPERATURE)
        reward = rewards(words, answers, mask)
        advantages = group_advantages(reward)
        with torch.no_grad():
            old = log_probabilities(model, prompts, answers)  # of the policy that sampled, before any update
        for _ in range(UPDATES):
            new = log_probabilities(model, prompts, answers)
            loss, clipped = policy_loss(new, old, advantages, mask)
            norm = optimizer_step(model, optimizer, loss)
        if step % 10 == 9 or step == steps - 1:
            print(
                f"step {step + 1:>4}  reward {float(reward.mean()):.2f}  held-out {accuracy(model, held_out):.2f}  "
                f"entropy {float(-(old * mask).sum() / mask.sum()):.2f}  clipped {float(clipped):.1%}  "
                f"gradient {norm:.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO teaches a tiny Llama to spell words backwards.")
    parser.add_argument("--steps", type=int, default=100, help="GRPO steps")
    parser.add_argument("--warm-start", type=int, default=200, help="most steps of the supervised warm start")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()

    torch.manual_seed(given.seed)  # sampling
    generator = torch.Generator().manual_seed(given.seed)  # words
    held_out = random_words(HELD_OUT, generator)
    model = builtin_model("builtin:tiny", tokenizer, {}, given.seed)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    steps = warm_start(model, held_out, generator, given.warm_start)
    print(f"held-out accuracy after {steps} steps of warm start: {accuracy(model, held_out):.2f}", flush=True)
    grpo(model, held_out, generator, given.steps)


if __name__ == "__main__":
    main()
