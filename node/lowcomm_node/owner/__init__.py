"""What the owner decides: settings, limits of the network, and when this machine may train."""
