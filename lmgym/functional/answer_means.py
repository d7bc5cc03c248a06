"""One number for each answer, from numbers of its tokens."""

import torch

from lmgym.functional.advantages import first_rows, sums
from lmgym.functional.reductions import tokens_of_episode
from lmgym.functional.shapes import Mask, PerRow, PerToken, RowIds, TokenIds


def answer_means(values: PerToken, actions: Mask, episode: RowIds) -> PerRow:
    """The mean over the actions of each row's whole episode (all of its rows), float64 [N].

    Example: answer_means(torch.tensor([[0., 1., 3.]]), torch.tensor([[False, True, True]]), torch.tensor([0]))
    -> tensor([2.])"""
    _, inverse = torch.unique(episode, return_inverse=True)
    own = (values.double() * actions).sum(1)
    return sums(own, inverse)[inverse] / tokens_of_episode(actions, episode).clamp(min=1)


def shared_by_equals(values: PerRow, tokens: TokenIds, mask: Mask, episode: RowIds, group: RowIds) -> PerRow:
    """The values, with their mean in the place of those of a group's answers that are equal token for token. What a
    model says of equal answers differs by rounding alone, which must not decide which of them was better. `values` are
    those of episodes, so rows of one episode have one value.

    Example: shared_by_equals(torch.tensor([1., 3.]), torch.tensor([[5, 6], [5, 6]]), torch.ones(2, 2).bool(),
    torch.arange(2), torch.zeros(2).long()) -> tensor([2., 2.])"""
    # What each episode's rows hold, in the order of the rows.
    texts: dict[int, list[bytes]] = {}
    for row, own in enumerate(episode.tolist()):
        texts.setdefault(own, []).append(tokens[row][mask[row]].cpu().numpy().tobytes())
    # A number for each distinct answer of each group.
    seen: dict[tuple[int, tuple[bytes, ...]], int] = {}
    pairs = zip(group.tolist(), episode.tolist(), strict=True)
    same = torch.tensor([seen.setdefault((g, tuple(texts[e])), len(seen)) for g, e in pairs], device=values.device)
    first = first_rows(episode).to(values.dtype)
    return (sums(values * first, same) / sums(first, same))[same]
