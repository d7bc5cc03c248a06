"""Several processes that train one run: who does which part, and how the parts come together."""
