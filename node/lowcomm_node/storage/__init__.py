"""Files of a home: written whole or not at all, verified when they are read, counted against a
quota."""
