"""What the world is told: history, metrics, webhooks."""
