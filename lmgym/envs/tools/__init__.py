"""Tools that a model calls: schema, parsing, a calculator, a sandbox."""
