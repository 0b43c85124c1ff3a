"""Other peers: their signed records, who is there, who may take part, and whom to trust."""
