"""What a node shows of itself: on a terminal, in lines, and to whatever watches over it."""
