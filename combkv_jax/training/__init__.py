"""Training of the history blocks in front of a frozen decoder."""
