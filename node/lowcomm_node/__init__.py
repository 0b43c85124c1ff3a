"""What one peer does: find others, train, exchange, remember."""

from lowcomm_node import (
    models as models,
)  # registers the families of models, wherever a run is read
