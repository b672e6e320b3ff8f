"""Measurement of retrieval ingestion: documents to an index that answers queries."""
