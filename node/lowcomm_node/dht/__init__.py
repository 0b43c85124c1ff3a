"""The distributed hash table: signed records by key, and peers that know each other."""
