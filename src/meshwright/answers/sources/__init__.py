"""The claims of the source documents with their answers."""
