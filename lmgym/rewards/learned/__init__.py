"""Rewards that a model computes: classifiers, reward models, similarity, entailment, perplexity, judges."""
