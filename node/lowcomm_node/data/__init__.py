"""Training text: its sources, its tokens on disk, and the batches that a peer draws."""

from lowcomm_node.data.local import Dataset, Split, open_data
from lowcomm_node.data.tokenizer import Tokenizer, open_tokenizer

__all__ = ["Dataset", "Split", "Tokenizer", "open_data", "open_tokenizer"]
