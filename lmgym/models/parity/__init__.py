"""`policy.parity: exact`: what is sampled and what is scored are the same bits (docs/precision.md).

In the default mode both compute the same sums in different orders: a product's kernel depends on its number of rows,
attention's blocks on the layout, a vectorised function on where a number stands. Here each token's result depends on
the tokens before it alone:

    products.py      linear layers, in tiles of rows whose bits are found to be the same
    modules.py       activations and rotary embeddings
    attention.py     one attention for rows, shared prompts, trees and the sampler's cache
    logprobs.py      the LM head and the softmax over the vocabulary

Only forward passes are so; gradients are those of the default mode, within rounding."""
