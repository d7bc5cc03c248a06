"""Text and token ids: chat templates, LaTeX. No torch."""
