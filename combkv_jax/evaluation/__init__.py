"""What a compressed history still answers: tasks, metrics, and the choice of layers."""
