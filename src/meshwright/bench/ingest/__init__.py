"""Measurement of retrieval ingestion: documents to an index that answers queries.

documents  documents of a folder, a file or a JSONL file; skipped files, with reasons
chunks     tokens of a document, and the chunks of an encoding
encoder    the encoder, in PyTorch
choices    indexes by name with their parameters
indexes    usearch, hnswlib and faiss behind one interface
recall     exact neighbours, and the recall of an index against them
stages     read, tokenize, encode, index: alternating, or overlapped in threads
queries    queries from chunks; latency and rate of a search
prepare    the request, its encoder and its documents
passes     one ingestion, measured
comparison indexes on the same vectors
bound      rate that the encoder cannot exceed
bench      all encodings, indexes and repeats, recorded
summary    medians over repeats, Pareto front of recall against latency
"""
