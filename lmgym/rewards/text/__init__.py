"""Text metrics: overlap with references (BLEU, ROUGE ...), form (length, words, patterns), diversity, sentiment."""
