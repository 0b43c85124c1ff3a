"""What the owner decides: settings, limits of the network, and the hours in which this machine may train."""
