"""The judge of answers: numbers, LaTeX, choices and texts, for evaluation and as a reward."""
