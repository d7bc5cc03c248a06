"""Engines that sample answers: the interface, lmgym's own sampler, Hugging Face's generate."""
