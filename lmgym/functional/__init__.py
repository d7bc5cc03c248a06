"""The mathematics of the algorithms as functions of tensors: no model, no text, no state."""
