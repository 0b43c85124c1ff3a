"""Decisions of the owner: settings, limits of the network, and hours of training."""
