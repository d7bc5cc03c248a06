"""Tools for the model: schemas, parsing of calls, a calculator, a sandbox for Python."""
