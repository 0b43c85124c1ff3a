"""An exchange of two."""
