"""Relevance for every example of a data set: read in turn, explained in batches and processes, kept in Parquet."""
