"""Rewards computed by a model: classifiers, reward models, similarity, entailment, perplexity, LLM judges."""
