"""What one peer does: find others, train, exchange, remember."""
