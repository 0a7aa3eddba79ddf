"""Training of the embedded model: tokenizer, corpus, target, drafter and its baselines."""
