"""When did a run change, and where did two runs part? Reads records alone, without torch."""
