"""Groups inside of a group: turns of several conversations that answered the same text are compared with each other."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lmgym.functional.advantages import episode_steps, scatter_steps, sums
from lmgym.functional.shapes import Mask, PerToken, RowIds, TokenIds


def turn_group_advantages(
    returns: PerToken,
    tokens: TokenIds,
    actions: Mask,
    turn: TokenIds,
    episode: RowIds,
    group: RowIds,
    source: Int[Tensor, "N S"] | None = None,
    scaled: bool = False,
    epsilon: float = 1e-4,
    history: int = 0,
    power: float = 1.0,
) -> PerToken:
    """On each action the return of its turn, less the mean of the group's turns that answered the same text.

    GiGPO's step-relative advantage (arXiv 2505.10978): an inner group are the turns of one group whose observation, the
    tokens between the action before and their own first one (with `source`, the encoder's tokens too), is the same.
    `scaled` divides by the inner group's unbiased standard deviation + epsilon. `returns` are the turns' own
    (turn_discounts.turn_returns), and a turn counts once. A turn that no other answers with, and turns of equal
    returns, get exactly zero, and so do tokens that are no actions.

    With `history` K, HGPO's (arXiv 2602.22817): A_0 is the one above, A_k the same among turns whose last k
    observations before it are the same too, k up to K; and A = sum of w_k A_k / sum of w_k, w_k = (k + 2)^power, over
    the k where the turn has such observations and the inner group has different returns.

    Example: two conversations of one group begin with 7 and say 5 or 6; only the first one goes on, with 8:
        >>> tokens, actions = torch.tensor([[7, 5, 8, 5], [7, 6, 0, 0]]), torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0]])
        >>> turn_group_advantages(torch.tensor([[0., 1., 0., 1.], [0., 0., 0., 0.]]), tokens, actions.bool(),
        ...                       torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]]), torch.arange(2), torch.zeros(2).long())
        tensor([[ 0.0000,  0.5000,  0.0000,  0.0000],
                [ 0.0000, -0.5000,  0.0000,  0.0000]])
    """
    # 1. The first action of each turn, in the order of the episodes.
    row, column, steps = episode_steps(actions, episode)
    numbers = turn[row, column]
    begins = steps.clone()
    begins[:, 1:] &= numbers[:, 1:] != numbers[:, :-1]
    first_row, first_column = row[begins], column[begins]
    # 2. What each turn answered, and which turn of its episode it is.
    texts = []
    for r, c in zip(first_row.tolist(), first_column.tolist(), strict=True):
        before = actions[r, :c].nonzero()
        start = int(before[-1]) + 1 if len(before) else 0
        texts.append((tuple(tokens[r, start:c].tolist()), None if source is None else tuple(source[r].tolist())))
    place = (begins.cumsum(1) - 1)[begins].tolist()
    owners = group[first_row].tolist()
    # 3. The mean of the levels' advantages, those with a longer history weighing more.
    values = returns[first_row, first_column]
    total, weights = torch.zeros_like(values), torch.zeros_like(values)
    for level in range(history + 1):
        seen: dict[tuple[object, ...], int] = {}
        labels = []
        for index, (own, known) in enumerate(zip(owners, place, strict=True)):
            key = (own, *texts[index - level : index + 1]) if known >= level else (index,)  # else alone
            labels.append(seen.setdefault((known >= level, key), len(seen)))
        found, differ = _centred(values, torch.tensor(labels, device=values.device), len(seen), scaled, epsilon)
        weight = (level + 2) ** power * differ.to(values.dtype)
        total, weights = total + weight * found, weights + weight
    credits = torch.where(weights > 0, total / torch.where(weights > 0, weights, 1.0), 0.0)
    # 4. From the first action of a turn to all of them.
    which = (begins.flatten().cumsum(0) - 1).reshape(begins.shape)  # episodes are lines, and each begins with a turn
    return scatter_steps(credits[which] * steps, row, column, steps, (actions.shape[0], actions.shape[1]))


def _centred(
    values: Float[Tensor, " M"], owner: Int[Tensor, " M"], count: int, scaled: bool, epsilon: float
) -> tuple[Float[Tensor, " M"], Bool[Tensor, " M"]]:
    """The values less their owner's mean, and whether the values of that owner differ. Means are of what is above the
    least value, so that equal ones leave exactly zero."""
    empty = values.new_zeros(count)
    least, most = (empty.scatter_reduce(0, owner, values, how, include_self=False) for how in ("amin", "amax"))
    counts = sums(torch.ones_like(values), owner)
    above = values - least[owner]
    centred = above - (sums(above, owner) / counts)[owner]
    if scaled:
        variance = sums(centred**2, owner) / (counts - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + epsilon)[owner]
    return centred, (least != most)[owner]
